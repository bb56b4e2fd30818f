"""Compute with named axes: their sizes, the places of their indices in an array, and the indices in a box.

Tests: tests/engine/record/test_rearranged.py, tests/engine/record/test_notation.py.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from eformer._engine.record.boxes import Box
from eformer._engine.record.lazy import lazy_property
from eformer._engine.record.notation import ONE, Axis, Concatenation, Group
from eformer.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

Sizes = dict[str, int]
Ranges = dict[str, tuple[int, int]]
"""Some indices: a start and a stop for each axis."""

_MOST_PARTS = 256  # reads of a box, unless each has many elements
_MANY_ELEMENTS = 2**14


# ----------------------------------------------------------------------------------------------- sizes


def all_names(axis: Axis) -> Iterator[str]:
    """Yield the names in an axis, in all blocks."""
    if isinstance(axis, str):
        if axis != ONE:
            yield axis
    else:
        for part in axis.parts if isinstance(axis, Group) else axis.blocks:
            yield from all_names(part)


def size_of(axis: Axis, sizes: Mapping[str, int]) -> int:
    if isinstance(axis, str):
        return 1 if axis == ONE else sizes[axis]
    if isinstance(axis, Group):
        return math.prod(size_of(part, sizes) for part in axis.parts)
    return sum(size_of(block, sizes) for block in axis.blocks)


def solve(axis: Axis, total: int, sizes: Sizes) -> set[str]:
    """Find the only unknown size on an axis of `total` elements. Return the unknown names if there are several.

    Raise FormatError if no size fits.
    """
    unknown = {name for name in all_names(axis) if name not in sizes}
    if len(unknown) > 1:
        return unknown
    found = dict(sizes)
    for name in unknown:
        found[name] = 0
        least = size_of(axis, found)
        found[name] = 1
        each = size_of(axis, found) - least
        if total < least or not each or (total - least) % each:
            raise FormatError("not divisible")
        found[name] = (total - least) // each
    if size_of(axis, found) != total:
        raise FormatError(f"{axis} is {size_of(axis, found)}")
    sizes.update(found)
    return set()


# -------------------------------------------------------------------------------------------- lattices


class Digit(NamedTuple):
    """An axis in an axis of an array: each step of its index is `stride` elements further."""

    name: str
    stride: int
    size: int


@dataclass(frozen=True, slots=True)
class Lattice:
    """The places of one block on an axis of an array: where it begins, and its digits, the slowest first."""

    offset: int
    digits: tuple[Digit, ...]

    def place(self, indices: Mapping[str, int]) -> int:
        """Return the place of indices; indices that are not given are 0."""
        return self.offset + sum(d.stride * indices[d.name] for d in self.digits if d.name in indices)


def lattice(axis: Axis, block: int, sizes: Mapping[str, int]) -> Lattice:
    """Return where the elements of a block lie on an axis."""
    if isinstance(axis, str):
        return Lattice(0, () if axis == ONE else (Digit(axis, 1, sizes[axis]),))
    if isinstance(axis, Concatenation):
        inner = lattice(axis.blocks[block], block, sizes)
        return Lattice(inner.offset + sum(size_of(b, sizes) for b in axis.blocks[:block]), inner.digits)
    offset, stride, digits = 0, 1, list[Digit]()
    for part in reversed(axis.parts):
        inner = lattice(part, block, sizes)
        offset += stride * inner.offset
        digits[:0] = [Digit(name, stride * step, size) for name, step, size in inner.digits]
        stride *= size_of(part, sizes)
    return Lattice(offset, tuple(digits))


def _ranges(digits: Sequence[Digit], start: int, stop: int) -> Iterator[Ranges]:
    """Yield the indices whose places are in start..stop: few boxes, which do not overlap."""
    if not digits:
        if start <= 0 < stop:
            yield {}
        return
    (name, stride, size), rest = digits[0], digits[1:]
    extent = 1 + sum((digit.size - 1) * digit.stride for digit in rest)
    first, last = max(0, (start - extent) // stride + 1), min(size, -(-stop // stride))
    inside, outside = max(first, -(-start // stride)), min(last, (stop - extent) // stride + 1)
    if inside < outside:
        yield {name: (inside, outside)} | {digit.name: (0, digit.size) for digit in rest}
    else:
        inside = outside = last
    for index in (*range(first, inside), *range(outside, last)):
        for found in _ranges(rest, start - index * stride, stop - index * stride):
            yield {name: (index, index + 1)} | found


# ---------------------------------------------------------------------------------------------- layouts


class Strided(NamedTuple):
    """Elements of an array: a box, and in it where the elements begin and how they go on.

    steps      the axis, stride and number of each digit
    is_shared  other targets read the same box, for the elements between these
    """

    box: Box
    begin: tuple[int, ...]
    steps: tuple[tuple[int, int, int], ...]
    is_shared: bool = False


@dataclass(frozen=True)
class Layout:
    """Where the elements of one block lie in its source and in its target.

    numbered    axes whose index the name of a source gives: each source is one index of them
    """

    source: tuple[Lattice, ...]
    target: tuple[Lattice, ...]
    numbered: tuple[str, ...] = ()

    @lazy_property
    def is_identity(self) -> bool:
        return (
            self.source == self.target
            and not self.numbered
            and all(len(axis.digits) <= 1 for axis in self.source)
        )

    @lazy_property
    def order(self) -> tuple[str, ...]:
        """List the axes in the order of the target."""
        return tuple(digit.name for axis in self.target for digit in axis.digits)

    @lazy_property
    def free(self) -> tuple[str, ...]:
        """List the axes that lie in the source and in the target, in the order of the target."""
        there = {digit.name for axis in self.source for digit in axis.digits}
        return tuple(name for name in self.order if name in there)

    def is_in_order(self, chosen: Collection[str]) -> bool:
        """Tell whether the elements of the target follow each other in its sources."""
        source = [digit.name for axis in self.source for digit in axis.digits if digit.size > 1]
        first, rest = self.order[: len(self.numbered)], self.order[len(self.numbered) :]
        in_target = [name for name in rest if name in source]
        return set(first) == set(self.numbered) and [n for n in source if n in chosen] + in_target == source

    def slow_axis(self, source_axis: int) -> int:
        """Return the axis of the target with the slowest digit of the source."""
        digits = self.source[source_axis].digits if source_axis < len(self.source) else ()
        slow = [*self.numbered, *(digit.name for digit in digits if digit.size > 1)]
        where = {digit.name: number for number, axis in enumerate(self.target) for digit in axis.digits}
        return next((where[name] for name in slow if name in where), 0)

    def ranges(self, box: Box, chosen: Mapping[str, int]) -> Iterator[Ranges]:
        """Yield the indices of the elements in a box of the target, in parts that are read together."""
        axes = zip(self.target, box.start, box.stop, strict=True)
        found = [list(_ranges(axis.digits, lo - axis.offset, hi - axis.offset)) for axis, lo, hi in axes]
        for parts in itertools.product(*found):
            yield from self._split({name: r for part in parts for name, r in part.items()}, chosen)

    def _split(self, ranges: Ranges, chosen: Mapping[str, int]) -> Iterator[Ranges]:
        """Split indices that lie so far apart that the box around them has more than twice their elements."""
        spread = []  # by source axis: how much of the box is not wanted, and the axis to split
        for axis in self.source:
            span = _span(axis, ranges, chosen)
            sizes = [
                (d.name, stop - first)
                for d in axis.digits
                if d.name in ranges
                for first, stop in [ranges[d.name]]
            ]
            count = math.prod(size for _, size in sizes)
            spread.append(
                ((span.stop - span.start) / count, next((name for name, size in sizes if size > 1), None))
            )
        waste, apart = max(((w, name) for w, name in spread if name), default=(1.0, None))
        if (
            apart is None
            or waste <= 1
            or math.prod(w for w, _ in spread) <= 2
            or not self._is_worth_it(ranges, apart)
        ):
            yield ranges
            return
        for index in range(*ranges[apart]):
            yield from self._split(ranges | {apart: (index, index + 1)}, chosen)

    def _is_worth_it(self, ranges: Ranges, apart: str) -> bool:
        start, stop = ranges[apart]
        each = math.prod(ranges[name][1] - ranges[name][0] for name in self.free if name != apart)
        return stop - start <= _MOST_PARTS or each >= _MANY_ELEMENTS

    def view_of_source(self, ranges: Ranges, chosen: Mapping[str, int]) -> Strided:
        """Return where elements lie in a source."""
        spans = [_span(axis, ranges, chosen) for axis in self.source]
        box = Box(tuple(span.start for span in spans), tuple(span.stop for span in spans))
        steps = {
            name: (number, stride, ranges[name][1] - ranges[name][0])
            for number, axis in enumerate(self.source)
            for name, stride, _ in axis.digits
            if name not in chosen
        }
        begin = tuple(span.begin for span in spans)
        return Strided(
            box, begin, tuple(steps[name] for name in self.free), any(span.is_shared for span in spans)
        )

    def view_of_target(self, ranges: Ranges, box: Box) -> Strided:
        """Return where elements lie in a box of the target, in the same order."""
        begin, steps = [], {}
        for number, (axis, low) in enumerate(zip(self.target, box.start, strict=True)):
            begin.append(axis.place({name: first for name, (first, _) in ranges.items()}) - low)
            for name, stride, _ in axis.digits:
                steps[name] = (number, stride, ranges[name][1] - ranges[name][0])
        return Strided(box, tuple(begin), tuple(steps[name] for name in self.free))


class _Span(NamedTuple):
    """The places of some indices on an axis of a source, and where in it the first lies."""

    start: int
    stop: int
    begin: int
    is_shared: bool


def _span(axis: Lattice, ranges: Ranges, chosen: Mapping[str, int]) -> _Span:
    """Return where some indices lie. If an axis with a chosen index alternates, the span has all its indices, so that
    other targets read the same box."""
    low = last = axis.offset
    begin, alternates, is_shared = 0, False, False
    for name, stride, size in axis.digits:
        if name not in chosen:
            low, last = low + stride * ranges[name][0], last + stride * (ranges[name][1] - 1)
            alternates = alternates or ranges[name][1] - ranges[name][0] > 1
        elif alternates:
            last, begin, is_shared = last + stride * (size - 1), begin + stride * chosen[name], True
        else:
            low, last = low + stride * chosen[name], last + stride * chosen[name]
    return _Span(low, last + 1, begin, is_shared)
