"""Write the new files of a save below an open directory of this machine, and put them on stable storage together."""

from __future__ import annotations

import ctypes
import logging
import os
import sys
import threading
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from eformer._engine.record.lazy import lazy_property
from eformer._engine.stores.directory import (
    FILE,
    Closing,
    Directory,
    content_of,
    function_of_libc,
    open_inside,
    version_of,
)
from eformer._engine.stores.durable import (
    LARGE_WRITE,
    replaceable_mode,
    sync_data,
    write_all,
    write_past_cache,
)
from eformer._engine.tasks.memory import available_memory
from eformer._engine.tasks.pool import default_threads, run_all
from eformer.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from eformer._engine.stores.base import Entry, Store, Takes

logger = logging.getLogger("eformer")

# Up to this many files are synced one by one, so that nobody waits for what others have written.
_FEW = 32

# File systems that are known to write everything on syncfs, and to report errors: ext2-4, xfs, btrfs, f2fs, tmpfs,
# overlayfs, zfs. On others, such as those in user space, it may do nothing.
_SYNCED_BY_SYNCFS = {0xEF53, 0x58465342, 0x9123683E, 0xF2F52010, 0x01021994, 0x794C7630, 0x2FC12FC1}

# Of the available memory: a save up to this part stays in the page cache for its next reader. A larger one would push
# out the pages of other files.
_WARM_PART = 1 / 8


class NewFiles:
    """The new files in `data`. Those at its top get the permissions of the files that they will replace in `place`."""

    takes: Takes = "ranges"

    def __init__(self, data: Directory, place: Directory) -> None:
        self.data, self.place = data, place
        self.nbytes = self._created = 0
        self._made: set[str] = set()
        self._unsynced: list[str] = []
        self._synced: list[str] = []
        self._files: list[NewFile] = []

    @lazy_property
    def passes_cache(self) -> bool:
        """Whether the files are written past the page cache. It is asked for when the first file is created."""
        return self.nbytes > 0 and self.nbytes > available_memory() * _WARM_PART

    def create(self, name: str, nbytes: int) -> NewFile:
        self._created += 1
        file = NewFile(self, name, nbytes, sync=self._created <= _FEW)
        self._files.append(file)
        return file

    def stream(self, name: str, nbytes: int, chunks: Iterable[Any]) -> None:
        file, offset = self.create(name, nbytes), 0
        for chunk in chunks:
            file.write(chunk, offset)
            offset += len(chunk)
        file.close()

    def put(self, files: Sequence[tuple[str, bytes]]) -> None:
        with _Folders(self) as folders:
            for path, data in files:
                outer, _, name = path.rpartition("/")
                write_new(folders.at(outer), name, data)
        self._unsynced += [path for path, _ in files]

    def link(self, name: str, source: Store, entry: Entry) -> bool:
        outer, _, plain = name.rpartition("/")
        try:
            if (target := _path_of(source, entry.name)) is None:
                return False
            with self.made_folder(outer) as folder:
                folder.link(plain, target)
                _require_same(folder, plain, entry)
        except (OSError, FormatError) as error:  # no links between these places; or it was just removed
            logger.warning("reuse: cannot link %s, writing it again: %s", source.path_to(entry.name), error)
            return False
        if outer:  # the new name in its directory; the bytes were synced by the save that wrote them
            self._unsynced.append(name)
        return True

    def folder(self, path: str) -> Directory:
        """Open a directory of the data; "" is the data itself. The caller closes it."""
        return self.data.enter(path) if path else Directory(self.data.path, os.dup(self.data.descriptor))

    def made_folder(self, path: str) -> Directory:
        """Open a directory of the data, made if it is not there. The caller closes it."""
        if path and path not in self._made:
            outer, _, name = path.rpartition("/")
            with self.made_folder(outer) as parent:
                self.make_in(parent, path, name)
        return self.folder(path)

    def make_in(self, parent: Directory, path: str, name: str) -> None:
        """Make a directory of the data in one that is open, unless it is there."""
        if path not in self._made:
            with suppress(FileExistsError):  # made by another process
                parent.make(name)
            self._made.add(path)

    def note_written(self, name: str, *, is_synced: bool) -> None:
        """Note a file that is complete; of one that is synced only the directory is left to sync."""
        (self._synced if is_synced else self._unsynced).append(name)

    def sync(self) -> None:
        files, self._unsynced = self._unsynced, []
        synced, self._synced = self._synced, []
        if len(files) >= _FEW and _syncfs(self.data.descriptor):
            return
        folders: dict[str, list[str]] = {}
        for path in files:
            outer, _, name = path.rpartition("/")
            folders.setdefault(outer, []).append(name)
        for path in (*folders, *(path.rpartition("/")[0] for path in synced)):
            outer = path
            folders.setdefault(outer, [])
            while outer := outer.rpartition("/")[0]:
                folders.setdefault(outer, [])
        tasks = [partial(self._sync_one, outer, name) for outer, names in folders.items() for name in names]
        run_all(tasks, default_threads())
        for path in folders:
            if path:  # the data directory itself is synced if it is moved
                with self.folder(path) as folder:
                    folder.sync()

    def _sync_one(self, outer: str, name: str) -> None:
        with self.folder(outer) as folder:
            sync_file(folder, name)

    def names(self) -> list[str]:
        return list(self.data.kinds())

    def abandon(self) -> None:
        """Close all files as a process does that dies: what they have stays."""
        for file in self._files:
            file.abandon()


def _path_of(store: Store, name: str) -> Path | None:
    """Return the path of a file of this machine, which does not lead out of its store; None for any other file."""
    from eformer._engine.stores.local import on_disk  # late: a store makes uploads

    if (place := on_disk(store)) is not None:
        os.close(open_inside(place, name))
        return place / name
    return None


def _require_same(folder: Directory, name: str, entry: Entry) -> None:
    status = folder.status(name)
    if status is None or content_of(version_of(status)) != content_of(entry.version):
        folder.unlink(name)
        raise FormatError("it is not the file that was looked at")


class _Folders:
    """Directories of the data, made and opened one after the other. Neighbours have the same parent, which stays
    open."""

    def __init__(self, upload: NewFiles) -> None:
        self._upload = upload
        self._path, self._folder = "", upload.folder("")
        self._parent_path, self._parent = "", upload.folder("")

    def at(self, path: str) -> Directory:
        if path == self._path:
            return self._folder
        self._folder.close()
        outer, _, name = path.rpartition("/")
        if outer != self._parent_path:
            self._parent.close()
            self._parent_path, self._parent = outer, self._upload.made_folder(outer)
        if name:
            self._upload.make_in(self._parent, path, name)
            self._folder = self._parent.enter(name)
        else:
            self._folder = self._upload.folder("")
        self._path = path
        return self._folder

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._folder.close()
        self._parent.close()


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
                # The permissions of a file that it will replace hold from the beginning.
                mode = None if outer else replaceable_mode(self._upload.place, name)
                with self._upload.made_folder(outer) as folder:
                    self._descriptor = folder.create(name)
                if mode is not None:
                    os.fchmod(self._descriptor, mode)
                os.ftruncate(self._descriptor, self._nbytes)

    def close(self) -> None:
        if self._descriptor < 0:
            self._open()
        if self._sync:  # through the descriptor that wrote it, which knows of every error
            sync_data(self._descriptor)
        self._upload.note_written(self._path, is_synced=self._sync)
        self.abandon()

    def abandon(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def write_new(directory: Directory, name: str, data: bytes) -> None:
    """Write a new file. Thousands of times: hence no objects."""
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
        sync_data(descriptor)


_fstatfs = function_of_libc("fstatfs", ctypes.c_int, ctypes.c_void_p)
_sync_all = function_of_libc("syncfs", ctypes.c_int)


def _reports_errors_of_syncfs() -> bool:
    """Tell whether this is Linux 5.8 or later; before, syncfs does not say when something could not be written."""
    release = os.uname().release.replace("-", ".").split(".")
    return sys.platform == "linux" and [int(part) for part in release[:2] if part.isdecimal()] >= [5, 8]


_IS_RELIABLE = _reports_errors_of_syncfs()


def _syncfs(descriptor: int) -> bool:
    """Flush the whole file system, which is much faster than each of many files alone. Return False if it is not of a
    kind that does so and reports errors."""
    if not (_IS_RELIABLE and _fstatfs and _sync_all):
        return False
    status = (ctypes.c_long * 32)()
    if _fstatfs(descriptor, status) or status[0] & 0xFFFFFFFF not in _SYNCED_BY_SYNCFS:
        return False
    if _sync_all(descriptor):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return True
