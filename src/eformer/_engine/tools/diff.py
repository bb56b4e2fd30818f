"""What two checkpoints have different, whatever their formats and shardings. Needs no jax."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from eformer._engine.formats.find import find
from eformer._engine.record.manifest import UNREADABLE, LeafEntry
from eformer._engine.record.pieces import pieces
from eformer._engine.record.text import few
from eformer._engine.record.values import value_from_json
from eformer._engine.tasks.progress import metered
from eformer._engine.tools.lazy_arrays import StoredLeaf
from eformer._engine.tools.view import View
from eformer._engine.tools.view import open as open_view

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Sequence

    from eformer._engine.tasks.progress import Meter, Progress

Array = np.ndarray[Any, Any]

_BOX_BYTES = 16 * 2**20  # of each side in memory at once; differences are computed in wider numbers
_BATCH_BYTES = 64 * 2**20
_BATCH = 4096


@dataclass(frozen=True, slots=True)
class Change:
    """A leaf that both have, but not the same. Differences are those of values, and None where shapes differ.

    `share` is the part of the elements that differ: in their bits, if the dtypes are the same, else in their values.
    """

    name: str
    before: str
    after: str
    largest: float | None = None
    mean: float | None = None
    share: float | None = None

    def __str__(self) -> str:
        what = self.before if self.before == self.after else f"{self.before} -> {self.after}"
        if self.share is None:
            return f"{self.name}: {what}"
        return (
            f"{self.name}: {what}: largest difference {self.largest:.3g}, mean {self.mean:.3g}, "
            f"in {self.share:.3%} of the elements"
        )


@dataclass(frozen=True, slots=True)
class Diff:
    """What `b` has and `a` has not is `added`, the other way round `removed`: names, and what they are.

    `notes` are of what is no leaf: containers of another kind, other metadata.
    """

    a: str
    b: str
    added: dict[str, str]
    removed: dict[str, str]
    changed: tuple[Change, ...]
    unchanged: int
    notes: tuple[str, ...]

    @property
    def same(self) -> bool:
        """Whether all leaves are."""
        return not (self.added or self.removed or self.changed)

    def __str__(self) -> str:
        lines = [f"{self.a} and {self.b}: {'the same' if self.same else 'different'}, {self._counts()}"]
        lines += [f"- {name}: {what}" for name, what in self.removed.items()]
        lines += [f"+ {name}: {what}" for name, what in self.added.items()]
        lines += [f"~ {change}" for change in self.changed]
        return "\n".join(lines + [f"! {note}" for note in self.notes])

    def _counts(self) -> str:
        counts = {
            "added": len(self.added), "removed": len(self.removed), "changed": len(self.changed),
            "unchanged": self.unchanged,
        }  # fmt: skip
        return ", ".join(f"{count} {what}" for what, count in counts.items() if count) or "no leaves"


def diff(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    prefix: str | None = None,
    progress: Progress = None,
) -> Diff:
    """Every leaf of `a` against that of `b`, read a little at a time; all differences in one result.

    Several trees are told apart by their prefixes; `prefix` compares one tree alone. What is read is checked against
    its digests. `progress` is True for a bar, or is called with the bytes that were compared and with all there are.
    """
    pairs = _pairs(a, b, prefix)
    found = _Differences()
    try:
        with metered(progress, sum(pair.nbytes for pair in pairs), "comparing") as meter:
            for pair in pairs:
                pair.compare(found, meter)
    finally:
        for pair in pairs:
            pair.close()
    return Diff(
        str(a), str(b), found.added, found.removed, tuple(found.changed), found.unchanged, tuple(found.notes)
    )


@dataclass(slots=True)
class _Differences:
    added: dict[str, str] = field(default_factory=dict)
    removed: dict[str, str] = field(default_factory=dict)
    changed: list[Change] = field(default_factory=list)
    unchanged: int = 0
    notes: list[str] = field(default_factory=list)


def _pairs(a: str | os.PathLike[str], b: str | os.PathLike[str], prefix: str | None) -> list[_Pair]:
    """The trees that belong together: two that are all there is, or those of one prefix."""
    if prefix is not None:
        return [_Pair(open_view(a, prefix=prefix), open_view(b, prefix=prefix), "")]
    of_a, of_b = list(find(a).trees), list(find(b).trees)
    if len(of_a) == len(of_b) == 1:
        return [_Pair(open_view(a, prefix=of_a[0]), open_view(b, prefix=of_b[0]), "")]
    return [
        _Pair(
            open_view(a, prefix=name) if name in of_a else None,
            open_view(b, prefix=name) if name in of_b else None,
            f"[{name}] " if name else "",
        )
        for name in dict.fromkeys([*of_a, *of_b])
    ]


class _Pair:
    """Two trees, or one that has no other."""

    def __init__(self, a: View | None, b: View | None, label: str) -> None:
        self.a, self.b, self.label = a, b, label
        self.of_a, self.of_b = _leaves(a), _leaves(b)

    def close(self) -> None:
        for view in (self.a, self.b):
            if view:
                view.close()

    def arrays(self) -> list[str]:
        """Those whose elements have to be compared."""
        return [
            name
            for name, one in self.of_a.items()
            if isinstance(one, LeafEntry)
            and isinstance(other := self.of_b.get(name), LeafEntry)
            and _is_comparable(one, other)
        ]

    @property
    def nbytes(self) -> int:
        return sum(self.of_a[name].nbytes for name in self.arrays())

    def compare(self, found: _Differences, meter: Meter) -> None:
        found.removed |= {self.label + n: _what(v) for n, v in self.of_a.items() if n not in self.of_b}
        found.added |= {self.label + n: _what(v) for n, v in self.of_b.items() if n not in self.of_a}
        values = dict(self.compared_values(meter))
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

    def change(self, name: str, before: Any, after: Any, values: _Tally | None) -> Change | None:
        what = _what(before), _what(after)
        if isinstance(before, _Plain) != isinstance(after, _Plain):
            what = self.with_value(self.a, name, before), self.with_value(self.b, name, after)
        if values is None:
            return None if before == after else Change(self.label + name, *what)
        if not values.differing and what[0] == what[1]:
            return None
        return Change(self.label + name, *what, values.largest, values.mean, values.share)

    def with_value(self, view: View | None, name: str, leaf: Any) -> str:
        """What it is: a plain value may have become an array without axes."""
        if view and isinstance(leaf, LeafEntry) and not leaf.shape:
            return f"{_what(leaf)} = {view.read_all([name])[name]}"
        return _what(leaf)

    def compared_values(self, meter: Meter) -> Iterator[tuple[str, _Tally]]:
        assert not self.arrays() or (self.a and self.b)
        for names in _batches(self.arrays(), self.of_a):
            for name, tally in self.compared_batch(names):
                meter.add(self.of_a[name].nbytes)
                yield name, tally

    def compared_batch(self, names: Sequence[str]) -> Iterator[tuple[str, _Tally]]:
        """Many small ones are read together; a large one comes alone, and box by box."""
        assert self.a
        assert self.b
        if len(names) > 1:
            some, others = self.a.read_all(names), self.b.read_all(names)
            for name in names:
                yield name, _Tally().add(some[name], others[name])
            return
        (name,) = names
        one = StoredLeaf(self.a, name, self.of_a[name])
        other = StoredLeaf(self.b, name, self.of_b[name])
        tally = _Tally()
        for box in pieces(one.shape, max(one.dtype.itemsize, other.dtype.itemsize), _BOX_BYTES):
            tally.add(one.read(box), other.read(box))
        yield name, tally


def _leaves(view: View | None) -> dict[str, Any]:
    """Entries of arrays, and plain values."""
    if view is None:
        return {}
    tree = view.tree
    return {**tree.leaves, **{name: _Plain(value) for name, value in tree.raw_values.items()}}


class _Plain:
    """A value that is no array. Compared as it is recorded, so that NaN is like NaN, and 1 not like 1.0."""

    def __init__(self, recorded: Any) -> None:
        self.recorded = msgspec.json.encode(recorded, order="sorted")
        self.text = repr(value_from_json(recorded))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Plain) and self.recorded == other.recorded

    def __hash__(self) -> int:
        return hash(self.recorded)


_MOST_SHOWN = 60


def _what(leaf: Any) -> str:
    if isinstance(leaf, LeafEntry):
        return f"{leaf.logical_dtype}{list(leaf.logical_shape)}"
    text: str = leaf.text
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}... ({len(text)} characters)"


def _is_comparable(one: LeafEntry, other: LeafEntry) -> bool:
    return one.shape == other.shape and one.key == other.key


def _batches(names: Sequence[str], entries: dict[str, Any]) -> Iterator[list[str]]:
    batch: list[str] = []
    room = _BATCH_BYTES
    for name in names:
        nbytes = entries[name].nbytes
        if batch and (nbytes > min(room, _BOX_BYTES) or len(batch) == _BATCH):
            yield batch
            batch, room = [], _BATCH_BYTES
        batch.append(name)
        room -= nbytes
        if nbytes > _BOX_BYTES:
            yield batch
            batch, room = [], _BATCH_BYTES
    if batch:
        yield batch


def _notes(a: View, b: View) -> Iterator[str]:
    one, other = (msgspec.json.decode(view.tree.structure) for view in (a, b))
    is_known = not any(isinstance(side, dict) and UNREADABLE in side for side in (one, other))
    if is_known and set(a) == set(b) and one != other:
        yield "the containers are not of the same kinds, such as lists for dicts"
    if a.tree.raw_metadata != b.tree.raw_metadata:
        yield "the metadata differs"
    for view in (a, b):
        if view.left_out:
            yield f"not compared, and may hold leaves: {few(view.left_out)}"


# -------------------------------------------------------------------------------------------- values


@dataclass(slots=True)
class _Tally:
    """Differences of elements, box by box."""

    elements: int = 0
    differing: int = 0
    total: float = 0.0
    largest: float = 0.0

    def add(self, one: Array, other: Array) -> _Tally:
        differs = _differing(one, other)
        self.elements += one.size
        count = int(np.count_nonzero(differs))
        if count:
            distances = _distances(one.reshape(-1)[differs], other.reshape(-1)[differs])
            self.differing += count
            self.total += float(distances.sum())
            self.largest = float(np.maximum(self.largest, distances.max()))  # NaN stays NaN
        return self

    @property
    def mean(self) -> float:
        return self.total / max(self.elements, 1)

    @property
    def share(self) -> float:
        return self.differing / max(self.elements, 1)


def _differing(one: Array, other: Array) -> Array:
    """Which elements do, one by one in a row: in their bits, or in their values if these are of two kinds."""
    if one.dtype == other.dtype:
        bits = [_bits(array) for array in (one, other)]
        unequal: Array = bits[0] != bits[1]
        return unequal if unequal.ndim == 1 else np.any(unequal, axis=1)
    wide = [_wide(array.reshape(-1)) for array in (one, other)]
    both_nan = np.isnan(wide[0]) & np.isnan(wide[1])
    differs: Array = (wide[0] != wide[1]) & ~both_nan
    return differs


def _bits(array: Array) -> Array:
    row = np.ascontiguousarray(array).reshape(-1)
    size = row.dtype.itemsize
    return row.view(f"u{size}") if size <= 8 else row.view(np.uint64).reshape(len(row), size // 8)


def _distances(one: Array, other: Array) -> Array:
    with np.errstate(all="ignore"):
        a, b = _wide(one), _wide(other)
        distances: Array = np.abs(a - b).astype(np.float64)
    distances[(np.isnan(a) & np.isnan(b)) | (a == b)] = 0.0  # infinities of one sign are not apart
    return distances


def _wide(array: Array) -> Array:
    """As numbers that hold every value: 64-bit integers do not fit into double precision."""
    if array.dtype.kind in "mM":
        array = array.view(np.int64)
    if "complex" in array.dtype.name:  # also those of ml_dtypes
        return array.astype(np.complex128)
    is_long = array.dtype.kind in "iu" and array.dtype.itemsize == 8
    return array.astype(np.longdouble if is_long or array.dtype.itemsize > 8 else np.float64)
