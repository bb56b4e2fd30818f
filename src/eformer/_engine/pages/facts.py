"""Describe a leaf of a report as JSON, and all leaves as compact columns, which source.js turns back into that.

Tests: tests/engine/pages/test_verdicts.py, tests/engine/pages/test_addresses.py, tests/browser/test_source.py.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from eformer._engine.pages.changes import rounded
from eformer._engine.record.outline import tree_rows

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from eformer._engine.pages.changes import LeafChange
    from eformer._engine.pages.contents import Leaf, PageContents
    from eformer._engine.pages.reading import Measured
    from eformer._engine.pages.statistics import Histogram, Statistics
    from eformer._engine.record.manifest import RecordedSharding

Json = dict[str, Any]

# Two digits are a number up to 4095: the height of a bin, relative to the highest bin, which has 4095.
DIGITS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
_MOST = len(DIGITS) ** 2 - 1
_SAFE = 2**53  # beyond this, integers in JavaScript are not exact


def leaf_facts(leaf: Leaf, measured: Measured | None, change: LeafChange | None = None) -> Json:
    """Describe one leaf, as `source.leaf(path)` of a page returns it."""
    return {
        "path": leaf.path,
        "dtype": leaf.dtype,
        "shape": list(leaf.shape),
        "nbytes": leaf.nbytes,
        "params": leaf.params,
        "value": leaf.value,
        "boxes": len(leaf.entry.extents) if leaf.entry else 0,
        "sharding": sharding_facts(leaf.sharding),
        "statistics": statistics_facts(measured.statistics) if measured else None,
        "problem": measured.problem if measured else None,
        "damaged": bool(measured and measured.is_damaged),
        "checked": bool(measured and measured.is_checked),
        "change": change.as_json() if change else None,
    }


def sharding_facts(sharding: RecordedSharding | None) -> Json | None:
    if sharding is None:
        return None
    spec = [list(axes) if isinstance(axes, tuple) else [axes] if axes else [] for axes in sharding.spec]
    return {"spec": spec, "mesh": [[name, size] for name, size in sharding.mesh.items()]}


def statistics_facts(found: Statistics | None) -> Json | None:
    if found is None:
        return None
    return {
        "size": found.size,
        "min": _number(found.least, 7),
        "max": _number(found.greatest, 7),
        "mean": _number(found.mean, 5),
        "std": _number(found.std, 5),
        "zeros": found.zeros,
        "nan": found.nans,
        "posinf": found.positive_infinities,
        "neginf": found.negative_infinities,
        "magnitudes": found.of_magnitudes,
        "histogram": _histogram_facts(found.histogram),
    }


def _histogram_facts(found: Histogram | None) -> Json | None:
    if found is None:
        return None
    return {
        "low": _number(found.low, 7),
        "high": _number(found.high, 7),
        "scale": "log" if found.is_log else "linear",
        "counts": list(found.counts),
        "below": found.below,
        "above": found.above,
    }


def _number(value: float | None, digits: int) -> Any:
    """Return a number for JSON: rounded, or as text if it is not exact in JavaScript."""
    if value is None or isinstance(value, int):
        return value if value is None or abs(value) < _SAFE else str(value)
    return rounded(value, digits) if math.isfinite(value) else None


# ------------------------------------------------------------------------------------------- columns


def columns(
    contents: PageContents, measured: Mapping[str, Measured], changes: Mapping[str, LeafChange]
) -> Json:
    """Return the tree and the leaves in columns, which take a tenth of the bytes of one object for each leaf."""
    rows = tree_rows([(leaf.path, leaf.kind) for leaf in contents.leaves])
    leaves = [contents.leaves[row.leaf] for row in rows if row.leaf >= 0]
    some = [measured.get(leaf.path) for leaf in leaves]
    parts, kinds, shardings = _Table(), _Table(), _Table()
    return {
        "depth": [row.depth for row in rows],
        "part": [parts.number(row.part) for row in rows],
        "kind": [kinds.number(_kind(leaf, shardings)) for leaf in leaves],
        "values": {n: leaf.value for n, leaf in enumerate(leaves) if leaf.value is not None},
        "statistics": _statistics_columns(
            [statistics_facts(one.statistics) if one else None for one in some]
        ),
        "problems": {
            n: [one.problem, int(one.is_damaged)] for n, one in enumerate(some) if one and one.problem
        },
        "checked": _runs([bool(one and one.is_checked) for one in some]),
        "changes": _change_columns([changes[leaf.path] for leaf in leaves]) if changes else None,
        "parts": parts.entries,
        "kinds": kinds.entries,
        "shardings": shardings.entries,
    }


class _Table:
    """Number distinct entries in the order of their first use."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}
        self.entries: list[Any] = []

    def number(self, entry: Any) -> int:
        key = repr(entry)
        if key not in self.numbers:
            self.numbers[key] = len(self.entries)
            self.entries.append(entry)
        return self.numbers[key]


def _kind(leaf: Leaf, shardings: _Table) -> list[Any]:
    sharding = sharding_facts(leaf.sharding)
    boxes = len(leaf.entry.extents) if leaf.entry else 0
    return [
        leaf.dtype,
        list(leaf.shape),
        leaf.nbytes,
        leaf.params,
        None if sharding is None else shardings.number(sharding),
        boxes,
    ]


def _runs(flags: Sequence[bool]) -> list[int]:
    """Return the lengths of runs of equal flags, beginning with False."""
    lengths, current = [0], False
    for flag in flags:
        if flag != current:
            lengths.append(0)
            current = flag
        lengths[-1] += 1
    return lengths


def _statistics_columns(facts: Sequence[Json | None]) -> Json | None:
    """Return the statistics in columns, and which leaves have them."""
    some = [one for one in facts if one]
    if not some:
        return None
    return {
        "of": _runs([one is not None for one in facts]),
        **{name: [one[name] for one in some] for name in ("min", "max", "mean", "std")},
        **{
            name: {n: one[name] for n, one in enumerate(some) if one[name]}
            for name in ("zeros", "nan", "posinf", "neginf")
        },
        "magnitudes": [n for n, one in enumerate(some) if one["magnitudes"]],
        "bins": [_packed(one["histogram"]["counts"]) if one["histogram"] else "" for one in some],
        "axes": {n: axis for n, one in enumerate(some) if (axis := _axis(one))},
    }


def _axis(found: Json) -> list[Any] | None:
    """Return the axis of a histogram; None for a linear axis from the least to the greatest element."""
    one = found["histogram"]
    if one is None or (
        one["scale"] == "linear" and (one["low"], one["high"]) == (found["min"], found["max"])
    ):
        return None
    return [one["low"], one["high"], int(one["scale"] == "log"), one["below"], one["above"]]


def _packed(counts: Sequence[int]) -> str:
    """Write the count of the highest bin, a blank, and each bin as two digits, relative to the highest."""
    most = max(counts)
    heights = [0 if not n else max(1, round(n * _MOST / most)) for n in counts]
    return f"{most} " + "".join(DIGITS[h // len(DIGITS)] + DIGITS[h % len(DIGITS)] for h in heights)


def _change_columns(changes: Sequence[LeafChange]) -> Json:
    """Return the first letter of each status, the amounts of the changed leaves in columns, and rare facts by the
    number of the leaf."""
    changed = [(n, change.as_json()) for n, change in enumerate(changes) if change.status == "changed"]
    dense = {"relative": 4, "largest": 3, "share": 4}
    return {
        "status": "".join(change.status[0] for change in changes),
        **{name: [_number(one.get(name), digits) for _, one in changed] for name, digits in dense.items()},
        **{
            name: {n: one[name] for n, one in changed if name in one}
            for name in ("what", "unlike", "from_zero", "became_nan", "became_inf")
        },
    }
