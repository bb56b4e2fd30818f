"""Divide bytes among processes or jobs: each finds its part alone, without a message. Pure.

The extents of a tree lie on a line, in the order of files and offsets. Part i of n begins after i/n of all bytes. A
piece belongs to the part in which it begins, so parts differ by a piece at most, and no piece is in two parts.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from itertools import accumulate
from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Place = tuple[int, int]
"""A file by its number, and a byte in it."""

_LAST: Place = (2**62, 0)


class Portion(Struct, frozen=True):
    """One of `count` parts, numbered from 0."""

    number: int = 0
    count: int = 1

    @property
    def is_first(self) -> bool:
        return self.number == 0

    def share(self, total: int) -> range:
        """Return the bytes of this part, of so many bytes."""
        return range(total * self.number // self.count, total * (self.number + 1) // self.count)

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"


WHOLE = Portion()

_PART = re.compile(r"(\d{1,9})/(\d{1,9})")


def parse_part(text: str, name: str = "part=") -> Portion:
    """Parse a part such as "7/64". Raise ValueError that names the argument."""
    found = _PART.fullmatch(text.strip())
    number, count = map(int, found.groups()) if found else (0, 0)
    if not found or not number < count:
        last = f", and {text} is not between 0/{count} and {count - 1}/{count}" if found and count else ""
        raise ValueError(f"{name}{text!r}: expected I/N with I from 0 to N-1, such as 7/64{last}")
    return Portion(number, count)


class ByteLine:
    """Extents side by side, by place and length: `before` has the bytes before each extent."""

    def __init__(self, extents: Iterable[tuple[int, int, int]]) -> None:
        self.extents = sorted(extents)
        self.before = list(accumulate((nbytes for _, _, nbytes in self.extents), initial=0))

    @property
    def nbytes(self) -> int:
        return self.before[-1]

    def place(self, byte: int) -> Place:
        """Return the place of a byte on the line."""
        if byte >= self.nbytes:
            return _LAST
        number = bisect_right(self.before, byte) - 1
        file, start, _ = self.extents[number]
        return file, start + byte - self.before[number]

    def span(self, start: int, stop: int) -> ByteSpan:
        """Return the places of the bytes from `start` to `stop`, which may lie beyond the line. Everything before the
        first extent belongs to the first byte, such as a header."""
        if stop <= 0 or start >= self.nbytes or start == stop:
            return NOTHING
        return ByteSpan((0, 0) if start <= 0 else self.place(start), self.place(stop))


class ByteSpan(Struct, frozen=True):
    """The places from `start` on, and before `stop`."""

    start: Place = (0, 0)
    stop: Place = _LAST

    def __contains__(self, place: object) -> bool:
        return self.start <= place < self.stop  # type: ignore[operator]

    def touches(self, file: int, start: int, nbytes: int) -> bool:
        """Tell whether bytes of a file are inside."""
        return self.start < (file, start + nbytes) and (file, start) < self.stop

    @property
    def files(self) -> tuple[int, int]:
        """Return the numbers of the first and the last file, the last one included."""
        return self.start[0], self.stop[0]


ALL = ByteSpan()
NOTHING = ByteSpan(_LAST, _LAST)


def spans(lines: Sequence[ByteLine], part: Portion) -> list[ByteSpan]:
    """Return the span of a part on each of several lines, which follow each other."""
    share = part.share(sum(line.nbytes for line in lines))
    before = accumulate((line.nbytes for line in lines), initial=0)
    if part == WHOLE:
        return [ALL] * len(lines)
    return [
        line.span(share.start - at, share.stop - at) if line.nbytes else ALL if part.is_first else NOTHING
        for line, at in zip(lines, before, strict=False)
    ]
