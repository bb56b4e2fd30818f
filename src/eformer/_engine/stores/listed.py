"""Read-only stores whose files are all known, with their lengths, before the first is read."""

from __future__ import annotations

import io
from bisect import bisect_left
from copy import copy
from itertools import islice, takewhile
from typing import TYPE_CHECKING, NoReturn, Self

from eformer._engine.record.names import is_inside
from eformer._engine.stores.base import Entry
from eformer.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from eformer._engine.stores.base import Files, Kind, Version


class Listing:
    """The lengths of files by path. The stores of all directories of one place share it."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.sizes, self._paths = sizes, sorted(sizes)

    def below(self, start: str) -> dict[str, int]:
        """Return the files in a directory, by the rest of their paths."""
        paths = islice(self._paths, bisect_left(self._paths, start), None)
        found = takewhile(lambda path: path.startswith(start), paths)
        return {path.removeprefix(start): self.sizes[path] for path in found}


class ListedStore:
    """A read-only directory of listed files. `_path` leads to it from the top. `refusal` is the message when a save
    begins, and what to do."""

    url: str
    refusal: str
    most_path_bytes = 0
    missing = "does not exist"
    _path: str

    # A subclass has the methods below.

    @property
    def listing(self) -> Listing:
        raise NotImplementedError

    def path_to(self, name: str) -> str:
        raise NotImplementedError

    def open(self, names: Sequence[str], versions: Mapping[str, Version] | None = None) -> Files:
        raise NotImplementedError

    def _version(self, path: str) -> Version:
        """Return the version of a listed file that the next read will have."""
        raise NotImplementedError

    def _enter(self, path: str) -> None:
        """Become the store of a directory."""
        raise NotImplementedError

    # --------------------------------------------------------------------------------------- derived

    def parent(self) -> tuple[Self, str]:
        outer, _, name = self._path.rpartition("/")
        return self._at(outer), name

    def at(self, below: str) -> Self:
        return self._at(self._inner(below))

    def _at(self, path: str) -> Self:
        other = copy(self)
        other._enter(path)
        return other

    def begin(
        self, root: str = "", token: str = "", *, save_id: str = "", may_be_new: bool = False
    ) -> NoReturn:
        raise io.UnsupportedOperation(self.refusal)

    def kinds(self, below: str = "") -> dict[str, Kind]:
        kinds: dict[str, Kind] = {}
        for path in self._below(below):
            name, slash, _ = path.partition("/")
            kinds[name] = "directory" if slash else "file"
        if not kinds:
            raise FileNotFoundError(f"no files are in {self.path_to(below) if below else self.url}")
        return dict(sorted(kinds.items()))

    def sizes(self, below: str, depth: int = 1) -> dict[str, int]:
        return {path: nbytes for path, nbytes in self._below(below).items() if path.count("/") < depth}

    def kind(self, name: str) -> Kind | None:
        if self.exists(name):
            return "file"
        return "directory" if self._below(name) else None

    def exists(self, name: str) -> bool:
        return self._inner(name) in self.listing.sizes

    is_file = exists

    def read(self, name: str, start: int = 0, nbytes: int | None = None) -> tuple[bytes, Entry]:
        path = self.inside(name)
        entry = Entry(name, self.listing.sizes[path], self._version(path))
        rest = max(0, entry.nbytes - start)
        memory = memoryview(bytearray(rest if nbytes is None else min(nbytes, rest)))
        if not memory:
            return b"", entry
        files = self.open([name])
        try:
            return bytes(memory[: files.read_into(0, memory, start)]), entry
        finally:
            files.close()

    def inside(self, name: str) -> str:
        """Return the path of a listed file from the top."""
        if not is_inside(name):
            raise FormatError(f"{name[:200]!r} is not the name of a file in {self.url}")
        if not self.exists(name):
            raise FileNotFoundError(f"{self.path_to(name)} {self.missing}")
        return self._inner(name)

    def _inner(self, name: str) -> str:
        return f"{self._path}/{name}" if self._path else name

    def _below(self, below: str) -> dict[str, int]:
        return self.listing.below("".join(f"{part}/" for part in (self._path, below) if part))
