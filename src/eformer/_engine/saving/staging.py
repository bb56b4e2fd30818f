"""Bring the elements of leaves into host memory, and limit the bytes on their way to the disk."""

from __future__ import annotations

import sys
import threading
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from eformer._engine.record.boxes import contiguous
from eformer._engine.record.planned import LazyArray
from eformer._engine.tasks import interrupts
from eformer._engine.trees.devices import staged

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from eformer._engine.record.boxes import Box
    from eformer._engine.record.planned import ArrayBox, Source


def released(source: Source) -> Source:
    """Return the leaf without its array."""
    return msgspec.structs.replace(source, whole=None, parts=())


_CPU_BATCH_BYTES = 8 * 2**20
_IN_ORDER_BYTES = 32 * 2**20  # so that one batch is written while the next is read


class Staging:
    """Host memory for bytes on their way to the disk, limited by a budget."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.used = 0
        self.changed = threading.Condition()

    def batch_bytes(self, parts: Sequence[ArrayBox]) -> int:
        """Return the number of bytes to fetch together."""
        enough = [_enough_of(array) for _, array in parts] or [_CPU_BATCH_BYTES]
        return min(self.budget // 4, *enough)

    def fetch(self, parts: Sequence[ArrayBox], box: Box) -> tuple[list[ArrayBox], int]:
        """Return the boxes inside `box` in host memory, and the number of bytes to `release` when they are written.

        Wait until enough of the budget is released; for a box that is larger than the budget, until all of it is.
        """
        wanted = [(overlap, held, array) for held, array in parts if (overlap := held.overlap(box))]
        nbytes = sum(o.size * a.dtype.itemsize for o, _, a in wanted if not isinstance(a, np.ndarray))
        if nbytes:
            with self.changed:
                interrupts.wait_until(partial(self.changed.wait_for, partial(self._has_room, nbytes)))
                self.used += nbytes
        try:
            return [(overlap, box_on_host(a, overlap.inside(held))) for overlap, held, a in wanted], nbytes
        except BaseException:
            self.release(nbytes)
            raise

    @contextmanager
    def reading(self, source: Source, box: Box) -> Iterator[np.ndarray[Any, Any]]:
        """Yield the elements of a box of a leaf in C order. Their memory is released after the block."""
        boxes, held = self.fetch(source.boxes, box)
        try:
            yield contiguous(boxes, box, source.dtype)
        finally:
            self.release(held)

    def _has_room(self, nbytes: int) -> bool:
        return self.used == 0 or self.used + nbytes <= self.budget

    def release(self, nbytes: int) -> None:
        if nbytes:
            with self.changed:
                self.used -= nbytes
                self.changed.notify_all()


def _enough_of(array: Any) -> int:
    """Return the number of bytes of an array to fetch together: large transfers keep an accelerator at full speed."""
    if isinstance(array, LazyArray):
        return _IN_ORDER_BYTES if array.in_order else sys.maxsize
    if isinstance(array, np.ndarray):
        return _CPU_BATCH_BYTES
    device: Any = next(iter(array.devices()))
    return _CPU_BATCH_BYTES if device.platform == "cpu" else sys.maxsize  # arrays on a CPU are only unpacked


def box_on_host(array: Any, box: Box) -> np.ndarray[Any, Any]:
    if isinstance(array, np.ndarray):
        return array[box.slices]
    if isinstance(array, LazyArray):
        return array.read(box)
    # A slice is a program, and a copy in host memory may still be on its way.
    array.block_until_ready()
    return staged(array if box.shape == array.shape else array[box.slices])
