"""Write the new files of a save on this machine, and put them on stable storage together.

Tests: tests/engine/stores/test_local.py, tests/faults/test_power.py.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import sys
import threading
import time
from contextlib import closing, suppress
from functools import partial
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from eformer._engine.record.text import size
from eformer._engine.stores.directory import (
    FILE,
    Closing,
    Directory,
    content_of,
    function_of_libc,
    open_inside,
    sync_opened,
    version_of,
)
from eformer._engine.stores.durable import (
    LARGE_WRITE,
    replaceable_mode,
    write_all,
    write_past_cache,
)
from eformer._engine.stores.scratch import Scratch
from eformer._engine.tasks import interrupts
from eformer._engine.tasks.memory import available_memory
from eformer._engine.tasks.pool import default_threads, run_all
from eformer.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from eformer._engine.stores.base import Entry, Store, Takes

logger = logging.getLogger("eformer")

# Up to this many files are synced one by one, so that a small save does not wait for the writes of other programs.
_FEW = 32

# File systems that are known to write everything on syncfs, and to report errors: ext2-4, xfs, btrfs, f2fs, tmpfs,
# overlayfs, zfs. On other file systems, such as file systems in user space, syncfs may do nothing.
_SYNCED_BY_SYNCFS = {0xEF53, 0x58465342, 0x9123683E, 0xF2F52010, 0x01021994, 0x794C7630, 0x2FC12FC1}

# A save up to this part of the available memory stays in the page cache for its next reader. A larger save would push
# out the pages of other files.
_WARM_PART = 1 / 8
_SMALL_SAVE = 64 * 2**20  # bytes; up to here a save stays in the page cache, whatever the machine has

# File systems on which a byte takes a byte: ext2-4, xfs, tmpfs. Others compress, or share equal blocks.
_UNCOMPRESSED = {0xEF53, 0x58465342, 0x01021994}

_REMOVING = 0.25  # seconds in which a removal that is under way frees room

# Directories that are open together while small files are written.
_MOST_OPEN = 8


class NewFiles(Scratch):
    """The new files of a save, in the `data` of its scratch directory. Files at its top get the permissions of the
    files that they will replace in `place`."""

    takes: Takes = "ranges"

    def __init__(self, directory: Path, token: str = "", *, may_be_new: bool = False) -> None:
        self.nbytes = 0
        self.passes_cache = False
        self.unsynced: list[str] = []  # complete files
        self.synced: list[str] = []  # their bytes are synced, only the directories are left
        self._made: set[str] = set()
        self._files: list[NewFile] = []
        self.file_type = NewFile
        super().__init__(directory, token, may_be_new=may_be_new)

    def require_room(self, nbytes: int) -> None:
        """Raise OSError, before anything is written, if it is certain that so many bytes do not fit."""
        require_room(self.data, nbytes, "this save", str(self._directory))

    def create(self, name: str, nbytes: int) -> NewFile:
        if self.nbytes > _SMALL_SAVE and not self._files:
            self.passes_cache = self.nbytes > available_memory() * _WARM_PART
        file = self.file_type(self, name, nbytes, sync=len(self._files) < _FEW)
        self._files.append(file)
        return file

    def stream(self, name: str, nbytes: int, chunks: Iterable[Any]) -> None:
        file, offset = self.create(name, nbytes), 0
        for chunk in chunks:
            file.write(chunk, offset)
            offset += len(chunk)
        file.close()

    def put(self, files: Sequence[tuple[str, bytes]]) -> None:
        with closing(_Folders(self.data, self._made)) as folders:
            for path, data in files:
                outer, _, name = path.rpartition("/")
                try:
                    write_new(folders.at(outer), name, data)
                except FileExistsError:
                    raise FileExistsError(
                        f"{path!r} is written twice: this file system takes two names for one, which may differ only "
                        "in case; rename a leaf, or save with format='safetensors'"
                    ) from None
        self.unsynced += [path for path, _ in files]

    def link(self, name: str, store: Store, entry: Entry) -> bool:
        from eformer._engine.stores.local import on_disk  # late: a store makes uploads

        outer, _, plain = name.rpartition("/")
        if (place := on_disk(store)) is None:
            return False
        try:
            os.close(open_inside(place, entry.name))  # raises if the name leads out of the store
            with self.made_folder(outer) as folder:
                folder.link(plain, place / entry.name)
                status = folder.status(plain)
                if status is None or content_of(version_of(status)) != content_of(entry.version):
                    folder.unlink(plain)
                    raise FormatError("it has changed since it was read")
        except (OSError, FormatError) as error:  # no links between these places, or the file was just removed
            logger.warning("reuse: cannot link %s, writing it again: %s", store.path_to(entry.name), error)
            return False
        if outer:  # for the new name in the directory; the save that wrote the bytes has synced them
            self.unsynced.append(name)
        return True

    def folder(self, path: str) -> Directory:
        """Open a directory of `data`; "" is `data` itself. The caller closes it."""
        return self.data.enter(path) if path else Directory(self.data.where, os.dup(self.data.descriptor))

    def made_folder(self, path: str) -> Directory:
        """Open a directory of `data`, and make it first if it does not exist. The caller closes it."""
        if path:
            with closing(_Folders(self.data, self._made)) as folders:
                folders.at(path)
        return self.folder(path)

    def sync(self) -> None:
        unsynced, self.unsynced = self.unsynced, []
        synced, self.synced = self.synced, []
        if len(unsynced) >= _FEW and _syncfs(self.data.descriptor):
            return
        if unsynced:
            run_all([partial(self._sync_one, path) for path in unsynced], default_threads())
        outer = {str(outer) for path in unsynced + synced for outer in PurePosixPath(path).parents}
        for path in outer - {"."}:  # the commit syncs `data` itself if it is moved
            with self.folder(path) as folder:
                folder.sync()

    def _sync_one(self, path: str) -> None:
        outer, _, name = path.rpartition("/")
        with self.folder(outer) as folder:
            sync_file(folder, name)

    def names(self) -> list[str]:
        return list(self.data.kinds())

    def abandon(self) -> None:
        """Close all files and remove nothing, as if this process had died."""
        for file in self._files:
            file.abandon()
        super().abandon()


class _Folders:
    """The last directory of `data` that was used, and the directories around it, in which its neighbours are opened."""

    def __init__(self, data: Directory, made: set[str]) -> None:
        self._made, self._open = made, [("", data)]

    def at(self, path: str) -> Directory:
        """Return a directory, and make it first if it does not exist. It stays open until the next call."""
        outer, folder = self._open[-1]
        if path == outer:
            return folder
        while outer and not path.startswith(f"{outer}/"):
            folder.close()
            self._open.pop()
            outer, folder = self._open[-1]
        for name in path.removeprefix(f"{outer}/").split("/") if path else ():
            outer = f"{outer}/{name}" if outer else name
            if outer not in self._made:
                with suppress(FileExistsError):  # another process has made it
                    folder.make(name)
                self._made.add(outer)
            folder = folder.enter(name)
            self._open.append((outer, folder))
            if len(self._open) > _MOST_OPEN:
                self._open.pop(1)[1].close()
        return folder

    def close(self) -> None:
        for _, folder in self._open[1:]:
            folder.close()


class NewFile:
    """A new file of known length that several threads write; open from the first write on until it is closed."""

    def __init__(self, upload: NewFiles, path: str, nbytes: int, *, sync: bool) -> None:
        self._upload, self._path, self._nbytes, self._sync = upload, path, nbytes, sync
        self._lock = threading.Lock()
        self._descriptor = -1
        self._passes_cache = upload.passes_cache

    def write(self, data: Any, offset: int) -> None:
        if self._descriptor < 0:
            self._open()
        if self._passes_cache and len(data) >= LARGE_WRITE:
            self._passes_cache = write_past_cache(self._descriptor, data, offset)
        else:
            write_all(self._descriptor, data, offset)

    def _open(self) -> None:
        with self._lock:
            if self._descriptor < 0:
                outer, _, name = self._path.rpartition("/")
                # From the beginning it has the permissions of the file that it will replace, so it is never more
                # readable.
                mode = None if outer else replaceable_mode(self._upload.place, name)
                with self._upload.made_folder(outer) as folder:
                    self._descriptor = self._create(folder, name)
                if mode is not None:
                    os.fchmod(self._descriptor, mode)
                os.ftruncate(self._descriptor, self._nbytes)

    def _create(self, folder: Directory, name: str) -> int:
        return folder.create(name)

    def close(self) -> None:
        if self._descriptor < 0:
            self._open()
        if self._sync:  # through the descriptor that wrote it, because it reports every error of a write
            sync_opened(self._descriptor, data_only=True)
        (self._upload.synced if self._sync else self._upload.unsynced).append(self._path)
        self.abandon()

    def abandon(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def write_new(directory: Directory, name: str, data: bytes) -> None:
    """Write a new file. Done for thousands of files, so without objects."""
    descriptor = directory.create(name)
    try:
        written = os.write(descriptor, data)
        while written < len(data):
            written += os.write(descriptor, memoryview(data)[written:])
    finally:
        os.close(descriptor)


# --------------------------------------------------------------------------------------------- sync


def sync_file(directory: Directory, name: str) -> None:
    with Closing(os.open(name, FILE, dir_fd=directory.descriptor)) as descriptor:
        sync_opened(descriptor, data_only=True)


_fstatfs = function_of_libc("fstatfs", ctypes.c_int, ctypes.c_void_p)
_sync_all = function_of_libc("syncfs", ctypes.c_int)


def _reports_errors_of_syncfs() -> bool:
    """Tell whether this is Linux 5.8 or later. Before, syncfs does not report failed writes."""
    release = os.uname().release.replace("-", ".").split(".")
    return sys.platform == "linux" and [int(part) for part in release[:2] if part.isdecimal()] >= [5, 8]


_IS_RELIABLE = _reports_errors_of_syncfs()


def _kind_of_file_system(descriptor: int) -> int | None:
    """Return the number of the kind of a file system, on Linux."""
    status = (ctypes.c_long * 32)()
    if sys.platform != "linux" or not _fstatfs or _fstatfs(descriptor, status):
        return None
    return int(status[0] & 0xFFFFFFFF)


def require_room(directory: Directory, nbytes: int, what: str, path: str) -> None:
    """Raise OSError if the file system has less room than `what` writes to `path`. Wait while the room grows: a removal
    may be under way."""
    free = _free_bytes(directory.descriptor)
    while free is not None and nbytes > free:
        before = free
        time.sleep(_REMOVING)
        interrupts.check()
        if (free := _free_bytes(directory.descriptor)) is not None and free <= before:
            raise OSError(
                errno.ENOSPC,
                f"{os.strerror(errno.ENOSPC)}: {what} writes {size(nbytes)}, and {size(free)} are free. Remove old "
                "checkpoints, or save to another disk",
                path,
            )


def _free_bytes(descriptor: int) -> int | None:
    """Return the room on a file system for this user; None if files may take less room than their lengths, or if the
    room is unknown."""
    if _kind_of_file_system(descriptor) not in _UNCOMPRESSED:
        return None
    status = os.fstatvfs(descriptor)
    return (
        status.f_frsize * (status.f_bavail if os.geteuid() else status.f_bfree) if status.f_blocks else None
    )


def _syncfs(descriptor: int) -> bool:
    """Flush the whole file system with syncfs, which is much faster than syncing many files one by one. Return False
    where syncfs is not reliable."""
    if not (_IS_RELIABLE and _sync_all and _kind_of_file_system(descriptor) in _SYNCED_BY_SYNCFS):
        return False
    if _sync_all(descriptor):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return True
