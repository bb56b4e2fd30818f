"""Digest arrays on their accelerators before they are copied to the host: a save whose copies differ is an error.

The host digests the bytes that it writes. Without this check it would record the digests of bytes that were damaged on
their way out of the device, and later confirm them.
"""

from __future__ import annotations

import logging
import threading
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from eformer._engine.record.dtypes import dtype_from_name
from eformer._engine.record.pieces import bounding, joined, piece_sizes, pieces, shifted
from eformer._engine.record.xxh3 import SHORTEST, digest_texts, parsed_digests
from eformer._engine.trees.device_digests import Digesters, Digests, Joined, PieceSpan, can_digest, results
from eformer.errors import TransferError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from eformer._engine.record.boxes import Box
    from eformer._engine.record.planned import PlannedExtent, PlannedFile

logger = logging.getLogger("eformer")

_TOGETHER_BYTES = (
    64 * 2**20
)  # joined on the device: starting a program takes longer than digesting a few pieces


class SourceDigests:
    """The digests of one save that are computed on accelerators. `begin` may be called from any thread."""

    def __init__(self, files: Iterable[PlannedFile], block: int) -> None:
        self.block = block
        self.digesters = Digesters(_TOGETHER_BYTES, block)
        self.lock = threading.Lock()
        self.groups: dict[int, _Group] = {}  # by the id of a planned extent, which its file keeps alive
        self.expected: dict[int, BoxDigests] = {}
        group = None
        for extent in (extent for file in files if not file.is_there for extent in file.extents):
            if (held := _held_by(extent, block)) is None:
                continue
            if group is None or not group.takes(held):
                group = _Group([])
            group.members.append(held)
            self.groups[id(extent)] = group

    def begin(self, extent: PlannedExtent) -> BoxDigests | None:
        """Begin to digest a box, and small boxes that are written after it.

        Call this before the array is released. Return None for a box that no compiled program can digest.
        """
        group = self.groups.get(id(extent))
        if group is None:
            return None
        with self.lock:
            if not group.is_begun:
                group.is_begun = True
                try:
                    self.expected |= group.digest(self.digesters, self.block)
                except Exception as error:  # noqa: BLE001  a device without memory, say: the host digests anyway
                    logger.debug("digests could not be computed on the device: %s", error)
            return self.expected.pop(id(extent), None)


class BoxDigests:
    """The digests of the pieces of a box, computed on the device."""

    def __init__(self, found: Sequence[tuple[Digests, int]], ends: Sequence[int], device: Any) -> None:
        self.found, self.ends, self.device = found, ends, device
        self.lock = threading.Lock()
        self.digests: np.ndarray[Any, Any] | None = None

    def wait(self) -> np.ndarray[Any, Any]:
        """Wait for the digests of all pieces, and return them as `merged_digests` does."""
        with self.lock:
            if self.digests is None:
                count = len(self.ends) - 1
                self.digests = np.concatenate(
                    [results([one])[start : start + count] for one, start in self.found]
                )
            return self.digests

    def texts(self) -> list[str]:
        """Wait for the digests of all pieces, and return them as text."""
        return digest_texts(self.wait())

    def require(self, name: str, first: int, digests: Sequence[str]) -> None:
        """Raise a TransferError if pieces in host memory, from number `first` on, differ from those on the device."""
        expected = self.wait()[first : first + len(digests)]
        wrong = np.nonzero((expected != parsed_digests("".join(digests))).any(1))[0]
        if len(wrong):
            number = first + wrong[0]
            raise TransferError(
                f"leaf {name!r}: bytes {self.ends[number]} to {self.ends[number + 1]} of its box on {self.device} "
                "arrived damaged in host memory, and the save is given up: check the device and its memory, and save "
                "again"
            )


class _Held(NamedTuple):
    """A box to be written that one array on an accelerator holds. `whole` is the box of the array."""

    extent: PlannedExtent
    whole: Box
    array: Any
    device: Any
    sizes: tuple[int, ...]  # of the pieces

    @property
    def is_small(self) -> bool:
        return self.extent.box == self.whole and self.extent.nbytes <= _TOGETHER_BYTES


class _Group:
    """Small boxes that are digested together, or one box of any size."""

    def __init__(self, members: list[_Held]) -> None:
        self.members, self.is_begun = members, False

    def takes(self, held: _Held) -> bool:
        if not self.members:
            return True
        nbytes = sum(member.extent.nbytes for member in self.members) + held.extent.nbytes
        are_small = held.is_small and self.members[0].is_small
        return are_small and nbytes <= _TOGETHER_BYTES and self.members[0].device == held.device

    def digest(self, digesters: Digesters, block: int) -> dict[int, BoxDigests]:
        """Begin to digest the boxes; return what has begun, by the id of the extent."""
        members, self.members = self.members, []
        arrived: Any = jax.block_until_ready
        arrived(
            [held.array for held in members]
        )  # a program must not read an array on its way, see `Transfer`
        return _together(members, digesters) if members[0].is_small else _alone(members[0], digesters, block)


def _together(members: Sequence[_Held], digesters: Digesters) -> dict[int, BoxDigests]:
    device = members[0].device
    joins = digesters.joining(device, [(held.array.shape, held.array.dtype) for held in members])
    if joins is None:
        return {}
    starts = list(accumulate((held.extent.nbytes for held in members), initial=0))
    filled, first = [], 0
    for made, count in joins:
        filled.append(
            Joined(made, [held.array for held in members[first : first + count]], None, starts[first])
        )
        first += count
    spans = [span for start, held in zip(starts, members, strict=False) for span in _spans(held.sizes, start)]
    digests = digesters.of(device).digest(filled, spans)
    numbers = accumulate((len(held.sizes) for held in members), initial=0)
    return {
        id(held.extent): BoxDigests([(digests, number)], _ends(held.sizes), device)
        for held, number in zip(members, numbers, strict=False)
    }


def _alone(held: _Held, digesters: Digesters, block: int) -> dict[int, BoxDigests]:
    """Digest a box in parts, which are cut out of its array."""
    extent, itemsize, device = held.extent, held.array.dtype.itemsize, held.device
    inside = shifted(pieces(extent.box.shape, itemsize, block), extent.box.start)
    found = []
    for group in joined(inside, itemsize, _TOGETHER_BYTES):
        part = bounding(group)
        made = digesters.cutting(device, (held.array.shape, held.array.dtype), part.shape)
        if made is None:
            return {}
        corner = part.inside(held.whole).start
        spans = _spans([box.size * itemsize for box in group], 0)
        found.append((digesters.of(device).digest([Joined(made, [held.array], corner, 0)], spans), 0))
    return {id(extent): BoxDigests(found, _ends(held.sizes), device)}


def _spans(sizes: Iterable[int], start: int) -> list[PieceSpan]:
    spans = []
    for nbytes in sizes:
        spans.append(PieceSpan(start, nbytes))
        start += nbytes
    return spans


def _ends(sizes: Iterable[int]) -> tuple[int, ...]:
    return tuple(accumulate(sizes, initial=0))


def _held_by(extent: PlannedExtent, block: int) -> _Held | None:
    """Return the box of an extent as an array on an accelerator has it; None if the host alone can digest it."""
    source = extent.source
    if source.whole is not None or extent.coding or extent.is_packed or not extent.nbytes:
        return None
    box, dtype = extent.box, dtype_from_name(source.dtype)
    whole, array = next((part for part in source.parts if part[0].overlap(box) == box), (box, None))
    if not isinstance(array, jax.Array) or array.dtype != dtype or not can_digest(dtype):
        return None
    (device,) = array.devices()
    sizes = tuple(piece_sizes(extent.shape, dtype.itemsize, block))
    if not is_accelerator(device) or array.sharding.memory_kind != device.default_memory().kind:
        return None
    return _Held(extent, whole, array, device, sizes) if min(sizes) >= SHORTEST else None


def is_accelerator(device: Any) -> bool:
    return bool(device.platform != "cpu")
