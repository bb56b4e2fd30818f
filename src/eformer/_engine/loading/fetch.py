"""Bytes from files into memory, checked on the way."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct

from eformer._engine.formats.codecs import decoded
from eformer._engine.loading.read_plan import Read, StoredPiece, Want, plan_reads
from eformer._engine.record.digests import xxh3_128
from eformer._engine.record.dtypes import DTYPES, dtype_from_name, unpack_nibbles
from eformer._engine.record.pieces import ALIGNMENT
from eformer._engine.record.regions import Region
from eformer._engine.tasks.pool import run_all
from eformer._engine.tasks.progress import SILENT, Meter
from eformer.errors import CorruptionError, Damage, FormatError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from eformer._engine.record.manifest import TreeEntry
    from eformer._engine.stores.base import Files

Array = np.ndarray[Any, Any]


def fetch(
    reads: Sequence[Read], wants: Sequence[Want], tree: TreeEntry, files: Files, threads: int
) -> list[Sequence[Array]]:
    """For each want the arrays of its regions, or the one of the whole leaf. Raises at the first damage."""
    fetching = prepare(wants, tree, files)
    run_all([partial(fetching.carry_out, read) for read in reads], threads)
    return fetching.arrays


def prepare(
    wants: Sequence[Want],
    tree: TreeEntry,
    files: Files,
    *,
    verify: bool = True,
    memory: Array | None = None,
    meter: Meter = SILENT,
) -> Fetching:
    """Reads of the wants can be carried out; after all of them the wants have their arrays.

    The memory of an array starts where XLA takes it as it is, if that can be had without a copy: large leaves have
    memory of their own or share it with neighbours, in `memory` as far as that goes; small ones share what they were
    read into.
    """
    fetching = Fetching(wants, tree, files, verify, raise_damage, meter)
    fetching.prepare(Arena(memory, has_neighbours=len(wants) > 1))
    return fetching


def check(
    wants: Sequence[Want],
    tree: TreeEntry,
    files: Files,
    threads: int,
    on_damage: Callable[[Damage], None],
    meter: Meter = SILENT,
) -> None:
    """Reads every piece of the wants, and keeps none."""
    fetching = Fetching(wants, tree, files, True, on_damage, meter)
    run_all([partial(fetching.look_at, read) for read in plan_reads(wants, tree)], threads)


def raise_damage(damage: Damage) -> None:
    raise CorruptionError(f"{damage}; restore the file from a copy, or load an older checkpoint")


_ARENA_BYTES = 64 * 2**20
_HUGE_PAGE = 2 * 2**20


class _Target(Struct):
    """Memory for a box of a leaf."""

    region: Region
    array: Array
    memory: Array


class Fetching:
    def __init__(
        self,
        wants: Sequence[Want],
        tree: TreeEntry,
        files: Files,
        verify: bool,
        on_damage: Callable[[Damage], None],
        meter: Meter,
    ) -> None:
        self.wants, self.tree, self.files = wants, tree, files
        self.verify, self.on_damage, self.meter = verify, on_damage, meter
        self.targets: dict[int, list[_Target]] = {}
        self.arrays: list[Sequence[Array]] = [()] * len(wants)

    def prepare(self, arena: Arena) -> None:
        """Memory for leaves that are put together, cast, or large. Others keep what they are read into."""
        block = self.tree.block
        for index, want in enumerate(self.wants):
            entry = want.entry
            if want.regions is None and want.dtype == entry.dtype and len(entry.extents) == 1:
                (extent,) = entry.extents
                is_plain = extent.region is None and extent.coding is None and want.dtype != "float4_e2m1fn"
                if is_plain and 0 < extent.nbytes <= block:
                    continue
            boxes = [Region.whole(entry.shape)] if want.regions is None else want.regions
            dtype = dtype_from_name(want.dtype)
            try:
                self.targets[index] = targets = [arena.target(box, dtype) for box in boxes]
            except MemoryError as error:
                what = f"{entry.dtype}{list(entry.shape)}"
                raise MemoryError(f"leaf {want.name!r}, {what}: there is not so much memory") from error
            self.arrays[index] = [target.array for target in targets]

    # ------------------------------------------------------------------------------------------ reads

    def carry_out(self, read: Read) -> None:
        straight = self.destination(read)
        memory = aligned(read.nbytes, read.offset) if straight is None else straight
        sound = self.sound_pieces(read, memory)
        if straight is not None:
            for _ in sound:  # they are where they belong, and only had to be looked at
                pass
            return
        wants, targets, arrays = self.wants, self.targets, self.arrays
        for piece, start in sound:
            if piece.want in targets:
                self.deliver(piece, memory[start : start + piece.nbytes])
                continue
            # The memory that a whole leaf was read into becomes its array; but others' files put numbers at odd places.
            want = wants[piece.want]
            dtype = DTYPES.get(want.dtype) or dtype_from_name(want.dtype)
            array: Array = np.ndarray(want.entry.shape, dtype, memory, start)
            arrays[piece.want] = (array if piece.offset % dtype.alignment == 0 else array.copy(),)

    def look_at(self, read: Read) -> None:
        memory = np.empty(read.nbytes, np.uint8)
        for piece, start in self.sound_pieces(read, memory):
            if piece.coding and not piece.digest:  # whether it can be decoded is all that can be known of it
                self.unpacked(piece, memory[start : start + piece.nbytes])

    def sound_pieces(self, read: Read, memory: Array) -> Iterator[tuple[StoredPiece, int]]:
        """The pieces of the read whose bytes are those that were saved, and where in memory they begin."""
        view, first, verify = memory.data, read.offset, self.verify
        try:
            found = self.files.read_into(read.file, view, first)
        except (FileNotFoundError, CorruptionError) as error:  # the latter of a database
            how = "are gone" if isinstance(error, FileNotFoundError) else "cannot be read"
            for piece in read.pieces:
                self.report(piece, f"{how}: {error}")
            return
        self.meter.add(read.nbytes)
        for piece in read.pieces:
            start = piece.offset - first
            stop = start + piece.nbytes
            if found < stop:
                self.report(piece, "are not all there: the file was cut short")
            elif verify and piece.digest and (digest := xxh3_128(view[start:stop])) != piece.digest:
                self.report(piece, f"are damaged: they digest to {digest}, recorded is {piece.digest}")
            else:
                yield piece, start

    def report(self, piece: StoredPiece, problem: str) -> None:
        name, file = self.wants[piece.want].name, self.tree.path_of(piece.file)
        self.on_damage(Damage(name, file, piece.offset, piece.offset + piece.nbytes, problem))

    # -------------------------------------------------------------------------------------- destinations

    def destination(self, read: Read) -> Array | None:
        """The memory of a target, if all pieces of the read belong into it side by side as they are."""
        first = read.pieces[0]
        if first.at < 0:
            return None
        return self.targets[first.want][first.target].memory[first.at : first.at + read.nbytes]

    def deliver(self, piece: StoredPiece, data: Array) -> None:
        """Copies the piece to where it is wanted, cast if it is wanted as another dtype."""
        box = piece.region or Region.whole(self.wants[piece.want].entry.shape)
        stored = self.unpacked(piece, data)
        if stored is None:
            return
        if self.wants[piece.want].regions is None:
            (target,) = self.targets[piece.want]
            target.array[box.slices] = stored  # () for a single number
            return
        for target in self.targets[piece.want]:
            if not box.start:
                target.array[()] = stored
            elif overlap := box.overlap(target.region):
                target.array[overlap.inside(target.region).slices] = stored[overlap.inside(box).slices]

    def unpacked(self, piece: StoredPiece, data: Array) -> Array | None:
        """The numbers of a piece; None if they cannot be decoded, which is reported."""
        entry, coding = self.wants[piece.want].entry, piece.coding
        shape = piece.region.shape if piece.region else entry.shape
        dtype = dtype_from_name(entry.dtype)
        if coding is None:
            if 2 * len(data) == math.prod(shape) and entry.dtype == "float4_e2m1fn":
                data = unpack_nibbles(data)
            return np.ndarray(shape, dtype, data)
        try:
            raw = decoded(coding.codec, data, coding.shape, dtype.itemsize, coding.detail)
        except FormatError as error:
            self.report(piece, f"cannot be decoded: {error}")
            return None
        chunk: Array = np.ndarray(coding.shape, dtype, raw)
        return chunk[tuple(slice(size) for size in shape)]


class Arena:
    """Memory for arrays, at addresses that XLA takes as they are.

    Neighbours share an allocation: fresh memory is touched for the first time while it is read into, which takes
    longer than reading unless it consists of whole huge pages. Half of one is lost at the end of an allocation, on
    average, and what is kept keeps all of its allocation: so it is neither small nor large.
    """

    def __init__(self, memory: Array | None = None, *, has_neighbours: bool = True) -> None:
        self.memory = np.empty(0, np.uint8) if memory is None else memory
        self.least = _ARENA_BYTES if has_neighbours else 0

    def target(self, region: Region, dtype: np.dtype[Any]) -> _Target:
        nbytes = dtype.itemsize * region.size
        if nbytes > len(self.memory):
            self.memory = aligned(max(nbytes, self.least))
        memory = self.memory[:nbytes]
        self.memory = self.memory[-(-nbytes // ALIGNMENT) * ALIGNMENT :]
        return _Target(region, np.ndarray(region.shape, dtype, memory), memory)


def aligned(nbytes: int, offset: int = 0) -> Array:
    """Memory that begins on a huge page, for which numpy asks the kernel, or as far behind it as `offset` is behind
    an aligned one: what is aligned in the file is so here."""
    to = _HUGE_PAGE if nbytes >= _HUGE_PAGE else ALIGNMENT
    memory = np.empty(nbytes + to + ALIGNMENT, np.uint8)
    start = -memory.__array_interface__["data"][0] % to + offset % ALIGNMENT
    return memory[start : start + nbytes]
