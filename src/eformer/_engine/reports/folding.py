"""Arrange the names of leaves as a tree to look at: chains joined, repeated layers folded into one row. Pure.

A row has a path: the escaped parts of a name, joined by dots. Two kinds of parts never occur in names: `%*0-31` is a
row for the siblings 0 to 31, which are alike and come below it, and `%=` is the leaf that has the name of a module.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from eformer._engine.record.names import split_name
from eformer._engine.record.outline import NUMBER, in_number_order

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

FOLD = "%*"
ITSELF = "%="

_FEWEST = 3  # siblings that are folded
_DEEPEST = 64  # levels; deeper parts stay one name, which bounds the recursion


@dataclass(frozen=True, slots=True)
class TreeRow:
    """A row of the tree, in the order of a depth-first walk.

    parent   the number of the row above it; -1 for the root, which is the first row
    part     what its path has after that of its parent
    leaf     the number of the leaf in the order that was given; -1 for a group
    """

    parent: int
    part: str
    leaf: int = -1


@dataclass(slots=True)
class _Node:
    part: str
    leaf: int = -1
    kind: str = ""
    children: list[_Node] = field(default_factory=list)
    shape: int = 0  # equal for nodes that are alike below their own names


def tree_rows(leaves: Iterable[tuple[str, str]]) -> list[TreeRow]:
    """Return the rows for leaves, each given by its name and its kind: dtype and shape, or anything else that leaves
    must share to be folded."""
    root = _nested(leaves)
    shapes: dict[object, int] = {}
    _arrange(root, shapes)
    return list(_walk(root))


def leaf_path(path: str) -> str:
    """Return the path of a leaf without the parts that only rows have."""
    if "%" not in path:
        return path
    return ".".join(part for part in path.split(".") if not part.startswith((FOLD, ITSELF)))


def _nested(leaves: Iterable[tuple[str, str]]) -> _Node:
    root = _Node("")
    inner: dict[tuple[str, ...], _Node] = {(): root}
    for number, (name, kind) in enumerate(leaves):
        parts = split_name(name) or (name,)
        if len(parts) > _DEEPEST:
            parts = (*parts[:_DEEPEST], ".".join(parts[_DEEPEST:]))
        node = _node_at(inner, parts)
        node.leaf, node.kind = number, kind
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


def _arrange(node: _Node, shapes: dict[object, int]) -> None:
    """Put the children in order, fold those that are alike, and join chains; innermost first."""
    if node.children and node.leaf >= 0:
        node.children.insert(0, _Node(ITSELF, node.leaf, node.kind))
        node.leaf = -1
    for child in node.children:
        _arrange(child, shapes)
    below = tuple(sorted((child.part, child.shape) for child in node.children))
    node.shape = shapes.setdefault((node.kind if node.leaf >= 0 else None, below), len(shapes))
    ordered = in_number_order(node.children, lambda child: child.part)
    node.children = [_joined(child) for child in _folded(ordered)]


def _joined(node: _Node) -> _Node:
    """Join a group that has one child with it."""
    if len(node.children) != 1 or node.leaf >= 0:
        return node
    (only,) = node.children
    if node.part.startswith(FOLD) or only.part == ITSELF:
        return node
    return _Node(f"{node.part}.{only.part}", only.leaf, only.kind, only.children, node.shape)


def _folded(nodes: Sequence[_Node]) -> Iterator[_Node]:
    run: list[_Node] = []
    for node in nodes:
        if run and not _follows(run[-1], node):
            yield from _fold(run)
            run = []
        run.append(node)
    yield from _fold(run)


def _follows(before: _Node, node: _Node) -> bool:
    a, b = NUMBER.search(before.part), NUMBER.search(node.part)
    if not a or not b or before.shape != node.shape or int(b[0]) != int(a[0]) + 1:
        return False
    return (before.part[: a.start()], before.part[a.end() :]) == (
        node.part[: b.start()],
        node.part[b.end() :],
    )


def _fold(run: Sequence[_Node]) -> Sequence[_Node]:
    if len(run) < _FEWEST or not run[0].children:
        return run
    first, last = run[0].part, run[-1].part
    match, end = NUMBER.search(first), NUMBER.search(last)
    assert match
    assert end
    label = f"{first[: match.start()]}{match[0]}-{end[0]}{first[match.end() :]}"
    return [_Node(FOLD + label, children=[_joined(node) for node in run])]


def _walk(root: _Node) -> Iterator[TreeRow]:
    left = [(-1, root)]
    number = 0
    while left:
        parent, node = left.pop()
        yield TreeRow(parent, node.part, node.leaf)
        left += [(number, child) for child in reversed(node.children)]
        number += 1
