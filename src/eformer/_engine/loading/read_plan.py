"""Plan the bytes to read, of each file, for the wanted boxes of leaves. Pure: reads nothing."""

from __future__ import annotations

import math
from bisect import bisect_left
from functools import lru_cache
from itertools import accumulate
from operator import attrgetter
from typing import TYPE_CHECKING

from msgspec import Struct

from eformer._engine.record.boxes import Box
from eformer._engine.record.check import is_whole
from eformer._engine.record.digests import DIGEST_DIGITS
from eformer._engine.record.division import ALL, ByteSpan
from eformer._engine.record.dtypes import dtype_from_name
from eformer._engine.record.pieces import (
    ALIGNMENT,
    count_pieces,
    offset_within,
    piece_sizes,
    pieces_in,
    shifted,
)
from eformer._engine.record.xxh3 import SHORTEST

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from eformer._engine.record.manifest import Coding, Extent, LeafEntry, TreeEntry

# One read is one system call: large enough for the disk, small enough to stay in the processor's cache, where its
# digests are computed.
READ_BYTES = 4 * 2**20

# Boxes of a leaf up to this size are read together with their neighbours in the file, and then copied into place.
_SMALL_BOX = 2**16


class Want(Struct, gc=False):
    """A wanted leaf: its record, its dtype after a cast, and the wanted boxes; None for the whole leaf."""

    name: str
    entry: LeafEntry
    dtype: str
    boxes: Sequence[Box] | None = None

    @property
    def wanted(self) -> Sequence[Box]:
        """Return the wanted boxes, as a list for the whole leaf as well."""
        return [Box.whole(self.entry.shape)] if self.boxes is None else self.boxes


class StoredPiece(Struct, frozen=True, gc=False):
    """A piece of a leaf as it lies in a file.

    want      number of its want
    box       box of the leaf that the piece holds; None for the whole leaf, and if `at` is enough
    target    number of the wanted box that contains the piece
    at        byte of the wanted box where the piece goes unchanged; -1 if it has to be cut or cast, according to `box`
    """

    file: int
    offset: int
    nbytes: int
    want: int
    digest: str
    box: Box | None = None
    target: int = 0
    at: int = -1
    coding: Coding | None = None

    @property
    def lies_in_array(self) -> bool:
        """Tell whether the piece is in its array as a whole, unchanged, and long enough to be digested there."""
        return self.at >= 0 and self.nbytes >= SHORTEST


class Read(Struct, frozen=True, gc=False):
    """Pieces that lie side by side in one file."""

    file: int
    offset: int
    nbytes: int
    pieces: Sequence[StoredPiece]


def plan_reads(
    wants: Sequence[Want],
    tree: TreeEntry,
    read_bytes: int = READ_BYTES,
    *,
    is_packed: bool = False,
    span: ByteSpan = ALL,
) -> list[Read]:
    """Return reads of about `read_bytes`, in file order, for the fewest pieces that cover the wants.

    `is_packed` says that arrays will lie in memory side by side, in the order of the wants, each taking
    `packed_nbytes`, so that neighbours can be read together. Leave out pieces that do not begin in `span`.
    """
    found: list[StoredPiece] = []
    starts = [file.header_nbytes for file in tree.files]
    for index, want in enumerate(wants):
        entry = want.entry
        for extent in entry.extents:
            start = starts[extent.file] + extent.offset
            if extent.coding:
                found.extend(_coded(index, want, extent, start))
            elif extent.region is None and (extent.nbytes <= tree.block or is_whole(entry, extent)):
                if extent.nbytes:
                    found.append(StoredPiece(extent.file, start, extent.nbytes, index, extent.digests))
            elif extent.nbytes <= min(_SMALL_BOX, tree.block) and extent.region is not None:
                found.extend(_small_box(index, want, extent, start))
            elif (
                extent.region is None
                and want.dtype == entry.dtype
                and (numbers := _piece_numbers(want, tree.block))
            ):
                found.extend(_whole_pieces(index, entry, extent, start, tree.block, numbers))
            else:
                found.extend(_stored_pieces(index, want, extent, start, tree.block))
    if span is not ALL:
        found = [piece for piece in found if (piece.file, piece.offset) in span]
    found.sort(key=attrgetter("offset"))  # two sorts: numbers compare faster than pairs
    found.sort(key=attrgetter("file"))
    return list(_adjacent(found, read_bytes, wants if is_packed else ()))


def packed_nbytes(nbytes: int) -> int:
    """Return the memory that an array takes up, so that the next array is aligned."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _piece_numbers(want: Want, block: int) -> range | None:
    """Return the numbers of the wanted pieces, if they are consecutive and whole; None if pieces have to be cut."""
    entry = want.entry
    itemsize = dtype_from_name(entry.dtype).itemsize
    if want.boxes is None:
        return range(count_pieces(entry.shape, itemsize, block))
    if len(want.boxes) != 1:
        return None
    (box,) = want.boxes
    before = offset_within(box, Box.whole(entry.shape))
    if before is None:
        return None
    ends = _piece_ends(entry.shape, itemsize, block)
    first, last = bisect_left(ends, before * itemsize), bisect_left(ends, (before + box.size) * itemsize)
    is_exact = ends[first] == before * itemsize and ends[last] == (before + box.size) * itemsize
    return range(first, last) if is_exact else None


@lru_cache(64)
def _piece_ends(shape: tuple[int, ...], itemsize: int, block: int) -> tuple[int, ...]:
    """Return the byte where the first piece of an array begins, which is 0, and the bytes where all pieces end."""
    return tuple(accumulate(piece_sizes(shape, itemsize, block), initial=0))


def _whole_pieces(
    index: int, entry: LeafEntry, extent: Extent, start: int, block: int, numbers: range
) -> Iterator[StoredPiece]:
    """Yield consecutive pieces of a leaf that go into its array unchanged."""
    ends = _piece_ends(entry.shape, dtype_from_name(entry.dtype).itemsize, block)
    first = ends[numbers.start]
    for number in numbers:
        digest = extent.digests[number * DIGEST_DIGITS : (number + 1) * DIGEST_DIGITS]
        at = ends[number]
        yield StoredPiece(extent.file, start + at, ends[number + 1] - at, index, digest, None, 0, at - first)


def _small_box(index: int, want: Want, extent: Extent, start: int) -> Iterator[StoredPiece]:
    stored = want.entry.region_of(extent)
    if extent.nbytes and (want.boxes is None or any(stored.overlap(box) for box in want.boxes)):
        yield StoredPiece(extent.file, start, extent.nbytes, index, extent.digests, stored, -1)


def _coded(index: int, want: Want, extent: Extent, start: int) -> Iterator[StoredPiece]:
    stored = want.entry.region_of(extent)
    if want.boxes is None or any(stored.overlap(box) for box in want.boxes):
        yield StoredPiece(
            extent.file, start, extent.nbytes, index, extent.digests, stored, -1, -1, coding=extent.coding
        )


def _stored_pieces(index: int, want: Want, extent: Extent, start: int, block: int) -> Iterator[StoredPiece]:
    """Yield the pieces of an extent that overlap a wanted box."""
    entry = want.entry
    stored = entry.region_of(extent)
    itemsize = dtype_from_name(entry.dtype).itemsize
    boxes = want.wanted
    if is_whole(entry, extent):
        if any(stored.overlap(box) for box in boxes):
            yield StoredPiece(extent.file, start, extent.nbytes, index, extent.digests, stored, -1)
        return
    wanted = [overlap for box in boxes if (overlap := stored.overlap(box))]
    found = dict(
        numbered
        for part in wanted
        for numbered in pieces_in(part.inside(stored), stored.shape, itemsize, block)
    )
    for number, piece in zip(found, shifted(found.values(), stored.start), strict=True):
        before = offset_within(piece, stored) or 0  # elements of the extent, in which a piece is contiguous
        digest = extent.digests[DIGEST_DIGITS * number : DIGEST_DIGITS * (number + 1)]
        target, at = _position(piece, boxes, itemsize) if want.dtype == entry.dtype else (-1, -1)
        nbytes = itemsize * piece.size
        yield StoredPiece(extent.file, start + before * itemsize, nbytes, index, digest, piece, target, at)


def _position(piece: Box, boxes: Sequence[Box], itemsize: int) -> tuple[int, int]:
    """Return the number of the box that the piece goes into unchanged, and the byte; (-1, -1) if it has to be cut."""
    touched = [number for number, box in enumerate(boxes) if piece.overlap(box)]
    if len(touched) == 1:
        before = offset_within(piece, boxes[touched[0]])
        if before is not None:
            return touched[0], before * itemsize
    return -1, -1


def _go_together(a: StoredPiece, b: StoredPiece, packed: Sequence[Want]) -> bool:
    """Tell whether two adjacent pieces can share a read. Small leaves can, and pieces that are adjacent in memory."""
    if a.at < 0 or b.at < 0:
        return a.at == b.at and (a.box is None) == (b.box is None)
    if a.want == b.want:
        return a.target == b.target and a.at + a.nbytes == b.at
    end = a.at + a.nbytes
    # Of an array with several boxes, only the first box lies beside the array before.
    is_next = a.want + 1 == b.want < len(packed) and b.target == b.at == 0
    return is_next and end == packed_nbytes(_nbytes(packed[a.want]))


def _nbytes(want: Want) -> int:
    """Return the bytes of the wanted array."""
    boxes = want.boxes
    size = math.prod(want.entry.shape) if boxes is None else sum(box.size for box in boxes)
    return size * dtype_from_name(want.dtype).itemsize


def _adjacent(found: Sequence[StoredPiece], read_bytes: int, packed: Sequence[Want]) -> Iterator[Read]:
    """Join neighbours in a file into reads of at most `read_bytes`, or of one piece."""
    start = 0
    for i in range(1, len(found) + 1):
        if i < len(found):
            before, piece = found[i - 1], found[i]
            nbytes = piece.offset + piece.nbytes - found[start].offset
            touches = piece.file == before.file and piece.offset == before.offset + before.nbytes
            if touches and nbytes <= read_bytes and _go_together(before, piece, packed):
                continue
        together = found[start:i]
        last = together[-1]
        yield Read(last.file, together[0].offset, last.offset + last.nbytes - together[0].offset, together)
        start = i
