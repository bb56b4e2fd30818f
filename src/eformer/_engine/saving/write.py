"""Bytes of leaves on their way into files, each box with its digests."""

from __future__ import annotations

import math
import threading
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from msgspec import Struct

from eformer._engine.record.digests import DIGEST_DIGITS, xxh3_128
from eformer._engine.record.dtypes import dtype_from_name, pack_nibbles
from eformer._engine.record.manifest import Coding, Extent, LeafEntry, weight_of
from eformer._engine.record.pieces import bounding, count_pieces, joined, pieces, shifted
from eformer._engine.record.regions import Region
from eformer._engine.saving.staging import Staging, contiguous, released, to_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from eformer._engine.record.planned import ArrayBox, Source
    from eformer._engine.tasks.progress import Meter

# One write: large enough for the disk, small enough to stay in the processor's cache.
_WRITE_BYTES = 4 * 2**20

NO_DIGEST = "0" * DIGEST_DIGITS


def weight(slots: Iterable[Slot]) -> int:
    """Of all elements in the slots; see `weight_of`."""
    return sum(weight_of(slot.source.name, math.prod(slot.shape)) for slot in slots) % 2**64


class Sink(Protocol):
    """A file under way."""

    def write(self, data: Any, offset: int) -> None: ...


class Counted:
    """A file under way whose bytes somebody counts."""

    __slots__ = ("_meter", "_sink")

    def __init__(self, sink: Sink, meter: Meter) -> None:
        self._sink, self._meter = sink, meter

    def write(self, data: Any, offset: int) -> None:
        self._sink.write(data, offset)
        self._meter.add(len(data))


class Slot(Struct, gc=False):
    """A box of a leaf on its way into a file. `region` is None for the whole leaf, `name` is what others call it."""

    name: str
    source: Source
    region: Region | None
    shape: tuple[int, ...]
    nbytes: int
    is_packed: bool
    digests: list[str]
    offset: int = 0
    coding: Coding | None = None

    @property
    def box(self) -> Region:
        return self.region or Region.whole(self.source.shape)

    def extent(self, file: int) -> Extent:
        region = (self.region.start, self.region.stop) if self.region else None
        return Extent(file, self.offset, self.nbytes, "".join(self.digests), region, self.coding)


def entry_of(source: Source, extents: Sequence[Extent], sha256: str | None = None) -> LeafEntry:
    return LeafEntry(
        source.dtype, source.shape, tuple(extents), source.home, source.key, source.sharding, sha256
    )


def no_digests(shape: tuple[int, ...], nbytes: int, itemsize: int, block: int) -> list[str]:
    """Room for as many digests as a box of this shape has pieces."""
    return [NO_DIGEST] * (1 if 0 < nbytes <= block else count_pieces(shape, itemsize, block))


def itemsize_of(source: Source) -> int:
    return dtype_from_name(source.dtype).itemsize


def own_shapes(source: Source) -> list[tuple[int, ...]]:
    """Of the boxes that this process writes."""
    return [source.shape] if source.whole is not None else [region.shape for region in source.regions]


def parts_of(source: Source) -> Sequence[ArrayBox]:
    return source.parts if source.whole is None else [(Region.whole(source.shape), source.whole)]


# --------------------------------------------------------------------------------------------- tasks


def in_one_place(slot: Slot) -> np.ndarray[Any, Any] | None:
    """The array in host memory that is the slot's box, if there is one."""
    source = slot.source
    if source.whole is not None:  # which nearly every leaf has
        return source.whole if slot.region is None else None
    if len(source.parts) != 1:
        return None
    ((box, array),) = source.parts
    return array if isinstance(array, np.ndarray) and box.shape == slot.shape else None


def small_bytes(slot: Slot) -> bytes:
    """All of a small box that lies in one place, with its digest."""
    whole = slot.source.whole
    data = to_bytes(in_one_place(slot) if whole is None else whole, slot.source.dtype)  # type: ignore[arg-type]
    if data:
        slot.digests[0] = xxh3_128(data)
    return data


def write_packed(sink: Sink, start: int, slot: Slot, staging: Staging) -> None:
    """Four-bit numbers, two to a byte."""
    parts, held = staging.fetch(parts_of(slot.source), slot.box)
    try:
        data = pack_nibbles(contiguous(parts, slot.box, slot.source.dtype))
        slot.digests[0] = xxh3_128(data)
        sink.write(data, start + slot.offset)
    finally:
        staging.release(held)
    slot.source = released(slot.source)


def piece_tasks(
    sink: Sink, start: int, slot: Slot, block: int, staging: Staging, end: Callable[[], None] | None = None
) -> Iterator[Callable[[], None]]:
    """Tasks that write the slot, a few pieces each; `end` is called after the last."""
    itemsize = itemsize_of(slot.source)
    inside = shifted(pieces(slot.box.shape, itemsize, block), slot.box.start)
    offset, number = start + slot.offset, 0
    all_of_it = Lease(end, len(inside))
    for group in joined(inside, itemsize, max(block, staging.batch_bytes(slot.source.parts))):
        parts, held = staging.fetch(parts_of(slot.source), bounding(group))
        lease = Lease(partial(staging.release, held), len(group), all_of_it)
        for run in joined(group, itemsize, max(block, _WRITE_BYTES)):
            yield partial(_write_run, sink, slot, number, parts, run, offset, lease)
            offset += itemsize * sum(region.size for region in run)
            number += len(run)
    slot.source = released(slot.source)  # the tasks hold what they need, and let go of it one by one


def digests_of(slot: Slot, block: int, staging: Staging) -> Iterator[str]:
    """The digests of the slot's pieces, each computed when it is asked for."""
    itemsize, dtype = itemsize_of(slot.source), slot.source.dtype
    inside = shifted(pieces(slot.box.shape, itemsize, block), slot.box.start)
    for group in joined(inside, itemsize, max(block, staging.batch_bytes(slot.source.parts))):
        parts, held = staging.fetch(parts_of(slot.source), bounding(group))
        try:
            for region in group:
                yield xxh3_128(bytes_of(contiguous(parts, region, dtype)))
        finally:
            staging.release(held)


def _write_run(
    sink: Sink,
    slot: Slot,
    number: int,
    parts: Sequence[ArrayBox],
    run: Sequence[Region],
    offset: int,
    lease: Lease,
) -> None:
    """Pieces that make up a box, the first of which has this number."""
    try:
        data = bytes_of(contiguous(parts, bounding(run), slot.source.dtype))
        at, itemsize = 0, itemsize_of(slot.source)
        for region in run:
            stop = at + region.size * itemsize
            slot.digests[number] = xxh3_128(data[at:stop])
            at, number = stop, number + 1
        sink.write(data, offset)  # right after its digests, while it is in the cache
    finally:
        lease.end(len(run))


def bytes_of(array: np.ndarray[Any, Any]) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


class Lease:
    """What several tasks share; the last one to end gives it back."""

    _lock = threading.Lock()

    def __init__(self, give_back: Callable[[], None] | None, tasks: int, outer: Lease | None = None) -> None:
        self.give_back, self.tasks, self.outer = give_back, tasks, outer

    def end(self, tasks: int = 1) -> None:
        with self._lock:
            self.tasks -= tasks
            is_last = self.tasks == 0
        if is_last and self.give_back:
            self.give_back()
        if self.outer:
            self.outer.end(tasks)


# ------------------------------------------------------------------------------------------- in order


def elements_of(source: Source, staging: Staging) -> Iterator[memoryview]:
    """The elements of a leaf in their order, as bytes, a little at a time."""
    for region in pieces(source.shape, itemsize_of(source), staging.batch_bytes(source.parts)):
        parts, held = staging.fetch(parts_of(source), region)
        try:
            yield bytes_of(contiguous(parts, region, source.dtype))
        finally:
            staging.release(held)


def is_all_here(source: Source) -> bool:
    """Whether this process has every element of a leaf."""
    if source.whole is not None:
        return True
    return sum(region.size for region, _ in source.parts) == math.prod(source.shape)
