"""Virtual files by number: made of scattered ranges of a real file, decoded from it, or chained from two groups."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy as np

    from eformer._engine.stores.base import Files

ReadInto = Callable[[memoryview, int], int]
"""Fills memory from an offset of the file on. Returns the number of bytes, which is smaller only at the end of the
file."""


class VirtualFile(Protocol):
    """A sequence of bytes that is computed from a real file."""

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


class BinaryFile(io.RawIOBase):
    """A file object of `nbytes` whose bytes `read` gives, for libraries that want one."""

    def __init__(self, read: ReadInto, nbytes: int) -> None:
        super().__init__()
        self._read, self._nbytes, self._at = read, nbytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._nbytes}[whence]
        if self._at < 0:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return self._at

    def readinto(self, memory: Any) -> int:
        inside = memoryview(memory).cast("B")[: max(0, self._nbytes - self._at)]
        found = self._read(inside, self._at) if inside else 0
        self._at += found
        return found


class UnchangingFiles:
    """The base of files by number that do not change while they are open, and cannot be mapped."""

    def map(self, number: int) -> np.ndarray[Any, Any] | None:
        return None

    def hold(self, numbers: Iterable[int]) -> None:
        """Do nothing."""

    def rewritten(self) -> str | None:
        return None

    def close(self) -> None:
        """Do nothing."""


class ChainedFiles:
    """Two groups of files under consecutive numbers: `count` files of `first`, then the files of `then`."""

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


class VirtualFiles(ChainedFiles):
    """The first `count` files under their own numbers, then virtual files, each made of the file of a given number."""

    def __init__(self, files: Files, parts: Sequence[tuple[int, VirtualFile]], count: int = 1) -> None:
        super().__init__(files, count, _Parts(files, parts))


class _Parts(UnchangingFiles):
    """Virtual files by number. They cannot be mapped: their bytes are not in a file as they are."""

    def __init__(self, files: Files, parts: Sequence[tuple[int, VirtualFile]]) -> None:
        self._files, self._parts = files, parts

    def hold(self, numbers: Iterable[int]) -> None:
        self._files.hold({self._parts[number][0] for number in numbers})

    def read_into(self, number: int, memory: memoryview, offset: int) -> int:
        real, part = self._parts[number]
        return part.read_into(partial(self._files.read_into, real), memory, offset)

    def nbytes(self, number: int) -> int:
        return self._parts[number][1].nbytes
