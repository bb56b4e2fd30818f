"""Stores of files that are all known by name, with their lengths, before one of them is read. They are only read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from itertools import islice, takewhile
from typing import TYPE_CHECKING, Generic, TypeVar

from eformer._engine.record.names import is_inside
from eformer._engine.record.signature import SignedFile
from eformer._engine.stores.base import Entry, ReadOnly
from eformer.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from eformer._engine.stores.base import Files, Kind, Store, Version


File = TypeVar("File", Entry, SignedFile)


class Listing(Generic[File]):
    """Files by path, sorted, which all stores of one place share."""

    def __init__(self, files: Mapping[str, File]) -> None:
        self.files = dict(sorted(files.items()))
        self._paths = list(self.files)

    def below(self, start: str) -> dict[str, File]:
        """Return the files whose paths begin so, by the rest of the path."""
        paths = islice(self._paths, bisect_left(self._paths, start), None)
        found = takewhile(lambda path: path.startswith(start), paths)
        return {path.removeprefix(start): self.files[path] for path in found}


class ListedStore(ReadOnly, ABC, Generic[File]):
    """A directory of listed files; `_path` leads to it from the top."""

    url: str
    missing = "does not exist"
    _path: str

    @property
    @abstractmethod
    def listing(self) -> Listing[File]: ...

    @abstractmethod
    def path_to(self, name: str) -> str: ...

    @abstractmethod
    def open(self, names: Sequence[str], versions: Mapping[str, Version] | None = None) -> Files: ...

    @abstractmethod
    def version_of(self, file: File) -> Version:
        """Return the version that the next read of a file is of."""

    @abstractmethod
    def _at(self, path: str) -> Store:
        """Return the store of another directory."""

    def parent(self) -> tuple[Store, str]:
        outer, _, name = self._path.rpartition("/")
        return self._at(outer), name

    def at(self, below: str) -> Store:
        return self._at(self.inner(below))

    def inner(self, name: str) -> str:
        """Return the path of a name from the top."""
        return f"{self._path}/{name}" if self._path else name

    # ---------------------------------------------------------------------------------------- look

    def kinds(self, below: str = "") -> dict[str, Kind]:
        kinds: dict[str, Kind] = {}
        for path in self._below(below):
            name, slash, _ = path.partition("/")
            kinds[name] = "directory" if slash else "file"
        if not kinds:
            raise FileNotFoundError(f"there are no files in {self.path_to(below) if below else self.url}")
        return dict(sorted(kinds.items()))

    def sizes(self, below: str, depth: int = 1) -> dict[str, int]:
        found = self._below(below)
        return {path: file.nbytes for path, file in found.items() if path.count("/") < depth}

    def kind(self, name: str) -> Kind | None:
        if self.exists(name):
            return "file"
        return "directory" if self._below(name) else None

    def exists(self, name: str) -> bool:
        return self.inner(name) in self.listing.files

    is_file = exists

    def _below(self, below: str) -> dict[str, File]:
        return self.listing.below("".join(f"{part}/" for part in (self._path, below) if part))

    # ---------------------------------------------------------------------------------------- read

    def read(self, name: str, start: int = 0, nbytes: int | None = None) -> tuple[bytes, Entry]:
        file = self.file(name)
        entry = Entry(name, file.nbytes, self.version_of(file))
        rest = max(0, file.nbytes - start)
        memory = memoryview(bytearray(rest if nbytes is None else min(nbytes, rest)))
        if not memory:
            return b"", entry
        files = self.open([name])
        try:
            return bytes(memory[: files.read_into(0, memory, start)]), entry
        finally:
            files.close()

    def file(self, name: str) -> File:
        if not is_inside(name):
            raise FormatError(f"{name[:200]!r} is not the name of a file in {self.url}")
        file = self.listing.files.get(self.inner(name))
        if file is None:
            raise FileNotFoundError(f"{self.path_to(name)} {self.missing}")
        return file
