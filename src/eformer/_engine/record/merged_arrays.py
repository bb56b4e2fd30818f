"""Compute leaves from leaves of several checkpoints, box by box: weighted sums, and weights with a LoRA added.

Sums are in float32, or float64 if a leaf is, in a fixed order, so that the result does not depend on the boxes that are
read. The result is rounded once.

Tests: tests/engine/tools/test_merge.py.
"""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from eformer._engine.record.boxes import Box
from eformer._engine.record.lazy_arrays import entry_of
from eformer._engine.record.manifest import LeafEntry
from eformer._engine.record.pieces import PIECE_BYTES, bounding, joined, pieces_in
from eformer._engine.record.planned import LazyArray

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

Array = np.ndarray[Any, Any]

_MOST_BYTES = 8 * 2**20  # of a sum in memory, beside the box that is read
_CHUNK = 2**16  # elements to add or multiply at a time: few enough to stay in the cache


def wide_dtype(dtypes: Sequence[np.dtype[Any]]) -> np.dtype[Any]:
    """Return the dtype to add numbers of these dtypes in."""
    is_long = any(dtype.itemsize // (2 if dtype.kind == "c" else 1) > 4 for dtype in dtypes)
    is_complex = any(dtype.kind == "c" for dtype in dtypes)
    word = ("complex128" if is_long else "complex64") if is_complex else ("float64" if is_long else "float32")
    return np.dtype(word)


def _number(value: float, wide: np.dtype[Any]) -> np.floating[Any]:
    return np.float64(value) if wide.itemsize // (2 if wide.kind == "c" else 1) > 4 else np.float32(value)


class _OfOneLeaf(LazyArray):
    """A leaf with other values, which keeps the record of a stored leaf: its sharding and the kind of its array."""

    is_changed = True

    def _keep_record(self, inner: LazyArray, dtype: np.dtype[Any]) -> None:
        before = entry_of(inner)
        self.shape, self.dtype = inner.shape, dtype
        self.entry = LeafEntry(dtype.name, inner.shape, (), before.home, before.key, before.sharding)

    def forget(self) -> None:
        for inner in self.inners:
            inner.forget()


class WeightedSum(_OfOneLeaf):
    """The sum of arrays of one shape, each times its weight, divided by the sum of the weights.

    The arrays are added in their order. The record is that of the last array.
    """

    is_read_together = True

    def __init__(
        self, inners: Sequence[LazyArray], weights: Sequence[float], dtype: np.dtype[Any], how: str
    ) -> None:
        self._keep_record(inners[-1], dtype)
        self.inners, self.how = inners, how
        self.wide = wide_dtype([inner.dtype for inner in inners])
        self.weights = [_number(weight, self.wide) for weight in weights]
        self.total = np.add.accumulate(np.array(self.weights))[-1]
        self.in_order, self.slow_axis = all(inner.in_order for inner in inners), inners[-1].slow_axis

    def read(self, box: Box) -> Array:
        parts = list(self._parts(box))
        if len(parts) == 1:
            return self._sum(parts[0])
        whole = np.empty(box.shape, self.dtype)
        for part in parts:
            whole[part.inside(box).slices] = self._sum(part)
        return whole

    def _parts(self, box: Box) -> Iterator[Box]:
        """Split a box between pieces of the stored arrays, because a piece is read whole to be checked."""
        touched = pieces_in(box, self.shape, self.inners[-1].dtype.itemsize, PIECE_BYTES)
        inside = (part for _, piece in touched if (part := piece.overlap(box)))
        return map(bounding, joined(inside, self.wide.itemsize, _MOST_BYTES))

    def _sum(self, box: Box) -> Array:
        return self.sum_of(box.shape, (array.read(box) for array in self.inners))

    def sum_of(self, shape: Sequence[int], boxes: Iterable[Array]) -> Array:
        """Return the sum of boxes of this shape, one of each array."""
        size = math.prod(shape)
        total = np.zeros(size, self.wide)
        with np.errstate(all="ignore"):  # a sum of infinities is NaN, as in the program without files
            for n, (elements, weight) in enumerate(zip(boxes, self.weights, strict=True)):
                found = elements.reshape(-1)
                for part in _parts_in_cache(size):
                    term = found[part].astype(self.wide)
                    term *= weight
                    total[part] = total[part] + term if n else term  # 0.0 plus -0.0 would be 0.0
            if self.total != 1:
                total /= self.total
            return total.astype(self.dtype, copy=False).reshape(shape)


def _parts_in_cache(number: int) -> Iterator[slice]:
    """Yield ranges of elements that stay in the cache of a processor."""
    return (slice(start, start + _CHUNK) for start in range(0, number, _CHUNK))


class LowRankUpdate(_OfOneLeaf):
    """A matrix plus a scaled product of two thin matrices: `inner` + scale * (rows @ columns).

    The product is added up over the rank in order: a library of linear algebra adds in an order that depends on the
    machine and on the box. Both thin matrices stay in memory until the leaf is written.
    """

    def __init__(
        self, inner: LazyArray, rows: LazyArray, columns: LazyArray, scale: float, dtype: np.dtype[Any]
    ) -> None:
        self._keep_record(inner, dtype)
        self.inner, self.rows, self.columns = inner, rows, columns
        self.inners = [inner, rows, columns]
        self.wide = wide_dtype([inner.dtype])
        self.scale, self.how = _number(scale, self.wide), f"LoRA added, times {scale:g}"
        self.in_order, self.slow_axis = inner.in_order, inner.slow_axis
        self._thin: tuple[Array, Array] | None = None
        self._lock = threading.Lock()

    def read(self, box: Box) -> Array:
        rows, columns = self._thin_boxes(box)
        found = self.inner.read(box)
        whole = np.empty(box.shape, self.dtype)
        height = max(1, _CHUNK // max(1, box.shape[1]))
        with np.errstate(all="ignore"):
            for start in range(0, box.shape[0], height):
                part = slice(start, start + height)
                whole[part] = found[part].astype(self.wide) + self.scale * _product(rows[part], columns)
        return whole

    def _thin_boxes(self, box: Box) -> tuple[Array, Array]:
        """Return the parts of the thin matrices for a box."""
        with self._lock:
            if self._thin is None:
                self._thin = self._read_whole(self.rows), self._read_whole(self.columns)
            rows, columns = self._thin
        return rows[box.slices[0]], columns[:, box.slices[1]]

    def _read_whole(self, array: LazyArray) -> Array:
        return array.read(Box.whole(array.shape)).astype(self.wide)

    def forget(self) -> None:
        super().forget()
        with self._lock:
            self._thin = None


def _product(rows: Array, columns: Array) -> Array:
    """Return the product of two matrices, added up in the order of the axis between them."""
    total = rows[:, :1] * columns[:1]
    for k in range(1, len(columns)):
        total += rows[:, k : k + 1] * columns[k : k + 1]
    return total
