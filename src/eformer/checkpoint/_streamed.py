"""Leaves on their way to accelerators: a part of them at a time, through page-locked memory of a fixed size.

From page-locked memory an accelerator copies several times as fast; but to lock memory takes longer than to copy it,
and what XLA locks for its own transfers it never gives back. So a few slots are locked, and used again and again.
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
from eformer.checkpoint._read import read
from eformer.checkpoint._transfer import aligned

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from eformer.checkpoint._formats._found import Found
    from eformer.checkpoint._items import Item
    from eformer.checkpoint._manifest import TreeEntry

LOCKED_BYTES = 2**30  # by one load, at most
_LANES = 4  # so that three are read into while the fourth is copied from
_WORTH_IT = 16 * 2**20


def is_worth_streaming(items: Iterable[Item]) -> bool:
    return sum(map(nbytes_of, items)) >= _WORTH_IT


def stream(
    found: Found, tree: TreeEntry, items: Sequence[Item], threads: int, *, verify: bool
) -> dict[str, Any]:
    """The arrays by name, on their devices when this returns."""
    room = _slot_bytes(items)
    groups = _groups(sorted(items, key=_place), room)
    lanes = min(len(groups), max(1, LOCKED_BYTES // room))
    loaded: dict[str, Any] = {}
    with ExitStack() as stack:
        slots: SimpleQueue[_Slot] = SimpleQueue()
        for _ in range(lanes):
            slots.put(_Slot(room, accelerator_of(items[0]), stack))

        def carry(group: Sequence[Item]) -> None:
            slot = slots.get()
            read(found, tree, group, -(-threads // lanes), verify=verify, memory=slot.memory)
            slot.lock()
            arrays = assemble(group)
            for array in arrays.values():
                array.block_until_ready()
            for item in group:
                item.arrays = ()
            loaded.update(arrays)
            slots.put(slot)

        run_all([partial(carry, group) for group in groups], lanes)
    return loaded


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
    """A part of what may be locked; more if a leaf needs it. A leaf that needs more than all has memory of its own."""
    sizes = [size for item in items if (size := nbytes_of(item)) <= LOCKED_BYTES]
    return min(max([LOCKED_BYTES // _LANES, *sizes]), sum(sizes) or ALIGNMENT)


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
