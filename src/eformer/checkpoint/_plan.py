"""Decisions about bytes, without touching any: which leaves share a file, who writes what, what to read."""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING

from msgspec import Struct

from eformer.checkpoint._manifest import DIGEST_DIGITS, is_packed
from eformer.checkpoint._ndarray import dtype_from_name
from eformer.checkpoint._pieces import offset_within, pieces_in, shifted

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from eformer.checkpoint._leaf import Region
    from eformer.checkpoint._manifest import Extent, LeafEntry, TreeEntry

# safetensors readers refuse a header of more than 100 MB.
MAX_HEADER_BYTES = 90_000_000
_HEADER_BYTES_A_LEAF = 150

ALIGNMENT = 64  # at such addresses XLA takes host memory as it is


def layout(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Which leaves share a file of at most `limit` bytes: those of one module, in their order, while they fit.

    A module that fits a file is not torn; a leaf larger than the limit has a file of its own.
    """
    files: list[list[str]] = []
    used = header = 0
    for module in _modules(sizes):
        total = sum(sizes[name] for name in module)
        if used + total > limit >= total:
            used = limit + 1  # the next file takes it whole
        for name in module:
            header += len(name) + _HEADER_BYTES_A_LEAF
            if not files or used + sizes[name] > limit or header > MAX_HEADER_BYTES:
                files.append([])
                used, header = 0, len(name) + _HEADER_BYTES_A_LEAF
            files[-1].append(name)
            used += sizes[name]
    return files


def _modules(names: Iterable[str]) -> Iterable[list[str]]:
    """The names by what stands before their last dot, modules in order of their first leaf."""
    modules: dict[str, list[str]] = {}
    for name in names:
        modules.setdefault(name.rpartition(".")[0], []).append(name)
    return modules.values()


def owners(holders: Iterable[tuple[int, Sequence[int]]], written: list[int]) -> list[int]:
    """For each (bytes, processes that hold them) the process that writes them: the one with the least to write.

    `written`, the bytes of each process so far, is brought up to date. Every process computes the same.
    """
    chosen = []
    for nbytes, processes in holders:
        owner = min(processes, key=lambda process: (written[process], process))
        written[owner] += nbytes
        chosen.append(owner)
    return chosen


# -------------------------------------------------------------------------------------------- reads

# One read is one system call's worth: large enough for the disk, small enough to stay in the processor's cache.
READ_BYTES = 4 * 2**20


class Want(Struct, frozen=True, gc=False):
    """A leaf that is wanted, as what dtype, and which boxes of it; None for the whole."""

    name: str
    entry: LeafEntry
    dtype: str
    regions: Sequence[Region] | None = None


class Stored(Struct, frozen=True, gc=False):
    """A piece of a leaf as it lies in a file. `region` is None where the piece is the whole leaf.

    `target` is the number of the wanted box that the piece belongs into as a whole; -1 if it has to be taken apart.
    """

    file: int
    offset: int
    nbytes: int
    want: int
    digest: str
    region: Region | None
    target: int = 0


class Read(Struct, frozen=True, gc=False):
    """Pieces that lie side by side in one file."""

    file: int
    offset: int
    nbytes: int
    pieces: Sequence[Stored]


def plan_reads(wants: Sequence[Want], tree: TreeEntry) -> list[Read]:
    """The fewest bytes that contain what is wanted and can be checked, in the order in which they lie."""
    found: list[Stored] = []
    starts = [file.header_nbytes for file in tree.files]
    for index, want in enumerate(wants):
        entry = want.entry
        for extent in entry.extents:
            start = starts[extent.file] + extent.offset
            if extent.region is None and (extent.nbytes <= tree.block or is_packed(entry, extent)):
                if extent.nbytes:
                    found.append(Stored(extent.file, start, extent.nbytes, index, extent.digests, None))
            else:
                found.extend(_stored_pieces(index, want, extent, start, tree.block))
    found.sort(key=attrgetter("file", "offset"))
    return list(_adjacent(found))


def _stored_pieces(index: int, want: Want, extent: Extent, start: int, block: int) -> Iterator[Stored]:
    entry = want.entry
    box = entry.region_of(extent)
    itemsize = dtype_from_name(entry.dtype).itemsize
    if is_packed(entry, extent):
        found = {0: box}
    else:
        wanted = [box] if want.regions is None else [o for r in want.regions if (o := box.overlap(r))]
        found = {
            number: piece
            for region in wanted
            for number, piece in pieces_in(region.inside(box), box.shape, itemsize, block)
        }
        found = dict(zip(found, shifted(found.values(), box.start), strict=True))
    for number, piece in found.items():
        target = _target(piece, want.regions)
        if target is not None:
            before = offset_within(piece, box) or 0  # elements of the extent; a piece is one run of them
            nbytes = extent.nbytes if is_packed(entry, extent) else itemsize * piece.size
            digest = extent.digests[DIGEST_DIGITS * number : DIGEST_DIGITS * (number + 1)]
            yield Stored(extent.file, start + before * itemsize, nbytes, index, digest, piece, target)


def _target(piece: Region, regions: Sequence[Region] | None) -> int | None:
    """Which of the boxes has the whole piece; -1 if several have a part of it, or one a part only; None if none has."""
    if regions is None:
        return 0
    touched = [number for number, region in enumerate(regions) if piece.overlap(region)]
    if not touched:
        return None
    return touched[0] if len(touched) == 1 and piece.overlap(regions[touched[0]]) == piece else -1


def _go_together(a: Stored, b: Stored) -> bool:
    """Small leaves share what they are read into; pieces of large ones are read to where they belong."""
    if a.region is None or b.region is None:
        return a.region is b.region
    return a.want == b.want and a.target == b.target


def _adjacent(found: Sequence[Stored]) -> Iterator[Read]:
    start = 0
    for i in range(1, len(found) + 1):
        if i < len(found):
            before, piece = found[i - 1], found[i]
            nbytes = piece.offset + piece.nbytes - found[start].offset
            touches = piece.file == before.file and piece.offset == before.offset + before.nbytes
            if touches and nbytes <= READ_BYTES and _go_together(before, piece):
                continue
        together = found[start:i]
        last = together[-1]
        yield Read(last.file, together[0].offset, last.offset + last.nbytes - together[0].offset, together)
        start = i
