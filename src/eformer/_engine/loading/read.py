"""The bytes of leaves that a load has placed: planned, read and checked, in host memory."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from eformer._engine.loading.fetch import check, prepare, raise_damage
from eformer._engine.loading.mapped import MappedFiles
from eformer._engine.loading.read_plan import READ_BYTES, Read, Want, plan_reads
from eformer._engine.record.pieces import ALIGNMENT
from eformer._engine.tasks.pool import in_turn, run_all
from eformer._engine.tasks.progress import SILENT, Meter
from eformer.errors import CorruptionError, FormatError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import numpy as np

    from eformer._engine.formats.found import Found
    from eformer._engine.loading.select import LeafTarget
    from eformer._engine.record.manifest import TreeEntry
    from eformer._engine.stores.base import Files

_MUCH = 2**20  # bytes of one file


def nbytes_read(tree: TreeEntry, items: Sequence[LeafTarget]) -> int:
    """What `read` and `stream` read until the items have their arrays."""
    return sum(read.nbytes for read in plan_reads([_want(item) for item in items], tree))


def read(
    found: Found,
    tree: TreeEntry,
    items: Sequence[LeafTarget],
    threads: int,
    *,
    verify: bool,
    mmap: bool = False,
    meter: Meter = SILENT,
) -> None:
    """The items have their arrays; with `mmap` those that can be are the files themselves."""
    reading = Reading(found, tree, verify=verify, meter=meter)
    try:
        if mmap:
            items = reading.map(items, threads)
        run_all(reading.tasks(items), threads)
        reading.require_unwritten()
    finally:
        reading.close()


class Reading:
    """Reads items of one tree, by and by. Whoever made it closes it."""

    def __init__(self, found: Found, tree: TreeEntry, *, verify: bool, meter: Meter = SILENT) -> None:
        self.tree, self.verify, self.meter = tree, verify, meter
        self.files = found.files(tree)
        self.claimed = [0] * len(tree.files)

    def close(self) -> None:
        self.files.close()

    def require_unwritten(self) -> None:
        """Refuses what was read while somebody wrote to the file, if there are no digests to tell by."""
        if not self.tree.has_digests and (name := self.files.rewritten()):
            raise FileNotFoundError(f"{name} was written to while it was read")

    def map(self, items: Sequence[LeafTarget], threads: int) -> Sequence[LeafTarget]:
        """Items that are in their files as they are wanted have their arrays; the others are returned."""
        mapping, others, wants = MappedFiles(self.tree, self.files), [], []
        for item in items:
            want = _want(item)
            # XLA takes only what is aligned; anything else it copies, which is slower than to read it.
            found = mapping.arrays(want, 1 if item.as_numpy else ALIGNMENT)
            if found is None:
                others.append(item)
            else:
                item.arrays = found
                wants.append(want)
        if self.verify:
            check(wants, self.tree, self.files, threads, raise_damage, self.meter)
        return others

    def tasks(
        self,
        items: Sequence[LeafTarget],
        *,
        memory: np.ndarray[Any, Any] | None = None,
        end: Callable[[], None] | None = None,
        read_bytes: int = READ_BYTES,
    ) -> list[Callable[[], None]]:
        """What is to be done until the items have their arrays, large ones in `memory` as far as it goes; then `end` is
        called. A read takes about `read_bytes`."""
        wants = [_want(item) for item in items]
        reads = plan_reads(wants, self.tree, read_bytes)
        needed = {read.file for read in reads}
        self.files.hold(needed)
        self.require_claims(reads)
        _require_bytes(self.tree, items, needed, self.files)
        fetching = prepare(wants, self.tree, self.files, verify=self.verify, memory=memory, meter=self.meter)

        def hand_over() -> None:
            for item, arrays in zip(items, fetching.arrays, strict=True):
                item.arrays = arrays
            if end:
                end()

        return in_turn([partial(fetching.carry_out, read) for read in reads], hand_over)

    def require_claims(self, reads: Sequence[Read]) -> None:
        """Refuses leaves that claim more bytes than the files have, before memory is allocated for them."""
        for read in reads:
            self.claimed[read.file] += read.nbytes
        for file, nbytes in zip(self.tree.files, self.claimed, strict=True):
            if nbytes > file.nbytes:
                raise FormatError(f"the leaves in {file.name!r} claim {nbytes} bytes, it has {file.nbytes}")


def _want(item: LeafTarget) -> Want:
    return Want(item.name, item.entry, item.dtype, item.regions)


def _require_bytes(tree: TreeEntry, items: Sequence[LeafTarget], needed: Iterable[int], files: Files) -> None:
    """Refuses files that are shorter than the leaves, before much memory is allocated for these."""
    lengths = [file.nbytes for file in tree.files]
    for number in needed:
        if lengths[number] > _MUCH and not tree.is_database:
            lengths[number] = files.nbytes(number)
    if all(length >= file.nbytes for length, file in zip(lengths, tree.files, strict=True)):
        return
    for item in items:
        for extent in item.entry.extents:
            file = tree.files[extent.file]
            stop = file.header_nbytes + extent.offset + extent.nbytes
            if stop > lengths[extent.file]:
                raise CorruptionError(
                    f"leaf {item.name!r}: {tree.path_of(extent.file)} was cut short: it ends after "
                    f"{lengths[extent.file]} bytes, the leaf after {stop}; restore the file from a copy, or load "
                    "an older checkpoint"
                )
