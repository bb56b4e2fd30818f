"""The new files of a save on this machine: written into a locked scratch directory, synced together, moved into place.

The scratch directory lies beside the files that it will become. It is locked as long as its writers live, so that a
later save can tell what a dead one left behind. Before whole directories are moved, a journal in it says which, so that
whoever comes later can finish or undo the save.

A save to a directory that does not exist yet has its scratch directory beside that one. The new directory is made in
there, and gets its name when it is complete: nobody ever sees it without its checkpoint.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import re
import threading
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import msgspec
from msgspec import UNSET

from eformer._engine.record.lazy import lazy_property
from eformer._engine.stores.base import Entry, tidy_up
from eformer._engine.stores.directory import (
    Directory,
    content_of,
    lock,
    open_inside,
    remove_opened,
    set_mode,
    unlock,
    version_of,
)
from eformer._engine.stores.durable import (
    LARGE_WRITE,
    make_directories,
    replaceable_mode,
    replacing_in,
    scratch_name,
    sync_data,
    sync_directory,
    write_all,
    write_past_cache,
)
from eformer._engine.stores.journal import (
    DATA,
    JOURNAL,
    NEW,
    Journal,
    carry_out,
    make_journal,
    read_journal,
    sweep,
)
from eformer._engine.tasks.memory import available_memory
from eformer._engine.tasks.pool import default_threads, run_all
from eformer.errors import FormatError, NotFoundError

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator, Sequence
    from pathlib import Path

    from eformer._engine.stores.base import Change, Commit, Store, Version

logger = logging.getLogger("eformer")

# Up to this many files are synced one by one, so that nobody waits for what others have written.
_FEW = 32

# File systems that are known to write everything on syncfs, and to report errors: ext2-4, xfs, btrfs, f2fs, tmpfs,
# overlayfs, zfs. On others, such as those in user space, it may do nothing.
_SYNCED_BY_SYNCFS = {0xEF53, 0x58465342, 0x9123683E, 0xF2F52010, 0x01021994, 0x794C7630, 0x2FC12FC1}

# Of the available memory: a save up to this part stays in the page cache for its next reader. A larger one would push
# out the pages of other files.
_WARM_PART = 1 / 8

_MOST_DEPTH = 64  # of directories in a checkpoint that is linked


class LocalUpload:
    """A scratch directory: `data` is the directory in it that new files are written to, `place` the one that they will
    be in.

    Other processes join it by its name; the process that made it removes it.
    """

    takes_whole_files = False
    takes_streams = False

    def __init__(self, directory: Path, token: str = "", *, is_first: bool = False) -> None:
        if is_first:
            _make_parent(directory)
        self.is_owner, self.token = not token, token
        self.must_stay = False  # because its journal is needed
        self._directory = directory
        self.is_new = _is_to_be_made(directory, token)  # the place is made by this save
        self._around = Directory.open(directory.parent if self.is_new else directory)
        self.place = self._around
        self.data = self._folder = Directory(directory, -1)
        self._made: set[str] = set()
        self._unsynced: list[str] = []
        self._synced: list[str] = []
        self._published: list[str] = []
        self._files: list[NewFile] = []
        self._created = self.nbytes = 0
        try:
            while self._folder.descriptor < 0:
                self._enter(token or scratch_name())
        except BaseException:
            self.close()
            raise

    def _enter(self, name: str) -> None:
        """Make the directory, or open the one that another process has made, and lock it."""
        self.token = name
        if self.is_owner:
            self._around.make(name, usable=True)
        try:
            self._folder = self._around.enter(name)
            lock(self._folder.descriptor, shared=True)
            if self.is_owner:
                self._folder.make(DATA, usable=True)
            if self.is_owner and self.is_new:
                self._make_place()
            self.data = self._folder.enter(DATA)
            if self.is_new:
                self.place = self._folder.enter(self._new)
        except FileNotFoundError:  # swept between its creation and the lock
            self.data.close()
            self._folder.close()
            if not self.is_owner or not self._around.path.is_dir():
                raise
        except BaseException:
            self.close()
            raise

    @property
    def _new(self) -> str:
        """Where the new place is in the scratch directory: with its name, so that nobody joins who means another."""
        return f"{NEW}/{self._directory.name}"

    def _make_place(self) -> None:
        self._folder.make(NEW, usable=True)
        with self._folder.enter(NEW) as folder:
            folder.make(self._directory.name)

    def announce(self) -> None:
        self._around.sync()

    # --------------------------------------------------------------------------------------- write

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
                _write_new(folders.at(outer), name, data)
        self._unsynced += [path for path, _ in files]

    def link(self, name: str, source: Store, entry: Entry) -> bool:
        outer, _, plain = name.rpartition("/")
        try:
            if (target := _path_of(source, entry.name)) is None:
                return False
            with self.made_folder(outer) as folder:
                folder.link(plain, target)
                _require_same(folder, plain, entry)
        except (
            OSError,
            FormatError,
        ) as error:  # another file system, or one without links; or it was just removed
            logger.warning("reuse: cannot link %s, writing it again: %s", source.path_to(entry.name), error)
            return False
        if outer:  # the new name in its directory; the bytes were synced by the save that wrote them
            self._unsynced.append(name)
        return True

    def linked(self, source: Store, name: str) -> Path:
        """Link all files of a directory. Return where they are."""
        for file in _files(source, name, _MOST_DEPTH):
            nbytes, version = (entry := source.read(file, 0, 0)[1]).nbytes, entry.version
            if not self.link(file, source, Entry(file, nbytes, version)):
                raise NotFoundError(f"{source.path_to(file)} cannot be linked")
        return self.data.path / name

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
            _sync(folder, name)

    def names(self) -> list[str]:
        return list(self.data.kinds())

    def is_published(self, name: str, final: str) -> bool:
        return _is_same(self.data.status(name), self.place.status(final))

    # ------------------------------------------------------------------------------------- publish

    def commit(self, commit: Commit) -> None:
        from eformer._engine.stores.local import LocalStore  # late: a store makes uploads

        with self._exclusive():
            store = LocalStore(self._place_path)
            index = commit.read(store)
            if commit.sweeps:
                self._sweep(index.save_ids)
            try:
                change = commit.change(index, store)
                self._publish(change, commit.save_id)
                if change.index:
                    self.swap(commit.name, change.index(UNSET), index.version)
            except BaseException:
                if not commit.is_done():  # a sync may fail after the index is in place
                    self._withdraw()
                raise
            tidy_up(change, store, self, self._finish)

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Keep other saves to the place waiting. A new place appears at the end."""
        if self.is_new:
            with self._around.locked():
                if not os.path.lexists(self._directory):
                    yield
                    self._appear()
                    return
            self._move_to(Directory.open(self._directory))  # another save has made it meanwhile
        with self.place.locked():
            yield

    def _appear(self) -> None:
        """Give the new directory its name."""
        self.place.sync()
        with self._folder.enter(NEW) as folder:
            folder.put(self._directory.name, self._around, self._directory.name)
        self._around.sync()

    def _move_to(self, place: Directory) -> None:
        self.place.close()
        self.place, self.is_new = place, False

    @property
    def _place_path(self) -> Path:
        """Where the place is by now: a new one gets its name at the end of the commit."""
        return self._around.path / self.token / self._new if self.is_new else self._directory

    def _sweep(self, committed: Container[str] | None) -> None:
        """Remove the remains of writers that died, while the index names the saves in `committed`; None if that is not
        known."""
        if not self.is_new:
            sweep(self.place, committed)
        with suppress(OSError), Directory.open(self._directory.parent) as around:  # saves that made the place
            sweep(around)

    def _publish(self, change: Change, save_id: str) -> None:
        """Give new files and directories their final names."""
        moves, replaced = change.moves, change.replaced
        directories = {
            name: final for name, final in moves.items() if not name or self.data.has_directory(name)
        }
        if (directories or replaced) and not self.is_new:  # what is in a new place is seen by nobody yet
            journal = make_journal(save_id, self.place, self.data, directories, replaced, change.unmarked)
            self._write_journal(journal)
        if "" in moves:
            self.data.sync()
        for name, final in moves.items():
            if name in directories:
                source = self.data if name else self._folder
                source.rename(name or DATA, self.place, final)
            elif not self.is_published(name, final):
                self._move_file(name, final)
        if moves:
            self.place.sync()

    def _write_journal(self, journal: Journal) -> None:
        _write_new(self._folder, JOURNAL, msgspec.json.encode(journal))
        _sync(self._folder, JOURNAL)
        self._folder.sync()
        self.place.sync()  # the journal is only there if the directory that it is in is
        self.must_stay = True

    def _move_file(self, name: str, final: str) -> None:
        mode, status = replaceable_mode(self.place, final), self.data.status(name)
        if mode is not None and status and status.st_nlink == 1:  # else another checkpoint has the file, too
            set_mode(self.data, name, mode)
        if self.place.status(final) is None:  # what is replaced is not ours to withdraw
            self._published.append(final)
        self.data.rename(name, self.place, final)

    def swap(self, name: str, data: bytes, expected: Version | None) -> None:
        with replacing_in(self.place, name) as file:  # the lock makes sure that it is the one expected
            file.write(data)

    def _withdraw(self) -> None:
        """Remove what was published: the save has failed before its commit."""
        for name in self._published:
            self.place.unlink(name)
        if self.must_stay:
            carry_out(self.place, read_journal(self._folder)[0], None)
        self.must_stay = False

    def _finish(self, change: Change) -> None:
        """Remove what was replaced: the save is committed."""
        if self.must_stay and (journal := read_journal(self._folder)[0]):
            carry_out(self.place, journal, {journal.save_id})
        self.must_stay = False

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            self.place.unlink(name)

    # ------------------------------------------------------------------------------------- the place

    def take_back(self, name: str) -> None:
        """Remove an entry that was put in place last, while nobody knows of it yet."""
        if self.place.has_directory(name):
            self.place.rename(name, self.data, name)
        else:
            self.place.unlink(name)

    def close(self) -> None:
        try:
            if self.is_owner and not self.must_stay and self._folder.descriptor >= 0:
                self._remove_scratch()
        finally:
            self.abandon()

    def _remove_scratch(self) -> None:
        for _ in range(2):  # a disk may fail once
            with suppress(OSError):  # left to the next save
                for name in (DATA, NEW):  # after a commit they are empty or gone, and need no listing
                    self._folder.remove_if_empty(name)
                self._around.remove_if_empty(self.token)
                if self._around.status(self.token) is not None:
                    remove_opened(self._around, self.token, self._folder)
                return

    def abandon(self) -> None:
        """Let go of the upload as a process does that dies: what it has written stays."""
        for file in self._files:
            file.abandon()
        if self._folder.descriptor >= 0:
            unlock(self._folder.descriptor)
        for directory in (self.data, self._folder, self.place, self._around):
            directory.close()


def _make_parent(directory: Path) -> None:
    """Make what the directory is in, if it is not there, so that it survives a crash; and the directory, if another
    program has made it, which may have died before it synced it."""
    make_directories(directory.parent)
    if not directory.parent.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(directory))
    if directory.is_dir():
        sync_directory(directory.parent)


def _path_of(store: Store, name: str) -> Path | None:
    """Return the path of a file of this machine, which does not lead out of its store; None for any other file."""
    from eformer._engine.stores.local import on_disk  # late: a store makes uploads

    if (place := on_disk(store)) is not None:
        os.close(open_inside(place, name))
        return place / name
    return None


def _is_to_be_made(directory: Path, token: str) -> bool:
    """Tell whether a save makes the directory, or whether the upload of this token does."""
    if token:
        return not (directory / token).is_dir() and (directory.parent / token).is_dir()
    return not os.path.lexists(directory)


def _files(store: Store, below: str, depth: int) -> Iterator[str]:
    """List the files of a directory, and of those in it."""
    for name, kind in store.kinds(below).items():
        path = f"{below}/{name}"
        if kind == "file":
            yield path
        elif kind == "directory" and depth and not name.startswith("."):
            yield from _files(store, path, depth - 1)


class _Folders:
    """Directories of the data, made and opened one after the other. Neighbours have the same parent, which stays
    open."""

    def __init__(self, upload: LocalUpload) -> None:
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

    def __init__(self, upload: LocalUpload, path: str, nbytes: int, *, sync: bool) -> None:
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


def _write_new(directory: Directory, name: str, data: bytes) -> None:
    """Write a new file. Thousands of times: hence no objects."""
    descriptor = directory.create(name)
    try:
        written = os.write(descriptor, data)
        while written < len(data):
            written += os.write(descriptor, memoryview(data)[written:])
    finally:
        os.close(descriptor)


def _require_same(folder: Directory, name: str, entry: Entry) -> None:
    status = folder.status(name)
    if status is None or content_of(version_of(status)) != content_of(entry.version):
        folder.unlink(name)
        raise FormatError("it is not the file that was looked at")


def _is_same(a: os.stat_result | None, b: os.stat_result | None) -> bool:
    """Tell whether both are names of one file."""
    return a is not None and b is not None and os.path.samestat(a, b)


# --------------------------------------------------------------------------------------------- sync


def _sync(directory: Directory, name: str) -> None:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(name, flags, dir_fd=directory.descriptor)
    try:
        sync_data(descriptor)
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
