"""Compare two checkpoints of any formats and shardings. No jax."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from eformer._engine.formats.find import reading, reread_all
from eformer._engine.processes.crew import AgainError, divided
from eformer._engine.record.boxes import Box
from eformer._engine.record.lazy_arrays import StoredLeaf
from eformer._engine.record.manifest import UNREADABLE, LeafEntry, parse_structure
from eformer._engine.record.pieces import pieces
from eformer._engine.record.text import few, glance
from eformer._engine.tasks.interrupts import uninterrupted
from eformer._engine.tasks.progress import metered
from eformer._engine.tools.compare import (
    Comparison,
    Plain,
    became_text,
    describe,
    number,
    plain_became,
    recorded_difference,
)
from eformer._engine.tools.view import View

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from concurrent.futures import Executor

    from eformer._engine.formats.found import Found
    from eformer._engine.loading.read_plan import Want
    from eformer._engine.processes.crew import Crew
    from eformer._engine.record.division import Portion
    from eformer._engine.tasks.progress import Meter, Progress
    from eformer._engine.tools.compare import Array

_BOX_BYTES = (
    16 * 2**20
)  # of each side in memory at a time; differences take several times as much, in wider numbers
_BATCH_BYTES = 64 * 2**20
_BATCH = 4096


@dataclass(frozen=True, slots=True)
class ChangedLeaf:
    """A leaf that differs between two checkpoints.

    before, after   dtype and shape, or the plain value
    largest, mean   the largest and the mean absolute difference of the elements; None if the shapes differ
    share           the fraction of elements that differ: in their bits if the dtypes are equal, else in their values
    became_nan      the number of elements that were finite before, and now are NaN
    became_inf      the number of elements that were finite before, and now are infinite
    """

    name: str
    before: str
    after: str
    largest: float | None = None
    mean: float | None = None
    share: float | None = None
    became_nan: int = 0
    became_inf: int = 0

    @property
    def became(self) -> int:
        """Return the number of elements that were finite before, and now are NaN or infinite."""
        return self.became_nan + self.became_inf

    def __str__(self) -> str:
        described = self.before if self.before == self.after else f"{self.before} -> {self.after}"
        parts = [self.name, became_text(self.became_nan, self.became_inf), described]
        if self.share is not None:
            parts.append(
                f"largest difference {self.largest:.3g}, mean {self.mean:.3g}, "
                f"in {100 * self.share:.5g}% of the elements"
            )
        return ": ".join(filter(None, parts))


@dataclass(frozen=True, slots=True)
class Diff:
    """The differences between the checkpoints `a` and `b`. `print` shows them.

    added       leaves that only `b` has: names, with dtypes and shapes or values
    removed     leaves that only `a` has
    changed     leaves that differ; leaves that became NaN or infinite come first
    unchanged   the number of equal leaves
    notes       differences outside the leaves: kinds of containers, metadata, files that were not compared

    Example:

        >>> found = checkpoint.diff("run/step-100", "run/step-200")
        >>> found.same, found.unchanged
        (False, 1)
    """

    a: str
    b: str
    added: dict[str, str]
    removed: dict[str, str]
    changed: tuple[ChangedLeaf, ...]
    unchanged: int
    notes: tuple[str, ...]

    @property
    def same(self) -> bool:
        """Tell whether all leaves are equal."""
        return not (self.added or self.removed or self.changed)

    def __repr__(self) -> str:
        return glance(str(self))

    def __str__(self) -> str:
        lines = [
            f"{self.a} and {self.b}: {'leaves the same' if self.same else 'different'}, {self._counts()}"
        ]
        lines += [f"~ {change}" for change in self.changed if change.became]
        lines += [f"- {name}: {text}" for name, text in self.removed.items()]
        lines += [f"+ {name}: {text}" for name, text in self.added.items()]
        lines += [f"~ {change}" for change in self.changed if not change.became]
        return "\n".join(lines + [f"! {note}" for note in self.notes])

    def _counts(self) -> str:
        counts = {
            "became NaN or infinite": sum(change.became > 0 for change in self.changed),
            "added": len(self.added), "removed": len(self.removed), "changed": len(self.changed),
            "unchanged": self.unchanged,
        }  # fmt: skip
        return ", ".join(f"{count} {kind}" for kind, count in counts.items() if count) or "no leaves"


@uninterrupted
def diff(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    prefix: str | None = None,
    progress: Progress = None,
    executor: Executor | Crew | None = None,
) -> Diff:
    """Compare every leaf of the checkpoint `a` with that of `b`, and return all differences.

    Formats and shardings may differ. Leaves are read a few at a time, in bounded memory, and checked against their
    digests. Leaves of one dtype are equal if their bits are equal: 0.0 and -0.0 differ, and so do two NaNs with
    different bits. Leaves that became NaN or infinite come first. Several trees are matched by prefix; `prefix`
    compares one tree alone. If a checkpoint is replaced or removed meanwhile, the comparison starts again with the
    newer checkpoint. `progress` is True for a progress bar, or a function of the bytes compared and the total.
    `executor` is a `concurrent.futures.Executor`, whose workers read both checkpoints by their paths and compare a part
    of the bytes each.

    Example:

        >>> found = diff("run/step-100", "run/step-200")
        >>> found.same
        False
        >>> print(found.changed[0])
        params.w: float32[8, 4]: largest difference 1, mean 1, in 100% of the elements
    """
    paths = os.fspath(a), os.fspath(b)
    return divided(
        partial(_compare_part, *paths, prefix),
        _joined,
        _ComparedPart,
        executor=executor,
        progress=progress,
        nbytes=partial(_nbytes_of, *paths, prefix),
        doing="comparing",
    ).as_diff()


class _Compared(Struct):
    """A leaf that both checkpoints have: its description on both sides, and how its elements differ; or the change that
    the records tell."""

    name: str
    described: tuple[str, str] = ("", "")
    values: Comparison | None = None
    recorded: ChangedLeaf | None = None

    def change(self) -> ChangedLeaf | None:
        found = self.values
        if found is None or (not found.differing and self.described[0] == self.described[1]):
            return self.recorded
        return ChangedLeaf(
            self.name,
            *self.described,
            found.farthest,
            found.mean,
            found.share,
            became_nan=found.became_nan,
            became_inf=found.became_inf,
        )


class _ComparedPart(Struct):
    """The result of a part: the leaves by their numbers. The first part has all that the records tell.

    `digests` tells whether parts have read the same checkpoints.
    """

    a: str
    b: str
    digests: list[str] = []
    added: dict[str, str] = {}
    removed: dict[str, str] = {}
    notes: list[str] = []
    leaves: dict[int, _Compared] = {}

    def as_diff(self) -> Diff:
        changes = [self.leaves[at].change() for at in sorted(self.leaves)]
        changed = sorted(filter(None, changes), key=lambda change: not change.became)
        unchanged = len(changes) - len(changed)
        return Diff(self.a, self.b, self.added, self.removed, tuple(changed), unchanged, tuple(self.notes))


def _joined(parts: Sequence[_ComparedPart]) -> _ComparedPart:
    """Join the parts of leaves. Raise AgainError if a checkpoint was replaced meanwhile."""
    first, *others = parts
    for part in others:
        if part.digests != first.digests:
            raise AgainError
        for at, leaf in part.leaves.items():
            there = first.leaves.setdefault(at, leaf)
            if there is not leaf and there.values and leaf.values:
                there.values.merge(leaf.values)
    return first


def _compare_part(a: str, b: str, prefix: str | None, part: Portion, progress: Progress) -> _ComparedPart:
    return reread_all([a, b], lambda found: _compared(a, b, found, prefix, part, progress))


def _nbytes_of(a: str, b: str, prefix: str | None) -> int:
    def add_up(found: Sequence[Found]) -> int:
        pairs = _pairs(found, prefix)
        for pair in pairs:
            pair.close()
        return sum(pair.nbytes for pair in pairs)

    return reread_all([a, b], add_up)


def _compared(
    a: str, b: str, both: Sequence[Found], prefix: str | None, part: Portion, progress: Progress
) -> _ComparedPart:
    pairs = _pairs(both, prefix)
    found = _ComparedPart(a, b, [one.manifest.digest for one in both])
    total, before, first = sum(pair.nbytes for pair in pairs), 0, 0
    share = part.share(total)
    try:
        with metered(progress, len(share), "comparing") as meter:
            for pair in pairs:
                if part.is_first:
                    pair.add_recorded(found, first)
                own = range(share.start - before, share.stop - before)
                pair.compare(found, first, own, meter)
                before, first = before + pair.nbytes, first + len(pair.of_a)
    finally:
        for pair in pairs:
            pair.close()
    return found


class _Side(View):
    """A tree to compare. Reads raise ReplacedError if a newer save has replaced the checkpoint: then compare again."""

    def __init__(self, found: Found, prefix: str) -> None:
        with reading(found):
            super().__init__(found, prefix)

    def _fetch(self, wants: Sequence[Want], threads: int | None = None) -> list[Sequence[Array]]:
        with reading(self._found):
            return super()._fetch(wants, threads)


def _pairs(found: Sequence[Found], prefix: str | None) -> list[_Pair]:
    """Match the trees of both sides: the only tree of each side, or trees with the same prefix."""
    a, b = found
    if prefix is not None:
        return [_Pair(_Side(a, prefix), _Side(b, prefix), "")]
    of_a, of_b = _prefixes(a), _prefixes(b)
    if len(of_a) == len(of_b) == 1:
        return [_Pair(_Side(a, of_a[0]), _Side(b, of_b[0]), "")]
    return [
        _Pair(
            _Side(a, name) if name in of_a else None,
            _Side(b, name) if name in of_b else None,
            f"[{name}] " if name else "",
        )
        for name in dict.fromkeys([*of_a, *of_b])
    ]


def _prefixes(found: Found) -> list[str]:
    with reading(found):
        return list(found.trees)


class _Pair:
    """Two trees to compare. A side is None if it has no tree of this prefix."""

    def __init__(self, a: View | None, b: View | None, label: str) -> None:
        self.a, self.b, self.label = a, b, label
        self.of_a, self.of_b = _leaves(a), _leaves(b)
        # The leaves whose elements must be compared.
        self.arrays = [
            name
            for name, one in self.of_a.items()
            if name in self.of_b and recorded_difference(one, self.of_b[name]) is None
        ]

    def close(self) -> None:
        for view in (self.a, self.b):
            if view:
                view.close()

    @property
    def nbytes(self) -> int:
        return sum(self.of_a[name].nbytes for name in self.arrays)

    def add_recorded(self, found: _ComparedPart, first: int) -> None:
        """Add everything that the records tell. `first` is the number of the first leaf."""
        found.removed |= {self.label + n: describe(v) for n, v in self.of_a.items() if n not in self.of_b}
        found.added |= {self.label + n: describe(v) for n, v in self.of_b.items() if n not in self.of_a}
        compared = set(self.arrays)
        for at, (name, before) in enumerate(self.of_a.items(), first):
            if name in self.of_b and name not in compared:
                change = self.recorded_change(name, before, self.of_b[name])
                found.leaves[at] = _Compared(self.label + name, recorded=change)
        if self.a and self.b:
            found.notes += [self.label + note for note in _notes(self.a, self.b)]

    def compare(self, found: _ComparedPart, first: int, own: range, meter: Meter) -> None:
        """Compare the elements of the boxes that begin in the bytes `own` of this pair."""
        numbers = {name: number for number, name in enumerate(self.of_a, first)}
        for name, values in self.compare_values(own, meter):
            described = describe(self.of_a[name]), describe(self.of_b[name])
            found.leaves[numbers[name]] = _Compared(self.label + name, described, values)

    def recorded_change(self, name: str, before: Any, after: Any) -> ChangedLeaf | None:
        if not recorded_difference(before, after):
            return None
        described = describe(before), describe(after)
        if isinstance(before, Plain) != isinstance(after, Plain):
            before, of_before = self.with_value(self.a, name, before)
            after, of_after = self.with_value(self.b, name, after)
            described = of_before, of_after
        nan, inf = plain_became(before, after)
        return ChangedLeaf(self.label + name, *described, became_nan=nan, became_inf=inf)

    def with_value(self, view: View | None, name: str, leaf: Any) -> tuple[Any, str]:
        """Return the number and the description of a leaf, if a plain value became an array without axes or the
        reverse."""
        if not view or not isinstance(leaf, LeafEntry) or leaf.shape:
            return leaf, describe(leaf)
        array = view.read_all([name])[name]
        return leaf if leaf.key else number(array), f"{describe(leaf)} = {array}"

    def compare_values(self, own: range, meter: Meter) -> Iterator[tuple[str, Comparison]]:
        """Compare many small leaves read together, or one large leaf box by box."""
        assert not self.arrays or (self.a and self.b)
        starts = dict(zip(self.arrays, accumulate(self._sizes(), initial=0), strict=False))
        for names in _batches(
            [name for name in self.arrays if self._is_own(starts[name], name, own)], self.of_a
        ):
            if len(names) > 1:
                of_a, of_b = self.a.read_all(names), self.b.read_all(names)  # type: ignore[union-attr]
                yield from ((name, Comparison(with_norm=False).add(of_a[name], of_b[name])) for name in names)
                meter.add(sum(self.of_a[name].nbytes for name in names))
            else:
                yield names[0], self.compare_boxes(names[0], starts[names[0]], own, meter)

    def _sizes(self) -> Iterator[int]:
        return (self.of_a[name].nbytes for name in self.arrays)

    def _is_own(self, start: int, name: str, own: range) -> bool:
        """Tell whether a box of a leaf may begin in these bytes: small leaves have one box. A leaf without bytes at the
        very end counts for the byte before it."""
        nbytes = self.of_a[name].nbytes
        if nbytes > _BOX_BYTES:
            return start < own.stop and own.start < start + nbytes
        return min(start, max(self.nbytes - 1, 0)) in own or (self.nbytes == 0 and own.start <= 0)

    def compare_boxes(self, name: str, start: int, own: range, meter: Meter) -> Comparison:
        assert self.a
        assert self.b
        one, other = StoredLeaf(self.a, name, self.of_a[name]), StoredLeaf(self.b, name, self.of_b[name])
        tally, nbytes, done = Comparison(with_norm=False), self.of_a[name].nbytes, 0
        elements = max(1, Box.whole(one.shape).size)
        for box in pieces(one.shape, max(one.dtype.itemsize, other.dtype.itemsize), _BOX_BYTES):
            is_own = nbytes <= _BOX_BYTES or start + nbytes * done // elements in own
            if is_own:
                tally.add(one.read(box), other.read(box))
                meter.add(nbytes * (done + box.size) // elements - nbytes * done // elements)
            done += box.size
        return tally


def _leaves(view: View | None) -> dict[str, Any]:
    """Return the entries of arrays and the plain values, by name."""
    if view is None:
        return {}
    tree = view.tree
    return {**tree.leaves, **{name: Plain(value) for name, value in tree.raw_values.items()}}


def _batches(names: Sequence[str], entries: dict[str, Any]) -> Iterator[list[str]]:
    """Yield names of small leaves in batches, and the name of each large leaf alone."""
    batch: list[str] = []
    total = 0
    for name in names:
        nbytes = entries[name].nbytes
        if nbytes > _BOX_BYTES:
            yield [name]
            continue
        if batch and (total + nbytes > _BATCH_BYTES or len(batch) == _BATCH):
            yield batch
            batch, total = [], 0
        batch.append(name)
        total += nbytes
    if batch:
        yield batch


def _notes(a: View, b: View) -> Iterator[str]:
    one, other = (parse_structure(view.tree.structure) for view in (a, b))
    is_known = not any(isinstance(side, dict) and UNREADABLE in side for side in (one, other))
    if is_known and set(a) == set(b) and one != other:
        yield "some containers are of different kinds, such as a list and a dict"
    if changes := list(_metadata_changes(a.tree.raw_metadata, b.tree.raw_metadata)):
        yield f"the metadata differs: {few(changes)}"
    for view in (a, b):
        if view.left_out:
            yield f"not compared, and may hold leaves: {few(view.left_out)}"


def _metadata_changes(before: dict[str, Any], after: dict[str, Any]) -> Iterator[str]:
    for name in {**before, **after}:
        if name not in after:
            yield f"{name} removed"
        elif name not in before:
            yield f"{name} added"
        elif before[name] != after[name]:
            yield f"{name} changed"
