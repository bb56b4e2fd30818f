"""Read leaves of a checkpoint box by box: as they are stored, transposed, stacked or unstacked.

Tests: tests/engine/record/test_rename.py, tests/engine/tools/test_convert.py.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from eformer._engine.record.boxes import Box, contiguous
from eformer._engine.record.dtypes import dtype_from_name, name_of_dtype
from eformer._engine.record.lazy import lazy_property
from eformer._engine.record.manifest import LeafEntry
from eformer._engine.record.planned import LazyArray

if TYPE_CHECKING:
    from collections.abc import Sequence

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


class Transposed(LazyArray):
    """An array with its axes in another order. Reading a few rows may read the whole inner array."""

    in_order = False

    def __init__(self, inner: LazyArray, axes: tuple[int, ...]) -> None:
        self.inner, self.axes = inner, axes
        self.shape, self.dtype = tuple(inner.shape[axis] for axis in axes), inner.dtype
        self.slow_axis = axes.index(inner.slow_axis) if axes else 0

    def read(self, box: Box) -> Array:
        start, stop = [0] * len(self.axes), [0] * len(self.axes)
        for here, axis in enumerate(self.axes):
            start[axis], stop[axis] = box.start[here], box.stop[here]
        return self.inner.read(Box(tuple(start), tuple(stop))).transpose(self.axes)

    def forget(self) -> None:
        self.inner.forget()


class Stacked(LazyArray):
    """Arrays of one shape and dtype, stacked along a new axis."""

    def __init__(self, inners: Sequence[LazyArray], axis: int) -> None:
        self.inners, self.axis = inners, axis
        shape = inners[0].shape
        self.shape, self.dtype = (*shape[:axis], len(inners), *shape[axis:]), inners[0].dtype
        self.in_order = axis == 0 and all(inner.in_order for inner in inners)
        self.slow_axis = axis
        self._latest = inners[0]

    def read(self, box: Box) -> Array:
        axis = self.axis
        first, last = box.start[axis], box.stop[axis]
        inner = Box(_without(box.start, axis), _without(box.stop, axis))
        if last - first == 1:
            return np.expand_dims(self._read(first, inner), axis)
        whole = np.empty(box.shape, self.dtype)
        for number in range(first, last):
            whole[(slice(None),) * axis + (number - first,)] = self._read(number, inner)
        return whole

    def _read(self, number: int, box: Box) -> Array:
        """Read from one array, after the previous array has dropped its decoded chunks. Several threads may read."""
        before, array = self._latest, self.inners[number]
        self._latest = array
        if before is not array:
            before.forget()
        return array.read(box)

    def forget(self) -> None:
        self._latest.forget()


class Unstacked(LazyArray):
    """The box of an array at one index of an axis, without that axis."""

    def __init__(self, inner: LazyArray, axis: int, index: int) -> None:
        self.inner, self.axis, self.index = inner, axis, index
        self.shape, self.dtype = _without(inner.shape, axis), inner.dtype
        self.in_order = axis == 0 and inner.in_order
        self.slow_axis = 0 if inner.slow_axis == axis else inner.slow_axis - (inner.slow_axis > axis)

    def read(self, box: Box) -> Array:
        axis, index = self.axis, self.index
        start = (*box.start[:axis], index, *box.start[axis:])
        stop = (*box.stop[:axis], index + 1, *box.stop[axis:])
        return self.inner.read(Box(start, stop)).squeeze(axis)

    def forget(self) -> None:
        if self.index == self.inner.shape[self.axis] - 1:  # the last user of the shared array
            self.inner.forget()


def stored_leaves(array: LazyArray) -> list[StoredLeaf]:
    """List the stored leaves behind an array."""
    if isinstance(array, StoredLeaf):
        return [array]
    return [stored for inner in inners_of(array) for stored in stored_leaves(inner)]


def entry_of(array: LazyArray) -> LeafEntry:
    """Return the record of a stored array, or describe an array that is computed from stored arrays."""
    if isinstance(array, StoredLeaf):
        return array.entry
    (first, *_) = stored_leaves(array)
    return LeafEntry(name_of_dtype(array.dtype), array.shape, (), first.entry.home)


def inners_of(array: LazyArray) -> Sequence[LazyArray]:
    """Return the arrays that an array reads."""
    if isinstance(array, (Transposed, Unstacked)):
        return [array.inner]
    inners: Sequence[LazyArray] = getattr(array, "inners", ())
    return inners


def _without(numbers: Sequence[int], axis: int) -> tuple[int, ...]:
    return (*numbers[:axis], *numbers[axis + 1 :])
