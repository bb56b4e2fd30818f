"""Leaves in safetensors files: a directory of them under a manifest, or one file that carries its own."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from eformer._engine.formats.safetensors.header import Tensor, header_bytes, open_header, tensor
from eformer._engine.formats.safetensors.names import own_name, save_of, tensor_name
from eformer._engine.record.digests import xxh3_128
from eformer._engine.record.dtypes import dtype_from_name
from eformer._engine.record.pieces import ALIGNMENT
from eformer._engine.saving.staging import released
from eformer._engine.saving.write import (
    NO_DIGEST,
    Counted,
    Slot,
    entry_of,
    in_one_place,
    itemsize_of,
    no_digests,
    own_shapes,
    piece_tasks,
    small_bytes,
    write_packed,
)
from eformer._engine.stores.local import logger, physical_memory, read_range_of
from eformer._engine.tasks.pool import run_all
from eformer.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from eformer._engine.record.manifest import DataFile, Extent, LeafEntry
    from eformer._engine.record.planned import Source
    from eformer._engine.record.regions import Region
    from eformer._engine.saving.reuse import Earlier
    from eformer._engine.saving.staging import Staging
    from eformer._engine.saving.write import Sink
    from eformer._engine.stores.local import Scratch
    from eformer._engine.stores.local_upload import ScratchTree
    from eformer._engine.tasks.progress import Meter

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from eformer._engine.record.manifest import Extent, LeafEntry
from eformer._engine.formats.safetensors.layout import layout

_MOST_KEPT = 64  # files, the largest: many small ones are written into one again
_MOST_APART = 16

_LARGE_PART = 1 / 16  # of the memory: what is more does not stay in the page cache


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


def arrange(sources: Sequence[Source], max_bytes: int, block: int, *, has_parts: bool = False) -> list[File]:
    """What goes into which file at which offset, counted from where the file's data begins."""
    slots = {slot.name: slot for source in sources for slot in _slots(source, block)}
    files = []
    for names in layout({name: slot.nbytes for name, slot in slots.items()}, max_bytes, has_parts=has_parts):
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
    name = tensor_name(source.name, region)
    shape = region.shape if region else source.shape
    nbytes = stored_nbytes(source.dtype, shape)
    is_packed = source.dtype == "float4_e2m1fn" and 0 < 2 * nbytes == math.prod(shape)
    digests = [NO_DIGEST] if is_packed else no_digests(shape, nbytes, itemsize_of(source), block)
    return Slot(name, source, region, shape, nbytes, is_packed, digests)


def own_nbytes(source: Source) -> int:
    """What this process writes of a leaf."""
    return sum(stored_nbytes(source.dtype, shape) for shape in own_shapes(source))


def stored_nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    """What an array takes in a file: what it takes in memory, but for four-bit floats, two of which share a byte."""
    nbytes = math.prod(shape) * dtype_from_name(dtype).itemsize
    return nbytes // 2 if dtype == "float4_e2m1fn" and nbytes % 2 == 0 else nbytes


def entries(files: Sequence[File]) -> dict[str, LeafEntry]:
    """What the manifest says of the leaves, in the order of the files."""
    extents: dict[str, list[Extent]] = {}
    sources: dict[str, Source] = {}
    for index, file in enumerate(files):
        for slot in file.slots:
            sources[slot.source.name] = slot.source
            extents.setdefault(slot.source.name, []).append(slot.extent(index))
    return {name: entry_of(source, extents[name]) for name, source in sources.items()}


# --------------------------------------------------------------------------------------------- reuse


@dataclass(slots=True)
class Kept:
    """Files of an earlier checkpoint that this one uses, too, and the leaves that are in them.

    The files have second names in a scratch directory: from then on nobody can take them away. `finals` says what
    these are to be called.
    """

    files: list[DataFile] = field(default_factory=list)
    finals: dict[str, str] = field(default_factory=dict)
    leaves: dict[str, tuple[Source, list[Extent]]] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(extent.nbytes for _, extents in self.leaves.values() for extent in extents)

    def entries(self, first: int) -> dict[str, LeafEntry]:
        """What the manifest says of the leaves, if the files are numbered from `first` on."""
        return {
            name: entry_of(source, [msgspec.structs.replace(e, file=first + e.file) for e in extents])
            for name, (source, extents) in self.leaves.items()
        }


def keep(
    earlier: Earlier, sources: Sequence[Source], scratch: ScratchTree, staging: Staging, threads: int
) -> tuple[Kept, list[list[Source]]]:
    """What need not be written; and what has to be, in two groups: leaves that have not changed and those that have, so
    that the next save can keep the files of the former as a whole.

    A file is kept if at least half of it is still needed. What is no part of the tree any more takes its room for as
    long; and because readers that know safetensors and not us take all that a file holds, it is not shown to them.
    """
    kept, tree = Kept(), earlier.tree
    slots = {source.name: list(_slots(source, tree.block)) for source in sources}
    same = earlier.unchanged(slots, staging, threads)
    needed = Counter[int]()
    for extents in same.values():
        for extent in extents:
            needed[extent.file] += extent.nbytes
    outdated = {
        extent.file for name, entry in tree.leaves.items() if name not in same for extent in entry.extents
    }
    numbers: dict[int, int] = {}
    for number, nbytes in needed.most_common(_MOST_KEPT):
        file = tree.files[number]
        is_worth_it = 2 * nbytes >= file.nbytes - file.header_nbytes
        if is_worth_it and (final := _link(earlier, number, scratch, is_outdated=number in outdated)):
            numbers[number] = len(kept.files)
            here = f"{scratch.name}/{scratch.data.path.name}/{final}"
            kept.files.append(msgspec.structs.replace(file, name=here))
            kept.finals[here] = final
    for source in sources:
        extents = same.get(source.name, [])
        if extents and all(extent.file in numbers for extent in extents):
            numbered = [msgspec.structs.replace(extent, file=numbers[extent.file]) for extent in extents]
            kept.leaves[source.name] = (released(source), numbered)
    left = [source for source in sources if source.name not in kept.leaves]
    return kept, [[s for s in left if s.name in same], [s for s in left if s.name not in same]]


def _link(earlier: Earlier, number: int, scratch: ScratchTree, *, is_outdated: bool) -> str | None:
    """The name that the file has now in the scratch directory, and is to have in the end."""
    file = earlier.tree.files[number]
    try:
        target = earlier.path_of(number)
        opened = open_header(target.parent, target.name)
        save_id = save_of(opened.header.metadata)
        if not save_id:
            raise FormatError("it does not say which save wrote it")
        name = own_name(file.name, save_id, is_private=is_outdated)
        scratch.data.link(name, target, file.nbytes)
        if xxh3_128(read_range_of(scratch.data.path / name, opened.header.start)) != file.header:
            raise FormatError("its header is not the one that was written")
    except (
        OSError,
        FormatError,
    ) as error:  # another file system, or one without links; or it has just been removed
        logger.warning("%s cannot be linked, what is in it is written again: %s", file.name, error)
        return None
    return name


def apart(sources: Sequence[Source]) -> list[list[Source]]:
    """The leaves by the outermost part of their names, each of which is likely to change, or to stay, as a whole; all
    together if that would be too many."""
    groups: dict[str, list[Source]] = {}
    for source in sources:
        outermost, dot, _ = source.name.partition(".")
        groups.setdefault(outermost if dot else "", []).append(source)
    return list(groups.values()) if len(groups) <= _MOST_APART else [list(sources)]


# --------------------------------------------------------------------------------------------- write


def write_data(files: Sequence[File], block: int, staging: Staging, threads: int, meter: Meter) -> None:
    """Every leaf's bytes at their place, and their digests in the slots. Nothing is synced yet."""
    is_large = sum(file.nbytes for file in files) > physical_memory() * _LARGE_PART
    for file in files:
        scratch_of(file).resize(file.nbytes)
        if is_large:
            scratch_of(file).pass_by()
    run_all((task for file in files for task in _tasks(file, block, staging, meter)), threads)


def write_headers(files: Sequence[File], threads: int) -> None:
    """The files are complete, and on stable storage."""
    for file in files:
        scratch_of(file).write(file.header, 0)
    run_all([scratch_of(file).sync for file in files], threads)


def scratch_of(file: File) -> Scratch:
    assert file.scratch is not None
    return file.scratch


def _tasks(file: File, block: int, staging: Staging, meter: Meter) -> Iterator[Callable[[], None]]:
    """Small neighbours are written together, large leaves piece by piece."""
    sink, start = Counted(scratch_of(file), meter), len(file.header)
    small: list[Slot] = []
    room = block
    for slot in file.slots:
        nbytes = slot.nbytes
        is_small = nbytes <= block and not slot.is_packed and in_one_place(slot) is not None
        if small and (not is_small or nbytes > room):
            yield partial(_write_small, sink, start, small)
            small, room = [], block
        if is_small:
            small.append(slot)
            room -= nbytes
        elif slot.is_packed:
            yield partial(write_packed, sink, start, slot, staging)
        else:
            yield from piece_tasks(sink, start, slot, block, staging)
    if small:
        yield partial(_write_small, sink, start, small)


def _write_small(sink: Sink, start: int, slots: Sequence[Slot]) -> None:
    data = b"".join(map(small_bytes, slots))
    sink.write(data, start + slots[0].offset)


def header_of(file: File, metadata: dict[str, str]) -> bytes:
    return header_bytes(metadata, file.tensors())
