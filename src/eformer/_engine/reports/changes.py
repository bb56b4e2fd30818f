"""Compare a checkpoint with another: leaves added, removed and changed, and how the change spreads over the layers."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from eformer._engine.reports.contents import Leaf

Array = np.ndarray[Any, Any]

_CHUNK = 2**16  # elements that are widened at once
_MOST_LARGEST = 10
_MOST_ROWS = 80  # modules of a heat map
_NUMBER = re.compile(r"(?<!\d)\d{1,9}(?!\d)")


@dataclass(frozen=True, slots=True)
class Change:
    """Describe how a leaf differs from that of the other checkpoint.

    status      "same", "changed", "added", or "unknown" if only its values could tell, and they were not read
    what        both dtypes and shapes, or values, if these differ
    relative    the norm of the difference, divided by the norm of the other; infinity if that is zero
    largest     the largest absolute difference
    share       the part of the elements that differ
    unlike      elements of which one is NaN or infinite and the other is not the same; they are not in the norms
    """

    status: str
    what: str = ""
    relative: float | None = None
    largest: float | None = None
    share: float | None = None
    unlike: int = 0

    def as_json(self) -> dict[str, Any]:
        found = {name: _json(getattr(self, name)) for name in self.__slots__}
        if self.relative == math.inf:
            found["from_zero"] = True
        return {name: value for name, value in found.items() if value or name == "status"}


def _json(value: Any) -> Any:
    """Round a number for JSON, which has none that is not finite."""
    if not isinstance(value, float):
        return value
    return rounded(value, 4) if math.isfinite(value) else None


def rounded(number: float, digits: int) -> float:
    """Round to so many significant digits."""
    return float(f"{number:.{digits}g}")


SAME = Change("same", relative=0.0, largest=0.0, share=0.0)


class Differences:
    """Add up the differences of elements, box by box."""

    def __init__(self) -> None:
        self.elements = self.differing = self.unlike = 0
        self.squares = self.norm = self.largest = 0.0

    def add(self, one: Array, other: Array) -> None:
        flat, others = (np.ascontiguousarray(array).reshape(-1) for array in (one, other))
        for start in range(0, flat.size, _CHUNK):
            self._add(_wide(flat[start : start + _CHUNK]), _wide(others[start : start + _CHUNK]))

    def _add(self, one: Array, other: Array) -> None:
        self.elements += one.size
        finite = np.isfinite(one) & np.isfinite(other)
        if not finite.all():
            apart, beside = one[~finite], other[~finite]
            alike = (apart == beside) | (np.isnan(apart) & np.isnan(beside))
            self.unlike += int(np.count_nonzero(~alike))
            one, other = one[finite], other[finite]
        with np.errstate(over="ignore"):
            self.norm += float(np.square(np.abs(other)).sum())
            distances = np.abs(one - other)
            if count := int(np.count_nonzero(distances)):
                self.differing += count
                self.squares += float(np.square(distances).sum())
                self.largest = max(self.largest, float(distances.max()))

    def result(self) -> Change:
        if not self.differing and not self.unlike:
            return SAME
        relative = math.sqrt(self.squares / self.norm) if self.norm else math.inf if self.squares else 0.0
        share = (self.differing + self.unlike) / max(1, self.elements)
        return Change("changed", "", relative, self.largest, share, self.unlike)


def _wide(row: Array) -> Array:
    """Return the elements in double precision."""
    if row.dtype.kind in "mM":
        row = row.view(np.int64)
    is_complex = "complex" in row.dtype.name  # those of ml_dtypes included
    doubles: Array = row.astype(np.complex128 if is_complex else np.float64)
    return doubles


def recorded_change(one: Leaf, other: Leaf | None, *, have_digests: bool) -> Change | None:
    """Return how a leaf differs, as far as the records tell; None if its values have to be compared.

    Leaves with the same digests are equal, and none of their bytes have to be read to know it.
    """
    if other is None:
        return Change("added")
    if one.entry is None or other.entry is None:
        is_same = one.entry is other.entry and one.value == other.value
        return SAME if is_same else Change("changed", f"{_described(other)} → {_described(one)}")
    if one.shape != other.shape or one.entry.key != other.entry.key:
        return Change("changed", f"{other.kind} → {one.kind}")
    is_known = have_digests and one.dtype == other.dtype
    return SAME if is_known and _digests(one) == _digests(other) else None


def with_dtypes(change: Change, one: Leaf, other: Leaf) -> Change:
    """Add the dtypes to a change of values, if they differ."""
    if one.dtype == other.dtype:
        return change
    return replace(change, status="changed", what=f"{other.kind} → {one.kind}")


def _described(leaf: Leaf) -> str:
    return leaf.kind if leaf.entry else str(leaf.value)


def _digests(leaf: Leaf) -> object:
    assert leaf.entry
    return sorted((extent.region or ((), ()), extent.digests, extent.nbytes) for extent in leaf.entry.extents)


# ------------------------------------------------------------------------------------------ overview


def overview(
    leaves: Sequence[Leaf], removed: Sequence[Leaf], found: Mapping[str, Change], *, most: int = 500
) -> dict[str, Any]:
    """Return what changed in a checkpoint as a whole, as JSON: counts, the leaves that were added and removed, the ten
    largest changes, and the heat maps."""
    by_status = Counter(change.status for change in found.values())
    arrays = [leaf.path for leaf in leaves if leaf.entry and found[leaf.path].status == "changed"]
    order = sorted(arrays, key=lambda path: -_weight(found[path]))
    largest = {
        of: [{"path": path, **found[path].as_json()} for path in order if is_of_optimizer(path) == of]
        for of in (False, True)
    }
    return {
        "counts": {**by_status, "removed": len(removed)},
        "added": [_brief(leaf) for leaf in leaves if found[leaf.path].status == "added"][:most],
        "removed": [_brief(leaf) for leaf in removed[:most]],
        "largest": largest[False][:_MOST_LARGEST],
        "state": largest[True][:_MOST_LARGEST],
        "heatmaps": heatmaps([(leaf.path, leaf.nbytes, found[leaf.path]) for leaf in leaves if leaf.entry]),
    }


def _brief(leaf: Leaf) -> dict[str, Any]:
    return {"path": leaf.path, "what": _described(leaf), "nbytes": leaf.nbytes}


def _weight(change: Change) -> float:
    """Order changes: what has other shapes or was zero before counts most."""
    return math.inf if change.relative is None else change.relative


def heatmaps(leaves: Iterable[tuple[str, int, Change]]) -> list[dict[str, Any]]:
    """Return heat maps as JSON, the one with the most bytes first: for each stack of layers, the relative change of
    every module in every layer; and one of all leaves outside of layers, each in the row of its module."""
    leaves = list(leaves)
    at = _layer_positions([path for path, _, _ in leaves])
    stacks: dict[tuple[str, str] | None, list[tuple[str, str, int, Change]]] = defaultdict(list)
    for path, nbytes, change in leaves:
        parts = path.split(".")
        if path in at:
            where = at[path]
            match = _NUMBER.search(parts[where])
            assert match
            before, after = parts[where][: match.start()], parts[where][match.end() :]
            ends = ".".join([*parts[:where], before]), after
            stacks[ends].append((".".join(parts[where + 1 :]), match[0], nbytes, change))
        else:
            stacks[None].append((".".join(parts[:-1]), parts[-1], nbytes, change))
    maps = [_heatmap(ends, cells) for ends, cells in stacks.items()]
    maps = [found for found in maps if found["nbytes"]]
    return sorted(maps, key=lambda one: (not one["stack"], is_of_optimizer(one["stack"]), -one["nbytes"]))


# Parts of names in which optimizers keep their state, which changes much more than what it belongs to.
_OPTIMIZERS = frozenset({"opt_state", "optimizer", "optim", "opt", "mu", "nu", "exp_avg", "exp_avg_sq"})


def is_of_optimizer(path: str) -> bool:
    return not _OPTIMIZERS.isdisjoint(path.split("."))


def _heatmap(ends: tuple[str, str] | None, cells: Sequence[tuple[str, str, int, Change]]) -> dict[str, Any]:
    stack = "*".join(ends) if ends else ""
    rows = list(dict.fromkeys(row for row, _, _, _ in cells))[:_MOST_ROWS]
    columns = list(dict.fromkeys(column for _, column, _, _ in cells))
    if stack:
        columns.sort(key=int)
    row_of, column_of = ({name: n for n, name in enumerate(names)} for names in (rows, columns))
    return {
        "stack": stack,
        "before": ends[0] if ends else "",
        "after": ends[1] if ends else "",
        "nbytes": sum(nbytes for _, _, nbytes, _ in cells),
        "rows": rows,
        "columns": columns,
        "cells": [
            [row_of[row], column_of[column], *_cell(change)]
            for row, column, _, change in cells
            if row in row_of
        ],
    }


def _cell(change: Change) -> list[Any]:
    """Return the relative change; if there is none, the reason."""
    if change.relative is not None and math.isfinite(change.relative):
        return [rounded(change.relative, 3)]
    return [None, "from zero" if change.relative == math.inf else change.what or change.status]


def _layer_positions(paths: Sequence[str]) -> dict[str, int]:
    """Find the part of each path that numbers a layer: the one with the most different numbers beside it."""
    numbers: dict[tuple[str, ...], set[str]] = defaultdict(set)
    candidates: dict[str, list[tuple[int, tuple[str, ...]]]] = {}
    for path in paths:
        parts = path.split(".")
        candidates[path] = []
        for where, part in enumerate(parts):
            if match := _NUMBER.search(part):
                beside = (*parts[:where], part[: match.start()], part[match.end() :])
                numbers[beside].add(match[0])
                candidates[path].append((where, beside))
    found = {}
    for path, some in candidates.items():
        where, beside = max(some, key=lambda one: len(numbers[one[1]]), default=(0, ()))
        if some and len(numbers[beside]) > 1:
            found[path] = where
    return found
