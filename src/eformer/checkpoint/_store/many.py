"""Very many files at once: written into a directory that nobody looks for, synced together, published by renames."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import re
import secrets
import shutil
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from eformer.checkpoint._codec import MALFORMED_JSON
from eformer.checkpoint._leaf import is_inside
from eformer.checkpoint._store.local import (
    SCRATCH,
    list_names,
    lock,
    read_small,
    rename,
    sync_directory,
    try_lock,
    unlock,
    write_all,
)
from eformer.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Sequence

logger = logging.getLogger("eformer")

# Up to so many files are synced one by one, so that nobody waits for what others have written.
_FEW = 32

# File systems that are known to write everything on syncfs, and to say if they could not: ext2-4, xfs, btrfs, f2fs,
# tmpfs, overlayfs, zfs. On others, such as those in user space, it may do nothing.
_SYNCED_BY_SYNCFS = {0xEF53, 0x58465342, 0x9123683E, 0xF2F52010, 0x01021994, 0x794C7630, 0x2FC12FC1}

_JOURNAL = "journal.json"

# What arrays and databases consist of; nothing else is ever removed.
_ARRAY_FILE = re.compile(r"\.zarray|\d+(\.\d+)*|manifest\.ocdbt|[0-9a-f]{32}|\.eformer(-\d+)?")

DATABASE_MARK = ".eformer"  # says of which save a database is
_DATABASE_FILES = "d"
_BRANCH = re.compile(r"process-\d+")  # of a database that several processes wrote


class Moved(msgspec.Struct, frozen=True, array_like=True):
    """A directory that a save has put in place or is about to remove: which one, and of which save its arrays are."""

    name: str
    inode: int
    mark: str

    @classmethod
    def of(cls, path: Path, name: str, mark: str) -> Moved:
        return cls(name, os.lstat(path).st_ino, mark)


class Journal(msgspec.Struct, frozen=True):
    """What a save does after its data is written: for whoever has to finish or undo it."""

    save_id: str
    new: tuple[Moved, ...]
    old: tuple[Moved, ...]


class ScratchTree:
    """A new directory whose contents become visible by `publish`. It is locked as long as its writers live.

    Other processes `join` it; who has made it also removes it.
    """

    def __init__(self, directory: Path, name: str | None = None) -> None:
        self.directory = directory
        self.is_finished = True
        self.is_owner = name is None
        self.descriptor = -1
        while self.descriptor < 0:
            self.path = directory / (name or f".eformer-{secrets.token_hex(8)}.tmp")
            self.data = self.path / "data"
            try:
                if self.is_owner:
                    os.mkdir(self.path)
                self.descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                lock(self.descriptor, shared=True)
                if self.is_owner:
                    os.mkdir(self.data)
            except FileNotFoundError:  # swept between its creation and the lock
                self.close()
                if not self.is_owner or not directory.is_dir():
                    raise
            except BaseException:
                self.discard()
                raise

    @classmethod
    def join(cls, directory: Path, name: str) -> ScratchTree:
        """The one that another process has made."""
        return cls(directory, name)

    def sync(self, files: Sequence[str]) -> None:
        """These files of the data, and the directories that they are in, are on stable storage."""
        if len(files) >= _FEW and _syncfs(self.descriptor):
            return
        folders = {""}
        for name in files:
            _sync(f"{self.data}/{name}")
            while name := name.rpartition("/")[0]:
                folders.add(name)
        for folder in folders:
            sync_directory(f"{self.data}/{folder}")

    def files(self, below: str = "") -> list[str]:
        """All files of the data, in and below a directory of it."""
        start = f"{self.data}/{below}" if below else str(self.data)
        return [
            os.path.relpath(os.path.join(folder, name), self.data)
            for folder, _, names in os.walk(start)
            for name in names
        ]

    def publish(
        self, save_id: str, moves: Sequence[tuple[Path, str]], mark: str, old: Sequence[str], old_mark: str
    ) -> None:
        """Moves directories to names that are free; a journal says so first, for the case that we die meanwhile.

        The arrays in them have this mark. The directories `old`, with arrays of another mark, are not needed then.
        """
        there = [(self.directory / name, name) for name in old if (self.directory / name).exists()]
        new = tuple(Moved.of(path, name, mark) for path, name in moves)
        gone = tuple(Moved.of(path, name, old_mark) for path, name in there)
        journal = f"{self.path}/{_JOURNAL}"
        write_new(journal, msgspec.json.encode(Journal(save_id, new, gone)))
        _sync(journal)
        sync_directory(self.path)
        sync_directory(self.directory)  # the journal is only there if the directory it is in is
        self.is_finished = False  # from here on it has to stay, for a later save to go by
        for path, name in moves:
            rename(path, self.directory / name)
        sync_directory(self.directory)

    def finish(self, is_sealed: bool) -> None:
        """Away with what is no longer needed: the old if the save is committed, else the new."""
        journal = _read_journal(self.path)
        _carry_out(self.directory, self.path, {journal.save_id} if is_sealed and journal else None)
        self.is_finished = True

    def close(self) -> None:
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            unlock(descriptor)
            os.close(descriptor)

    def discard(self) -> None:
        try:
            if self.is_finished and self.is_owner:
                shutil.rmtree(self.path, ignore_errors=True)
        finally:
            self.close()


def make_directory(path: str) -> None:
    with suppress(FileExistsError):  # another process may have been first
        os.mkdir(path)


def read_file(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def file_nbytes(path: str) -> int:
    return os.stat(path).st_size


def write_new(path: str, data: bytes) -> None:
    """A new file. Thousands of times: hence no objects."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]
    finally:
        os.close(descriptor)


class NewFile:
    """A new file of known length, that several threads write; open from the first write on until it is closed."""

    def __init__(self, path: str, nbytes: int) -> None:
        self.path, self.length = path, nbytes
        self._lock = threading.Lock()
        self._descriptor = -1

    def write(self, data: Any, offset: int) -> None:
        with self._lock:
            if self._descriptor < 0:
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
                self._descriptor = os.open(self.path, flags, 0o666)
                os.ftruncate(self._descriptor, self.length)
        write_all(self._descriptor, data, offset)

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def has_unfinished(directory: Path) -> bool:
    """Whether a save is under way here, or has died."""
    return any(SCRATCH.fullmatch(name) and (directory / name).is_dir() for name in list_names(directory))


def sweep_trees(directory: Path, sealed: Container[str] | None) -> None:
    """Finishes what saves that died left undone: those in `sealed`, which are all that are known of, were committed,
    others never happened, or are replaced by now. None if that is not known: then only what is new is removed."""
    for name in list_names(directory):
        if SCRATCH.fullmatch(name) and (directory / name).is_dir():
            _sweep(directory, directory / name, sealed)


def sweep_unpublished(directory: Path) -> None:
    """Away with what dead writers have left that had published nothing: it is no business of any index here."""
    for name in list_names(directory):
        scratch = directory / name
        if SCRATCH.fullmatch(name) and scratch.is_dir() and not (scratch / _JOURNAL).exists():
            _sweep(directory, scratch, None)


def _sweep(directory: Path, scratch: Path, sealed: Container[str] | None) -> None:
    with suppress(OSError):  # it is alive (locked), or its writer has just removed it
        descriptor = os.open(scratch, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            try_lock(descriptor)
            _carry_out(directory, scratch, sealed)
            shutil.rmtree(scratch, ignore_errors=True)
        finally:
            os.close(descriptor)


def _read_journal(scratch: Path) -> Journal | None:
    try:
        return msgspec.json.decode(read_small(scratch, _JOURNAL) or b"", type=Journal)
    except (OSError, FormatError, *MALFORMED_JSON):  # it died before it had one: nothing was moved
        return None


def _carry_out(directory: Path, scratch: Path, sealed: Container[str] | None) -> None:
    """Away with the new directories if their save is not among those that are `sealed`, else with the old; and with old
    ones that nobody knows of any more, because others have committed since. Nothing but the new if that is None."""
    journal = _read_journal(scratch)
    if journal is None:
        return
    is_sealed = sealed is not None and journal.save_id in sealed
    for moved in () if is_sealed else journal.new:
        _remove_moved(directory, moved)
    for moved in journal.old:
        if is_sealed or (sealed is not None and moved.mark and moved.mark not in sealed):
            _remove_moved(directory, moved)


def _remove_moved(directory: Path, moved: Moved) -> None:
    path = directory / moved.name
    try:
        is_the_one = os.lstat(path).st_ino == moved.inode
    except FileNotFoundError:
        return
    if is_the_one and is_inside(moved.name) and "/" not in moved.name:
        remove_arrays(path, moved.mark)


def remove_arrays(path: Path, mark: str) -> None:
    """The arrays of one save in and below a directory are gone, and it too unless there is something else in it.

    What says whose they are goes last, so that this can be done again should it be interrupted.
    """
    if _mark_of_database(path) == mark:
        for branch in (*filter(_BRANCH.fullmatch, list_names(path)), "."):
            _remove_files(f"{path}/{branch}/{_DATABASE_FILES}")
            _remove_files(f"{path}/{branch}")
    for folder, _, names in os.walk(path, topdown=False):
        if ".zarray" in names and mark_of_array(folder) == mark:
            _remove_files(folder)
        _remove_if_empty(folder)


def mark_of_array(folder: str) -> str | None:
    """Which save of ours an array is of; empty for somebody else's, None for what is no array."""
    try:
        return msgspec.json.decode(read_small(Path(folder), ".zarray") or b"", type=_Marked).eformer
    except (OSError, FormatError, *MALFORMED_JSON):
        return None


class _Marked(msgspec.Struct):
    eformer: str = ""


def _mark_of_database(path: Path) -> str | None:
    try:
        return (read_small(path, DATABASE_MARK) or b"").decode(errors="replace")
    except (OSError, FormatError):
        return None


def _remove_files(folder: str) -> None:
    names = list_names(folder) if os.path.isdir(folder) else []
    for name in sorted(names, key=lambda name: name in (".zarray", DATABASE_MARK)):
        if _ARRAY_FILE.fullmatch(name):
            os.unlink(f"{folder}/{name}")


def _remove_if_empty(folder: str) -> None:
    try:
        os.rmdir(folder)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
            raise


# --------------------------------------------------------------------------------------------- sync


def _sync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _libc() -> Callable[[int], int] | None:
    try:
        release = tuple(int(part) for part in re.findall(r"\d+", os.uname().release)[:2])
        if release < (5, 8):  # which does not say when something could not be written
            return None
        libc = ctypes.CDLL(None, use_errno=True)
        libc.syncfs.argtypes = [ctypes.c_int]
        libc.fstatfs.argtypes = [ctypes.c_int, ctypes.c_void_p]
    except (OSError, AttributeError):  # not Linux
        return None

    def syncfs(descriptor: int) -> int:
        status = (ctypes.c_long * 32)()
        if libc.fstatfs(descriptor, status) or status[0] & 0xFFFFFFFF not in _SYNCED_BY_SYNCFS:
            return 0
        if libc.syncfs(descriptor):
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))
        return 1

    return syncfs


_syncfs_of_linux = _libc()


def _syncfs(descriptor: int) -> bool:
    """Writes the whole file system, if it is of a kind that does: for many files much faster than each alone."""
    return bool(_syncfs_of_linux and _syncfs_of_linux(descriptor))
