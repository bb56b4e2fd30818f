"""Compare two checkpoints of any formats and shardings. No jax."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from eformer._engine.formats.find import reading, reread_all
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
    import os
    from collections.abc import Iterator, Sequence

    from eformer._engine.formats.found import Found
    from eformer._engine.loading.read_plan import Want
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
) -> Diff:
    """Compare every leaf of the checkpoint `a` with that of `b`, and return all differences.

    Formats and shardings may differ. Leaves are read a few at a time, in bounded memory, and checked against their
    digests. Leaves of one dtype are equal if their bits are equal: 0.0 and -0.0 differ, and so do two NaNs with
    different bits. Leaves that became NaN or infinite come first. Several trees are matched by prefix; `prefix`
    compares one tree alone. If a checkpoint is replaced or removed meanwhile, the comparison starts again with the
    newer checkpoint. `progress` is True for a progress bar, or a function of the bytes compared and the total.

    Example:

        >>> found = diff("run/step-100", "run/step-200")
        >>> found.same
        False
        >>> print(found.changed[0])
        params.w: float32[8, 4]: largest difference 1, mean 1, in 100% of the elements
    """
    return reread_all([a, b], lambda found: _compared(str(a), str(b), _pairs(found, prefix), progress))


def _compared(a: str, b: str, pairs: Sequence[_Pair], progress: Progress) -> Diff:
    found = _Differences()
    try:
        with metered(progress, sum(pair.nbytes for pair in pairs), "comparing") as meter:
            for pair in pairs:
                pair.compare(found, meter)
    finally:
        for pair in pairs:
            pair.close()
    changed = tuple(sorted(found.changed, key=lambda change: not change.became))
    return Diff(a, b, found.added, found.removed, changed, found.unchanged, tuple(found.notes))


@dataclass(slots=True)
class _Differences:
    added: dict[str, str] = field(default_factory=dict)
    removed: dict[str, str] = field(default_factory=dict)
    changed: list[ChangedLeaf] = field(default_factory=list)
    unchanged: int = 0
    notes: list[str] = field(default_factory=list)


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

    def compare(self, found: _Differences, meter: Meter) -> None:
        found.removed |= {self.label + n: describe(v) for n, v in self.of_a.items() if n not in self.of_b}
        found.added |= {self.label + n: describe(v) for n, v in self.of_b.items() if n not in self.of_a}
        values = dict(self.compare_values(meter))
        for name, before in self.of_a.items():
            if name not in self.of_b:
                continue
            change = self.change(name, before, self.of_b[name], values.get(name))
            if change:
                found.changed.append(change)
            else:
                found.unchanged += 1
        if self.a and self.b:
            found.notes += [self.label + note for note in _notes(self.a, self.b)]

    def change(self, name: str, before: Any, after: Any, values: Comparison | None) -> ChangedLeaf | None:
        described = describe(before), describe(after)
        if values is None:
            return self.recorded_change(name, before, after, described)
        if not values.differing and described[0] == described[1]:
            return None
        return ChangedLeaf(
            self.label + name,
            *described,
            values.farthest,
            values.mean,
            values.share,
            became_nan=values.became_nan,
            became_inf=values.became_inf,
        )

    def recorded_change(
        self, name: str, before: Any, after: Any, described: tuple[str, str]
    ) -> ChangedLeaf | None:
        if not recorded_difference(before, after):
            return None
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

    def compare_values(self, meter: Meter) -> Iterator[tuple[str, Comparison]]:
        """Compare many small leaves read together, or one large leaf box by box."""
        for names in _batches(self.arrays, self.of_a):
            assert self.a
            assert self.b
            if len(names) > 1:
                of_a, of_b = self.a.read_all(names), self.b.read_all(names)
                yield from ((name, Comparison(with_norm=False).add(of_a[name], of_b[name])) for name in names)
            else:
                yield names[0], self.compare_boxes(self.a, self.b, names[0])
            meter.add(sum(self.of_a[name].nbytes for name in names))

    def compare_boxes(self, a: View, b: View, name: str) -> Comparison:
        one, other = StoredLeaf(a, name, self.of_a[name]), StoredLeaf(b, name, self.of_b[name])
        tally = Comparison(with_norm=False)
        for box in pieces(one.shape, max(one.dtype.itemsize, other.dtype.itemsize), _BOX_BYTES):
            tally.add(one.read(box), other.read(box))
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
