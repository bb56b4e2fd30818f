"""Read the bytes of placed leaves into host memory: plan, allocate, fetch, check."""

from __future__ import annotations

from contextlib import closing
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from eformer._engine.loading.fetch import check_pieces, prepare, raise_damage, together
from eformer._engine.loading.read_plan import plan_reads
from eformer._engine.record.check import is_whole
from eformer._engine.record.dtypes import dtype_from_name
from eformer._engine.record.pieces import ALIGNMENT, offset_within
from eformer._engine.tasks.pool import in_turn, run_all
from eformer._engine.tasks.progress import SILENT, Meter
from eformer.errors import CorruptionError, FormatError

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Sequence

    from eformer._engine.formats.found import Found
    from eformer._engine.loading.read_plan import Read
    from eformer._engine.loading.select import LeafTarget
    from eformer._engine.record.boxes import Box
    from eformer._engine.record.manifest import TreeEntry
    from eformer._engine.stores.base import Files

Array = np.ndarray[Any, Any]

_LARGE_FILE = 2**20
_MANY = 8  # for fewer files, starting threads takes longer than asking for the lengths


def nbytes_read(tree: TreeEntry, targets: Sequence[LeafTarget]) -> int:
    """Return the number of bytes that a load reads for the targets."""
    wants = [target for target in targets if target.is_stored]
    return sum(read.nbytes for read in plan_reads(wants, tree))


def read_targets(
    found: Found,
    tree: TreeEntry,
    targets: Sequence[LeafTarget],
    threads: int,
    *,
    verify: bool,
    mmap: bool = False,
    meter: Meter = SILENT,
) -> None:
    """Read the stored arrays of targets into host memory; with `mmap`, map arrays instead where that is possible."""
    targets = [target for target in targets if target.is_stored]
    reading = Reading(found, tree, verify=verify, meter=meter)
    with closing(reading.files) as files:
        if mmap:
            targets = reading.map(targets, threads)
        reads = plan_reads(targets, tree, found.store.read_bytes)
        run_all(reading.tasks(targets, reads), threads)
        require_unchanged(tree, files)


class Reading:
    """Read targets of one tree. Call `map` or `tasks` for some targets at a time, then `require_unchanged`, then close
    the `files`."""

    def __init__(self, found: Found, tree: TreeEntry, *, verify: bool, meter: Meter = SILENT) -> None:
        self.tree, self.verify, self.meter = tree, verify, meter
        self.store, self.files = found.store, found.files(tree)
        self.threads = found.store.read_threads
        self.claimed = [0] * len(tree.files)

    def map(self, targets: Sequence[LeafTarget], threads: int) -> Sequence[LeafTarget]:
        """Map the targets whose files hold the wanted bytes unchanged; return the targets that have to be read."""
        others, wants = [], []
        memory_of = cache(self.files.map)  # None for a file system that cannot map
        for target in targets:
            arrays = _mapped(target, self.tree, memory_of)
            if arrays is None:
                others.append(target)
            else:
                target.arrays = arrays
                wants.append(target)
        if self.verify:
            on_damage = partial(raise_damage, self.store.path_to)
            check_pieces(wants, self.tree, self.files, threads, on_damage, self.meter)
        return others

    def tasks(
        self,
        targets: Sequence[LeafTarget],
        reads: Sequence[Read],
        *,
        memory: Array | None = None,
        end: Callable[[], None] | None = None,
        is_claimed: bool = False,
        checked_later: Container[int] = (),
    ) -> list[Callable[[], None]]:
        """Return tasks that carry out the reads of some targets; the last task to finish calls `end`.

        Large arrays are taken from `memory` while it lasts. `is_claimed` says that `claim` has counted their bytes.
        `checked_later` has the numbers of the targets whose pieces are checked on their devices.
        """
        needed = {read.file for read in reads}
        self.files.hold(needed)
        if not is_claimed:
            self.require_space([(read.file, read.nbytes) for read in reads])
        _require_length(self.tree, targets, needed, self.files, self.threads)
        fetching = prepare(
            targets,
            self.tree,
            self.files,
            verify=self.verify,
            memory=memory,
            meter=self.meter,
            path_to=self.store.path_to,
            checked_later=checked_later,
        )

        def hand_over() -> None:
            for target, arrays in zip(targets, fetching.arrays, strict=True):
                target.arrays = arrays
            if end:
                end()

        groups = together(reads, self.threads)
        return in_turn([partial(fetching.carry_out, some) for some in groups], hand_over)

    def claim(self, target: LeafTarget) -> None:
        """Count the bytes of a leaf that is read in parts afterwards."""
        self.require_space([(extent.file, extent.nbytes) for extent in target.entry.extents])

    def require_space(self, claims: Iterable[tuple[int, int]]) -> None:
        """Refuse leaves that claim more bytes than their file has, before memory is allocated for them."""
        for number, nbytes in claims:
            self.claimed[number] += nbytes
        for file, nbytes in zip(self.tree.files, self.claimed, strict=True):
            if nbytes > file.nbytes:
                raise FormatError(
                    f"the leaves in {file.name!r} claim {nbytes} bytes, but it has {file.nbytes}"
                )


def require_unchanged(tree: TreeEntry, files: Files) -> None:
    """Raise if another program wrote to a file without digests while it was read."""
    if not tree.has_digests and (name := files.rewritten()):
        raise FileNotFoundError(f"{name} was written to while it was being read")


def require_boxes(targets: Iterable[LeafTarget]) -> None:
    """Refuse targets with a wanted box that is not stored: its memory would stay uninitialised."""
    for target in targets:
        entry = target.entry
        stored = [entry.region_of(extent) for extent in entry.extents]
        for box in target.wanted:
            there = sum(overlap.size for other in stored if (overlap := box.overlap(other)))
            if target.is_stored and there != box.size:
                raise FormatError(
                    f"leaf {target.name!r}: {box.slices} of {entry.described} is not among the boxes of this process"
                )


def _require_length(
    tree: TreeEntry, targets: Sequence[LeafTarget], needed: Iterable[int], files: Files, threads: int
) -> None:
    """Refuse large files that are shorter than their leaves, before memory is allocated for the leaves."""
    lengths = [file.nbytes for file in tree.files]

    def look(number: int) -> None:
        lengths[number] = files.nbytes(number)

    large = [number for number in needed if lengths[number] > _LARGE_FILE and not tree.is_database]
    if not large:
        return
    run_all([partial(look, number) for number in large], threads if len(large) >= _MANY else 1)
    if all(length >= file.nbytes for length, file in zip(lengths, tree.files, strict=True)):
        return
    for target in targets:
        for extent in target.entry.extents:
            file = tree.files[extent.file]
            stop = file.header_nbytes + extent.offset + extent.nbytes
            if stop > lengths[extent.file]:
                raise CorruptionError(
                    f"leaf {target.name!r}: {tree.path_of(extent.file)} was cut short: it ends after "
                    f"{lengths[extent.file]} bytes, the leaf after {stop}; restore the file from a copy, or load "
                    "an older checkpoint"
                )


# ------------------------------------------------------------------------------------------ mapped files


def _mapped(
    target: LeafTarget, tree: TreeEntry, memory_of: Callable[[int], Array | None]
) -> list[Array] | None:
    """Return the arrays of the wanted boxes of a target, without reading them.

    Return None if a box does not lie in a file unchanged and aligned: XLA aliases aligned memory only, and copies other
    memory, which is slower than reading.
    """
    found: list[Array] = []
    if target.dtype != target.entry.dtype:
        return None
    for box in target.wanted:
        array = _mapped_box(target, box, tree, memory_of)
        if array is None:
            return None
        found.append(array)
    return found


def _mapped_box(
    target: LeafTarget, box: Box, tree: TreeEntry, memory_of: Callable[[int], Array | None]
) -> Array | None:
    entry, dtype = target.entry, dtype_from_name(target.entry.dtype)
    alignment = max(1 if target.as_numpy else ALIGNMENT, dtype.alignment)
    for extent in entry.extents:
        before = offset_within(box, entry.region_of(extent))
        if before is None or not box.size or is_whole(entry, extent):
            continue
        start = tree.files[extent.file].header_nbytes + extent.offset + before * dtype.itemsize
        memory = memory_of(extent.file)
        if memory is None or start % alignment:
            return None
        if start + box.size * dtype.itemsize > len(memory):
            raise CorruptionError(
                f"leaf {target.name!r}: {tree.path_of(extent.file)} was cut short: it ends after {len(memory)} "
                "bytes; restore the file from a copy, or load an older checkpoint"
            )
        return np.ndarray(box.shape, dtype, memory, start)
    return None
