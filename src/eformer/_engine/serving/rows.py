"""Fold, sort, search and page the rows of a checkpoint, so that a page asks for a few of 100,000. No I/O.

The answers are those of `embeddedSource` (reports/assets/embedded.js), which has all rows in the page instead.
"""

from __future__ import annotations

import fnmatch
import re
from collections import Counter, OrderedDict
from functools import partial
from typing import TYPE_CHECKING, Any

from eformer._engine.record.lazy import lazy_property
from eformer._engine.record.names import BARE_LEAF, unescape
from eformer._engine.reports.changes import combined, weight
from eformer._engine.reports.contents import TREE, row_paths
from eformer._engine.reports.facts import statistics_facts
from eformer._engine.reports.folding import FOLD, ITSELF

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from eformer._engine.reports.changes import Change
    from eformer._engine.reports.contents import Contents
    from eformer._engine.reports.reading import Measured

Json = dict[str, Any]

MOST_ROWS = 1000
MOST_QUERY = 300  # characters
_MOST_MEASURED = 5000  # leaves whose statistics are kept
_MOST_ORDERS = 8  # sorted lists that are kept
_ITEMS, _INNER, _LEVELS = 240, 24, 3  # tiles of a treemap, inside of each, and how deep: as in embedded.js
_TILES = 3000  # of all levels below the first
_WILDCARD = re.compile(r"[*?[]")
_DIGITS = re.compile(r"(\d+)")


class Rows:
    """The rows of one checkpoint, with totals for the groups."""

    def __init__(self, contents: Contents, changes: Mapping[str, Change] | None = None) -> None:
        self._leaves = contents.leaves
        self._rows = contents.rows
        self._paths = row_paths(contents.rows)
        self._children = _children(contents)
        self._totals = _totals(contents)
        self._changes = self._combined_changes(changes) if changes else []
        self._groups = {path: n for n, path in enumerate(self._paths) if self._rows[n].leaf < 0}
        self._measured: OrderedDict[str, Measured] = OrderedDict()
        self._damaged: set[int] = set()
        self._special: Counter[int] = Counter()
        self._marked: set[str] = set()
        self._orders: OrderedDict[tuple[str, str, bool], list[int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._rows)

    # ----------------------------------------------------------------------------------------- answers

    def children(self, path: str, options: Options) -> Json:
        """Return one page of the rows directly below a group."""
        number = self._groups.get(path)
        if number is None:
            return {"total": 0, "rows": []}
        order = self._ordered(f"/{path}", options, lambda: self._children[number])
        return options.page(order, lambda n: self._row(n, self._rows[n].part))

    def search(self, query: str, options: Options) -> Json:
        """Return one page of the leaves whose names contain the query, or match it if it is a pattern."""
        text = query[:MOST_QUERY].strip().lower()
        order = self._ordered(f"?{text}", options, lambda: self._matching(text))
        return options.page(order, lambda n: self._row(n, self._paths[n]))

    def treemap(self, path: str) -> Json:
        """Return the largest rows below a group, the largest below each of these, and so on, level by level.

        On each level, `rest` stands for the rows that are left out: the bytes of a tile are those of its children and
        of its rest.
        """
        number = self._groups.get(path, 0)
        items, rest = self._largest(number, _ITEMS)
        above: list[Json] = []
        up = number
        while up >= 0:
            above.insert(0, {"path": self._paths[up], "name": self._rows[up].part})
            up = self._rows[up].parent
        return {
            "path": self._paths[number],
            "above": above,
            "rest": rest,
            "nbytes": self._totals[number].nbytes,
            "items": self._nested(items),
        }

    def _nested(self, numbers: Sequence[int]) -> list[Json]:
        shown = level = [(n, self._tile(n)) for n in numbers]
        left = _TILES
        for _ in range(_LEVELS):
            inner = []
            for number, tile in level:
                below, rest = self._largest(number, min(_INNER, left))
                left -= len(below)
                made = [(n, self._tile(n)) for n in below]
                tile["children"] = [one for _, one in made]
                tile["rest"] = rest
                inner += made
            level = inner
        for number, tile in level:
            tile["rest"] = self._largest(number, 0)[1]
        return [tile for _, tile in shown]

    def _tile(self, number: int) -> Json:
        return self._brief(number) | {"children": []} | self._count(number)

    def _count(self, number: int) -> Json:
        """Say how many layers a row stands for, if it is a folded one."""
        is_folded = any(part.startswith(FOLD) for part in self._rows[number].part.split("."))
        return {"count": len(self._children[number])} if is_folded else {}

    def locate(self, path: str, kind: str, options: Options) -> list[int]:
        """Return the place of a row among the children of each group above it, from the root down."""
        number = self._row_of_leaf.get(path, 0) if kind == "leaf" else self._groups.get(path, 0)
        steps: list[int] = []
        while (above := self._rows[number].parent) >= 0:
            siblings = self._ordered(
                f"/{self._paths[above]}", options, partial(self._children.__getitem__, above)
            )
            steps.insert(0, siblings.index(number))
            number = above
        return steps

    def note(self, path: str, measured: Measured) -> None:
        """Remember what reading a leaf has shown, for the rows of it and of the groups above it."""
        self._measured[path] = measured
        self._measured.move_to_end(path)
        if len(self._measured) > _MOST_MEASURED:
            self._measured.popitem(last=False)
        if path in self._marked:
            return
        self._marked.add(path)
        special = _specials(measured)
        row = self._row_of_leaf.get(path, -1)
        if row >= 0 and measured.change and self._changes:
            self._note_change(row, measured.change)
        while row >= 0 and (special or measured.is_damaged):
            self._special[row] += special
            if measured.is_damaged:
                self._damaged.add(row)
            row = self._rows[row].parent

    def _note_change(self, row: int, change: Change) -> None:
        """Set the change of a leaf, and combine those of the groups above it anew."""
        self._changes[row] = change
        while (row := self._rows[row].parent) >= 0:
            self._changes[row] = combined(self._changes[n] for n in self._children[row])

    def measured(self, path: str) -> Measured | None:
        return self._measured.get(path)

    def measured_changes(self) -> dict[str, Change]:
        """Return how the leaves that were read have changed, by their paths."""
        return {path: self._changes[self._row_of_leaf[path]] for path in self._marked if self._changes}

    # -------------------------------------------------------------------------------------------- rows

    @lazy_property
    def _row_of_leaf(self) -> dict[str, int]:
        return {self._paths[n]: n for n, row in enumerate(self._rows) if row.leaf >= 0}

    @lazy_property
    def _searched(self) -> list[tuple[str, int]]:
        """The names of the leaves as they are searched: as people write them, then as they are stored."""
        found = []
        for n, row in enumerate(self._rows):
            if row.leaf >= 0:
                path = self._paths[n]
                text = path.lower()
                found.append((f"{label(path).lower()}\n{text}" if "%" in path else text, n))
        return found

    def _matching(self, text: str) -> list[int]:
        if not _WILDCARD.search(text):
            return [n for names, n in self._searched if text in names]
        matches = re.compile(fnmatch.translate(text)).match
        return [n for names, n in self._searched if any(map(matches, names.split("\n")))]

    def _row(self, number: int, name: str) -> Json:
        totals = self._totals[number]
        row = self._brief(number) | {
            "name": name,
            "params": totals.params,
            "damaged": number in self._damaged,
            "special": self._special[number],
        }
        leaf_number = self._rows[number].leaf
        if leaf_number < 0:
            row["dtype"] = ", ".join(filter(None, totals.dtypes))
            return row | self._count(number)
        leaf = self._leaves[leaf_number]
        row["shape"] = list(leaf.shape)
        if leaf.value is not None:
            row["value"] = leaf.value
        return row | _measured_facts(self._measured.get(leaf.path))

    def _brief(self, number: int) -> Json:
        totals = self._totals[number]
        return {
            "path": self._paths[number],
            "name": self._rows[number].part,
            "kind": "group" if self._rows[number].leaf < 0 else "leaf",
            "nbytes": totals.nbytes,
            "leaves": totals.leaves,
            "dtype": totals.main_dtype,
            "change": self._change(number),
        }

    def _change(self, number: int) -> Json | None:
        """Return how a row has changed: as it was measured, if it is a leaf that was read."""
        return self._changes[number].as_json() if self._changes else None

    def _combined_changes(self, changes: Mapping[str, Change]) -> list[Change]:
        """Return the change of each row: of a group, that of its leaves together."""
        found = [combined(())] * len(self._rows)
        for number in range(len(found) - 1, -1, -1):  # groups come before their rows
            is_leaf = self._rows[number].leaf >= 0
            below = self._children[number]
            found[number] = changes[self._paths[number]] if is_leaf else combined(found[n] for n in below)
        return found

    def _largest(self, number: int, most: int) -> tuple[list[int], Json]:
        """Return the largest rows below a group, and the facts of a tile for all others together."""
        inside = [n for n in self._children[number] if self._totals[n].nbytes]
        order = sorted(inside, key=lambda n: -self._totals[n].nbytes)
        shown, others = order[:most], order[most:]
        nbytes = sum(self._totals[n].nbytes for n in others)
        changed = combined(self._changes[n] for n in others).as_json() if others and self._changes else None
        return shown, {"count": len(others), "nbytes": nbytes, "change": changed}

    # ------------------------------------------------------------------------------------------ orders

    def _ordered(self, what: str, options: Options, unsorted: Callable[[], Sequence[int]]) -> Sequence[int]:
        """Return rows in the order asked for. The last few orders are kept, for the next page of the same."""
        key = (what, options.sort, options.descending)
        if key in self._orders and options.sort not in ("std", "change"):
            self._orders.move_to_end(key)
            return self._orders[key]
        order = list(unsorted())
        if sort_key := self._sort_keys().get(options.sort):
            order.sort(key=sort_key, reverse=options.descending)
        self._orders[key] = order
        if len(self._orders) > _MOST_ORDERS:
            self._orders.popitem(last=False)
        return order

    def _sort_keys(self) -> dict[str, Callable[[int], Any]]:
        return {
            "name": lambda n: natural(label(self._paths[n])),
            "params": lambda n: self._totals[n].params,
            "nbytes": lambda n: self._totals[n].nbytes,
            "dtype": lambda n: self._totals[n].main_dtype,
            "std": self._std,
            "change": lambda n: weight(self._changes[n] if self._changes else None),
        }

    def _std(self, number: int) -> float:
        measured = self._measured.get(self._paths[number]) if self._rows[number].leaf >= 0 else None
        return (measured.statistics.std or 0.0) if measured and measured.statistics else 0.0


class Options:
    """Which rows of a list are asked for, and in which order."""

    def __init__(self, parameters: Mapping[str, str]) -> None:
        self.offset = _whole(parameters.get("offset", ""), 0)
        self.limit = min(_whole(parameters.get("limit", ""), 200), MOST_ROWS)
        self.sort = parameters.get("sort", "")[:16]
        self.descending = parameters.get("descending") == "true"

    def page(self, order: Sequence[int], row: Callable[[int], Json]) -> Json:
        shown = order[self.offset : self.offset + self.limit]
        return {"total": len(order), "rows": [row(n) for n in shown]}


def _whole(text: str, default: int) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else default


class _Totals:
    """What a group has below it, or a leaf itself."""

    __slots__ = ("dtypes", "leaves", "nbytes", "params")

    def __init__(self) -> None:
        self.leaves = self.nbytes = self.params = 0
        self.dtypes: dict[str, int] = {}

    def add(self, other: _Totals) -> None:
        self.leaves += other.leaves
        self.nbytes += other.nbytes
        self.params += other.params
        for dtype, nbytes in other.dtypes.items():
            self.dtypes[dtype] = self.dtypes.get(dtype, 0) + nbytes

    @property
    def main_dtype(self) -> str:
        return max(self.dtypes, key=self.dtypes.__getitem__, default="")


def _totals(contents: Contents) -> list[_Totals]:
    totals = [_Totals() for _ in contents.rows]
    for number in range(len(totals) - 1, -1, -1):
        row = contents.rows[number]
        if row.leaf >= 0:
            leaf, found = contents.leaves[row.leaf], totals[number]
            found.leaves, found.nbytes, found.params = 1, leaf.nbytes, leaf.params
            found.dtypes = {leaf.dtype: leaf.nbytes}
        if row.parent >= 0:
            totals[row.parent].add(totals[number])
    return totals


def _children(contents: Contents) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in contents.rows]
    for number, row in enumerate(contents.rows):
        if row.parent >= 0:
            found[row.parent].append(number)
    return found


def _specials(measured: Measured) -> int:
    found = measured.statistics
    return found.nans + found.positive_infinities + found.negative_infinities if found else 0


def _measured_facts(measured: Measured | None) -> Json:
    if measured is None:
        return {}
    found: Json = {"problem": measured.problem} if measured.problem else {}
    statistics = statistics_facts(measured.statistics)
    if statistics and statistics["histogram"]:
        found |= {name: statistics[name] for name in ("std", "mean")}
        found["bins"] = statistics["histogram"]["counts"]
    return found


def label(path: str) -> str:
    """Return a path as people read it."""
    return ".".join(map(_part_label, path.split("."))) if "%" in path else path


def _part_label(part: str) -> str:
    if part.startswith(FOLD):
        return unescape(part[len(FOLD) :])
    if part == ITSELF:
        return "(itself)"
    if part == BARE_LEAF:
        return "(the only leaf)"
    return unescape(part[len(TREE) :]) if part.startswith(TREE) else unescape(part)


def natural(text: str) -> list[str | int]:
    """Return a key that sorts numbers in a text by their values."""
    return [int(part) if n % 2 else part for n, part in enumerate(_DIGITS.split(text.lower()))]
