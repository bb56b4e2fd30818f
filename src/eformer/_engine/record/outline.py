"""Arrange the names of leaves as a tree to look at: in order, chains joined, repeated modules folded. Pure.

A row has a path: the escaped parts of a name, joined by dots. Two kinds of parts never occur in names: `%*0-31` is a
row for the siblings 0 to 31, which are alike and follow below it; `%=` is a leaf that has the name of a module.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from eformer._engine.record.names import split_name, unescape
from eformer._engine.record.text import printable

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator, Sequence

FOLD = "%*"
ITSELF = "%="

_DEEPEST = 64  # levels of modules; deeper parts stay one name, which bounds the recursion

# The text before the first number of a part, the number, and the rest. Digits of escapes do not count as numbers.
_NUMBERED = re.compile(
    r"((?>(?:%(?:[0-9A-F]{2}|uD[89A-F][0-9A-F]{2}|#\d+)|\d{10,}|\D)*))(\d{1,9})(.*)", re.DOTALL
)


@dataclass(slots=True)
class _Node:
    """A leaf, a module, or a fold.

    leaf    the number of the leaf in the given order; -1 for a module
    alike   equal for nodes that differ only in their own names
    """

    part: str
    leaf: int = -1
    kind: Hashable = None
    children: list[_Node] = field(default_factory=list)
    alike: int = 0


@dataclass(frozen=True, slots=True)
class _Arranger:
    """Put children in order, fold siblings that are alike, and join chains.

    fewest        fold at least this many siblings
    with_leaves   fold leaves, too
    """

    fewest: int
    with_leaves: bool
    shapes: dict[object, int] = field(default_factory=dict)

    def arrange(self, node: _Node) -> None:
        if node.children and node.leaf >= 0:
            node.children.insert(0, _Node(ITSELF, node.leaf, node.kind))
            node.leaf = -1
        for child in node.children:
            self.arrange(child)
        # Sorted, because leaves that are spread over shards come in another order in every layer.
        below = tuple(sorted((child.part, child.alike) for child in node.children))
        shape = (node.kind if node.leaf >= 0 else None, below)
        node.alike = self.shapes.setdefault(shape, len(self.shapes))
        node.children = [_joined(one) for run in _runs(node.children) for one in self._fold(run)]

    def _fold(self, run: Sequence[_Node]) -> Sequence[_Node]:
        if len(run) < self.fewest or not (self.with_leaves or run[0].children):
            return run
        first, last = (_NUMBERED.fullmatch(node.part) for node in (run[0], run[-1]))
        assert first
        assert last
        part = f"{FOLD}{first[1]}{first[2]}-{last[2]}{first[3]}"
        return [_Node(part, children=[_joined(node) for node in run])]


def _arranged(leaves: Iterable[tuple[str, Hashable]], *, fewest: int, with_leaves: bool) -> _Node:
    """Return the root of the tree of these leaves: pairs of a name and a kind, which is equal for leaves that are
    alike."""
    root = _Node("")
    inner: dict[tuple[str, ...], _Node] = {(): root}
    for number, (name, kind) in enumerate(leaves):
        parts = split_name(name) if name else ()
        if len(parts) > _DEEPEST:
            parts = (*parts[:_DEEPEST], ".".join(parts[_DEEPEST:]))
        node = _node_at(inner, parts)
        node.leaf, node.kind = number, kind
    _Arranger(fewest, with_leaves).arrange(root)
    return root


def _node_at(inner: dict[tuple[str, ...], _Node], parts: tuple[str, ...]) -> _Node:
    known = len(parts)
    while parts[:known] not in inner:
        known -= 1
    node = inner[parts[:known]]
    for depth in range(known, len(parts)):
        child = _Node(parts[depth])
        node.children.append(child)
        inner[parts[: depth + 1]] = node = child
    return node


def _runs(nodes: Iterable[_Node]) -> Iterator[list[_Node]]:
    """Yield runs of nodes: nodes that are alike and have consecutive numbers together, every other node alone.

    Numbered nodes come in the order of their numbers, at the place of the first, because 10 comes before 2 in the
    alphabet.
    """
    groups: dict[str | tuple[str, str], list[tuple[int, _Node]]] = {}
    for node in nodes:
        match = _NUMBERED.fullmatch(node.part)
        ends = (match[1], match[3]) if match else node.part
        groups.setdefault(ends, []).append((int(match[2]) if match else 0, node))
    for group in groups.values():
        group.sort(key=lambda one: one[0])
        start = 0
        for end in range(1, len(group) + 1):
            if end == len(group) or not _follows(group[end - 1], group[end]):
                yield [node for _, node in group[start:end]]
                start = end


def _follows(before: tuple[int, _Node], after: tuple[int, _Node]) -> bool:
    return after[0] == before[0] + 1 and after[1].alike == before[1].alike


def _joined(node: _Node) -> _Node:
    """Join a module with its only child."""
    if len(node.children) != 1 or node.leaf >= 0:
        return node
    (only,) = node.children
    if node.part.startswith(FOLD) or only.part == ITSELF:
        return node
    return replace(only, part=f"{node.part}.{only.part}", alike=node.alike)


# --------------------------------------------------------------------------------------------- pages


@dataclass(frozen=True, slots=True)
class TreeRow:
    """A row of the tree, in the order of a depth-first walk.

    depth   the number of rows above it; 0 for the root, which is the first row
    part    its path below the row above it
    leaf    the number of the leaf in the given order; -1 for a group
    """

    depth: int
    part: str
    leaf: int = -1


def tree_rows(leaves: Sequence[tuple[str, Hashable]]) -> list[TreeRow]:
    """Return the rows of a page. Only modules are folded, three or more of a kind; the page can unfold them."""
    root = _arranged(leaves, fewest=3, with_leaves=False)
    if root.leaf >= 0:
        root = _Node("", children=[replace(root, part=leaves[root.leaf][0])])
    return list(_walk(root))


def _walk(root: _Node) -> Iterator[TreeRow]:
    left = [(0, root)]
    while left:
        depth, node = left.pop()
        yield TreeRow(depth, node.part, node.leaf)
        left += [(depth + 1, child) for child in reversed(node.children)]


# ------------------------------------------------------------------------------------- text and HTML


@dataclass(frozen=True, slots=True)
class LeafLine:
    """A leaf for display. `text` is its dtype and shape, or its plain value."""

    name: str
    text: str
    nbytes: int = 0


@dataclass(slots=True)
class OutlineNode:
    """A leaf, or a module with its children. Represents `count` nodes that differ only in a number in the label."""

    label: str
    line: LeafLine | None = None
    children: list[OutlineNode] = field(default_factory=list)
    count: int = 1

    @property
    def nbytes(self) -> int:
        """Return the bytes of all represented nodes."""
        return self.count * (self.line.nbytes if self.line else sum(child.nbytes for child in self.children))

    def rows(self) -> list[tuple[int, OutlineNode]]:
        """List every node below the root with its depth; or the root alone, if it is a leaf."""
        if self.line:
            return [(0, self)]
        found, left = [], [(0, child) for child in reversed(self.children)]
        while left:
            depth, node = left.pop()
            found.append((depth, node))
            left += [(depth + 1, child) for child in reversed(node.children)]
        return found


def outline(lines: Sequence[LeafLine]) -> OutlineNode:
    """Return the root of the tree of these leaves, with repeated nodes shown once."""
    root = _arranged(((line.name, (line.text, line.nbytes)) for line in lines), fewest=2, with_leaves=True)
    return _shown(root, lines)


def _shown(node: _Node, lines: Sequence[LeafLine]) -> OutlineNode:
    above, _, last = node.part.rpartition(".")
    if not last.startswith(FOLD):
        line = lines[node.leaf] if node.leaf >= 0 else None
        return OutlineNode(_label(node.part), line, [_shown(child, lines) for child in node.children])
    if above:
        return OutlineNode(_label(above), children=[_shown(replace(node, part=last), lines)])
    first = node.children[0]
    _, dot, joined = first.part.partition(".")
    found = _shown(replace(first, part=last[len(FOLD) :] + dot + joined), lines)
    found.count = len(node.children)
    return found


def _label(part: str) -> str:
    return ".".join("(itself)" if one == ITSELF else printable(unescape(one)) for one in part.split("."))
