"""Stream leaves to accelerators through a few slots of page-locked memory.

An accelerator copies several times as fast from page-locked memory; but locking memory takes longer than copying it,
and XLA never frees the memory that it locks for its own transfers. So a few slots are locked and reused: while one is
copied from, others are read into.
"""

from __future__ import annotations

import math
from contextlib import ExitStack
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from eformer._engine.loading.assemble import assemble
from eformer._engine.loading.fetch import aligned
from eformer._engine.loading.placement import accelerator_of
from eformer._engine.loading.read import Reading
from eformer._engine.record.dtypes import dtype_from_name
from eformer._engine.record.pieces import ALIGNMENT
from eformer._engine.tasks.pool import run_all
from eformer._engine.tasks.progress import SILENT, Meter
from eformer._engine.trees.devices import page_locked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import numpy as np

    from eformer._engine.formats.found import Found
    from eformer._engine.loading.select import LeafTarget
    from eformer._engine.record.manifest import TreeEntry

_LOCKED_BYTES = 2**30  # by one load, at most; a leaf that needs more has memory of its own
_SLOT_BYTES = 64 * 2**20  # unless a leaf needs more
_SLOTS = 4  # with more of them, the memory has left the processor's caches before it is used again
_READ_BYTES = 16 * 2**20  # larger than for other reads: with many threads, fewer tasks contend for their turn
_WORTH_IT = 16 * 2**20


def is_worth_streaming(targets: Iterable[LeafTarget]) -> bool:
    """Tell whether the targets are large enough for the cost of locking memory."""
    return sum(map(nbytes_of, targets)) >= _WORTH_IT


def stream(
    found: Found,
    tree: TreeEntry,
    targets: Sequence[LeafTarget],
    threads: int,
    *,
    verify: bool,
    meter: Meter = SILENT,
) -> dict[str, Any]:
    """Read the targets and return their arrays by name. All of them are on their devices when this returns."""
    with ExitStack() as stack:
        reading = Reading(found, tree, verify=verify, meter=meter)
        stack.callback(reading.close)
        stream = _Stream(targets, stack)
        threads = max(2, threads * 3 // 4)  # leaves the others to the transfers
        run_all(stream.tasks(reading), threads, stream.give_up)
        reading.require_unwritten()
    return stream.loaded


class _Stream:
    """Pass leaves through slots of memory: large leaves first, each through a slot that is large enough, then small
    ones, through the parts that these slots are cut into."""

    def __init__(self, targets: Sequence[LeafTarget], stack: ExitStack) -> None:
        self.large = [target for target in targets if nbytes_of(target) > _SLOT_BYTES]
        # The largest comes first: a slot is locked after its first leaf, which has to touch all of it.
        self.large.sort(key=nbytes_of, reverse=True)
        self.small = sorted((target for target in targets if nbytes_of(target) <= _SLOT_BYTES), key=_position)
        self.device, self.stack = accelerator_of(targets[0]), stack
        self.slots: SimpleQueue[_Slot | None] = SimpleQueue()  # an interrupt cannot leave it locked
        self.parts = 0  # number of small slots that large ones are still to be cut into
        self.loaded: dict[str, Any] = {}

    def tasks(self, reading: Reading) -> Iterator[Callable[[], None]]:
        """Yield tasks that read all leaves and move them to their devices."""
        for group, slot in self.turns():
            if slot is None:
                return
            arrive = partial(self.arrive, group, slot)
            yield from reading.tasks(group, memory=slot.memory, end=arrive, read_bytes=_READ_BYTES)

    def turns(self) -> Iterator[tuple[list[LeafTarget], _Slot | None]]:
        """Yield groups of leaves, each with the slot that it goes through; None for the slot ends the stream.

        Waiting for a slot cannot deadlock: all reads into the other slots are under way in other threads.
        """
        fitting = [nbytes for target in self.large if (nbytes := nbytes_of(target)) <= _LOCKED_BYTES]
        room = max(fitting, default=_SLOT_BYTES)
        number = min(2, len(self.large), _LOCKED_BYTES // room)
        self.add_slots(number, room)
        for target in self.large:
            yield [target], self.slots.get()
        total = sum(map(nbytes_of, self.small))
        wanted = min(_SLOTS, max(1, -(-total // _SLOT_BYTES)))
        self.parts = min(wanted, number * (room // _SLOT_BYTES))
        self.add_slots(wanted - self.parts, min(_SLOT_BYTES, total))
        for group in _groups(self.small):
            yield group, self.take_part()

    def add_slots(self, number: int, nbytes: int) -> None:
        for _ in range(number):
            self.slots.put(_Slot(aligned(nbytes), self.device, self.stack))

    def take_part(self) -> _Slot | None:
        """Return a small slot; cut large ones, which no large leaf needs any more."""
        while (slot := self.slots.get()) and len(slot.memory) > _SLOT_BYTES:
            for part in slot.cut(_SLOT_BYTES)[: self.parts]:
                self.slots.put(part)
                self.parts -= 1
        return slot

    def give_up(self) -> None:
        """Wake the thread that waits for a slot, and end the stream."""
        self.slots.put(None)

    def arrive(self, group: Sequence[LeafTarget], slot: _Slot) -> None:
        """Move a group that has been read to its devices, and free its slot."""
        slot.lock()
        arrays = assemble(group)
        for target in group:
            target.arrays = ()
        for array in arrays.values():
            array.block_until_ready()
        self.loaded.update(arrays)
        self.slots.put(slot)


class _Slot:
    """Memory that is read into and copied from, in turns.

    It is locked after the first read into it: locking memory that was never touched takes ten times as long.
    """

    def __init__(
        self, memory: np.ndarray[Any, Any], device: Any, stack: ExitStack, *, is_locked: bool = False
    ) -> None:
        self.memory, self.device, self.stack, self.is_locked = memory, device, stack, is_locked

    def cut(self, nbytes: int) -> list[_Slot]:
        """Return as many slots of `nbytes` as fit into this one."""
        starts = range(0, len(self.memory) - nbytes + 1, nbytes)
        parts = [self.memory[start : start + nbytes] for start in starts]
        return [_Slot(part, self.device, self.stack, is_locked=self.is_locked) for part in parts]

    def lock(self) -> None:
        """Lock the memory until the end of the load, unless it is locked."""
        if not self.is_locked:
            self.is_locked = True
            self.stack.enter_context(page_locked(self.memory, self.device))


def _groups(targets: Sequence[LeafTarget]) -> list[list[LeafTarget]]:
    """Group neighbours that fit into one slot."""
    groups: list[list[LeafTarget]] = []
    used = 0
    for target in targets:
        if not groups or used + nbytes_of(target) > _SLOT_BYTES:
            groups.append([])
            used = 0
        groups[-1].append(target)
        used += nbytes_of(target)
    return groups


def _position(target: LeafTarget) -> tuple[int, int]:
    """Return the file and the offset where the leaf starts, to sort by: neighbours are read together."""
    return min(((extent.file, extent.offset) for extent in target.entry.extents), default=(0, 0))


def nbytes_of(target: LeafTarget) -> int:
    """Return the memory that the boxes of this process take."""
    regions = target.regions
    size = math.prod(target.entry.shape) if regions is None else sum(region.size for region in regions)
    return -(-size * dtype_from_name(target.dtype).itemsize // ALIGNMENT) * ALIGNMENT
