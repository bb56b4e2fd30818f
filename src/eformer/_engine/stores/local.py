"""Checkpoints in directories of this machine: read without leaving them."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from eformer._engine.stores.base import Entry
from eformer._engine.stores.directory import kinds_of, open_inside, read_range, version_of, walk
from eformer._engine.stores.local_files import LocalFiles
from eformer._engine.stores.local_upload import LocalUpload
from eformer._engine.tasks.pool import default_threads

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from eformer._engine.stores.base import Kind, Version


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

    most_path_bytes = 4095
    read_threads = default_threads()
    read_bytes = 4 * 2**20  # one system call's worth: enough for the disk, and still in the processor's cache

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

    def resolve(self, name: str) -> tuple[LocalStore, str]:
        """Follow links. Return the place and the name of the file itself; without a name, the place itself and ""."""
        if not name:
            return LocalStore(self.key), ""
        real = Path(os.path.realpath(self.path / name))
        return LocalStore(real.parent), real.name

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

    def begin(
        self, root: str = "", token: str = "", *, save_id: str = "", is_first: bool = False
    ) -> LocalUpload:
        return LocalUpload(self.path, token, is_first=is_first)
