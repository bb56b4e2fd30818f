"""Check the digests of streamed leaves on their devices, after the transfer.

The arrays that a load returns are digested, not the bytes on their way: a transfer that failed, a program that cut a
slot wrongly or too early, and a damaged file are all found. The host does not compute these digests, which would take
a quarter of the time of a load.

The host checks a leaf as it reads it until the programs for the leaf are compiled. It always checks leaves that the
programs do not serve, see `_is_served`, and pieces that are cut between devices, which are in no array as a whole.
"""

from __future__ import annotations

import logging
import math
import threading
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from eformer._engine.record.digests import xxh3_128
from eformer._engine.record.dtypes import dtype_from_name
from eformer._engine.record.xxh3 import parsed_digests
from eformer._engine.trees.device_digests import (
    Digesters,
    Digests,
    Joined,
    Kind,
    PieceSpan,
    can_digest,
    results,
)
from eformer._engine.trees.devices import on_host
from eformer.errors import TransferError

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Mapping, Sequence

    from eformer._engine.loading.read_plan import Read, StoredPiece
    from eformer._engine.loading.select import LeafTarget
    from eformer._engine.record.boxes import Box
    from eformer._engine.record.manifest import TreeEntry

logger = logging.getLogger("eformer")


class DigestJob(NamedTuple):
    """Pieces to digest on one device.

    joined    the arrays, by keys that `begin` knows, and the programs that join them in the buffer
    pieces    the pieces, as `(target, piece)`, in the order of `spans`
    """

    device: Any
    joined: list[Joined]
    spans: list[PieceSpan]
    pieces: list[tuple[LeafTarget, StoredPiece]]


class Wrong(NamedTuple):
    """A piece whose bytes on a device do not have the recorded digest."""

    target: LeafTarget
    piece: StoredPiece
    device: Any


class DeviceCheck:
    """The digests of one load that are checked on devices. `begin` and `wrong` may be called from any thread."""

    def __init__(self, tree: TreeEntry, slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        self.digesters = Digesters(slot_bytes, tree.block)
        self.lock = threading.Lock()
        self.pending: list[tuple[DigestJob, Digests]] = []
        self.unchecked: dict[str, LeafTarget] = {}  # leaves that no device could digest after all

    # ---------------------------------------------------------------------------------- before the read

    def of_leaves(self, targets: Sequence[LeafTarget], reads: Iterable[Read], default: Any) -> Checks:
        """Plan the check of whole leaves that share a slot. `default` is the device of leaves without a sharding."""
        pieces = _pieces_of(reads)
        served = [number for number in pieces if _is_served(targets[number])]
        shards: dict[Any, list[tuple[int, int]]] = {}  # number of the target and of its box, by device
        for number in served:
            boxes = targets[number].device_boxes
            held = [(default, 0)] if boxes is None else zip(boxes.devices, boxes.numbers, strict=True)
            for device, box in held:
                shards.setdefault(device, []).append((number, box))
        jobs = []
        for device, some in shards.items():
            kinds = [_kind(targets[number], targets[number].wanted[box]) for number, box in some]
            *starts, end = accumulate(map(_nbytes, kinds), initial=0)
            joins = self.digesters.joining(device, kinds) if end <= self.slot_bytes else None
            if joins is None:
                return Checks((), [])
            joined, first = list[Joined](), 0
            for made, count in joins:
                names = [targets[number].name for number, _ in some[first : first + count]]
                joined.append(Joined(made, names, None, starts[first]))
                first += count
            found = [
                (start, targets[number], piece)
                for start, (number, box) in zip(starts, some, strict=True)
                for piece in pieces[number]
                if piece.target == box
            ]
            jobs.append(_job(device, joined, found))
        return Checks(frozenset(served), jobs)

    def of_part(
        self, target: LeafTarget, reads: Iterable[Read], parts: Sequence[tuple[int, Any, Any, Box]]
    ) -> Checks:
        """Plan the check of boxes of a large leaf that are read together.

        Each of `parts` has the number of a box among the target's boxes and, for a device that gets the box, a key of
        the array there, the device, and the box of the whole array.
        """
        pieces = _pieces_of(reads).get(0, [])
        jobs: list[DigestJob] = []
        if not pieces or not _is_served(target):
            return Checks((), [])
        for number, key, device, whole in parts:
            box = target.wanted[number]
            made = self.digesters.cutting(device, _kind(target, whole), box.shape)
            if made is None:
                return Checks((), [])
            corner = box.inside(whole).start
            found = [(0, target, piece) for piece in pieces if piece.target == number]
            jobs.append(_job(device, [Joined(made, [key], corner, 0)], found))
        return Checks(frozenset((0,)), jobs)

    # --------------------------------------------------------------------------------- after the arrival

    def begin(self, checks: Checks, array_of: Callable[[Any, Any], Any]) -> None:
        """Begin to digest arrays, which must have arrived; `array_of` returns the array of a key on a device."""
        for job in checks.jobs:
            with self.lock:
                self._begin(job, array_of)

    def _begin(self, job: DigestJob, array_of: Callable[[Any, Any], Any]) -> None:
        try:
            filled = [
                one._replace(arrays=[array_of(key, job.device) for key in one.arrays]) for one in job.joined
            ]
            self.pending.append((job, self.digesters.of(job.device).digest(filled, job.spans)))
        except Exception as error:  # noqa: BLE001  a device without memory, say: the arrays themselves are there
            self._give_up([job], error)

    def wrong(self) -> list[Wrong]:
        """Wait for all digests, and return the pieces whose digests differ."""
        jobs = [job for job, _ in self.pending]
        try:
            found = results([digests for _, digests in self.pending])
        except Exception as error:  # noqa: BLE001  as above, later
            self._give_up(jobs, error)
            return []
        finally:
            self.pending.clear()
        pieces = [(*piece, job.device) for job in jobs for piece in job.pieces]
        expected = parsed_digests("".join(piece.digest for _, piece, _ in pieces))
        return [Wrong(*pieces[number]) for number in np.nonzero((found != expected).any(1))[0]]

    def _give_up(self, jobs: Sequence[DigestJob], error: Exception) -> None:
        logger.debug("digests could not be computed on the device, and are checked in host memory: %s", error)
        self.unchecked |= {target.name: target for job in jobs for target, _ in job.pieces}


class Checks(NamedTuple):
    """The checks of one batch: the numbers of the targets whose digests the host need not check, and the jobs."""

    wants: Container[int]
    jobs: list[DigestJob]


def shard_on(array: Any, device: Any) -> Any:
    """Return the part of an array that is on a device."""
    if len(array.sharding.device_set) == 1:
        return array.addressable_data(0)
    return next(shard.data for shard in array.addressable_shards if shard.device == device)


def warn_of(wrong: Sequence[Wrong], tree: TreeEntry) -> None:
    """Say which transfers failed, after the files were found undamaged."""
    for target, piece, device in wrong[:3]:
        logger.warning(
            "leaf %r: bytes %d to %d of %s arrived damaged on %s; the file is undamaged, and the transfer is repeated",
            target.name, piece.offset, piece.offset + piece.nbytes, tree.path_of(piece.file), device,
        )  # fmt: skip
    if len(wrong) > 3:
        logger.warning("%d more pieces arrived damaged and are transferred again", len(wrong) - 3)


def require_arrived(wrong: Sequence[Wrong], arrays: Mapping[str, Any], tree: TreeEntry) -> None:
    """Copy the transferred arrays back and compare the pieces that were wrong. Raise a TransferError if one differs."""
    for target, piece, device in wrong:
        data = np.ascontiguousarray(on_host(shard_on(arrays[target.name], device))).reshape(-1).view(np.uint8)
        if xxh3_128(data[piece.at : piece.at + piece.nbytes].data) != piece.digest:
            raise TransferError(
                f"leaf {target.name!r}: bytes {piece.offset} to {piece.offset + piece.nbytes} of "
                f"{tree.path_of(piece.file)} arrived damaged on {device}, twice; the file is undamaged: check the "
                "device and its memory"
            )


def _job(device: Any, joined: list[Any], found: Sequence[tuple[int, LeafTarget, StoredPiece]]) -> DigestJob:
    spans = [PieceSpan(start + piece.at, piece.nbytes) for start, _, piece in found]
    return DigestJob(device, joined, spans, [(target, piece) for _, target, piece in found])


def _pieces_of(reads: Iterable[Read]) -> dict[int, list[StoredPiece]]:
    """Return the pieces that can be digested in arrays, by the numbers of their targets."""
    found: dict[int, list[StoredPiece]] = {}
    for read in reads:
        for piece in read.pieces:
            if piece.lies_in_array and piece.digest:
                found.setdefault(piece.want, []).append(piece)
    return found


def _is_served(target: LeafTarget) -> bool:
    """Tell whether the arrays on the devices have the bytes of the file, and programs can read them.

    Not served: cast leaves, packed dtypes and booleans, PRNG keys, and small arrays that are cut in host memory.
    Encoded leaves and leaves up to the size of a piece have no pieces that lie in an array.
    """
    boxes, entry = target.device_boxes, target.entry
    is_plain = not entry.key and not target.is_weak and target.dtype == entry.dtype
    return is_plain and can_digest(dtype_from_name(target.dtype)) and not (boxes is not None and boxes.cuts)


def _kind(target: LeafTarget, box: Box) -> Kind:
    return box.shape, dtype_from_name(target.dtype)


def _nbytes(kind: Kind) -> int:
    shape, dtype = kind
    return math.prod(shape) * dtype.itemsize
