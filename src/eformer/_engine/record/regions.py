"""Boxes of an array: half-open ranges along every axis."""

from __future__ import annotations

import math
from dataclasses import dataclass
from operator import le, lt, sub


@dataclass(frozen=True, slots=True)
class Region:
    """A box `start <= index < stop`. An empty box overlaps nothing, not even itself."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    def __post_init__(self) -> None:
        start, stop = self.start, self.stop
        if len(start) != len(stop) or min(start, default=0) < 0 or not all(map(le, start, stop)):
            raise ValueError(f"not a box: start {self.start}, stop {self.stop}")

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Region:
        return cls((0,) * len(shape), tuple(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(map(sub, self.stop, self.start))

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(map(slice, self.start, self.stop))

    def overlap(self, other: Region) -> Region | None:
        """Return the box that both contain, or None."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        if len(self.start) != len(other.start) or not all(map(lt, start, stop)):
            return None
        return Region(start, stop)

    def inside(self, outer: Region) -> Region:
        """Return this box in the coordinates of `outer`, which must contain it."""
        origin = outer.start
        if (
            len(origin) != len(self.start)
            or not all(map(le, origin, self.start))
            or not all(map(le, self.stop, outer.stop))
        ):
            raise ValueError(f"{self} is not inside {outer}")
        return Region(tuple(map(sub, self.start, origin)), tuple(map(sub, self.stop, origin)))
