"""Record which process wrote which boxes, so that a load reads only the process records that it needs.

The table must stay small: it is in the manifest, which every process reads. So leaves that have the same boxes in a
file share one entry, and files with the same leaves share the list of their numbers. The table of 1,000 processes that
shard 100,000 leaves alike is a few hundred kilobytes.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from msgspec import Struct

from eformer._engine.record.pieces import bounding
from eformer.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from eformer._engine.record.boxes import Box
    from eformer._engine.record.planned import PlannedFile

    Numbers = np.ndarray[Any, np.dtype[np.int64]]

Bounds = tuple[tuple[int, ...], tuple[int, ...]]

# Bytes of the table of one process. All processes send their tables to one: 1,000 tables must take less than a second.
_MOST_BYTES = 2**15
_MOST_ENTRIES = _MOST_BYTES // 16
_MOST_BOXES = 8  # of one leaf in one file; more boxes become the box around all of them
_NUMBER = np.dtype("<u4")


class OwnedLeaves(Struct, frozen=True, array_like=True, gc=False):
    """A list of leaves, by its number, and the boxes that a file has of each of them; None for whole leaves."""

    leaves: int
    boxes: tuple[Bounds, ...] | None = None


class Owners(Struct, frozen=True):
    """The leaves and boxes of each file with a process record, in the order of the files.

    `leaves` are lists of leaves by their numbers in the tree: the differences of ascending numbers, four bytes each,
    compressed by zlib. A box may be larger than the written part of the leaf, never smaller.
    """

    leaves: tuple[bytes, ...] = ()
    files: tuple[tuple[OwnedLeaves, ...], ...] = ()


# ----------------------------------------------------------------------------------------------- write


def owners_of(groups: Sequence[Sequence[PlannedFile]], numbers: Mapping[str, int]) -> Owners | None:
    """Return the table of one process; None if the table would be too long, because its leaves have too many different
    boxes.

    Each group of files has one record. `numbers` has the number of every leaf of the tree.
    """
    lists: dict[bytes, int] = {}
    files = []
    for group in groups:
        alike = _alike(group, numbers)
        if len(alike) > _MOST_ENTRIES:
            return None
        files.append(
            tuple(
                OwnedLeaves(lists.setdefault(pack_numbers(leaves), len(lists)), boxes or None)
                for boxes, leaves in alike.items()
            )
        )
    found = Owners(tuple(lists), tuple(files))
    return found if len(msgspec.msgpack.encode(found)) <= _MOST_BYTES else None


def _alike(files: Iterable[PlannedFile], numbers: Mapping[str, int]) -> dict[tuple[Bounds, ...], list[int]]:
    """Group the leaves in the files by their boxes. Whole leaves have no boxes."""
    by_name: dict[str, list[Box]] = {}
    for file in files:
        for extent in file.extents:
            found = by_name.setdefault(extent.source.name, [])
            if extent.region is not None:
                found.append(extent.region)
    alike: dict[tuple[Bounds, ...], list[int]] = {}
    for name, boxes in by_name.items():
        alike.setdefault(_few(boxes), []).append(numbers[name])
    return alike


def _few(boxes: Sequence[Box]) -> tuple[Bounds, ...]:
    if len(boxes) > _MOST_BOXES:
        boxes = [bounding(boxes)]
    return tuple((box.start, box.stop) for box in boxes)


def joined_owners(owners: Iterable[Owners | None]) -> Owners | None:
    """Join the tables of all processes, in their order; None if a table is None."""
    lists: dict[bytes, int] = {}
    files = []
    for one in owners:
        if one is None:
            return None
        numbers = [lists.setdefault(leaves, len(lists)) for leaves in one.leaves]
        files += [tuple(OwnedLeaves(numbers[held.leaves], held.boxes) for held in file) for file in one.files]
    return Owners(tuple(lists), tuple(files))


# ------------------------------------------------------------------------------------------------ read


def files_with(owners: Owners, count: int, wants: Iterable[tuple[int, Sequence[Box] | None]]) -> list[int]:
    """Return the numbers of the files whose records have wanted boxes, of a tree of `count` leaves.

    A want is the number of a leaf and its wanted boxes; None for the whole leaf. Each leaf is wanted at most once.
    """
    kinds: dict[tuple[Box, ...] | None, int] = {}
    kind_of = np.full(count, -1, np.int64)
    for leaf, asked in wants:
        kind_of[leaf] = kinds.setdefault(None if asked is None else tuple(asked), len(kinds))
    wanted = _wanted(owners, kind_of, list(kinds))
    boxes: dict[int, list[tuple[int, Bounds]]] = {}
    found: set[int] = set()
    for number, file in enumerate(owners.files):
        for held in file:
            if held.leaves not in wanted:
                continue
            if held.boxes is None or wanted[held.leaves] is None:
                found.add(number)
            else:
                boxes.setdefault(held.leaves, []).extend((number, box) for box in held.boxes)
    for leaves, candidates in boxes.items():
        found.update(_overlapping(candidates, wanted[leaves] or ()))
    return sorted(found)


def _wanted(
    owners: Owners, kind_of: Numbers, kinds: Sequence[tuple[Box, ...] | None]
) -> dict[int, set[Box] | None]:
    """Return the boxes that are wanted of any leaf in a list, by the number of the list; None for whole leaves. Skip
    lists without a wanted leaf."""
    wanted: dict[int, set[Box] | None] = {}
    for number, packed in enumerate(owners.leaves):
        there = kind_of[unpack_numbers(packed, len(kind_of))]
        found = [kinds[kind] for kind in np.unique(there[there >= 0])]
        if found:
            is_whole = any(boxes is None for boxes in found)
            wanted[number] = None if is_whole else {box for boxes in found for box in boxes or ()}
    return wanted


def _overlapping(candidates: Sequence[tuple[int, Bounds]], wanted: Iterable[Box]) -> Iterator[int]:
    """Yield the files whose boxes overlap a wanted box."""
    try:
        starts = np.array([start for _, (start, _) in candidates], np.int64)
        stops = np.array([stop for _, (_, stop) in candidates], np.int64)
        hit = np.zeros(len(candidates), bool)
        for box in wanted:
            if starts.shape[1:] != (len(box.start),):
                raise ValueError("the boxes and their leaves have different numbers of axes")
            hit |= ((starts < box.stop) & (stops > box.start)).all(axis=1)
    except (ValueError, OverflowError) as error:
        raise FormatError(f"the manifest's table of holdings is invalid: {error}") from error
    yield from (file for (file, _), is_hit in zip(candidates, hit, strict=True) if is_hit)


# ----------------------------------------------------------------------------------------------- lists


def pack_numbers(numbers: Iterable[int]) -> bytes:
    """Encode a list of distinct numbers, in ascending order."""
    ascending = np.sort(np.fromiter(numbers, np.int64))
    return zlib.compress(np.diff(ascending, prepend=0).astype(_NUMBER).tobytes())


def unpack_numbers(packed: bytes, count: int) -> Numbers:
    """Decode a list of distinct numbers below `count`."""
    decompress = zlib.decompressobj()
    try:
        data = decompress.decompress(packed, max(1, count * _NUMBER.itemsize))
        steps = np.frombuffer(data, _NUMBER)
    except (zlib.error, ValueError) as error:
        raise FormatError(f"the manifest has an invalid list of leaves: {error}") from error
    numbers = np.cumsum(steps, dtype=np.int64)
    if not decompress.eof or (len(numbers) and numbers[-1] >= count):
        raise FormatError(f"the manifest has a list of other leaves than its {count}")
    return numbers
