"""Checkpoints in directories of this machine: read them without leaving them, and use features that only a disk has."""

from __future__ import annotations

import os
import stat
from collections import Counter
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from eformer._engine.stores.base import Entry
from eformer._engine.stores.directory import (
    Closing,
    Directory,
    kinds_of,
    open_folder,
    open_inside,
    own_path,
    read_range,
    version_of,
    walk,
)
from eformer._engine.stores.durable import replaceable_mode
from eformer._engine.stores.journal import sweep_dead
from eformer._engine.stores.local_files import LocalFiles
from eformer._engine.stores.local_upload import LocalUpload
from eformer._engine.stores.scratch import Scratch
from eformer._engine.tasks.pool import default_threads

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from eformer._engine.stores.base import Kind, Store, Version


_ALL_DEPTHS = 1000


class LocalStore:
    """A directory of this machine.

    A file may be a link that ends in or below the directory. In a snapshot of Hugging Face's cache it may also end in
    ../../blobs, where that cache keeps its files. Other links are refused, and their targets are not opened.
    """

    most_path_bytes = os.pathconf("/", "PC_PATH_MAX") - 1  # 4095 on Linux, 1023 on macOS
    read_threads = default_threads()
    # For one system call: enough for the disk, and small enough for the processor's cache.
    read_bytes = 4 * 2**20

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.url = str(self.path)

    @property
    def key(self) -> str:
        return os.path.realpath(self.path)

    def path_to(self, name: str) -> str:
        return str(self.path / name)

    def parent(self) -> tuple[LocalStore, str]:
        return LocalStore(self.path.parent), self.path.name

    def at(self, below: str) -> LocalStore:
        return LocalStore(self.path / below)

    # --------------------------------------------------------------------------------------- look

    def kinds(self, below: str = "") -> dict[str, Kind]:
        return kinds_of(open_folder(self.path, below))

    def sizes(self, below: str, depth: int = 1) -> dict[str, int]:
        return {
            path: entry.stat(follow_symlinks=False).st_size
            for path, entry in walk(self.path, below, levels=depth)
            if not entry.is_dir(follow_symlinks=False)
        }

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

    # --------------------------------------------------------------------------------------- read

    def read(self, name: str, start: int = 0, nbytes: int | None = None) -> tuple[bytes, Entry]:
        with Closing(open_inside(self.path, name)) as descriptor:
            status = os.fstat(descriptor)
            rest = status.st_size - start
            data = read_range(descriptor, start, rest if nbytes is None else min(nbytes, rest))
            return data, Entry(name, status.st_size, version_of(status))

    def open(self, names: Sequence[str], versions: Mapping[str, Version] | None = None) -> LocalFiles:
        return LocalFiles(self.path, names, versions)

    # -------------------------------------------------------------------------------------- write

    def begin(
        self, root: str = "", token: str = "", *, save_id: str = "", may_be_new: bool = False
    ) -> LocalUpload:
        return LocalUpload(self.path, token, may_be_new=may_be_new)


# ------------------------------------------------------------------------------- the properties of a disk


def on_disk(store: Store) -> Path | None:
    """Return the path of a store that is a directory of this machine; None for any other store."""
    return store.path if isinstance(store, LocalStore) else None


def is_there(store: Store) -> bool:
    """Tell whether a store is an existing directory, or a prefix of objects."""
    if (place := on_disk(store)) is not None:
        return place.is_dir()
    try:
        return bool(store.kinds())
    except FileNotFoundError:
        return False


def resolved(store: Store, name: str = "") -> tuple[Store, str]:
    """Follow a link at the caller's path. Return the store and the name of its target, or the store by a path without
    links."""
    if (place := on_disk(store)) is None:
        return store, name
    real = Path(os.path.realpath(place / name))
    return (LocalStore(real.parent), real.name) if name else (LocalStore(real), "")


def check_replaceable(store: Store, name: str) -> None:
    """Raise OSError if the name belongs to a directory, a pipe or a device, which a file cannot replace."""
    if (place := on_disk(store)) is not None:
        with Directory.open(place) as directory:
            replaceable_mode(directory, name)


def usage(store: Store, names: Sequence[str]) -> dict[str, int]:
    """Return the bytes that each file takes on the disk, and each directory with its contents. A file with several
    names counts for the first name."""
    found = dict.fromkeys(names, 0)
    if (place := on_disk(store)) is None:
        for path, nbytes in store.sizes("", _ALL_DEPTHS).items():
            if (top := path.partition("/")[0]) in found:
                found[top] += nbytes
        return found
    seen = set()
    for name in names:
        with suppress(FileNotFoundError):  # another process removes it meanwhile
            for status in _statuses(place / name):
                identity = (status.st_dev, status.st_ino)
                if stat.S_ISREG(status.st_mode) and identity not in seen:
                    seen.add(identity)
                    found[name] += status.st_size
    return found


def freed_by_removal(store: Store, names: Sequence[str]) -> int:
    """Return the bytes that a removal of files and directories frees. A file that also has a name elsewhere stays."""
    if (place := on_disk(store)) is None:
        return sum(usage(store, names).values())
    nbytes, links = 0, Counter[tuple[int, int]]()
    for name in names:
        with suppress(FileNotFoundError):  # another process removes it meanwhile
            for status in _statuses(place / name):
                identity = (status.st_dev, status.st_ino)
                links[identity] += 1
                if stat.S_ISREG(status.st_mode) and links[identity] == status.st_nlink:
                    nbytes += status.st_size
    return nbytes


def _statuses(top: Path) -> Iterator[os.stat_result]:
    """Return the status of a file, or of everything in a directory."""
    if not top.is_dir():
        yield top.lstat()
        return
    for _, entry in walk(top):
        yield entry.stat(follow_symlinks=False)


@contextmanager
def appearing(path: Path) -> Iterator[Path]:
    """Yield a scratch path for a new file or directory. It gets the name `path` at the end of the block, and is removed
    after an error."""
    with Directory.open(path.parent) as place:
        sweep_dead(place)  # remains of dead writers
    with Scratch(path.parent) as scratch:
        data, place, name = scratch.data, scratch.place, path.name
        yield own_path(data) / name
        data.put(name, place, name)
        try:
            place.sync()
        except OSError:  # it may not survive a crash, so it must not become visible
            if place.has_directory(name):
                place.rename(name, data, name)
            else:
                place.unlink(name)
            raise
