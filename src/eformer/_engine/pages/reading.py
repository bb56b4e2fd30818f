"""Read the values of a checkpoint once, in bounded memory, measure each leaf, and compare it with an older
checkpoint.

Tests: tests/engine/pages/test_report.py, tests/engine/pages/test_verdicts.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from eformer._engine.pages.changes import LeafChange, measured_change, recorded_change
from eformer._engine.pages.statistics import Collector, Statistics, has_statistics
from eformer._engine.processes.crew import AgainError
from eformer._engine.record.division import WHOLE
from eformer._engine.record.lazy_arrays import StoredLeaf
from eformer._engine.record.pieces import pieces
from eformer._engine.record.text import printable, size
from eformer._engine.tasks.memory import resident_bytes
from eformer._engine.tasks.pool import default_threads, run_all
from eformer._engine.tasks.progress import metered
from eformer._engine.tools.compare import Comparison
from eformer.errors import EformerError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy as np

    from eformer._engine.pages.contents import Leaf, PageContents
    from eformer._engine.record.division import Portion
    from eformer._engine.tasks.progress import Meter, Progress
    from eformer._engine.tools.view import View

_DEFAULT_MEMORY = 10**9  # bytes
_LEAST = 64 * 10**6  # bytes beyond the present size of the program
_WORKING = 8 * 2**20  # bytes of a thread besides its boxes
_BOX_BYTES = 16 * 2**20
_LEAST_BOX = 2**18
_BATCH = 2048  # leaves


@dataclass(frozen=True, slots=True)
class Measured:
    """The result of reading a leaf.

    problem      why the leaf could not be read
    is_damaged   whether its bytes are missing or do not match their digests
    is_checked   whether every byte was compared with its digest
    """

    statistics: Statistics | None = None
    change: LeafChange | None = None
    problem: str | None = None
    is_damaged: bool = False
    is_checked: bool = False


@dataclass(frozen=True, slots=True)
class Room:
    """A bound on memory: the number of threads, and the bytes of one box of each thread."""

    threads: int
    box: int

    @classmethod
    def within(cls, memory: int | None, *, sides: int = 1) -> Room:
        """Divide `memory`, the most bytes that the program takes; None for 1 GB more than it takes now.

        A box is in memory up to five times: as bytes, as elements, as elements that are being widened, and in freed
        memory of earlier boxes that the allocator keeps.
        """
        taken = resident_bytes()
        free = _DEFAULT_MEMORY if memory is None else memory - taken
        if free < _LEAST:
            raise ValueError(
                f"memory={size(memory or 0)} is not enough: the program itself takes {size(taken)}; allow at least "
                f"{size(taken + _LEAST)}"
            )
        threads = max(1, min(default_threads(), free // _LEAST))
        share = free // threads - _WORKING
        return cls(threads, max(_LEAST_BOX, min(_BOX_BYTES, share // (5 * sides))))


def measure(
    contents: PageContents,
    other: PageContents | None = None,
    *,
    memory: int | None = None,
    progress: Progress = None,
    part: Portion = WHOLE,
) -> dict[str, Measured]:
    """Read every array of a part once, and return the results by the paths of the leaves.

    Check bytes against their digests, where the format has digests. A damaged leaf does not stop the rest. Arrays of
    `other` are read only if the records do not say that they are the same.
    """
    room = Room.within(memory, sides=1 if other is None else 2)
    leaves = _leaves_of([leaf for leaf in contents.leaves if leaf.entry], part)
    pairs = [_Pair(contents, leaf, other) for leaf in leaves]
    found: dict[str, Measured] = {}
    total = contents.nbytes if part == WHOLE else sum(pair.entry.nbytes for pair in pairs)
    with metered(progress, total, "reading") as meter:
        run_all(list(_tasks(pairs, room, found, meter)), room.threads)
    return found


def _leaves_of(leaves: Sequence[Leaf], part: Portion) -> list[Leaf]:
    """Return the leaves of a part: their middle lies in its share of all bytes. One process counts a whole leaf, so
    the statistics do not depend on the number of processes."""
    weights = [leaf.entry.nbytes + 1 for leaf in leaves if leaf.entry]
    share = part.share(sum(weights))
    starts = accumulate(weights, initial=0)
    found = zip(leaves, weights, starts, strict=False)
    return [leaf for leaf, weight, start in found if start + weight // 2 in share]


class MeasuredPart(Struct):
    """The leaves that a part has read. `digests` tells whether parts have read the same checkpoints."""

    digests: list[str]
    leaves: dict[str, Measured]


def joined_parts(parts: Sequence[MeasuredPart]) -> MeasuredPart:
    """Join the leaves of all parts. Raise AgainError if a checkpoint was replaced meanwhile."""
    if any(part.digests != parts[0].digests for part in parts):
        raise AgainError
    return MeasuredPart(parts[0].digests, {path: one for part in parts for path, one in part.leaves.items()})


class _Pair:
    """A leaf, and its counterpart in the older checkpoint, if one is compared."""

    def __init__(self, contents: PageContents, leaf: Leaf, other: PageContents | None) -> None:
        assert leaf.entry
        self.leaf, self.entry = leaf, leaf.entry
        self.view: View = contents.views[leaf.prefix]
        self.other = other.counterpart(leaf, contents) if other else None
        self.other_view = other.views[self.other.prefix] if other and self.other else None
        self.change = recorded_change(contents, leaf, other) if other else None
        self.dtype = StoredLeaf(self.view, leaf.name, self.entry).dtype
        self.is_compared = other is not None and self.change is None

    @property
    def nbytes(self) -> int:
        other = self.other.entry if self.other else None
        return max(self.entry.nbytes, other.nbytes if other and self.is_compared else 0)


def _tasks(
    pairs: Sequence[_Pair], room: Room, found: dict[str, Measured], meter: Meter
) -> Iterator[Callable[[], None]]:
    """Yield tasks, the largest leaves first: each reads one leaf box by box, or a batch of small leaves."""
    large = [pair for pair in pairs if not _is_small(pair, room)]
    for pair in sorted(large, key=lambda pair: -pair.nbytes):
        yield partial(_measure_large, pair, room, found, meter)
    for batch in _batches([pair for pair in pairs if _is_small(pair, room)], room.box):
        yield partial(_measure_batch, batch, room, found, meter)


def _is_small(pair: _Pair, room: Room) -> bool:
    stored = StoredLeaf(pair.view, pair.leaf.name, pair.entry)
    elements = stored.dtype.itemsize * max(1, pair.leaf.params)
    return max(pair.nbytes, elements, stored.decoded_nbytes) <= room.box // 4


def _batches(pairs: Sequence[_Pair], most: int) -> Iterator[list[_Pair]]:
    """Group small leaves of the same trees so that each group fits into one box."""
    batch: list[_Pair] = []
    nbytes = 0
    for pair in pairs:
        is_other = bool(batch) and (pair.view, pair.other_view) != (batch[0].view, batch[0].other_view)
        if batch and (nbytes + pair.nbytes > most or len(batch) == _BATCH or is_other):
            yield batch
            batch, nbytes = [], 0
        batch.append(pair)
        nbytes += pair.nbytes
    if batch:
        yield batch


_READ_ERRORS = (EformerError, OSError)


def _measure_batch(batch: Sequence[_Pair], room: Room, found: dict[str, Measured], meter: Meter) -> None:
    try:
        arrays = batch[0].view.read_all([pair.leaf.name for pair in batch])
        others: dict[str, np.ndarray[Any, Any]] = {}
        if compared := [pair.other.name for pair in batch if pair.is_compared and pair.other]:
            assert batch[0].other_view
            others = batch[0].other_view.read_all(compared)
    except _READ_ERRORS:  # of one leaf: read each alone to find it
        for pair in batch:
            _measure_large(pair, room, found, meter)
        return
    for pair in batch:
        other = others[pair.other.name] if pair.is_compared and pair.other else None
        found[pair.leaf.path] = _measured(pair, [(arrays[pair.leaf.name], other)])
        meter.add(pair.entry.nbytes)


def _measured(pair: _Pair, boxes: Any) -> Measured:
    collector = Collector(pair.dtype) if has_statistics(pair.dtype) and not pair.entry.key else None
    comparison = Comparison() if pair.is_compared else None
    for box, other in boxes:
        if collector:
            collector.add(box)
        if comparison:
            comparison.add(other, box)
        del box, other  # frees their memory for the next boxes
    change = measured_change(pair.leaf, pair.other, comparison) if comparison and pair.other else pair.change
    statistics = collector.result() if collector else None
    return Measured(statistics, change, is_checked=pair.view.tree.has_digests)


def _measure_large(pair: _Pair, room: Room, found: dict[str, Measured], meter: Meter) -> None:
    found[pair.leaf.path] = _measured_by_boxes(pair, _boxes(pair, room))
    meter.add(pair.entry.nbytes)


def _measured_by_boxes(pair: _Pair, boxes: Iterator[tuple[Any, Any]]) -> Measured:
    try:
        return _measured(pair, boxes)
    except TooLargeError as error:
        return Measured(problem=str(error))
    except _READ_ERRORS as error:
        return Measured(problem=printable(str(error)), is_damaged=True)


def measure_one(
    contents: PageContents, leaf: Leaf, other: PageContents | None = None, *, before_box: Callable[[], None]
) -> Measured:
    """Read one array, box by box, and compare it with its counterpart. Call `before_box` before each box; it may raise
    to give up."""

    def watched() -> Iterator[tuple[Any, Any]]:
        before_box()
        for box in _boxes(pair, Room(1, _BOX_BYTES)):
            yield box
            before_box()

    pair = _Pair(contents, leaf, other)
    return _measured_by_boxes(pair, watched())


class TooLargeError(Exception):
    """A leaf needs more memory than `memory` allows."""


def _boxes(pair: _Pair, room: Room) -> Iterator[tuple[Any, Any]]:
    one = _stored(pair.view, pair.leaf, room)
    other = _stored(pair.other_view, pair.other, room) if pair.is_compared else None
    itemsize = max(one.dtype.itemsize, other.dtype.itemsize if other else 0)
    for box in pieces(one.shape, itemsize, room.box):
        yield one.read(box), other.read(box) if other else None
    one.forget()


def _stored(view: View | None, leaf: Leaf | None, room: Room) -> StoredLeaf:
    assert view
    assert leaf
    assert leaf.entry
    stored = StoredLeaf(view, leaf.name, leaf.entry)
    if stored.decoded_nbytes > room.box * 3:
        raise TooLargeError(
            f"not read: it is stored in chunks, which take {size(stored.decoded_nbytes)} when decoded, more than "
            "--memory allows"
        )
    if stored.decoded_nbytes:
        stored.threads = 1
    return stored


def compared(
    contents: PageContents, leaf: Leaf, others: PageContents, other: Leaf, room: Room, *, is_same: bool
) -> Comparison:
    """Compare a leaf with its counterpart in an earlier checkpoint. With `is_same`, read the earlier leaf alone."""
    before = _stored(others.views[other.prefix], other, room)
    now = before if is_same else _stored(contents.views[leaf.prefix], leaf, room)
    found = Comparison()
    for box in pieces(before.shape, max(now.dtype.itemsize, before.dtype.itemsize), room.box):
        elements = before.read(box)
        found.add(elements, elements if is_same else now.read(box))
    return found
