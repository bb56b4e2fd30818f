"""Read arrays that rules make of stored ones: transposed, stacked or unstacked, each box from what it needs."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from eformer._engine.loading.fetch import aligned, fetch
from eformer._engine.loading.read_plan import Want, plan_reads
from eformer._engine.record.dtypes import dtype_from_name
from eformer._engine.record.pieces import bounding
from eformer._engine.record.regions import Region
from eformer._engine.tasks.forks import Lock
from eformer._engine.tasks.pool import run_all

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from eformer._engine.formats.found import Found
    from eformer._engine.loading.select import LeafTarget
    from eformer._engine.record.manifest import LeafEntry, TreeEntry
    from eformer._engine.record.planned import LazyArray
    from eformer._engine.stores.base import Files
    from eformer._engine.tasks.progress import Meter

Array = np.ndarray[Any, Any]

_SLICE_BYTES = 32 * 2**20  # read at a time


class TreeReader:
    """Read boxes of the leaves of one tree. The first read opens its files, `close` closes them."""

    def __init__(self, found: Found, tree: TreeEntry, *, verify: bool) -> None:
        self.found, self.tree, self.verify = found, tree, verify
        self.opened: Files | None = None
        self.lock = Lock()

    def read(self, name: str, entry: LeafEntry, region: Region, threads: int | None = None) -> Array:
        wants = [Want(name, entry, entry.dtype, [region])]
        reads = plan_reads(wants, self.tree)
        path_to = self.found.store.path_to
        ((array,),) = fetch(
            reads, wants, self.tree, self.files(), threads or 1, verify=self.verify, path_to=path_to
        )
        return array

    def files(self) -> Files:
        with self.lock:
            self.opened = self.opened or self.found.files(self.tree)
            return self.opened

    def require_unwritten(self) -> None:
        """Raise if a file was written to while it was read, and has no digests that would have shown it."""
        if self.opened and not self.tree.has_digests and (name := self.opened.rewritten()):
            raise FileNotFoundError(f"{name} was written to while it was being read")

    def close(self) -> None:
        if self.opened:
            self.opened.close()


def read_computed(
    computed: Mapping[str, LazyArray], targets: Sequence[LeafTarget], threads: int, meter: Meter
) -> None:
    """Read those of the targets that are computed into host memory."""
    tasks: list[Callable[[], None]] = []
    for target in targets:
        if (array := computed.get(target.name)) is not None:
            tasks += _tasks(array, target, meter)
    run_all(tasks, threads)


def nbytes_computed(computed: Mapping[str, LazyArray], targets: Sequence[LeafTarget]) -> int:
    """Return how many bytes `read_computed` reads for the targets."""
    return sum(
        array.dtype.itemsize * sum(box.size for box in _boxes(target))
        for target in targets
        if (array := computed.get(target.name)) is not None
    )


def _tasks(array: LazyArray, target: LeafTarget, meter: Meter) -> list[Callable[[], None]]:
    """Return tasks that read one array, each a slice that the store holds in few runs."""
    dtype = dtype_from_name(target.dtype)
    regions = [Region.whole(array.shape)] if target.regions is None else target.regions
    outputs = [(region, _empty(region.shape, dtype)) for region in regions]
    target.arrays = [output for _, output in outputs]

    def read(part: Region) -> None:
        elements = array.read(part)
        meter.add(elements.nbytes)
        for region, output in outputs:
            if not part.start:
                output[()] = elements
            elif overlap := part.overlap(region):
                output[overlap.inside(region).slices] = elements[overlap.inside(part).slices]

    return [partial(read, part) for box in _boxes(target) for part in _slices(box, array)]


def _boxes(target: LeafTarget) -> list[Region]:
    """Return the boxes to read: one for all regions, unless they lie far apart."""
    regions = [Region.whole(target.entry.shape)] if target.regions is None else target.regions
    around = bounding(regions)
    return [around] if around.size <= 2 * sum(region.size for region in regions) else list(regions)


def _slices(box: Region, array: LazyArray) -> list[Region]:
    """Cut a box across the axis along which reading a slice reads the fewest other bytes."""
    if not box.start or not box.size:
        return [box] if box.size else []
    axis = array.slow_axis
    first, last = box.start[axis], box.stop[axis]
    row = array.dtype.itemsize * box.size // (last - first)
    rows = max(1, _SLICE_BYTES // max(1, row))
    starts = range(first, last, rows)
    return [
        Region(
            (*box.start[:axis], start, *box.start[axis + 1 :]),
            (*box.stop[:axis], min(start + rows, last), *box.stop[axis + 1 :]),
        )
        for start in starts
    ]


def _empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Allocate an array at an address that XLA can alias."""
    return np.ndarray(shape, dtype, aligned(dtype.itemsize * math.prod(shape)))
