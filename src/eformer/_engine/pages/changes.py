"""Compare two checkpoints: leaves added, removed and changed, and the spread of the change over the layers.

Tests: tests/engine/pages/test_report.py, tests/engine/pages/test_verdicts.py.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from eformer._engine.record.text import printable
from eformer._engine.tools.compare import became_text, describe, plain_became, recorded_difference

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from eformer._engine.pages.contents import Leaf, PageContents
    from eformer._engine.tools.compare import Comparison

_MOST_LARGEST = 10
_MOST_ROWS = 80  # modules of a heat map
_NUMBER = re.compile(r"(?<!\d)\d{1,9}(?!\d)")


@dataclass(frozen=True, slots=True)
class LeafChange:
    """Describe how a leaf differs from its counterpart in the older checkpoint.

    status      "same", "changed", "added", or "unknown" if only unread values could tell
    what        both dtypes and shapes, or values, if these differ
    relative    the norm of the difference, divided by the norm of the older leaf; infinity if that norm is zero
    largest     the largest absolute difference of finite elements
    share       the share of the elements that differ
    unlike      differing elements that are NaN or infinite on one side; they are not in the norms
    became_nan  elements that were finite, and now are NaN
    became_inf  elements that were finite, and now are infinite
    """

    status: str
    what: str = ""
    relative: float | None = None
    largest: float | None = None
    share: float | None = None
    unlike: int = 0
    became_nan: int = 0
    became_inf: int = 0

    @property
    def became(self) -> int:
        """Return the number of elements that were finite, and now are not."""
        return self.became_nan + self.became_inf

    def as_json(self) -> dict[str, Any]:
        """Return the facts that are not zero. A relative change of 0 of a leaf that changed is one of them."""
        found = {name: _json(getattr(self, name)) for name in self.__slots__}
        if self.relative == math.inf:
            found["from_zero"] = True
        kept = {"status", "relative"} if self.status == "changed" and self.relative == 0 else {"status"}
        return {name: value for name, value in found.items() if value or name in kept}


def _json(value: Any) -> Any:
    """Round a number for JSON, which has no NaN and no infinity."""
    if not isinstance(value, float):
        return value
    return rounded(value, 4) if math.isfinite(value) else None


def rounded(number: float, digits: int) -> float:
    """Round to so many significant digits."""
    return float(f"{number:.{digits}g}")


SAME = LeafChange("same", relative=0.0, largest=0.0, share=0.0)


def recorded_change(contents: PageContents, after: Leaf, other: PageContents) -> LeafChange | None:
    """Return how a leaf differs from its counterpart in `other`, as far as the records tell; None if the values must
    be compared.

    Leaves with the same digests are equal, and none of their bytes have to be read to know it.
    """
    before = other.counterpart(after, contents)
    if before is None:
        return LeafChange("added")
    views = contents.views[after.prefix], other.views[before.prefix]
    have_digests = all(view.tree.has_digests for view in views)
    differs = recorded_difference(before.record, after.record, have_digests=have_digests)
    if differs is None:
        return None
    if not differs:
        return SAME
    nan, inf = plain_became(before.record, after.record)
    return LeafChange("changed", _was_and_is(before, after), became_nan=nan, became_inf=inf)


def measured_change(after: Leaf, before: Leaf, found: Comparison) -> LeafChange:
    """Return how a leaf differs, given the comparison of its elements."""
    has_dtype = after.dtype == before.dtype
    if has_dtype and not found.differing:
        return SAME
    return LeafChange(
        "changed",
        "" if has_dtype else _was_and_is(before, after),
        found.relative,
        found.largest,
        found.share,
        found.unlike,
        found.became_nan,
        found.became_inf,
    )


def _was_and_is(before: Leaf, after: Leaf) -> str:
    return f"{printable(describe(before.record))} → {printable(describe(after.record))}"


# ------------------------------------------------------------------------------------------ overview


def overview(
    contents: PageContents, other: PageContents, found: Mapping[str, LeafChange], *, most: int = 500
) -> dict[str, Any]:
    """Describe the changes of a checkpoint as a whole, as JSON.

    Return counts, the leaves that became NaN or infinite, the leaves that were added and removed, the ten largest
    changes, and the heat maps.
    """
    leaves = contents.leaves
    removed = [leaf for leaf in other.leaves if contents.counterpart(leaf, other) is None]
    by_status = Counter(change.status for change in found.values())
    became = [leaf.path for leaf in leaves if found[leaf.path].became]
    loud = {"became": len(became)} if became else {}
    arrays = [leaf.path for leaf in leaves if leaf.entry and found[leaf.path].status == "changed"]
    order = sorted(arrays, key=lambda path: strength(found[path]), reverse=True)
    largest = {
        of: [{"path": path, **found[path].as_json()} for path in order if is_of_optimizer(path) == of]
        for of in (False, True)
    }
    return {
        "counts": {**by_status, "removed": len(removed), **loud},
        "became": [{"path": path, **found[path].as_json()} for path in became[:most]],
        "added": [_brief(leaf) for leaf in leaves if found[leaf.path].status == "added"][:most],
        "removed": [_brief(leaf) for leaf in removed[:most]],
        "largest": largest[False][:_MOST_LARGEST],
        "state": largest[True][:_MOST_LARGEST],
        "heatmaps": heatmaps([leaf for leaf in leaves if leaf.entry], found),
    }


def _brief(leaf: Leaf) -> dict[str, Any]:
    return {"path": leaf.path, "what": leaf.kind if leaf.entry else leaf.value, "nbytes": leaf.nbytes}


_RANKS = {"same": 0, "unknown": 1, "changed": 2, "added": 3}


def strength(change: LeafChange | None) -> tuple[int, float]:
    """Return a key that orders changes from the weakest: same, not read, changed by so much, added, changed beyond
    measure, from zero, and became NaN or infinite. `strength` of source.js gives the same order."""
    if change is None:
        return -1, 0.0
    if change.became:
        return 6, float(change.became)
    if change.status == "changed" and (change.relative is None or change.relative == math.inf):
        return 4 if change.relative is None else 5, 0.0
    return _RANKS[change.status], change.relative or 0.0


def heatmaps(leaves: Sequence[Leaf], found: Mapping[str, LeafChange]) -> list[dict[str, Any]]:
    """Return heat maps as JSON, for each stack of layers: the relative change of every module in every layer.

    One more map has all leaves outside of layers, each in the row of its module. A map with leaves that became NaN or
    infinite is first, then the map with the most bytes.
    """
    at = _layer_positions([leaf.path for leaf in leaves])
    stacks: dict[tuple[str, str] | None, list[tuple[str, str, int, LeafChange]]] = defaultdict(list)
    for leaf in leaves:
        parts, where = leaf.path.split("."), at.get(leaf.path, -1)
        match = _NUMBER.search(parts[where]) if where >= 0 else None
        ends, row, column = None, ".".join(parts[:-1]), parts[-1]
        if match:
            before, after = parts[where][: match.start()], parts[where][match.end() :]
            ends = ".".join([*parts[:where], before]), after
            row, column = ".".join(parts[where + 1 :]), match[0]
        stacks[ends].append((row, column, leaf.nbytes, found[leaf.path]))
    maps = [_heatmap(ends, cells) for ends, cells in stacks.items()]
    return sorted(
        (one for one in maps if one["nbytes"]),
        key=lambda one: (not one["became"], not one["stack"], is_of_optimizer(one["stack"]), -one["nbytes"]),
    )


# Parts of names of optimizer state, which changes much more than the model.
_OPTIMIZERS = frozenset({"opt_state", "optimizer", "optim", "opt", "mu", "nu", "exp_avg", "exp_avg_sq"})


def is_of_optimizer(path: str) -> bool:
    return not _OPTIMIZERS.isdisjoint(path.split("."))


def _heatmap(
    ends: tuple[str, str] | None, cells: Sequence[tuple[str, str, int, LeafChange]]
) -> dict[str, Any]:
    stack = "*".join(ends) if ends else ""
    loud = {row for row, _, _, change in cells if change.became}
    every_row = dict.fromkeys(row for row, _, _, _ in cells)
    rows = sorted(every_row, key=lambda row: row not in loud)[:_MOST_ROWS]
    columns = list(dict.fromkeys(column for _, column, _, _ in cells))
    if stack:
        columns.sort(key=int)
    row_of, column_of = ({name: n for n, name in enumerate(names)} for names in (rows, columns))
    return {
        "stack": stack,
        "before": ends[0] if ends else "",
        "after": ends[1] if ends else "",
        "nbytes": sum(nbytes for _, _, nbytes, _ in cells),
        "became": sum(change.became > 0 for _, _, _, change in cells),
        "rows": rows,
        "more_rows": len(every_row) - len(rows),
        "columns": columns,
        "cells": [
            [row_of[row], column_of[column], *_cell(change)]
            for row, column, _, change in cells
            if row in row_of
        ],
    }


def _cell(change: LeafChange) -> list[Any]:
    """Return the relative change; or null and a text if no number describes it, and 1 if it became NaN or Inf."""
    if change.became:
        return [None, became_text(change.became_nan, change.became_inf), 1]
    if change.relative is None or not math.isfinite(change.relative):
        return [None, "from zero" if change.relative == math.inf else change.what or change.status]
    if change.status == "changed" and not change.relative:
        return [None, change.what or ("other NaN or Inf" if change.unlike else "changed in its bits alone")]
    return [rounded(change.relative, 3)]


def _layer_positions(paths: Sequence[str]) -> dict[str, int]:
    """Find the part of each path that numbers a layer: the part with the most different numbers in its place."""
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
