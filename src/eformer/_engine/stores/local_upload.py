"""Very many files at once: written into a directory that nobody looks for, synced together, published by renames."""

from __future__ import annotations

import ctypes
import logging
import os
import re
import secrets
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import msgspec

from eformer._engine.record.values import MALFORMED_JSON
from eformer._engine.stores.directory import Directory, lock, try_lock, unlock
from eformer._engine.stores.local import SCRATCH, walk, write_all
from eformer._engine.stores.removal import Moved, remove_moved
from eformer.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Generator, Iterable, Iterator, Sequence
    from pathlib import Path

logger = logging.getLogger("eformer")

# Up to so many files are synced one by one, so that nobody waits for what others have written.
_FEW = 32

# File systems that are known to write everything on syncfs, and to say if they could not: ext2-4, xfs, btrfs, f2fs,
# tmpfs, overlayfs, zfs. On others, such as those in user space, it may do nothing.
_SYNCED_BY_SYNCFS = {0xEF53, 0x58465342, 0x9123683E, 0xF2F52010, 0x01021994, 0x794C7630, 0x2FC12FC1}

_JOURNAL = "journal.json"
_MOST_JOURNAL = 2**27  # bytes


class Journal(msgspec.Struct, frozen=True):
    """What a save does after its data is written: for whoever has to finish or undo it."""

    save_id: str
    new: tuple[Moved, ...]
    old: tuple[Moved, ...]


_DATA = "data"


class ScratchTree:
    """A new directory whose contents become visible by `publish`. It is locked as long as its writers live.

    `place` is the directory that it is in, and `data` the one to write to. Other processes `join` it; who has made it
    also removes it.
    """

    def __init__(self, directory: Path, name: str | None = None) -> None:
        self.is_finished = True
        self.is_owner = name is None
        self.place = Directory.open(directory)
        self.data = self._folder = Directory(directory, -1)
        try:
            while self._folder.descriptor < 0:
                self._enter(name or f".eformer-{secrets.token_hex(8)}.tmp")
        except BaseException:
            self.close()
            raise

    def _enter(self, name: str) -> None:
        """Make the directory, or open the one that another process has made, and lock it."""
        self.name = name
        if self.is_owner:
            self.place.make(name)
        try:
            self._folder = self.place.enter(name)
            lock(self._folder.descriptor, shared=True)
            if self.is_owner:
                self._folder.make(_DATA)
            self.data = self._folder.enter(_DATA)
        except FileNotFoundError:  # swept between its creation and the lock
            self._folder.close()
            if not self.is_owner or not self.place.path.is_dir():
                raise
        except BaseException:
            self.discard()
            raise

    @classmethod
    def join(cls, directory: Path, name: str) -> ScratchTree:
        """The one that another process has made."""
        return cls(directory, name)

    @property
    def path(self) -> Path:
        return self.place.path / self.name

    # --------------------------------------------------------------------------------------- write

    def make_folders(self, paths: Iterable[str]) -> Generator[Directory, None, None]:
        """Make directories in others that are there, and open each until the next one is asked for."""
        last, parent = "", self.folder("")
        try:
            for path in paths:
                outer, _, name = path.rpartition("/")
                if outer != last:  # neighbours have the same
                    parent.close()
                    last, parent = outer, self.folder(outer)
                with suppress(FileExistsError):  # another process may have been first
                    parent.make(name)
                with parent.enter(name) as folder:
                    yield folder
        finally:
            parent.close()

    @contextmanager
    def make_folder(self, path: str) -> Iterator[Directory]:
        """Make a directory in one that is there, and open it."""
        yield from self.make_folders([path])

    def folder(self, path: str) -> Directory:
        """Open a directory of the data; "" is the data itself. The caller closes it."""
        return self.data.enter(path) if path else Directory(self.data.path, os.dup(self.data.descriptor))

    def write_new(self, path: str, data: bytes) -> None:
        outer, _, name = path.rpartition("/")
        with self.folder(outer) as folder:
            write_new(folder, name, data)

    def sync(self, files: Iterable[str]) -> None:
        """These files of the data, and the directories that they are in, are on stable storage."""
        files = list(files)
        if len(files) >= _FEW and _syncfs(self.data.descriptor):
            return
        folders: dict[str, list[str]] = {"": []}
        for path in files:
            outer, _, name = path.rpartition("/")
            folders.setdefault(outer, []).append(name)
            while outer := outer.rpartition("/")[0]:
                folders.setdefault(outer, [])
        for path, names in folders.items():
            with self.folder(path) as folder:
                for name in names:
                    _sync(folder, name)
                folder.sync()

    def files(self, below: str = "") -> list[str]:
        """All files of the data, in and below a directory of it."""
        start = self.data.path / below
        entries = walk(start) if start.is_dir() else ()
        return [
            os.path.relpath(entry.path, self.data.path)
            for entry in entries
            if not entry.is_dir(follow_symlinks=False)
        ]

    # ------------------------------------------------------------------------------------- publish

    def publish(self, journal: Journal, moves: Sequence[tuple[str, str]]) -> None:
        """Moves directories of the data, "" for all of it, to names that are free; the journal says so first, for the
        case that we die meanwhile."""
        write_new(self._folder, _JOURNAL, msgspec.json.encode(journal))
        _sync(self._folder, _JOURNAL)
        self._folder.sync()
        self.place.sync()  # the journal is only there if the directory it is in is
        self.is_finished = False  # from here on it has to stay, for a later save to go by
        for name, final in moves:
            source = self.data if name else self._folder
            source.rename(name or _DATA, self.place, final)
        self.place.sync()

    def finish(self, is_sealed: bool) -> None:
        """Away with what is no longer needed: the old if the save is committed, else the new."""
        journal = _read_journal(self._folder)
        _carry_out(self.place, journal, {journal.save_id} if is_sealed and journal else None)
        self.is_finished = True

    def close(self) -> None:
        if self._folder.descriptor >= 0:
            unlock(self._folder.descriptor)
        for directory in (self.data, self._folder, self.place):
            directory.close()

    def discard(self) -> None:
        try:
            if self.is_finished and self.is_owner and self.place.descriptor >= 0:
                self._remove()
        finally:
            self.close()

    def _remove(self) -> None:
        with suppress(OSError):  # what cannot be removed is left to the next save
            self.place.remove_tree(self.name)


def write_new(directory: Directory, name: str, data: bytes) -> None:
    """A new file. Thousands of times: hence no objects."""
    descriptor = directory.create(name)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]
    finally:
        os.close(descriptor)


class NewFile:
    """A new file of known length, that several threads write; open from the first write on until it is closed."""

    def __init__(self, scratch: ScratchTree, path: str, nbytes: int) -> None:
        self.scratch, self.path, self.length = scratch, path, nbytes
        self._lock = threading.Lock()
        self._descriptor = -1

    def write(self, data: Any, offset: int) -> None:
        with self._lock:
            if self._descriptor < 0:
                outer, _, name = self.path.rpartition("/")
                with self.scratch.folder(outer) as folder:
                    self._descriptor = folder.create(name)
                os.ftruncate(self._descriptor, self.length)
        write_all(self._descriptor, data, offset)

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


# --------------------------------------------------------------------------------------------- sweep


def has_unfinished(directory: Path) -> bool:
    """Whether a save is under way here, or has died."""
    with Directory.open(directory) as place:
        return bool(_scratch_names(place))


def sweep_trees(place: Directory, sealed: Container[str] | None) -> None:
    """Finishes what saves that died left undone: those in `sealed`, which are all that are known of, were committed,
    others never happened, or are replaced by now. None if that is not known: then only what is new is removed."""
    with suppress(OSError):  # which cannot be listed
        for name in _scratch_names(place):
            _sweep(place, name, sealed)


def sweep_unpublished(place: Directory) -> None:
    """Away with what dead writers have left that had published nothing: it is no business of any index here."""
    with suppress(OSError):  # which cannot be listed
        for name in _scratch_names(place):
            _sweep(place, name, None, only_unpublished=True)


def _scratch_names(place: Directory) -> list[str]:
    return [name for name, kind in place.kinds().items() if kind == "directory" and SCRATCH.fullmatch(name)]


def _sweep(
    place: Directory, name: str, sealed: Container[str] | None, *, only_unpublished: bool = False
) -> None:
    with suppress(OSError), place.enter(name) as scratch:  # unless it has just been removed by its writer
        try_lock(scratch.descriptor)  # raises if that is alive
        if only_unpublished and scratch.status(_JOURNAL):
            return
        _carry_out(place, _read_journal(scratch), sealed)
        place.remove_tree(name)


def _read_journal(scratch: Directory) -> Journal | None:
    try:
        return msgspec.json.decode(scratch.read(_JOURNAL, _MOST_JOURNAL), type=Journal)
    except (FileNotFoundError, FormatError, *MALFORMED_JSON):  # it died before it had one: nothing was moved
        return None


def _carry_out(place: Directory, journal: Journal | None, sealed: Container[str] | None) -> None:
    """Away with the new directories if their save is not among those that are `sealed`, else with the old; and with old
    ones that nobody knows of any more, because others have committed since. Nothing but the new if that is None."""
    if journal is None:
        return
    if sealed is None:
        doomed = journal.new
    elif journal.save_id in sealed:
        doomed = journal.old
    else:
        doomed = (*journal.new, *(moved for moved in journal.old if moved.mark))
    for moved in doomed:
        if sealed is None or moved.mark not in sealed:  # which the index knows, whatever the journal says
            remove_moved(place, moved)


# --------------------------------------------------------------------------------------------- sync


def _sync(directory: Directory, name: str) -> None:
    descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory.descriptor)
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
