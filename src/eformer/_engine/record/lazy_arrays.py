"""Read leaves of a checkpoint box by box: as they are stored, or with their elements in another order or changed.

Tests: tests/engine/record/test_rename.py, tests/engine/tools/test_convert.py.
"""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.lib.stride_tricks import as_strided

from eformer._engine.record.axes import Lattice, Layout, Strided, lattice
from eformer._engine.record.boxes import Box, contiguous
from eformer._engine.record.dtypes import dtype_from_name, name_of_dtype
from eformer._engine.record.lazy import lazy_property
from eformer._engine.record.manifest import LeafEntry
from eformer._engine.record.planned import LazyArray

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


Array = np.ndarray[Any, Any]

_FEW_CHUNKS = 4
_LARGE_CHUNKS = 2**23  # bytes; larger chunks stay between reads


class LeafReader(Protocol):
    """Read boxes of leaves from an open checkpoint."""

    def read(self, name: str, entry: LeafEntry, box: Box, threads: int | None = None) -> Array:
        """Return the elements of a box. Check them if the leaf has digests."""
        ...


class StoredLeaf(LazyArray):
    """A leaf as stored in a checkpoint.

    Decoded chunks stay for the next read if they are large; with `keeps_small`, also if the read needs few of them.
    """

    in_order = True
    entry: LeafEntry

    def __init__(self, reader: LeafReader, name: str, entry: LeafEntry, *, keeps_small: bool = False) -> None:
        self.reader, self.name, self.entry = reader, name, entry
        self.keeps_small = keeps_small
        self.shape, self.dtype = entry.shape, dtype_from_name(entry.dtype)
        self.threads: int | None = None
        self._decoded: dict[Box, Array] = {}
        self._lock = threading.Lock()

    def read(self, box: Box) -> Array:
        if self.decoded_nbytes > _LARGE_CHUNKS or (self.keeps_small and self._is_in_few_chunks(box)):
            return self._from_chunks(box)
        return self.reader.read(self.name, self.entry, box, self.threads)

    def _is_in_few_chunks(self, box: Box) -> bool:
        return 0 < sum(chunk.overlap(box) is not None for chunk in self.chunks) <= _FEW_CHUNKS

    @lazy_property
    def chunks(self) -> list[Box]:
        """List the encoded boxes, which can only be read whole."""
        return [self.entry.region_of(extent) for extent in self.entry.extents if extent.coding]

    @lazy_property
    def decoded_nbytes(self) -> int:
        """Return the memory for the decoded chunks of one row; 0 if no chunk is encoded."""
        nbytes: dict[int, int] = defaultdict(int)
        for chunk in self.chunks:
            nbytes[chunk.start[0] if chunk.start else 0] += chunk.size * self.dtype.itemsize
        return max(nbytes.values(), default=0)

    def _from_chunks(self, box: Box) -> Array:
        """Decode each large chunk once: keep the chunks of this read for the next rows."""
        with self._lock:  # several new leaves may share this leaf
            kept, self._decoded = self._decoded, {}
            for chunk in self.chunks:
                if chunk.overlap(box):
                    decoded = kept.get(chunk)
                    if decoded is None:
                        decoded = self.reader.read(self.name, self.entry, chunk, self.threads)
                    self._decoded[chunk] = decoded
            decoded_boxes = list(self._decoded.items())
        return np.array(contiguous(decoded_boxes, box, self.entry.dtype))  # a view would keep the whole chunk

    def forget(self) -> None:
        with self._lock:
            self._decoded = {}


@dataclass(frozen=True, slots=True)
class SourceBlock:
    """The sources of one block of an array, by their indices on the numbered axes of the layout.

    `chosen` has the indices that the name of the array gives.
    """

    layout: Layout
    sources: Mapping[tuple[int, ...], LazyArray]
    chosen: Mapping[str, int] = field(default_factory=dict)

    @property
    def is_all(self) -> bool:
        """Tell whether the part is its only source, as it is."""
        return self.layout.is_identity and not self.chosen

    @property
    def is_last(self) -> bool:
        """Tell whether the chosen indices are the last, so that no other array follows in the sources."""
        sizes = {d.name: d.size for axis in self.layout.source for d in axis.digits}
        return all(index == sizes[name] - 1 for name, index in self.chosen.items())


class Rearranged(LazyArray):
    """An array whose elements lie elsewhere, in other arrays: transposed, reshaped, stacked, split, fused.

    A box reads at most twice its elements, with the exceptions in `Layout`. Sources are read one after the other; each
    drops its decoded chunks when the next one is read.
    """

    def __init__(self, parts: Sequence[SourceBlock], shape: Sequence[int]) -> None:
        self.parts = parts
        self._latest = next(iter(parts[0].sources.values()))
        self.shape, self.dtype = tuple(shape), self._latest.dtype
        self.is_changed, self.keeps_dtype = self._latest.is_changed, self._latest.keeps_dtype

    @property
    def in_order(self) -> bool:  # type: ignore[override]
        first = self.parts[0]
        return len(self.parts) == 1 and self._latest.in_order and first.layout.is_in_order(first.chosen)

    @property
    def slow_axis(self) -> int:  # type: ignore[override]
        return self.parts[0].layout.slow_axis(self._latest.slow_axis)

    @property
    def inners(self) -> list[LazyArray]:  # type: ignore[override]
        return [part.sources[index] for part in self.parts for index in sorted(part.sources)]

    @property
    def is_joined(self) -> bool:
        """Tell whether the array joins leaves, if there are several."""
        return len(self.parts) > 1 or bool(self.parts[0].layout.numbered)

    def read(self, box: Box) -> Array:
        copies = [copy for part in self.parts for copy in _copies(part, box)] if box.size else []
        if len(copies) == 1:
            source, here, _ = copies[0]
            return _digits(self._read(source, here), here).reshape(box.shape)
        whole = np.empty(box.shape, self.dtype)
        for source, here, there in copies:
            _digits(whole, there)[...] = _digits(self._read(source, here), here)
        return whole

    def _read(self, source: LazyArray, here: Strided) -> Array:
        """Read from one array, after the previous array has dropped its decoded chunks. Several threads may read."""
        before, self._latest = self._latest, source
        if before is not source:
            before.forget()
        if here.is_shared and isinstance(source, Shared):
            return source.read_for_all(here.box)
        return source.read(here.box)

    def forget(self) -> None:
        if all(part.is_last for part in self.parts):  # the last user of the shared arrays
            self._latest.forget()


def _copies(part: SourceBlock, box: Box) -> Iterator[tuple[LazyArray, Strided, Strided]]:
    """Yield the sources of the elements in a box, with the places there and in the box."""
    layout, chosen = part.layout, part.chosen
    for ranges in layout.ranges(box, chosen):
        here = layout.view_of_source(ranges, chosen)
        for index in itertools.product(*(range(*ranges[name]) for name in layout.numbered)):
            one = dict(zip(layout.numbered, ((i, i + 1) for i in index), strict=True))
            yield part.sources[index], here, layout.view_of_target(ranges | one if one else ranges, box)


def _digits(array: Array, view: Strided) -> Array:
    """Return the elements of a view, with one axis for each digit."""
    if not view.steps and not array.ndim:
        return array
    start = array[tuple(slice(begin, None) for begin in view.begin)]
    strides = [stride * array.strides[axis] for axis, stride, _ in view.steps]
    return as_strided(start, [count for _, _, count in view.steps], strides)


class Shared(LazyArray):
    """An array of which other arrays have alternating elements, such as interleaved projections.

    If `readers` of them are read side by side, each box that all of them need is read once, and kept until the last of
    them has it.
    """

    def __init__(self, inner: LazyArray) -> None:
        self.inner, self.inners = inner, [inner]
        self.shape, self.dtype, self.is_changed = inner.shape, inner.dtype, inner.is_changed
        self.keeps_dtype = inner.keeps_dtype
        self.in_order, self.slow_axis = inner.in_order, inner.slow_axis
        self.readers = 1
        self._kept: dict[Box, tuple[Array, int]] = {}
        self._lock = threading.Lock()

    def read(self, box: Box) -> Array:
        return self.inner.read(box)

    def read_for_all(self, box: Box) -> Array:
        """Read a box that the other readers need as well."""
        if self.readers == 1:
            return self.inner.read(box)
        with self._lock:
            array, left = self._kept.pop(box, (None, self.readers))
            if array is None:
                array = self.inner.read(box)
            if left > 1:
                self._kept[box] = array, left - 1
            return array

    def forget(self) -> None:
        self.inner.forget()


def shared_in(array: LazyArray) -> Iterator[Shared]:
    """Yield the shared arrays behind an array."""
    if isinstance(array, Shared):
        yield array
    for inner in array.inners:
        yield from shared_in(inner)


# ------------------------------------------------------------------------------------- common layouts


def _plain(names: Sequence[str], sizes: Mapping[str, int]) -> tuple[Lattice, ...]:
    return tuple(lattice(name, 0, sizes) for name in names)


def transposed(inner: LazyArray, axes: Sequence[int]) -> Rearranged:
    """Return an array with its axes in another order. Reading a few rows may read the whole inner array."""
    names = [f"x{axis}" for axis in range(len(inner.shape))]
    sizes = dict(zip(names, inner.shape, strict=True))
    order = [names[axis] for axis in axes]
    layout = Layout(_plain(names, sizes), _plain(order, sizes))
    return Rearranged([SourceBlock(layout, {(): inner})], [sizes[name] for name in order])


def stacked(inners: Sequence[LazyArray], axis: int) -> Rearranged:
    """Return arrays of one shape and dtype, stacked along a new axis."""
    names = [f"x{axis}" for axis in range(len(inners[0].shape))]
    sizes = dict(zip(names, inners[0].shape, strict=True)) | {"n": len(inners)}
    order = [*names[:axis], "n", *names[axis:]]
    layout = Layout(_plain(names, sizes), _plain(order, sizes), ("n",))
    return Rearranged(
        [SourceBlock(layout, {(n,): a for n, a in enumerate(inners)})], [sizes[name] for name in order]
    )


def unstacked(inner: LazyArray, axis: int) -> list[Rearranged]:
    """Return the boxes of an array at each index of an axis, without that axis."""
    names = [f"x{axis}" for axis in range(len(inner.shape))]
    sizes = dict(zip(names, inner.shape, strict=True))
    order = [name for name in names if name != names[axis]]
    layout = Layout(_plain(names, sizes), _plain(order, sizes))
    shape = [sizes[name] for name in order]
    return [
        Rearranged([SourceBlock(layout, {(): inner}, {names[axis]: index})], shape)
        for index in range(inner.shape[axis])
    ]


# --------------------------------------------------------------------------------------- changed values


class Computed(LazyArray):
    """An array with other values: each element times a factor or plus a number, computed in float32, or in a dtype."""

    def __init__(self, inner: LazyArray, dtype: np.dtype[Any], verb: str = "", number: float = 0) -> None:
        self.inner, self.verb, self.number = inner, verb, np.float32(number)
        self.inners = [inner]
        self.shape, self.dtype = inner.shape, dtype
        self.is_changed = bool(verb) or inner.is_changed
        self.in_order, self.slow_axis = inner.in_order, inner.slow_axis

    def read(self, box: Box) -> Array:
        elements = self.inner.read(box)
        if self.verb:
            wide = elements.astype(np.float32)
            elements = wide * self.number if self.verb == "scale" else wide + self.number
        return elements.astype(self.dtype, copy=False)

    def forget(self) -> None:
        self.inner.forget()


class Resized(LazyArray):
    """An array that is cut to a shape, or has zeros behind its elements up to it."""

    def __init__(self, inner: LazyArray, shape: Sequence[int]) -> None:
        self.inner, self.shape, self.dtype = inner, tuple(shape), inner.dtype
        self.inners = [inner]
        self.is_changed, self.keeps_dtype = inner.is_changed, inner.keeps_dtype
        self.in_order, self.slow_axis = inner.in_order, inner.slow_axis

    def read(self, box: Box) -> Array:
        there = box.overlap(Box.whole(self.inner.shape))
        if there == box:
            return self.inner.read(box)
        whole = np.zeros(box.shape, self.dtype)
        if there:
            whole[there.inside(box).slices] = self.inner.read(there)
        return whole

    def forget(self) -> None:
        self.inner.forget()


class Constant(LazyArray):
    """An array of one number, which is stored nowhere."""

    in_order = True

    def __init__(
        self, number: float, shape: Sequence[int], dtype: np.dtype[Any], *, keeps_dtype: bool = False
    ) -> None:
        self.number, self.shape, self.dtype, self.keeps_dtype = number, tuple(shape), dtype, keeps_dtype

    def read(self, box: Box) -> Array:
        return np.full(box.shape, self.number, self.dtype)

    def forget(self) -> None:
        """Keep nothing."""


def entry_of(array: LazyArray) -> LeafEntry:
    """Return the record of a stored leaf, or describe an array that is computed."""
    if array.entry is not None:
        return array.entry
    first = next(iter(stored_leaves(array)), None)
    return LeafEntry(name_of_dtype(array.dtype), array.shape, (), first.entry.home if first else "jax")


def stored_leaves(array: LazyArray) -> list[StoredLeaf]:
    """List the stored leaves behind an array."""
    if isinstance(array, StoredLeaf):
        return [array]
    return list(dict.fromkeys(leaf for inner in array.inners for leaf in stored_leaves(inner)))


def decoded_together(array: LazyArray) -> int:
    """Return the memory for the decoded chunks of a read. Most arrays read their leaves one after the other."""
    if isinstance(array, StoredLeaf):
        return array.decoded_nbytes
    found = [decoded_together(inner) for inner in array.inners]
    return sum(found) if array.is_read_together else max(found, default=0)
