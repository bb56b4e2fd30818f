"""Refuse a manifest whose numbers contradict each other, before anything is allocated or read.

Tests: tests/engine/record/test_manifest.py, tests/engine/formats/test_hostile_arrays.py.
"""

from __future__ import annotations

import math
from operator import le
from typing import TYPE_CHECKING

from eformer._engine.record.digests import DIGEST_DIGITS
from eformer._engine.record.dtypes import DTYPES, MOST_AXES, dtype_from_name
from eformer._engine.record.names import is_inside
from eformer._engine.record.pieces import count_pieces, is_tiling
from eformer.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from eformer._engine.record.boxes import Box
    from eformer._engine.record.manifest import Coding, Extent, LeafEntry, TreeEntry

_MOST_BLOCK = 2**30  # bytes; a piece is read into memory whole
MOST_EXPANSION = 50_000  # no codec packs more tightly: zstd turns 2**17 equal bytes into three

# A chunk is decoded whole. Other programs pad the chunks of small arrays: such a chunk is larger than its array.
_MOST_TIMES = 4
_MOST_PADDED = 2**26  # bytes


def check_tree(tree: TreeEntry) -> None:
    """Refuse a tree whose piece size, files or directory are impossible."""
    names = [file.name for file in tree.files]
    if not tree.has_digests or not 0 < tree.block <= _MOST_BLOCK:
        raise FormatError(f"invalid save id {tree.save_id!r} or piece size {tree.block}")
    if len(set(names)) < len(names):
        raise FormatError("a file is listed twice")
    if tree.root and not is_inside(tree.root):
        raise FormatError(f"the directory of the files, {tree.root[:200]!r}, is outside the checkpoint")
    for file in tree.files:
        if not 0 <= file.header_nbytes <= file.nbytes:
            raise FormatError(
                f"file {file.name!r} of {file.nbytes} bytes cannot have a header of {file.header_nbytes}"
            )


def check_leaf(name: str, entry: LeafEntry, tree: TreeEntry) -> None:
    """Refuse an entry whose numbers contradict each other, before anything is allocated for it."""
    check_boxes(name, entry, None, tree)


def check_boxes(name: str, entry: LeafEntry, boxes: Sequence[Box] | None, tree: TreeEntry) -> None:
    """Refuse an entry whose numbers contradict each other, or whose extents lack elements of the wanted `boxes`. None
    wants the whole leaf."""
    try:
        _check_numbers(entry, boxes, tree)
    except (FormatError, ValueError) as error:
        raise FormatError(f"the manifest's entry for leaf {name[:200]!r} is invalid: {error}") from error


def is_plain(entry: LeafEntry, extent: Extent, rooms: list[int], block: int) -> bool:
    """Tell quickly whether the entry is valid, for the most common kind: a leaf in one extent."""
    nbytes, file = extent.nbytes, extent.file
    return (
        extent.region is None
        and nbytes > 0
        and len(entry.shape) <= MOST_AXES
        and file < len(rooms)
        and extent.offset <= rooms[file] - nbytes
        and entry.dtype in DTYPES
        and nbytes == (itemsize := DTYPES[entry.dtype].itemsize) * math.prod(entry.shape)
        and len(extent.digests)
        == (DIGEST_DIGITS if nbytes <= block else DIGEST_DIGITS * count_pieces(entry.shape, itemsize, block))
        and entry.key is None
        and extent.coding is None
    )


def _check_numbers(entry: LeafEntry, boxes: Sequence[Box] | None, tree: TreeEntry) -> None:
    itemsize = dtype_from_name(entry.dtype).itemsize
    if len(entry.shape) > MOST_AXES or itemsize * math.prod(max(1, size) for size in entry.shape) >= 2**62:
        raise FormatError(f"{entry.dtype}{list(entry.shape)[:80]} is larger than an array can be")
    if entry.key and (entry.dtype != "uint32" or not entry.shape):
        raise FormatError(f"{entry.dtype}{list(entry.shape)} cannot be PRNG keys")
    if len(entry.extents) == 1 and entry.extents[0].region is None:
        _check_extent(entry.extents[0], entry.shape, itemsize, entry, tree)
        return
    stored = [entry.region_of(extent) for extent in entry.extents]
    for extent, box in zip(entry.extents, stored, strict=True):
        if len(box.stop) != len(entry.shape) or not all(map(le, box.stop, entry.shape)):
            raise FormatError(f"region {extent.region} lies outside shape {list(entry.shape)}")
        _check_extent(extent, box.shape, itemsize, entry, tree)
    if boxes is None and not is_tiling(stored, entry.shape):
        raise FormatError(f"its {len(stored)} extents overlap or do not cover the shape {list(entry.shape)}")
    for box in boxes or ():
        if not _is_covered(box, stored):
            raise FormatError(
                f"its {len(stored)} extents overlap or do not cover {box.slices} of {list(entry.shape)}"
            )


def _is_covered(box: Box, stored: Sequence[Box]) -> bool:
    """Tell whether every element of the box is in exactly one of the stored boxes."""
    parts = [part for one in stored if (part := box.overlap(one))]
    if len(parts) == 1:
        return parts[0].size == box.size
    return is_tiling([part.inside(box) for part in parts], box.shape)


def _check_extent(
    extent: Extent, shape: tuple[int, ...], itemsize: int, entry: LeafEntry, tree: TreeEntry
) -> None:
    if extent.file >= len(tree.files):
        raise FormatError(f"file number {extent.file}, but there are {len(tree.files)} files")
    nbytes = itemsize * math.prod(shape)
    is_one = 0 < nbytes <= tree.block or is_whole(entry, extent)
    if extent.coding:
        _check_coding(extent, extent.coding, shape, itemsize, is_ours=tree.has_digests)
        require_chunk_for(entry.shape, extent.coding.shape, itemsize)
    elif extent.nbytes != nbytes and not is_whole(entry, extent):
        raise FormatError(f"{extent.nbytes} bytes for {entry.dtype}{list(shape)}, expected {nbytes}")
    file = tree.files[extent.file]
    if extent.offset > file.nbytes - file.header_nbytes - extent.nbytes:
        raise FormatError(f"{extent.nbytes} bytes at {extent.offset} exceed file {file.name!r}")
    if not tree.has_digests and not extent.digests:
        return
    expected = DIGEST_DIGITS * (1 if is_one else count_pieces(shape, itemsize, tree.block))
    if len(extent.digests) != expected:
        raise FormatError(f"{len(extent.digests)} digits of digests, expected {expected}")


def _check_coding(
    extent: Extent, coding: Coding, shape: tuple[int, ...], itemsize: int, *, is_ours: bool
) -> None:
    if coding.codec not in (("zstd",) if is_ours else ("", "zstd", "zarr")):
        raise FormatError(f"unknown codec {coding.codec[:40]!r}; upgrade eformer")
    if len(coding.shape) != len(shape) or any(a > b for a, b in zip(shape, coding.shape, strict=True)):
        raise FormatError(f"a box of shape {list(shape)} does not fit a chunk of shape {list(coding.shape)}")
    decoded = itemsize * math.prod(coding.shape)
    most = extent.nbytes * MOST_EXPANSION if coding.codec else extent.nbytes
    if decoded > most:
        raise FormatError(
            f"{extent.nbytes} bytes cannot decode to a chunk of shape {list(coding.shape)}, {decoded} bytes"
        )


def require_chunk_for(shape: tuple[int, ...], chunk: tuple[int, ...], itemsize: int) -> None:
    """Refuse a chunk that takes far more memory than its array: more than 64 MiB and than 4 times the array."""
    nbytes, decoded = itemsize * math.prod(shape), itemsize * math.prod(chunk)
    if decoded > max(_MOST_PADDED, _MOST_TIMES * nbytes):
        raise FormatError(
            f"a chunk of shape {list(chunk)} would take {decoded} bytes of memory, its array of shape {list(shape)} "
            f"{nbytes}; at most {_MOST_PADDED} bytes or {_MOST_TIMES} times the array are allowed"
        )


def is_whole(entry: LeafEntry, extent: Extent) -> bool:
    """Tell whether an extent can only be read whole: encoded, or four-bit numbers packed two to a byte."""
    if extent.coding:
        return True
    return entry.dtype == "float4_e2m1fn" and 0 < 2 * extent.nbytes == entry.region_of(extent).size
