"""Stream leaves to accelerators through a few slots of page-locked memory.

An accelerator copies several times as fast from page-locked memory. But locking memory takes longer than copying it,
and XLA never frees the memory that it locks for its own transfers. So a few slots are locked and reused: while the
device copies from some slots, threads read into other slots. Small leaves share a slot; a large leaf passes through
several, see `large_leaves`.
"""

from __future__ import annotations

import math
import threading
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import lru_cache, partial
from itertools import accumulate
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from eformer._engine.loading.assemble import assemble
from eformer._engine.loading.device_check import (
    DeviceCheck,
    Wrong,
    require_arrived,
    shard_on,
    warn_of,
)
from eformer._engine.loading.device_put import PutShards, Transfer, default_device, wait_for
from eformer._engine.loading.fetch import aligned, check_pieces, raise_damage
from eformer._engine.loading.large_leaves import LargeLeaf, Part
from eformer._engine.loading.placement import default_memory
from eformer._engine.loading.read import Reading, read_targets, require_unchanged
from eformer._engine.loading.read_plan import packed_nbytes, plan_reads
from eformer._engine.loading.slot_split import Sent, Split, splits_of
from eformer._engine.record.dtypes import dtype_from_name
from eformer._engine.tasks.pool import run_all
from eformer._engine.tasks.progress import SILENT, Meter
from eformer._engine.trees import device_digests
from eformer._engine.trees.devices import page_locked, takes_host_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator, Sequence

    from jax.sharding import Sharding

    from eformer._engine.formats.found import Found
    from eformer._engine.loading.read_plan import Read
    from eformer._engine.loading.select import LeafTarget
    from eformer._engine.record.manifest import TreeEntry

_enable_x64: Any = jax.enable_x64  # without types
_config: Any = jax.config  # without types

_SLOT_BYTES = 64 * 2**20  # large enough that starting a transfer takes no time beside the transfer
_SLOTS = 4  # each slot is touched and locked once, which takes longer than a fifth slot would save
_READ_BYTES = 8 * 2**20  # larger than for other reads: with many threads, fewer tasks contend for their turn
_WORTH_IT = 16 * 2**20  # for fewer bytes, locking a slot takes longer than it saves

# A function to call with host memory right before each transfer from it. Tests damage transfers with it.
before_transfer: ContextVar[Callable[[Any], None]] = ContextVar("before_transfer", default=lambda _: None)

# Slots that a device may still copy from after an error, kept until the process ends: if the memory were freed, the
# device would copy whatever the allocator puts there next.
_kept: list[Any] = []


def streamable(targets: list[LeafTarget]) -> tuple[list[LeafTarget], list[LeafTarget]]:
    """Split targets into a list to stream to accelerators, and a list to read into host memory first.

    A leaf is streamed only in its stored form, because a slot is reused before the caller's functions could run.
    Nothing is streamed if all leaves together are too small for the cost of locking memory.
    """
    as_stored = (t for t in targets if t.is_stored and t.new_shape is None and t.read_sharding is None)
    streamed = [target for target in as_stored if accelerator_of(target) is not None]
    # Running totals, because summing thousands of leaves would take longer: the first few are usually enough.
    if not streamed or all(total < _WORTH_IT for total in accumulate(map(nbytes_of, streamed))):
        return [], targets
    names = {target.name for target in streamed}
    return streamed, [target for target in targets if target.name not in names]


def accelerator_of(target: LeafTarget) -> Any:
    """Return one of the target's devices if all of them are accelerators with memory of their own; None otherwise."""
    return None if target.as_numpy else _accelerator(target.sharding, _config.jax_default_device)


@lru_cache(1024)
def _accelerator(sharding: Sharding | None, default: Any) -> Any:
    if sharding is None:
        devices = [default_device(default)]
    elif sharding.memory_kind in (None, default_memory(sharding)):
        devices = list(sharding.addressable_devices)
    else:
        devices = []
    if any(device.platform == "cpu" or takes_host_memory(device) for device in devices):
        return None
    return next(iter(devices), None)


def stream(
    found: Found,
    tree: TreeEntry,
    targets: Sequence[LeafTarget],
    threads: int,
    *,
    verify: bool,
    meter: Meter = SILENT,
) -> dict[str, Any]:
    """Read the targets and return their arrays by name. All arrays are on their devices when this returns."""
    with ExitStack() as stack:
        reading = Reading(found, tree, verify=verify, meter=meter)
        stack.callback(reading.files.close)
        check = DeviceCheck(tree, _SLOT_BYTES) if verify and device_digests.ENABLED else None
        stream = _Stream(targets, tree, stack, check)
        threads = max(2, threads * 7 // 8)  # the other cores are for the transfers
        run_all(stream.tasks(reading), threads, stream.give_up)
        require_unchanged(tree, reading.files)
        wait_for(list(stream.loaded.values()))  # before the exit stack unlocks the slots
        wrong = stream.check.wrong() if stream.check else []
        if stream.check and stream.check.unchecked:
            wants, on_damage = (
                list(stream.check.unchecked.values()),
                partial(raise_damage, found.store.path_to),
            )
            check_pieces(wants, tree, reading.files, threads, on_damage)
    if wrong:
        stream.loaded |= _repeated(wrong, found, tree, threads)
    return stream.loaded


def _repeated(wrong: Sequence[Wrong], found: Found, tree: TreeEntry, threads: int) -> dict[str, Any]:
    """Read leaves once more whose bytes on a device are wrong, check them in host memory, and transfer them again.

    Raise a CorruptionError if a file is damaged, and a TransferError if the second transfer fails, too.
    """
    targets = list({target.name: target for target, _, _ in wrong}.values())
    read_targets(found, tree, targets, threads, verify=True)
    warn_of(wrong, tree)
    for target in targets:
        for array in target.arrays:
            before_transfer.get()(array.reshape(-1).view(np.uint8))
    arrays = assemble(targets)
    wait_for(list(arrays.values()))
    require_arrived(wrong, arrays, tree)
    return arrays


class _Leaves:
    """Whole leaves that fit into one slot, or a leaf with memory of its own."""

    def __init__(
        self, targets: list[LeafTarget], loaded: dict[str, Any], put: PutShards, split: Split | None = None
    ) -> None:
        self.targets, self.loaded, self.put, self.split = targets, loaded, put, split
        self.check: Callable[[], None] | None = None

    def plan_check(self, check: DeviceCheck, reads: Sequence[Read], default: Any) -> Container[int]:
        """Plan the check on the devices, and return the numbers of the targets that the host need not check."""
        checks = check.of_leaves(self.targets, reads, default)
        if checks.jobs:
            self.check = partial(
                check.begin, checks, lambda name, device: shard_on(self.loaded[name], device)
            )
        return checks.wants

    def move(self, memory: np.ndarray[Any, Any]) -> Transfer:
        """Begin to move the leaves to their devices. The memory is free when the arrays of the result are ready."""
        # One transfer for most leaves, if the program that cuts them apart on the device is compiled.
        sent = self.split.send(memory) if self.split else None
        arrays = assemble(self.targets if sent is None else sent.others, self.put)
        for target in self.targets:
            target.arrays = ()  # views of the slot, which is read into again
        self.loaded.update(arrays)
        if sent is None:
            return Transfer(list(arrays.values()), self.check)
        return Transfer([*arrays.values(), sent.data], partial(self.cut, sent))

    def cut(self, sent: Sent) -> None:
        """Cut the slot into arrays, and check them."""
        self.loaded.update(sent.cut())
        if self.check:
            self.check()


class _Stream:
    """Pass leaves through slots of memory: small leaves first, while the programs for large leaves are compiled."""

    def __init__(
        self,
        targets: Sequence[LeafTarget],
        tree: TreeEntry,
        stack: ExitStack,
        check: DeviceCheck | None = None,
    ) -> None:
        self.check, self.before_transfer = check, before_transfer.get()
        self.device, self.stack, self.tree = accelerator_of(targets[0]), stack, tree
        sizes = [(target, nbytes_of(target)) for target in sorted(targets, key=_position)]
        self.small = _groups([(target, nbytes) for target, nbytes in sizes if nbytes <= _SLOT_BYTES])
        self.large = [target for target, nbytes in sizes if nbytes > _SLOT_BYTES]
        # Free slots, or None to end. A SimpleQueue has no lock in Python that a Ctrl-C could leave locked.
        self.slots: SimpleQueue[_Slot | None] = SimpleQueue()
        self.loaded: dict[str, Any] = {}
        self.put = PutShards()
        self.moving = threading.Lock()
        # JAX keeps these settings for each thread. The settings of the calling thread apply in all threads of a load.
        self.default, self.x64 = default_device(_config.jax_default_device), _config.jax_enable_x64
        self.splits = splits_of(self.small, tree.block, self.default, x64=self.x64)
        total = sum(nbytes for _, nbytes in sizes)
        self.count = min(_SLOTS, max(1, -(-total // _SLOT_BYTES)))
        for _ in range(self.count):
            self.slots.put(_Slot(aligned(min(_SLOT_BYTES, total)), self.device, stack))

    def tasks(self, reading: Reading) -> Iterator[Callable[[], None]]:
        """Yield tasks that read all leaves and move them to their devices.

        One thread at a time asks for the next task. It waits here for a free slot, which cannot deadlock: other threads
        carry out all reads into the slots that are in use, and the last read of a slot hands it on.
        """
        for batch in self.batches(reading):
            # Planned before the slot is asked for, while other threads read.
            reads = plan_reads(batch.targets, self.tree, _READ_BYTES, is_packed=True)
            checked_later = batch.plan_check(self.check, reads, self.default) if self.check else ()
            slot = self.slots.get()
            if slot is None:
                return
            yield from self.rest_of(slot)
            arrive = partial(self.arrive, batch, slot)
            is_claimed = isinstance(batch, Part)
            yield from reading.tasks(
                batch.targets,
                reads,
                memory=slot.memory,
                end=arrive,
                is_claimed=is_claimed,
                checked_later=checked_later,
            )
        for _ in range(self.count):  # the last transfers, whose programs no further read would start
            slot = self.slots.get()
            if slot is None:
                return
            yield from self.rest_of(slot)

    def rest_of(self, slot: _Slot) -> Iterator[Callable[[], None]]:
        """Wait until the slot is free, and yield the task that runs programs on the arrays that have arrived.

        The programs read the arrays on the device, not the slot, so another thread can run them during the next read.
        """
        transfer = slot.transfer
        slot.wait()
        if transfer.then:
            yield partial(self.finish, transfer)

    def batches(self, reading: Reading) -> Iterator[_Leaves | Part]:
        large = [
            (target, LargeLeaf.of(target, self.default, _SLOT_BYTES, self.tree, self.loaded, x64=self.x64))
            for target in self.large
        ]
        # The programs of the large leaves are being compiled from here on.
        for group, split in zip(self.small, self.splits, strict=True):
            yield _Leaves(group, self.loaded, self.put, split)
        for target, leaf in large:
            if leaf is None:  # it cannot arrive in parts: its arrays get memory of their own, beside the slot
                yield _Leaves([target], self.loaded, self.put)
            else:
                reading.claim(target)
                yield from leaf.parts()

    def give_up(self) -> None:
        """End the stream after an error, and wake the thread that waits for a slot."""
        self.slots.put(None)

    def arrive(self, batch: _Leaves | Part, slot: _Slot) -> None:
        """Begin to move the leaves of a batch, which have been read, to their devices, and hand the slot on."""
        slot.lock()
        self.before_transfer(slot.memory)
        # One thread at a time: starting a transfer needs the interpreter lock, for which several would only wait.
        with self.moving, self.settings(), slot.lost_on_error():
            slot.transfer = batch.move(slot.memory)
        # The device may still copy: the thread that takes the slot next waits for it, so this one can go on reading.
        self.slots.put(slot)

    def finish(self, transfer: Transfer) -> None:
        """Run programs on arrays that have arrived, while other threads start transfers."""
        # The arrays have arrived, but XLA needs the wait in the thread that runs the programs, see `Transfer`.
        wait_for(transfer.arrays)
        with self.settings():
            assert transfer.then
            transfer.then()

    @contextmanager
    def settings(self) -> Iterator[None]:
        """Apply the settings of the calling thread in this one."""
        with jax.default_device(self.default), _enable_x64(self.x64):
            yield


class _Slot:
    """Memory that threads read into and a device copies from, in turns.

    It is locked after the first read into it, which touches all of its pages: locking pages that were never touched
    takes ten times as long, because the kernel has to allocate and clear each of them.
    """

    def __init__(self, memory: np.ndarray[Any, Any], device: Any, stack: ExitStack) -> None:
        self.memory, self.device, self.stack = memory, device, stack
        self.is_locked = self.is_lost = False
        self.transfer = Transfer(())

    def lock(self) -> None:
        """Lock the memory until the end of the load, unless it is locked."""
        if not self.is_locked:
            self.is_locked = True
            locked = ExitStack()
            locked.enter_context(page_locked(self.memory, self.device))
            self.stack.callback(self.unlock, locked)

    def unlock(self, locked: ExitStack) -> None:
        """Unlock the memory after the last copy from it, also if the load fails."""
        try:
            with self.lost_on_error():
                self.wait()
        finally:
            if self.is_lost:
                _kept.append((self.memory, locked))  # neither unlocked nor freed
            else:
                locked.close()

    @contextmanager
    def lost_on_error(self) -> Iterator[None]:
        """Keep the memory locked until the process ends if an error occurs.

        Copies from it may be under way, and without their arrays the load cannot wait for them.
        """
        try:
            yield
        except BaseException:
            self.is_lost = True
            raise

    def wait(self) -> None:
        """Return when the device has copied all bytes from the memory."""
        wait_for(self.transfer.arrays)
        self.transfer = Transfer(())


def _groups(sizes: Iterable[tuple[LeafTarget, int]]) -> list[list[LeafTarget]]:
    """Group neighbouring leaves that fit into one slot, by the memory that each takes."""
    groups: list[list[LeafTarget]] = []
    used = 0
    for target, nbytes in sizes:
        if not groups or used + nbytes > _SLOT_BYTES:
            groups.append([])
            used = 0
        groups[-1].append(target)
        used += nbytes
    return groups


def _position(target: LeafTarget) -> tuple[int, int]:
    """Return the file and the offset where the leaf starts, as a sort key: neighbours in a file are read together."""
    return min(((extent.file, extent.offset) for extent in target.entry.extents), default=(0, 0))


def nbytes_of(target: LeafTarget) -> int:
    """Return the bytes of memory that the boxes of this process take, each box aligned."""
    boxes, itemsize = target.boxes, dtype_from_name(target.dtype).itemsize
    sizes = [math.prod(target.entry.shape)] if boxes is None else [box.size for box in boxes]
    return sum(packed_nbytes(size * itemsize) for size in sizes)
