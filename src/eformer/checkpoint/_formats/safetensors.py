"""Leaves in safetensors files: a directory of them under a manifest, or one file that carries its own."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct

from eformer.checkpoint._arrays import Part, Source, Staging, contiguous, released, to_bytes
from eformer.checkpoint._codec import xxh3_128
from eformer.checkpoint._formats._header import Tensor, header_bytes, tensor
from eformer.checkpoint._leaf import Region
from eformer.checkpoint._manifest import DIGEST_DIGITS, Extent, LeafEntry
from eformer.checkpoint._ndarray import dtype_from_name, pack_nibbles
from eformer.checkpoint._pieces import bounding, count_pieces, joined, pieces, shifted
from eformer.checkpoint._plan import ALIGNMENT, layout
from eformer.checkpoint._pool import run_all

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from eformer.checkpoint._store.local import Scratch

NO_DIGEST = "0" * DIGEST_DIGITS


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

    def extent(self, file: int) -> Extent:
        region = (self.region.start, self.region.stop) if self.region else None
        return Extent(file, self.offset, self.nbytes, "".join(self.digests), region)


@dataclass(slots=True)
class File:
    """A data file: what goes into it, and where it is written."""

    slots: list[Slot]
    header: bytes = b""
    scratch: Scratch | None = None

    @property
    def data_nbytes(self) -> int:
        return sum(slot.nbytes for slot in self.slots)

    @property
    def nbytes(self) -> int:
        return len(self.header) + self.data_nbytes

    def tensors(self) -> dict[str, Tensor]:
        return {
            slot.name: tensor(slot.source.dtype, slot.shape, slot.offset, slot.nbytes) for slot in self.slots
        }


# ---------------------------------------------------------------------------------------------- plan


def arrange(sources: Sequence[Source], max_bytes: int, block: int) -> list[File]:
    """What goes into which file at which offset, counted from where the file's data begins."""
    slots = {slot.name: slot for source in sources for slot in _slots(source, block)}
    files = []
    for names in layout({name: slot.nbytes for name, slot in slots.items()}, max_bytes):
        file = File(sorted((slots[name] for name in names), key=_order))
        offset = 0
        for slot in file.slots:
            slot.offset = offset
            offset += slot.nbytes
        files.append(file)
    return files


def _order(slot: Slot) -> tuple[bool, int]:
    """Those first whose length keeps the next one aligned for XLA, then those that keep it aligned for numpy: the
    format allows no gaps."""
    return slot.nbytes % ALIGNMENT != 0, -itemsize_of(slot.source)


def _slots(source: Source, block: int) -> Iterator[Slot]:
    if source.whole is not None:
        yield _slot(source, None, block)
        return
    for box in source.regions:
        yield _slot(source, None if box.shape == source.shape else box, block)


def _slot(source: Source, region: Region | None, block: int) -> Slot:
    # A name that the format reserves, and parts of a leaf, are called something else in the file.
    name = source.name if source.name != "__metadata__" else "%5F_metadata__"
    if region:
        name += f"%[{_ranges(region)}]"
    shape = region.shape if region else source.shape
    nbytes = stored_nbytes(source.dtype, shape)
    is_packed = source.dtype == "float4_e2m1fn" and 0 < 2 * nbytes == math.prod(shape)
    is_one = is_packed or 0 < nbytes <= block
    digests = [NO_DIGEST] * (1 if is_one else count_pieces(shape, itemsize_of(source), block))
    return Slot(name, source, region, shape, nbytes, is_packed, digests)


def stored_nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    """What an array takes in a file: what it takes in memory, but for four-bit floats, two of which share a byte."""
    nbytes = math.prod(shape) * dtype_from_name(dtype).itemsize
    return nbytes // 2 if dtype == "float4_e2m1fn" and nbytes % 2 == 0 else nbytes


def itemsize_of(source: Source) -> int:
    return dtype_from_name(source.dtype).itemsize


def _ranges(region: Region) -> str:
    return ",".join(f"{a}:{b}" for a, b in zip(region.start, region.stop, strict=True))


def entries(files: Sequence[File]) -> dict[str, LeafEntry]:
    """What the manifest says of the leaves, in the order of the files."""
    extents: dict[str, list[Extent]] = {}
    sources: dict[str, Source] = {}
    for index, file in enumerate(files):
        for slot in file.slots:
            sources[slot.source.name] = slot.source
            extents.setdefault(slot.source.name, []).append(slot.extent(index))
    return {name: entry_of(source, extents[name]) for name, source in sources.items()}


def entry_of(source: Source, extents: Sequence[Extent]) -> LeafEntry:
    return LeafEntry(source.dtype, source.shape, tuple(extents), source.home, source.key, source.sharding)


# --------------------------------------------------------------------------------------------- write


def write_data(files: Sequence[File], block: int, staging: Staging, threads: int) -> None:
    """Every leaf's bytes at their place, and their digests in the slots. Nothing is synced yet."""
    for file in files:
        scratch_of(file).resize(file.nbytes)
    run_all((task for file in files for task in _tasks(file, block, staging)), threads)


def write_headers(files: Sequence[File], threads: int) -> None:
    """The files are complete, and on stable storage."""
    for file in files:
        scratch_of(file).write(file.header, 0)
    run_all([scratch_of(file).sync for file in files], threads)


def scratch_of(file: File) -> Scratch:
    assert file.scratch is not None
    return file.scratch


def _tasks(file: File, block: int, staging: Staging) -> Iterator[Callable[[], None]]:
    """Small neighbours are written together, large leaves piece by piece."""
    small: list[Slot] = []
    nbytes = 0
    for slot in file.slots:
        is_small = slot.source.whole is not None and slot.nbytes <= block and not slot.is_packed
        if small and (not is_small or nbytes + slot.nbytes > block):
            yield partial(_write_small, file, small)
            small, nbytes = [], 0
        if is_small:
            small.append(slot)
            nbytes += slot.nbytes
        elif slot.is_packed:
            yield partial(_write_packed, file, slot, staging)
        else:
            yield from _piece_tasks(file, slot, block, staging)
    if small:
        yield partial(_write_small, file, small)


def _write_small(file: File, slots: Sequence[Slot]) -> None:
    chunks = []
    for slot in slots:
        data = to_bytes(slot.source.whole, slot.source.dtype)  # type: ignore[arg-type]
        if data:
            slot.digests[0] = xxh3_128(data)
            chunks.append(data)
    scratch_of(file).write(b"".join(chunks), len(file.header) + slots[0].offset)


def _write_packed(file: File, slot: Slot, staging: Staging) -> None:
    region = slot.region or Region.whole(slot.source.shape)
    parts, held = staging.fetch(_parts(slot.source), region)
    try:
        data = pack_nibbles(contiguous(parts, region, slot.source.dtype))
        slot.digests[0] = xxh3_128(data)
        scratch_of(file).write(data, len(file.header) + slot.offset)
    finally:
        staging.release(held)
    slot.source = released(slot.source)


def _piece_tasks(file: File, slot: Slot, block: int, staging: Staging) -> Iterator[Callable[[], None]]:
    box = slot.region or Region.whole(slot.source.shape)
    itemsize = itemsize_of(slot.source)
    inside = shifted(pieces(box.shape, itemsize, block), box.start)
    offset, number = len(file.header) + slot.offset, 0
    for group in joined(inside, itemsize, max(block, staging.batch_bytes(slot.source.parts))):
        parts, held = staging.fetch(_parts(slot.source), bounding(group))
        lease = _Lease(staging, held, len(group))
        for region in group:
            yield partial(_write_piece, file, slot, number, parts, region, offset, lease)
            offset, number = offset + region.size * itemsize, number + 1
    slot.source = released(slot.source)  # the tasks hold what they need, and let go of it one by one


def _parts(source: Source) -> Sequence[Part]:
    return source.parts if source.whole is None else [(Region.whole(source.shape), source.whole)]


def _write_piece(
    file: File, slot: Slot, number: int, parts: Sequence[Part], region: Region, offset: int, lease: _Lease
) -> None:
    try:
        data = _bytes_of(contiguous(parts, region, slot.source.dtype))
        slot.digests[number] = xxh3_128(data)
        scratch_of(file).write(data, offset)  # right after its digest, while it is in the cache
    finally:
        lease.end()


def _bytes_of(array: np.ndarray[Any, Any]) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


class _Lease:
    """Staged memory that several tasks share; the last one gives it back."""

    def __init__(self, staging: Staging, nbytes: int, tasks: int) -> None:
        self.staging, self.nbytes, self.tasks = staging, nbytes, tasks

    def end(self) -> None:
        with self.staging.changed:
            self.tasks -= 1
            last = self.tasks == 0
        if last:
            self.staging.release(self.nbytes)


def header_of(file: File, metadata: dict[str, str]) -> bytes:
    return header_bytes(metadata, file.tensors())
