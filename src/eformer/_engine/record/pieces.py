"""Split boxes of arrays into pieces: the smallest units with a digest, and so the smallest units of a read."""

from __future__ import annotations

import itertools
import math
from functools import lru_cache
from typing import TYPE_CHECKING

from eformer._engine.record.boxes import Box

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

# Small enough that a slice reads little more than its own bytes, large enough that digests take little space.
PIECE_BYTES = 2**20


def pieces(shape: tuple[int, ...], itemsize: int, limit: int) -> list[Box]:
    """Split a box of this shape into boxes of at most `limit` bytes, each contiguous in C order, and in that order.

    An empty box has no pieces.
    """
    return [piece for _, piece in pieces_in(Box.whole(shape), shape, itemsize, limit)]


def pieces_in(wanted: Box, shape: tuple[int, ...], itemsize: int, limit: int) -> Iterator[tuple[int, Box]]:
    """Yield the pieces of an array that touch the wanted box, with their numbers, without computing any other piece."""
    if not wanted.size:
        return
    if itemsize * math.prod(shape) <= max(limit, itemsize):
        yield 0, Box.whole(shape)
        return
    axis, rows = _cut(shape, itemsize, limit)
    inner, in_a_row = shape[axis + 1 :], -(-shape[axis] // rows)
    outer_ranges = [range(a, b) for a, b in zip(wanted.start[:axis], wanted.stop[:axis], strict=True)]
    for outer in itertools.product(*outer_ranges):
        number = 0
        for index, size in zip(outer, shape, strict=False):
            number = number * size + index
        end = tuple(index + 1 for index in outer)
        for part in range(wanted.start[axis] // rows, -(-wanted.stop[axis] // rows)):
            start, stop = part * rows, min((part + 1) * rows, shape[axis])
            yield number * in_a_row + part, Box((*outer, start, *(0 for _ in inner)), (*end, stop, *inner))


def piece_sizes(shape: tuple[int, ...], itemsize: int, limit: int) -> Iterator[int]:
    """Yield the sizes in bytes of the pieces of an array, in their order."""
    size = math.prod(shape)
    if size <= 1 or itemsize * size <= limit:
        if size:
            yield itemsize * size
        return
    axis, rows = _cut(shape, itemsize, limit)
    row = itemsize * math.prod(shape[axis + 1 :])
    full, rest = divmod(shape[axis], rows)
    for _ in range(math.prod(shape[:axis])):
        for _ in range(full):
            yield rows * row
        if rest:
            yield rest * row


@lru_cache(4096)  # most leaves of a tree have one of a few shapes
def count_pieces(shape: tuple[int, ...], itemsize: int, limit: int) -> int:
    """Count the pieces of an array."""
    size = math.prod(shape)
    if size <= 1 or itemsize * size <= limit:
        return min(size, 1)
    axis, rows = _cut(shape, itemsize, limit)
    return math.prod(shape[:axis]) * -(-shape[axis] // rows)


def _cut(shape: tuple[int, ...], itemsize: int, limit: int) -> tuple[int, int]:
    """Return the first axis whose single rows fit into `limit`, and how many rows fit."""
    row = itemsize * math.prod(shape)
    for axis, size in enumerate(shape):
        row //= size
        if row <= limit:
            return axis, limit // row
    return len(shape) - 1, 1  # an element is larger than the limit


def joined(boxes: Iterable[Box], itemsize: int, limit: int) -> Iterator[list[Box]]:
    """Group consecutive pieces that form a box of at most `limit` bytes."""
    group: list[Box] = []
    around, size = None, 0
    for box in boxes:
        around = bounding([around, box]) if around else box
        size += box.size
        if group and (size * itemsize > limit or around.size != size):
            yield group
            group, around, size = [], box, box.size
        group.append(box)
    if group:
        yield group


def bounding(boxes: Sequence[Box]) -> Box:
    """Return the smallest box that contains all boxes."""
    starts = zip(*(box.start for box in boxes), strict=True)
    stops = zip(*(box.stop for box in boxes), strict=True)
    return Box(tuple(map(min, starts)), tuple(map(max, stops)))


def merged(boxes: Sequence[Box]) -> list[Box]:
    """Return one box if the disjoint `boxes` fill it exactly, else the boxes themselves."""
    if len(boxes) < 2:
        return list(boxes)
    around = bounding(boxes)
    return [around] if around.size == sum(box.size for box in boxes) else list(boxes)


def shifted(boxes: Iterable[Box], start: tuple[int, ...]) -> list[Box]:
    """Move boxes that are relative to `start` to absolute coordinates."""
    if not any(start):
        return list(boxes)
    return [
        Box(
            tuple(a + o for a, o in zip(box.start, start, strict=True)),
            tuple(b + o for b, o in zip(box.stop, start, strict=True)),
        )
        for box in boxes
    ]


def offset_within(box: Box, outer: Box) -> int | None:
    """Return how many elements of `outer` precede `box`; None if `box` is not consecutive in `outer`."""
    if any(a < c or b > d for a, b, c, d in zip(box.start, box.stop, outer.start, outer.stop, strict=True)):
        return None
    offset, is_run = 0, True  # consecutive: single indices, then a range, then only whole axes
    for size, whole, start, first in zip(box.shape, outer.shape, box.start, outer.start, strict=True):
        if not is_run and size != whole:
            return None
        is_run = is_run and size == 1
        offset = offset * whole + start - first
    return offset


def is_tiling(boxes: Sequence[Box], shape: tuple[int, ...]) -> bool:
    """Tell whether every element of the shape is in exactly one box. All boxes must be inside the shape."""
    boxes = [box for box in boxes if box.size]
    if sum(box.size for box in boxes) != math.prod(shape) or len({box.start for box in boxes}) < len(boxes):
        return False
    # Shards are usually cells of a grid. Cells never overlap, so pairs need not be compared.
    edges = [sorted({box.start[axis] for box in boxes} | {size}) for axis, size in enumerate(shape)]
    ends = [dict(itertools.pairwise(axis)) for axis in edges]
    if all(end[a] == b for box in boxes for end, a, b in zip(ends, box.start, box.stop, strict=True)):
        return True
    return not _overlap_anywhere(boxes, max(range(len(shape)), key=lambda axis: len(edges[axis])))


def _overlap_anywhere(boxes: Sequence[Box], axis: int) -> bool:
    """Tell whether two of the boxes overlap, by a sweep along one axis."""
    still_open: list[Box] = []
    for box in sorted(boxes, key=lambda box: box.start[axis]):
        still_open = [other for other in still_open if other.stop[axis] > box.start[axis]]
        if any(box.overlap(other) for other in still_open):
            return True
        still_open.append(box)
    return False


ALIGNMENT = 64  # bytes; XLA uses host memory at such addresses without a copy
