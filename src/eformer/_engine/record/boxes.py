"""Boxes of an array: half-open ranges along every axis, and the elements in them.

Tests: tests/engine/record/test_pieces.py, tests/engine/loading/test_read_plan.py, tests/engine/tools/test_convert.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from operator import le, lt, sub
from typing import TYPE_CHECKING, Any

import numpy as np

from eformer._engine.record.dtypes import dtype_from_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from eformer._engine.record.planned import ArrayBox


@dataclass(frozen=True, slots=True)
class Box:
    """A box `start <= index < stop`. An empty box overlaps nothing, not even itself."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    def __post_init__(self) -> None:
        start, stop = self.start, self.stop
        if len(start) != len(stop) or min(start, default=0) < 0 or not all(map(le, start, stop)):
            raise ValueError(f"not a box: start {self.start}, stop {self.stop}")

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Box:
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

    def overlap(self, other: Box) -> Box | None:
        """Return the box that both contain, or None."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        if len(self.start) != len(other.start) or not all(map(lt, start, stop)):
            return None
        return Box(start, stop)

    def inside(self, outer: Box) -> Box:
        """Return this box in the coordinates of `outer`, which must contain it."""
        origin = outer.start
        if (
            len(origin) != len(self.start)
            or not all(map(le, origin, self.start))
            or not all(map(le, self.stop, outer.stop))
        ):
            raise ValueError(f"{self} is not inside {outer}")
        return Box(tuple(map(sub, self.start, origin)), tuple(map(sub, self.stop, origin)))


# ------------------------------------------------------------------------------------------ elements


def contiguous(parts: Sequence[ArrayBox], wanted: Box, dtype: str) -> np.ndarray[Any, Any]:
    """Return the elements of `wanted` in C order, little endian, as `dtype`: a view if possible, otherwise a copy."""
    for box, array in parts:
        if box == wanted:
            return straight(array, dtype)
        if box.overlap(wanted) == wanted:
            return straight(array[wanted.inside(box).slices], dtype)
    whole = np.empty(wanted.shape, _little(dtype))
    found = 0
    for box, array in parts:
        if overlap := box.overlap(wanted):
            whole[overlap.inside(wanted).slices] = array[overlap.inside(box).slices]
            found += overlap.size
    if found != wanted.size:  # other elements would be uninitialized memory
        raise AssertionError(f"only {found} of the {wanted.size} elements of {wanted} were found")
    return whole


def to_bytes(array: np.ndarray[Any, Any], dtype: str) -> bytes:
    """Return the bytes of a whole small array in C order, little endian, as `dtype`."""
    little = _little(dtype)
    return (array if array.dtype == little else array.astype(little)).tobytes()


def straight(array: np.ndarray[Any, Any], dtype: str) -> np.ndarray[Any, Any]:
    """Return an array in C order, little endian, as `dtype`: itself if possible, otherwise a copy."""
    return np.ascontiguousarray(array, _little(dtype)) if array.ndim else np.asarray(array, _little(dtype))


@lru_cache(64)
def _little(dtype: str) -> np.dtype[Any]:
    return dtype_from_name(dtype).newbyteorder("<")
