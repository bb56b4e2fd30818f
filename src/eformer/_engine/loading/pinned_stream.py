"""Leaves on their way to accelerators: a part of them at a time, through page-locked memory of a fixed size.

From page-locked memory an accelerator copies several times as fast; but to lock memory takes longer than to copy it,
and what XLA locks for its own transfers it never gives back. So a few slots are locked, and used again and again:
while one is copied from, others are read into.
"""

from __future__ import annotations

import math
from contextlib import ExitStack
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from eformer._engine.loading.fetch import aligned
from eformer._engine.loading.placement import accelerator_of, assemble
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
_SLOT_BYTES = 64 * 2**20  # where a leaf does not need more
_SLOTS = 4  # with more of them the memory is out of the processor's caches before it is used again
_READ_BYTES = 16 * 2**20  # with many threads there are fewer turns to wait for than with small ones
_WORTH_IT = 16 * 2**20


def is_worth_streaming(items: Iterable[LeafTarget]) -> bool:
    return sum(map(nbytes_of, items)) >= _WORTH_IT


def stream(
    found: Found,
    tree: TreeEntry,
    items: Sequence[LeafTarget],
    threads: int,
    *,
    verify: bool,
    meter: Meter = SILENT,
) -> dict[str, Any]:
    """The arrays by name, on their devices when this returns."""
    with ExitStack() as stack:
        reading = Reading(found, tree, verify=verify, meter=meter)
        stack.callback(reading.close)
        stream = _Stream(items, stack)
        threads = max(2, threads * 3 // 4)  # the others are for the transfers
        run_all(stream.tasks(reading), threads, stream.give_up)
        reading.require_unwritten()
    return stream.loaded


class _Stream:
    """Slots of memory, and what has arrived through them: large leaves first, each through a slot that is large enough,
    then the others, through the parts that these slots are cut into."""

    def __init__(self, items: Sequence[LeafTarget], stack: ExitStack) -> None:
        self.large = [item for item in items if nbytes_of(item) > _SLOT_BYTES]
        self.large.sort(
            key=nbytes_of, reverse=True
        )  # a slot is locked after the first, which touches all of it
        self.small = sorted((item for item in items if nbytes_of(item) <= _SLOT_BYTES), key=_place)
        self.device, self.stack = accelerator_of(items[0]), stack
        self.slots: SimpleQueue[_Slot | None] = SimpleQueue()  # no interrupt leaves it locked
        self.parts = 0  # that large slots are still to be cut into
        self.loaded: dict[str, Any] = {}

    def tasks(self, reading: Reading) -> Iterator[Callable[[], None]]:
        for group, slot in self.turns():
            if slot is None:
                return
            arrive = partial(self.arrive, group, slot)
            yield from reading.tasks(group, memory=slot.memory, end=arrive, read_bytes=_READ_BYTES)

    def turns(self) -> Iterator[tuple[list[LeafTarget], _Slot | None]]:
        """Whoever waits for a slot gets one: all reads into the others are under way in other threads."""
        fitting = [nbytes for item in self.large if (nbytes := nbytes_of(item)) <= _LOCKED_BYTES]
        room = max(fitting, default=_SLOT_BYTES)
        number = min(2, len(self.large), _LOCKED_BYTES // room)
        self.add_slots(number, room)
        for item in self.large:
            yield [item], self.slots.get()
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
        """A slot; a large one is cut first, for no large leaf needs it any more."""
        while (slot := self.slots.get()) and len(slot.memory) > _SLOT_BYTES:
            for part in slot.cut(_SLOT_BYTES)[: self.parts]:
                self.slots.put(part)
                self.parts -= 1
        return slot

    def give_up(self) -> None:
        """Nobody waits for a slot any more."""
        self.slots.put(None)

    def arrive(self, group: Sequence[LeafTarget], slot: _Slot) -> None:
        """All of the group has been read."""
        slot.lock()
        arrays = assemble(group)
        for item in group:
            item.arrays = ()
        for array in arrays.values():
            array.block_until_ready()
        self.loaded.update(arrays)
        self.slots.put(slot)


class _Slot:
    """Memory that is read into and copied from, in turns. Locked when it was read into for the first time: memory that
    nobody has touched takes ten times as long."""

    def __init__(
        self, memory: np.ndarray[Any, Any], device: Any, stack: ExitStack, *, is_locked: bool = False
    ) -> None:
        self.memory, self.device, self.stack, self.is_locked = memory, device, stack, is_locked

    def cut(self, nbytes: int) -> list[_Slot]:
        starts = range(0, len(self.memory) - nbytes + 1, nbytes)
        parts = [self.memory[start : start + nbytes] for start in starts]
        return [_Slot(part, self.device, self.stack, is_locked=self.is_locked) for part in parts]

    def lock(self) -> None:
        if not self.is_locked:
            self.is_locked = True
            self.stack.enter_context(page_locked(self.memory, self.device))


def _groups(items: Sequence[LeafTarget]) -> list[list[LeafTarget]]:
    """Neighbours that fit into a slot."""
    groups: list[list[LeafTarget]] = []
    used = 0
    for item in items:
        if not groups or used + nbytes_of(item) > _SLOT_BYTES:
            groups.append([])
            used = 0
        groups[-1].append(item)
        used += nbytes_of(item)
    return groups


def _place(item: LeafTarget) -> tuple[int, int]:
    """Where the leaf begins: neighbours are read together."""
    return min(((extent.file, extent.offset) for extent in item.entry.extents), default=(0, 0))


def nbytes_of(item: LeafTarget) -> int:
    """What the boxes that this process's devices hold take in memory."""
    regions = item.regions
    size = math.prod(item.entry.shape) if regions is None else sum(region.size for region in regions)
    return -(-size * dtype_from_name(item.dtype).itemsize // ALIGNMENT) * ALIGNMENT
