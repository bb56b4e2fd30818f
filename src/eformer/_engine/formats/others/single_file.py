"""Open a checkpoint of another program that is one file, and describe it in eformer's terms.

Tests: tests/compat/test_files.py, tests/compat/test_files_msgpack.py, tests/compat/test_flax_directories.py.
"""

from __future__ import annotations

from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from eformer._engine.formats.found import FileReader, Foreign, Found, foreign_found
from eformer._engine.record.manifest import (
    Coding,
    DataFile,
    Extent,
    LeafEntry,
    foreign_tree,
)
from eformer._engine.record.values import locating
from eformer._engine.stores.virtual_files import VirtualFile, VirtualFiles
from eformer.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from eformer._engine.stores.base import Entry, Files, Store, Version

Library = Literal["jax", "numpy"]

FIRST_BYTES = 9  # by which readers recognise a file
_READ_AHEAD = 2**16  # bytes
_MAX_PLAIN_VALUE = 2**28  # bytes
_MAX_ATTEMPTS = 100


@dataclass(frozen=True, slots=True)
class SingleFile:
    """An open file, or the bytes of one from `start` on. Its contents stay the same if another file takes its name."""

    store: Store
    name: str
    nbytes: int
    version: Version
    files: Files
    start: int | None = None

    @property
    def path(self) -> str:
        path = self.store.path_to(self.name)
        return path if self.start is None else f"{path}, from byte {self.start} on"

    def part(self, start: int, nbytes: int) -> SingleFile:
        """Return the file that lies inside this one at these bytes."""
        return replace(self, start=(self.start or 0) + start, nbytes=nbytes)

    def read(self, offset: int, nbytes: int) -> bytes:
        """Read `nbytes` from `offset` on; fewer only at the end of the file."""
        memory = bytearray(max(0, min(nbytes, self.nbytes - offset)))
        return bytes(memory[: self.read_into(memoryview(memory), offset)])

    def read_into(self, memory: memoryview, offset: int) -> int:
        """Fill `memory` from `offset` on. Return the number of bytes, which is smaller only at the end of the file."""
        return self.files.read_into(0, memory[: max(0, self.nbytes - offset)], (self.start or 0) + offset)


@contextmanager
def open_single_file(store: Store, name: str) -> Iterator[SingleFile]:
    """Open a regular file. Close it at the end of the block."""
    entry, files = _hold(store, name)
    with closing(files):
        yield SingleFile(store, name, entry.nbytes, entry.version, files)


def read_file(store: Store, name: str, kind: str, *readers: FileReader) -> Found:
    """Find the checkpoint in a file of a directory by one of the readers. `kind` names their format in errors."""
    with open_single_file(store, name) as file:
        first = file.read(0, FIRST_BYTES)
        for read in readers:
            if found := read(file, first):
                return found
        raise FormatError(f"{file.path} is not {kind}: it begins with {first!r}")


def _hold(store: Store, name: str) -> tuple[Entry, Files]:
    """Open a file at its current version. If another file takes its name meanwhile, open that."""
    attempts = 0
    while True:
        _, entry = store.read(name, 0, 0)
        files = store.open([name], {name: entry.version})
        try:
            files.hold([0])
        except FileNotFoundError:
            files.close()
            attempts += 1
            if attempts == _MAX_ATTEMPTS:
                raise
        else:
            return entry, files


class Window:
    """Bytes of a file, indexed as if they were in memory. A long slice is a window as well, and is not read yet.

    A mapped file would end the process if another program cut it short. A window merely ends early.
    """

    def __init__(self, file: SingleFile) -> None:
        self._file = file
        self._ahead, self._ahead_at = b"", 0

    def __len__(self) -> int:
        return self._file.nbytes

    def __bytes__(self) -> bytes:
        if len(self) > _MAX_PLAIN_VALUE:
            raise FormatError(f"a plain value of {len(self)} bytes, expected at most {_MAX_PLAIN_VALUE}")
        return self._file.read(0, len(self))

    def __getitem__(self, at: int | slice) -> Any:
        if isinstance(at, int):
            return self._read(at, at + 1)[0]
        start, stop, _ = at.indices(len(self))
        if stop - start > _READ_AHEAD:
            return Window(self._file.part(start, stop - start))
        return self._read(start, stop)

    def _read(self, start: int, stop: int) -> bytes:
        stop = min(stop, len(self))
        if not self._ahead_at <= start <= stop <= self._ahead_at + len(self._ahead):
            self._ahead_at = start
            self._ahead = self._file.read(start, _READ_AHEAD)
        return self._ahead[start - self._ahead_at : stop - self._ahead_at]


@dataclass(frozen=True, slots=True)
class ArrayInFile:
    """An array in the file. Its bytes lie at `offset`, or are the contents of a `virtual_file` made from the file.

    is_encoded  marks a virtual file that has to be decoded as a whole
    key         the name of the generator, for a PRNG key
    library     the library whose array it becomes
    """

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    offset: int = 0
    virtual_file: VirtualFile | None = None
    is_encoded: bool = False
    key: str | None = None
    library: Library = "jax"


def describe_file(
    file: SingleFile,
    format_name: str,
    arrays: Mapping[str, ArrayInFile],
    structure: Any,
    *,
    values: Mapping[str, Any] | None = None,
    metadata: Mapping[str, Any] | None = None,
    foreign: Foreign | None = None,
) -> Found:
    """Describe the checkpoint in a file. `structure`, `values` and `metadata` are JSON; `foreign` has further facts.

    An invalid leaf raises a FormatError that names the file.
    """
    virtual: list[VirtualFile] = []
    entries = {}
    for leaf, array in arrays.items():
        if array.virtual_file:
            virtual.append(array.virtual_file)
        entries[leaf] = describe_array(array, len(virtual) if array.virtual_file else 0)
    name = file.name
    tree = foreign_tree(
        files=(DataFile(name, file.nbytes), *(DataFile(f"{name}/{v.name}", v.nbytes) for v in virtual)),
        metadata=metadata,
        values=values,
        structure=structure,
        leaves=entries,
    )
    with locating(file.path):
        tree.check_leaves()
    foreign, versions = foreign or Foreign(), {name: file.version}
    if virtual:
        parts = [(0, part) for part in virtual]
        foreign = replace(
            foreign, open_files=lambda _: VirtualFiles(file.store.open([name], versions), parts)
        )
    return foreign_found(file.path, file.store, format_name, {"": tree}, versions, foreign)


def describe_array(array: ArrayInFile, file_number: int) -> LeafEntry:
    """Describe an array whose bytes are in the file of this number: 0, or the number of its virtual file."""
    coding = Coding("", array.shape) if array.is_encoded else None  # so that it is read as a whole
    extent = Extent(file_number, array.offset, array.nbytes, "", None, coding)
    return LeafEntry(array.dtype, array.shape, (extent,), home=array.library, key=array.key)
