"""Checkpoints in directories of this machine: read without leaving them."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from eformer._engine.stores.base import Entry
from eformer._engine.stores.directory import Directory, kinds_of, open_inside, read_range, version_of, walk
from eformer._engine.stores.durable import make_directories, replaceable_mode, sync_directory
from eformer._engine.stores.journal import has_unfinished, sweep_dead
from eformer._engine.stores.local_files import LocalFiles
from eformer._engine.stores.local_removal import identity_of, remove_checkpoint, set_aside
from eformer._engine.stores.local_upload import LocalUpload
from eformer._engine.tasks.pool import default_threads

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from eformer._engine.stores.base import Identity, Indexes, Kind, Version


_MOST_PATH = 4096  # bytes


def _statuses(top: Path) -> Iterator[os.stat_result]:
    """Return the status of a file, or of everything in a directory."""
    if not top.is_dir():
        yield top.lstat()
        return
    for _, entry in walk(top):
        yield entry.stat(follow_symlinks=False)


class LocalStore:
    """A directory of this machine.

    A file of it may be a link to another file in it or below it or, in a snapshot of Hugging Face's cache, to
    ../../blobs, where that keeps the files. Links anywhere else are refused, and nothing there is opened.
    """

    can_rename = True
    read_bytes = 4 * 2**20  # one system call's worth: enough for the disk, and still in the processor's cache

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    @property
    def url(self) -> str:
        return str(self.path)

    @property
    def key(self) -> str:
        return os.path.realpath(self.path)

    @property
    def read_threads(self) -> int:
        return default_threads()

    def path_to(self, name: str) -> str:
        return str(self.path / name)

    def is_there(self) -> bool:
        return self.path.is_dir()

    def parent(self) -> tuple[LocalStore, str]:
        return LocalStore(self.path.parent), self.path.name

    def at(self, below: str) -> LocalStore:
        return LocalStore(self.path / below)

    def real(self) -> LocalStore:
        return LocalStore(self.key)

    def resolve(self, name: str) -> tuple[LocalStore, str]:
        real = Path(os.path.realpath(self.path / name))
        return LocalStore(real.parent), real.name

    def local_path(self, name: str = "") -> Path:
        if name:
            os.close(open_inside(self.path, name))  # refuses a name that leads out
        return self.path / name

    def require_short(self, name: str) -> None:
        path = self.path_to(name)
        if len(os.fsencode(path)) >= _MOST_PATH:
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), path)

    # --------------------------------------------------------------------------------------- look

    def kinds(self, below: str = "") -> dict[str, Kind]:
        return kinds_of(walk(self.path, below, levels=1))

    def sizes(self, below: str, depth: int = 1) -> dict[str, int]:
        return {
            path: entry.stat(follow_symlinks=False).st_size
            for path, entry in walk(self.path, below, levels=depth)
            if not entry.is_dir(follow_symlinks=False)
        }

    def usage(self, names: Sequence[str]) -> dict[str, int]:
        seen: set[tuple[int, int]] = set()
        return {name: self._usage(self.path / name, seen) for name in names}

    def _usage(self, top: Path, seen: set[tuple[int, int]]) -> int:
        """Count the bytes of files that were not `seen` yet, and add them to those."""
        nbytes = 0
        with suppress(FileNotFoundError):  # somebody removes them
            for status in _statuses(top):
                identity = (status.st_dev, status.st_ino)
                if stat.S_ISREG(status.st_mode) and identity not in seen:
                    seen.add(identity)
                    nbytes += status.st_size
        return nbytes

    def kind(self, name: str) -> Kind | None:
        try:
            mode = (self.path / name).lstat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            return None
        return "file" if stat.S_ISREG(mode) else "directory" if stat.S_ISDIR(mode) else "other"

    def is_file(self, name: str) -> bool:
        return self.kind(name) == "file"

    def exists(self, name: str) -> bool:
        return (self.path / name).exists()

    def has_unfinished(self) -> bool:
        return has_unfinished(self.path)

    # --------------------------------------------------------------------------------------- read

    def read(self, name: str, start: int = 0, nbytes: int | None = None) -> tuple[bytes, Entry]:
        descriptor = open_inside(self.path, name)
        try:
            status = os.fstat(descriptor)
            rest = status.st_size - start
            data = read_range(descriptor, start, rest if nbytes is None else min(nbytes, rest))
            return data, Entry(name, status.st_size, version_of(status))
        finally:
            os.close(descriptor)

    def open(self, names: Sequence[str], versions: Mapping[str, Version] | None = None) -> LocalFiles:
        return LocalFiles(self.path, names, versions)

    # -------------------------------------------------------------------------------------- write

    def make(self) -> None:
        make_directories(self.path.parent)
        if not self.path.parent.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(self.path))
        if self.path.is_dir():
            sync_directory(self.path.parent)  # whoever made the directory may have died before this

    def check_replaceable(self, name: str) -> None:
        with Directory.open(self.path) as directory:
            replaceable_mode(directory, name)

    def identity(self, name: str, indexes: Indexes) -> Identity:
        return identity_of(self.path / name)

    def remove_checkpoint(self, name: str, indexes: Indexes, identity: Identity | None = None) -> bool:
        now = identity_of(self.path / name)  # raises if it is gone
        remove_checkpoint(self.path, name, identity or now)
        return True

    def sweep(self, name: str, indexes: Indexes) -> None:
        with Directory.open(self.path) as place:
            sweep_dead(place, name)

    def set_aside(self, name: str, why: str, marks: Sequence[str]) -> str:
        return set_aside(self.path, name, why)

    @contextmanager
    def held(self, name: str) -> Iterator[str]:
        """Link the files into a hidden directory, which is removed at the end. If this process dies, the next save
        beside it removes it."""
        upload = self.begin()
        try:
            yield str(upload.linked(self, name))
        finally:
            upload.close()

    def begin(self, root: str = "", token: str = "", *, save_id: str = "") -> LocalUpload:
        return LocalUpload(self.path, token)
