"""Fetch planned reads from files into memory, and check their digests on the way."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct

from eformer._engine.formats.codecs import decoded
from eformer._engine.loading.read_plan import (
    READ_BYTES,
    Read,
    StoredPiece,
    Want,
    packed_nbytes,
    plan_reads,
)
from eformer._engine.record.boxes import Box
from eformer._engine.record.digests import xxh3_128
from eformer._engine.record.division import ALL, ByteSpan
from eformer._engine.record.dtypes import DTYPES, dtype_from_name, unpack_nibbles
from eformer._engine.record.pieces import ALIGNMENT
from eformer._engine.stores.base import KeepsCopies
from eformer._engine.tasks.pool import run_all
from eformer._engine.tasks.progress import SILENT, Meter
from eformer.errors import AlteredError, CorruptionError, Damage, FormatError

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator, Sequence

    from eformer._engine.record.manifest import TreeEntry
    from eformer._engine.stores.base import Files

Array = np.ndarray[Any, Any]


def fetch(
    reads: Sequence[Read],
    wants: Sequence[Want],
    tree: TreeEntry,
    files: Files,
    threads: int,
    *,
    verify: bool = True,
    path_to: Callable[[str], str] = str,
) -> list[Sequence[Array]]:
    """Return, for each want, the arrays of its boxes, or one array for the whole leaf.

    Raise at the first damage; `path_to` turns the name of a file into its path for the message.
    """
    fetching = prepare(wants, tree, files, verify=verify, path_to=path_to)
    run_all([partial(fetching.carry_out, some) for some in together(reads, threads)], threads)
    return fetching.arrays


def prepare(
    wants: Sequence[Want],
    tree: TreeEntry,
    files: Files,
    *,
    verify: bool = True,
    memory: Array | None = None,
    meter: Meter = SILENT,
    path_to: Callable[[str], str] = str,
    checked_later: Container[int] = (),
) -> Fetching:
    """Allocate memory for the wants, so that their reads can be carried out. `Fetching.arrays` then has the arrays.

    `checked_later` has the numbers of the wants whose pieces are checked on a device, if they lie in an array.

    Arrays are aligned so that XLA can alias them, unless that would need a copy. Large leaves have memory of their own
    or share it with neighbours, taken from `memory` while it lasts; small leaves share the memory of their read.
    """
    fetching = Fetching(wants, tree, files, verify, partial(raise_damage, path_to), meter, checked_later)
    fetching.prepare(Arena(memory, has_neighbours=len(wants) > 1))
    return fetching


def check_pieces(
    wants: Sequence[Want],
    tree: TreeEntry,
    files: Files,
    threads: int,
    on_damage: Callable[[Damage], None],
    meter: Meter = SILENT,
    read_bytes: int = READ_BYTES,
    span: ByteSpan = ALL,
) -> None:
    """Read and check every piece of the wants that begins in `span`, without keeping it, and report damage to
    `on_damage`."""
    fetching = Fetching(wants, tree, files, True, on_damage, meter)
    reads = plan_reads(wants, tree, read_bytes, span=span)
    run_all([partial(fetching.check, read) for read in reads], threads)


def raise_damage(path_to: Callable[[str], str], damage: Damage) -> None:
    """Raise a CorruptionError for the damage. `partial(raise_damage, path_to)` is an `on_damage`."""
    raise CorruptionError(
        f"{damage}; restore {path_to(damage.file)} from a copy, or load an older checkpoint"
    )


class _Target(Struct):
    """Memory for a box of a leaf."""

    box: Box
    array: Array
    memory: Array


class Fetching:
    """Carry out reads in any order and from any thread; `arrays` is complete after the last one.

    Call `prepare` once before the first `carry_out`. `check` needs no preparation.
    """

    def __init__(
        self,
        wants: Sequence[Want],
        tree: TreeEntry,
        files: Files,
        verify: bool,
        on_damage: Callable[[Damage], None],
        meter: Meter,
        checked_later: Container[int] = (),
    ) -> None:
        self.wants, self.tree, self.files = wants, tree, files
        self.checked_later = checked_later
        self.verify, self.on_damage, self.meter = verify, on_damage, meter
        self.targets: dict[int, list[_Target]] = {}
        self.arrays: list[Sequence[Array]] = [()] * len(wants)

    def prepare(self, arena: Arena) -> None:
        """Allocate memory for leaves that are joined, cast or large. Small leaves keep the memory of their read."""
        block = self.tree.block
        for index, want in enumerate(self.wants):
            entry = want.entry
            if want.boxes is None and want.dtype == entry.dtype and len(entry.extents) == 1:
                (extent,) = entry.extents
                is_plain = extent.region is None and extent.coding is None and want.dtype != "float4_e2m1fn"
                if is_plain and 0 < extent.nbytes <= block:
                    continue
            dtype = dtype_from_name(want.dtype)
            try:
                self.targets[index] = targets = [arena.target(box, dtype) for box in want.wanted]
            except MemoryError as error:
                leaf = f"leaf {want.name!r}, {entry.dtype}{list(entry.shape)}"
                raise MemoryError(f"not enough memory for {leaf}") from error
            self.arrays[index] = [target.array for target in targets]

    # ------------------------------------------------------------------------------------------ reads

    def carry_out(self, reads: Sequence[Read]) -> None:
        """Read the pieces, check them and copy them into their arrays. All reads share one allocation."""
        memory, at = None, 0
        for read in reads:
            destination = self.destination(read)
            if destination is not None:
                for _ in self.sound_pieces(
                    read, destination.data
                ):  # they are in place, and only have to be checked
                    pass
                continue
            if memory is None:
                memory = aligned(sum(map(_room, reads)))
            start = (
                at + read.offset % ALIGNMENT
            )  # an array that is aligned in the file is aligned in memory, too
            self.take(read, memory, start)
            at += _room(read)

    def take(self, read: Read, memory: Array, first: int) -> None:
        """Read the pieces into memory, from byte `first` on, check them and copy them into their arrays."""
        wants, targets, arrays = self.wants, self.targets, self.arrays
        for piece, start in self.sound_pieces(read, memory.data[first : first + read.nbytes]):
            start += first
            if piece.want in targets:
                self.deliver(piece, memory[start : start + piece.nbytes])
                continue
            # The memory of the read becomes the array without a copy, unless the leaf is misaligned in its file.
            want = wants[piece.want]
            dtype = DTYPES.get(want.dtype) or dtype_from_name(want.dtype)
            array: Array = np.ndarray(want.entry.shape, dtype, memory, start)
            arrays[piece.want] = (array if piece.offset % dtype.alignment == 0 else array.copy(),)

    def check(self, read: Read) -> None:
        """Read the pieces and check them, without keeping them."""
        memory = np.empty(read.nbytes, np.uint8)
        for piece, start in self.sound_pieces(read, memory.data):
            if piece.coding and not piece.digest:  # without a digest, decoding is the only check
                self.unpacked(piece, memory[start : start + piece.nbytes])

    def sound_pieces(self, read: Read, view: memoryview) -> Iterator[tuple[StoredPiece, int]]:
        """Read into memory, and yield the undamaged pieces with their offsets in memory. Report damaged pieces."""
        first, verify, checked_later = read.offset, self.verify, self.checked_later
        try:
            found = self.files.read_into(read.file, view, first)
        except AlteredError:  # a signed file has changed: the whole file is refused, not a piece of it
            raise
        except (FileNotFoundError, CorruptionError) as error:  # databases raise CorruptionError
            problem = "are gone" if isinstance(error, FileNotFoundError) else "cannot be read"
            for piece in read.pieces:
                self.report(piece, f"{problem}: {error}")
            return
        self.meter.add(read.nbytes)
        for piece in read.pieces:
            start = piece.offset - first
            stop = start + piece.nbytes
            if found < stop:
                self.report(piece, "are incomplete: the file was cut short")
            elif (
                verify
                and piece.digest
                and not (piece.want in checked_later and piece.lies_in_array)
                and xxh3_128(view[start:stop]) != piece.digest
                and (digest := self.digest_again(piece, view[start:stop])) != piece.digest
            ):
                self.report(piece, f"are damaged: their digest is {digest}, expected {piece.digest}")
            else:
                yield piece, start

    def digest_again(self, piece: StoredPiece, data: memoryview) -> str:
        """Return the digest of a piece that differs from its record; read it again from the bucket if it is cached."""
        if isinstance(self.files, KeepsCopies) and self.files.forget(piece.file, piece.offset, piece.nbytes):
            self.files.read_into(piece.file, data, piece.offset)
        return xxh3_128(data)

    def report(self, piece: StoredPiece, problem: str) -> None:
        name, file = self.wants[piece.want].name, self.tree.path_of(piece.file)
        self.on_damage(Damage(name, file, piece.offset, piece.offset + piece.nbytes, problem))

    # -------------------------------------------------------------------------------------- destinations

    def destination(self, read: Read) -> Array | None:
        """Return the memory to read into directly, if the pieces lie in one array side by side, as in the file."""
        first = read.pieces[0]
        if first.at < 0:
            return None
        return self.targets[first.want][first.target].memory[first.at : first.at + read.nbytes]

    def deliver(self, piece: StoredPiece, data: Array) -> None:
        """Copy the piece, cast to the wanted dtype, into every array whose box overlaps it."""
        box = piece.box or Box.whole(self.wants[piece.want].entry.shape)
        stored = self.unpacked(piece, data)
        if stored is None:
            return
        if self.wants[piece.want].boxes is None:
            (target,) = self.targets[piece.want]
            target.array[box.slices] = stored  # () for a single number
            return
        for target in self.targets[piece.want]:
            if not box.start:
                target.array[()] = stored
            elif overlap := box.overlap(target.box):
                target.array[overlap.inside(target.box).slices] = stored[overlap.inside(box).slices]

    def unpacked(self, piece: StoredPiece, data: Array) -> Array | None:
        """Decode a piece into an array; report it and return None if that fails."""
        entry, coding = self.wants[piece.want].entry, piece.coding
        shape = piece.box.shape if piece.box else entry.shape
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


# Small reads are carried out together by one task.
_MOST_TOGETHER = 128
_TOGETHER_BYTES = 2**20
_TASKS = 8  # for each thread, at least, so that all threads end at about the same time


def together(reads: Sequence[Read], threads: int) -> Iterator[Sequence[Read]]:
    """Yield small neighbouring reads together, as long as every thread has enough tasks.

    With a file for each leaf, a task and an allocation for each read would take longer than the read.
    """
    most = max(1, min(_MOST_TOGETHER, len(reads) // (_TASKS * threads)))
    some: list[Read] = []
    room = _TOGETHER_BYTES
    for read in reads:
        if some and (len(some) == most or read.nbytes > room):
            yield some
            some, room = [], _TOGETHER_BYTES
        some.append(read)
        room -= _room(read)
    if some:
        yield some


def _room(read: Read) -> int:
    """Return the memory that a read takes, so that the next read is aligned as well."""
    return -(-(read.offset % ALIGNMENT + read.nbytes) // ALIGNMENT) * ALIGNMENT


_ARENA_BYTES = 64 * 2**20
_HUGE_PAGE = 2 * 2**20


class Arena:
    """Allocate memory for arrays, at addresses that XLA can alias.

    Neighbours share an allocation, because the first access to fresh memory takes longer than the read itself, unless
    the memory consists of whole huge pages. An allocation wastes half a huge page on average, so it is not small; it is
    freed only with the last of its arrays, so it is not large.
    """

    def __init__(self, memory: Array | None = None, *, has_neighbours: bool = True) -> None:
        self.memory = np.empty(0, np.uint8) if memory is None else memory
        self.least = _ARENA_BYTES if has_neighbours else 0

    def target(self, box: Box, dtype: np.dtype[Any]) -> _Target:
        """Return an uninitialised array for a box of a leaf."""
        nbytes = dtype.itemsize * box.size
        if nbytes > len(self.memory):
            self.memory = aligned(max(nbytes, self.least))
        memory = self.memory  # longer than the array: one read may go on into the arrays of its neighbours
        self.memory = memory[packed_nbytes(nbytes) :]
        return _Target(box, np.ndarray(box.shape, dtype, memory), memory)


def aligned(nbytes: int) -> Array:
    """Return memory that starts on a huge page, or for few bytes on an aligned address.

    numpy asks the kernel for huge pages, an anonymous `mmap` does not.
    """
    unit = _HUGE_PAGE if nbytes >= _HUGE_PAGE else ALIGNMENT
    memory = np.empty(nbytes + unit, np.uint8)
    start = -memory.__array_interface__["data"][0] % unit
    return memory[start : start + nbytes]
