"""Digest the pieces of leaves that are in memory or on devices. Needs no jax.

A save records the fingerprint of a leaf if the digests of its extents do not give it: compressed chunks, and chunks
that cut rows. `saving/live.py` digests a tree that is not saved.

Tests: tests/engine/saving/test_fingerprints.py.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from msgspec.structs import replace

from eformer._engine.record.digests import NO_DIGEST, xxh3_128
from eformer._engine.record.dtypes import pack_nibbles
from eformer._engine.record.fingerprints import fingerprint_of, recorded_fingerprint, whole_cut
from eformer._engine.record.pieces import PIECE_BYTES, bounding, joined, pieces, shifted
from eformer._engine.record.planned import LazyArray, PlannedExtent
from eformer._engine.saving.write import bytes_of, digests_of
from eformer._engine.tasks.pool import run_all

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from eformer._engine.record.boxes import Box
    from eformer._engine.record.fingerprints import Piece
    from eformer._engine.record.planned import PlannedFile, Source
    from eformer._engine.saving.staging import Staging

_TASK_BYTES = 32 * 2**20  # of a leaf that one thread digests

Digests = dict[int, str]  # by the number of the piece


class Texts(Protocol):
    """Digests of the pieces of a box, which a device computes."""

    def texts(self) -> list[str]: ...


class OnDevices(Protocol):
    """Digests that accelerators compute: `source_digests`, which needs jax."""

    def begin(self, extent: PlannedExtent) -> Texts | None: ...


class PieceBatch:
    """Consecutive pieces of a leaf that form a box, and the numbers of these pieces."""

    def __init__(
        self, source: Source, numbers: Sequence[int], boxes: Sequence[Box], *, is_packed: bool
    ) -> None:
        around = bounding(boxes)
        nbytes = around.size * source.itemsize
        digests = [NO_DIGEST] * len(boxes)
        self.numbers, self.boxes = numbers, boxes
        self.extent = PlannedExtent(source, around, around.shape, nbytes, digests, is_packed=is_packed)

    @property
    def is_cut_alike(self) -> bool:
        """Tell whether the box alone, cut into pieces, has these pieces."""
        box = self.extent.box
        inside = pieces(box.shape, self.extent.source.itemsize, PIECE_BYTES)
        return shifted(inside, box.start) == list(self.boxes)

    def digest(self, into: Digests, staging: Staging, on_devices: OnDevices | None = None) -> None:
        """Digest the pieces where they are."""
        found = on_devices.begin(self.extent) if on_devices and self.is_cut_alike else None
        texts = found.texts() if found else self._on_host(staging)
        into.update(zip(self.numbers, texts, strict=True))

    def _on_host(self, staging: Staging) -> list[str]:
        source = self.extent.source
        if self.extent.is_packed:
            with staging.reading(source, self.extent.box) as array:
                return [xxh3_128(pack_nibbles(array))]
        if self.is_cut_alike:
            return list(digests_of(self.extent, PIECE_BYTES, staging))
        texts = []
        for box in self.boxes:
            with staging.reading(source, box) as array:
                texts.append(xxh3_128(bytes_of(array)))
        return texts


def batches_of(source: Source, cut: Sequence[Piece], numbers: Sequence[int]) -> Iterator[PieceBatch]:
    """Group the pieces with these numbers into boxes that one thread digests."""
    packed = [number for number in numbers if cut[number].is_packed]
    for number in packed:
        yield PieceBatch(source, [number], [cut[number].box], is_packed=True)
    plain = [number for number in numbers if not cut[number].is_packed] if packed else numbers
    start = 0
    for boxes in joined((cut[number].box for number in plain), source.itemsize, _TASK_BYTES):
        stop = start + len(boxes)
        yield PieceBatch(source, plain[start:stop], boxes, is_packed=False)
        start = stop


# -------------------------------------------------------------------------------------- at a save


def note_fingerprints(
    files: Sequence[PlannedFile], block: int, staging: Staging, threads: int, *, costly: bool
) -> None:
    """Add the fingerprint to each leaf that the digests of its extents will not give. Unless `costly`, skip leaves that
    are not one array in host memory: their rows would be put together, copied from a device or read from a file, for
    the fingerprint alone."""
    planned: dict[str, list[PlannedExtent]] = {}
    for file in files:
        for extent in file.extents:
            planned.setdefault(extent.source.name, []).append(extent)
    tasks = [
        partial(_note, extents, staging) for extents in planned.values() if _lacks(extents, block, costly)
    ]
    run_all(tasks, threads)


def _lacks(extents: Sequence[PlannedExtent], block: int, costly: bool) -> bool:
    source = extents[0].source
    if not costly and not (len(source.boxes) == 1 and is_in_memory(source.boxes[0][1])):
        return False
    return recorded_fingerprint(source.entry(tuple(one.extent(0) for one in extents)), block) is None


def lacks_fingerprint(extent: PlannedExtent, block: int) -> bool:
    """Tell whether the digests of an extent do not give the fingerprint of its leaf."""
    return recorded_fingerprint(extent.source.entry((extent.extent(0),)), block) is None


def _note(extents: Sequence[PlannedExtent], staging: Staging) -> None:
    source = extents[0].source
    cut = whole_cut(source.dtype, source.shape)
    found: Digests = {}
    for batch in batches_of(source, cut, range(len(cut))):
        batch.digest(found, staging)
    digests = "".join(found[number] for number in range(len(cut)))
    noted = replace(source, fingerprint=fingerprint_of(source.entry(), digests))
    for extent in extents:
        extent.source = noted


def is_in_memory(array: Any) -> bool:
    """Tell whether an array is in host memory, or can be viewed there."""
    if isinstance(array, LazyArray):
        return False
    return not hasattr(array, "devices") or all(device.platform == "cpu" for device in array.devices())
