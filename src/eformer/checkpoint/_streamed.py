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

from eformer.checkpoint._device import page_locked
from eformer.checkpoint._ndarray import dtype_from_name
from eformer.checkpoint._placed import accelerator_of, assemble
from eformer.checkpoint._plan import ALIGNMENT
from eformer.checkpoint._pool import run_all
from eformer.checkpoint._read import Reading
from eformer.checkpoint._transfer import aligned

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from eformer.checkpoint._formats._found import Found
    from eformer.checkpoint._items import Item
    from eformer.checkpoint._manifest import TreeEntry

LOCKED_BYTES = 2**30  # by one load, at most; half of it unless a leaf needs more
_LOCKED_BYTES = LOCKED_BYTES // 2
_SLOT_BYTES = 64 * 2**20
_SLOTS = 8
_READ_BYTES = 16 * 2**20  # with many threads there are fewer turns to wait for than with small ones
_WORTH_IT = 16 * 2**20


def is_worth_streaming(items: Iterable[Item]) -> bool:
    return sum(map(nbytes_of, items)) >= _WORTH_IT


def stream(
    found: Found, tree: TreeEntry, items: Sequence[Item], threads: int, *, verify: bool
) -> dict[str, Any]:
    """The arrays by name, on their devices when this returns."""
    room = _slot_bytes(items)
    groups = _groups(sorted(items, key=_place), room)
    with ExitStack() as stack:
        reading = Reading(found, tree, verify=verify)
        stack.callback(reading.close)
        stream = _Stream(room, accelerator_of(items[0]), stack)
        threads = max(2, threads * 3 // 4)  # the others are for the transfers
        run_all(stream.tasks(reading, groups), threads, stream.give_up)
    return stream.loaded


class _Stream:
    """Slots of memory, and what has arrived through them."""

    def __init__(self, room: int, device: Any, stack: ExitStack) -> None:
        number = max(1, min(_SLOTS, _LOCKED_BYTES // room), min(2, LOCKED_BYTES // room))
        self.slots: SimpleQueue[_Slot | None] = SimpleQueue()  # no interrupt leaves it locked
        for _ in range(number):
            self.slots.put(_Slot(room, device, stack))
        self.loaded: dict[str, Any] = {}

    def tasks(self, reading: Reading, groups: Sequence[Sequence[Item]]) -> Iterator[Callable[[], None]]:
        for group in groups:
            slot = (
                self.slots.get()
            )  # one is given back: all reads into the others are under way in other threads
            if slot is None:
                return
            arrive = partial(self.arrive, group, slot)
            yield from reading.tasks(group, memory=slot.memory, end=arrive, read_bytes=_READ_BYTES)

    def give_up(self) -> None:
        """Nobody waits for a slot any more."""
        self.slots.put(None)

    def arrive(self, group: Sequence[Item], slot: _Slot) -> None:
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

    def __init__(self, nbytes: int, device: Any, stack: ExitStack) -> None:
        self.memory, self.device, self.stack = aligned(nbytes), device, stack
        self.is_locked = False

    def lock(self) -> None:
        if not self.is_locked:
            self.is_locked = True
            self.stack.enter_context(page_locked(self.memory, self.device))


def _slot_bytes(items: Sequence[Item]) -> int:
    """Room for many reads; more if a leaf needs it. A leaf that needs more than may be locked has memory of its own."""
    sizes = [size for item in items if (size := nbytes_of(item)) <= LOCKED_BYTES]
    return min(max([_SLOT_BYTES, *sizes]), sum(sizes) or ALIGNMENT)


def _groups(items: Sequence[Item], room: int) -> list[list[Item]]:
    groups: list[list[Item]] = []
    used = room
    for item in items:
        if used + nbytes_of(item) > room:
            groups.append([])
            used = 0
        groups[-1].append(item)
        used += nbytes_of(item)
    return groups


def _place(item: Item) -> tuple[int, int]:
    """Where the leaf begins: neighbours are read together."""
    return min(((extent.file, extent.offset) for extent in item.entry.extents), default=(0, 0))


def nbytes_of(item: Item) -> int:
    """What the boxes that this process's devices hold take in memory."""
    regions = item.regions
    size = math.prod(item.entry.shape) if regions is None else sum(region.size for region in regions)
    return -(-size * dtype_from_name(item.dtype).itemsize // ALIGNMENT) * ALIGNMENT
