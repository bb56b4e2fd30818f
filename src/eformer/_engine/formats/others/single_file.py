"""One file that holds a whole tree: opened for a look, and described as if it were ours."""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

from eformer._engine.formats.found import Found
from eformer._engine.record.manifest import (
    Coding,
    DataFile,
    Extent,
    LeafEntry,
    Manifest,
    TreeEntry,
    foreign_tree,
)
from eformer._engine.stores.inside import open_regular, read_into, read_range, version_of
from eformer._engine.stores.local import LocalStore
from eformer._engine.stores.virtual_files import VirtualFiles
from eformer.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from eformer._engine.stores.base import Version
    from eformer._engine.stores.virtual_files import VirtualFile
    from eformer.errors import Damage


_AHEAD = 2**16  # bytes that are read at once
_MOST_PLAIN = 2**28


@dataclass(frozen=True, slots=True)
class SingleFile:
    """A file that is open."""

    path: Path
    descriptor: int
    nbytes: int
    version: Version

    def read(self, offset: int, nbytes: int) -> bytes:
        return read_range(self.descriptor, offset, nbytes)

    def read_into(self, memory: memoryview, offset: int) -> int:
        return read_into(self.descriptor, memory, offset)


class Window:
    """The bytes of a file, as if they were in memory. Long slices are windows, too, of which nothing is read yet.

    A file that is mapped ends the process when somebody else cuts it short; this one only comes to its end.
    """

    def __init__(self, file: SingleFile, start: int = 0, stop: int | None = None) -> None:
        self._file, self._start = file, start
        self._stop = file.nbytes if stop is None else stop
        self._ahead, self._ahead_at = b"", 0

    def __len__(self) -> int:
        return self._stop - self._start

    def __bytes__(self) -> bytes:
        if len(self) > _MOST_PLAIN:
            raise FormatError(f"a plain value of {len(self)} bytes")
        return self._file.read(self._start, len(self))

    @overload
    def __getitem__(self, at: int) -> int: ...

    @overload
    def __getitem__(self, at: slice) -> bytes | Window: ...

    def __getitem__(self, at: int | slice) -> int | bytes | Window:
        if isinstance(at, int):
            return self._read(at, at + 1)[0]
        start, stop, _ = at.indices(len(self))
        if stop - start > _AHEAD:
            return Window(self._file, self._start + start, self._start + stop)
        return self._read(start, stop)

    def _read(self, start: int, stop: int) -> bytes:
        stop = min(stop, len(self))
        if not self._ahead_at <= start <= stop <= self._ahead_at + len(self._ahead):
            self._ahead_at = start
            self._ahead = self._file.read(self._start + start, min(_AHEAD, len(self) - start))
        return self._ahead[start - self._ahead_at : stop - self._ahead_at]


@contextmanager
def opened(path: Path) -> Iterator[SingleFile]:
    descriptor = open_regular(path)
    try:
        yield SingleFile(path, descriptor, os.fstat(descriptor).st_size, version_of(os.fstat(descriptor)))
    finally:
        os.close(descriptor)


@dataclass(frozen=True, slots=True)
class StoredArray:
    """An array of the file. It lies there as it is at `offset`, or it is a `part`, which is decoded as a whole if it
    `is_coded`."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    offset: int = 0
    part: VirtualFile | None = None
    is_coded: bool = False
    key: str | None = None


def describe(
    file: SingleFile,
    form: str,
    arrays: Mapping[str, StoredArray],
    structure: Any,
    *,
    home: str = "jax",
    values: Mapping[str, Any] | None = None,
    metadata: Mapping[str, Any] | None = None,
    has_names: bool = True,
    find_damages: Callable[[], Iterator[Damage]] | None = None,
) -> Found:
    """The checkpoint that a file is. `values` and `metadata` are JSON already."""
    parts: list[VirtualFile] = []
    entries = {}
    for name, array in arrays.items():
        entries[name] = entry_of(array, home, len(parts) + 1)
        if array.part:
            parts.append(array.part)
    name = file.path.name
    tree = foreign_tree(
        files=(DataFile(name, file.nbytes), *(DataFile(f"{name}/{p.name}", p.nbytes) for p in parts)),
        metadata=metadata,
        values=values,
        structure=structure,
        leaves=entries,
    )
    try:
        tree.leaves  # noqa: B018  parsed and checked
    except FormatError as error:
        raise FormatError(f"{file.path}: {error}") from error
    return Found(
        str(file.path),
        LocalStore(file.path.parent),
        Manifest(format=form, trees={"": tree}),
        {"": tree},
        versions={name: file.version},
        open_files=_opener(file, parts) if parts else None,
        has_names=has_names,
        find_damages=find_damages,
    )


def entry_of(array: StoredArray, home: str, number: int) -> LeafEntry:
    """Describe an array that lies in file 0, or is the part of this number."""
    coding = Coding("", array.shape) if array.is_coded else None  # so that it is read as a whole
    extent = Extent(number if array.part else 0, array.offset, array.nbytes, "", None, coding)
    return LeafEntry(array.dtype, array.shape, (extent,), home, array.key)


def _opener(file: SingleFile, parts: Sequence[VirtualFile]) -> Callable[[TreeEntry], VirtualFiles]:
    store, name, seen = LocalStore(file.path.parent), file.path.name, file.version

    def open_files(_: TreeEntry) -> VirtualFiles:
        return VirtualFiles(store.open([name], {name: seen}), parts)

    return open_files
