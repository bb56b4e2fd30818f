"""Fingerprints of leaves: one digest each, which does not depend on sharding, format or files. Pure.

The fingerprint of an array is the xxh3-128 of its dtype and shape and of the digests of its pieces, cut as one whole
box. A leaf that is stored as one box, or as boxes that end where pieces end, already has these digests in its record.

Tests: tests/engine/saving/test_fingerprints.py, tests/engine/record/test_fingerprints.py.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from eformer._engine.record.boxes import Box
from eformer._engine.record.digests import DIGEST_DIGITS, xxh3_128
from eformer._engine.record.dtypes import dtype_from_name
from eformer._engine.record.pieces import PIECE_BYTES, pieces, shifted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from eformer._engine.record.manifest import LeafEntry


class Piece(NamedTuple):
    """A box of a leaf that has one digest. `is_packed` tells that four-bit numbers in it share bytes."""

    box: Box
    is_packed: bool = False


@lru_cache(256)  # many leaves of a tree are alike
def whole_cut(dtype: str, shape: tuple[int, ...]) -> tuple[Piece, ...]:
    """Cut a leaf into the pieces whose digests make its fingerprint."""
    if _is_packed(dtype, shape):
        return (Piece(Box.whole(shape), is_packed=True),)
    return tuple(map(Piece, pieces(shape, dtype_from_name(dtype).itemsize, PIECE_BYTES)))


def _is_packed(dtype: str, shape: tuple[int, ...]) -> bool:
    return dtype == "float4_e2m1fn" and math.prod(shape) % 2 == 0 and 0 not in shape


def recorded_cut(entry: LeafEntry, block: int) -> tuple[list[Piece], str] | None:
    """Return the pieces of a stored leaf with their digests; None if the record has no digests of its elements."""
    itemsize = dtype_from_name(entry.dtype).itemsize
    cut: list[Piece] = []
    for extent in entry.extents:
        box = entry.region_of(extent)
        if extent.coding or not extent.digests:
            if box.size:
                return None
        elif extent.nbytes < itemsize * box.size:
            cut.append(Piece(box, is_packed=True))
        else:
            cut += map(Piece, shifted(pieces(box.shape, itemsize, block), box.start))
    if sum(piece.box.size for piece in cut) != Box.whole(entry.shape).size:
        return None
    return cut, "".join(extent.digests for extent in entry.extents)


def fingerprint_of(entry: LeafEntry, digests: str) -> str:
    """Return the fingerprint of an array, given the joined digests of its pieces."""
    return xxh3_128(f"{entry.described}\n{digests}".encode())


def fingerprint_of_value(recorded: Any) -> str:
    """Return the fingerprint of a plain value, given as JSON."""
    return xxh3_128(b"value\n" + msgspec.json.encode(recorded, order="sorted"))


def recorded_fingerprint(entry: LeafEntry, block: int) -> str | None:
    """Return the fingerprint of a stored array; None if neither the save nor the digests of its pieces give it."""
    if entry.own_fingerprint:
        return entry.own_fingerprint
    digests = _digests_in_order(entry, block)
    return None if digests is None else fingerprint_of(entry, digests)


def _digests_in_order(entry: LeafEntry, block: int) -> str | None:
    """Return the digests of the pieces of the whole leaf, if the stored boxes are cut into the same pieces."""
    if len(entry.extents) == 1 and not entry.extents[0].region and not entry.extents[0].coding:
        extent = entry.extents[0]
        if block == PIECE_BYTES and not _is_packed(entry.dtype, entry.shape) and extent.nbytes:
            return extent.digests or None  # as for nearly all leaves
    found = recorded_cut(entry, block)
    if found is None:
        return None
    known = dict(zip(found[0], digests_in(found[1]), strict=True))
    wanted = whole_cut(entry.dtype, entry.shape)
    return "".join(known[piece] for piece in wanted) if all(piece in known for piece in wanted) else None


def digests_in(text: str) -> Sequence[str]:
    """Split joined digests."""
    return [text[start : start + DIGEST_DIGITS] for start in range(0, len(text), DIGEST_DIGITS)]
