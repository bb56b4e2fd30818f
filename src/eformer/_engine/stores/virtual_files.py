"""Present parts of one file as files of their own: bytes that are scattered, or have to be decoded."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy as np

    from eformer._engine.stores.base import Files

ReadInto = Callable[[memoryview, int], int]
"""Fills memory from an offset of the file on; returns the number of bytes, less only at the end of the file."""


class VirtualFile(Protocol):
    """A sequence of bytes that is computed from those of a real file."""

    @property
    def name(self) -> str: ...

    @property
    def nbytes(self) -> int: ...

    def read_into(self, read: ReadInto, memory: memoryview, offset: int) -> int:
        """Fill `memory` from `offset` of the virtual file on, by calling `read`; return the number of bytes."""


class JoinedRanges(Struct, frozen=True):
    """The concatenation of ranges of a file, (offset, nbytes) each."""

    name: str
    ranges: tuple[tuple[int, int], ...]

    @property
    def nbytes(self) -> int:
        return sum(nbytes for _, nbytes in self.ranges)

    def read_into(self, read: ReadInto, memory: memoryview, offset: int) -> int:
        done = 0
        for start, nbytes in self.ranges:
            wanted = memory[done : done + max(0, nbytes - offset)]
            found = read(wanted, start + offset) if wanted else 0
            done += found
            if found < len(wanted):
                break
            offset = max(0, offset - nbytes)
        return done


class VirtualFiles:
    """A file under the number 0, and its virtual files under the numbers from 1 on."""

    def __init__(self, file: Files, parts: Sequence[VirtualFile]) -> None:
        self._file, self._parts = file, parts

    def hold(self, numbers: Iterable[int]) -> None:
        if any(True for _ in numbers):
            self._file.hold([0])

    def read_into(self, number: int, memory: memoryview, offset: int) -> int:
        if number == 0:
            return self._file.read_into(0, memory, offset)
        return self._parts[number - 1].read_into(self._read, memory, offset)

    def nbytes(self, number: int) -> int:
        return self._file.nbytes(0) if number == 0 else self._parts[number - 1].nbytes

    def map(self, number: int) -> np.ndarray[Any, Any] | None:
        """Map the file itself; return None for virtual files, whose bytes are not in the file as they are."""
        return self._file.map(0) if number == 0 else None

    def rewritten(self) -> str | None:
        return self._file.rewritten()

    def close(self) -> None:
        self._file.close()

    def _read(self, memory: memoryview, offset: int) -> int:
        return self._file.read_into(0, memory, offset)


class ChainedFiles:
    """Two groups of files under consecutive numbers: `count` files of `first`, followed by those of `then`."""

    def __init__(self, first: Files, count: int, then: Files) -> None:
        self._first, self._count, self._then = first, count, then

    def hold(self, numbers: Iterable[int]) -> None:
        wanted = list(numbers)
        self._first.hold(number for number in wanted if number < self._count)
        self._then.hold(number - self._count for number in wanted if number >= self._count)

    def read_into(self, number: int, memory: memoryview, offset: int) -> int:
        files, number = self._at(number)
        return files.read_into(number, memory, offset)

    def nbytes(self, number: int) -> int:
        files, number = self._at(number)
        return files.nbytes(number)

    def map(self, number: int) -> np.ndarray[Any, Any] | None:
        files, number = self._at(number)
        return files.map(number)

    def rewritten(self) -> str | None:
        return self._first.rewritten() or self._then.rewritten()

    def close(self) -> None:
        self._first.close()
        self._then.close()

    def _at(self, number: int) -> tuple[Files, int]:
        return (self._first, number) if number < self._count else (self._then, number - self._count)
