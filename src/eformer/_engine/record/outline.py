"""Fold a tree of leaves for display: nested modules, with repeated ones shown once. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from eformer._engine.record.names import split_name, unescape
from eformer._engine.record.text import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

_T = TypeVar("_T")

_DEEPEST = 64  # levels of modules; deeper parts stay one name, which keeps the recursion bounded


@dataclass(frozen=True, slots=True)
class LeafLine:
    """A leaf for display. `what` is its dtype and shape, or the text of a plain value."""

    name: str
    what: str
    nbytes: int = 0


@dataclass(slots=True)
class OutlineNode:
    """A leaf, or a module with its children. It stands for `count` nodes that differ only in a number in the label."""

    label: str
    line: LeafLine | None = None
    children: list[OutlineNode] = field(default_factory=list)
    count: int = 1

    def lines(self) -> Iterator[LeafLine]:
        if self.line:
            yield self.line
        for child in self.children:
            yield from child.lines()

    @property
    def nbytes(self) -> int:
        """Return the bytes of all nodes that this one stands for."""
        return self.count * (self.line.nbytes if self.line else sum(child.nbytes for child in self.children))

    @property
    def rows(self) -> int:
        return 1 + sum(child.rows for child in self.children)

    @property
    def leaves(self) -> int:
        return self.count * (1 if self.line else sum(child.leaves for child in self.children))


def outline(lines: Iterable[LeafLine]) -> OutlineNode:
    """Build the folded tree of these leaves, and return its root."""
    root = OutlineNode("")
    inner: dict[tuple[str, ...], OutlineNode] = {(): root}
    for line in lines:
        parts = split_name(line.name) if line.name else ()
        parts = (*parts[:_DEEPEST], ".".join(parts[_DEEPEST:])) if len(parts) > _DEEPEST else parts
        for depth in range(len(parts)):
            here = parts[: depth + 1]
            if here not in inner:
                inner[here] = OutlineNode(printable(unescape(here[-1])))
                inner[here[:-1]].children.append(inner[here])
        inner[parts].line = line
    return _fold(root)


def _fold(node: OutlineNode) -> OutlineNode:
    """Fold the children, innermost first; merge a module that has one child with that child."""
    children = _merge_runs([_fold(child) for child in node.children])
    if len(children) == 1 and node.label and not node.line and children[0].count == 1:
        (only,) = children
        return OutlineNode(f"{node.label}.{only.label}", only.line, only.children)
    return OutlineNode(node.label, node.line, children)


def _merge_runs(nodes: Sequence[OutlineNode]) -> list[OutlineNode]:
    """Merge consecutive nodes that differ in one number into one node, labelled with the range."""
    runs: list[list[OutlineNode]] = []
    for node in in_number_order(nodes, lambda node: node.label):
        if runs and _follows(runs[-1][-1], node):
            runs[-1].append(node)
        else:
            runs.append([node])
    return [run[0] if len(run) == 1 else _merge(run) for run in runs]


NUMBER = re.compile(r"(?<!\d)\d{1,9}(?!\d)")


def in_number_order(nodes: Iterable[_T], label: Callable[[_T], str]) -> list[_T]:
    """Sort numbered nodes by number, at the place of the first: alphabetically, 10 comes before 2."""
    groups: dict[str | tuple[str, str], list[tuple[int, int, _T]]] = {}
    for position, node in enumerate(nodes):
        name = label(node)
        match = NUMBER.search(name)
        kind = (name[: match.start()], name[match.end() :]) if match else name
        groups.setdefault(kind, []).append((int(match[0]) if match else 0, position, node))
    return [node for group in groups.values() for _, _, node in sorted(group, key=lambda item: item[:2])]


def _follows(before: OutlineNode, node: OutlineNode) -> bool:
    """Tell whether the label has the next number and the contents are the same."""
    a, b = NUMBER.search(before.label), NUMBER.search(node.label)
    if not a or not b:
        return False
    is_next = int(b[0]) == int(a[0]) + 1
    same = (before.label[: a.start()], before.label[a.end() :]) == (
        node.label[: b.start()],
        node.label[b.end() :],
    )
    return is_next and same and _shape_of(before) == _shape_of(node)


def _shape_of(node: OutlineNode) -> object:
    """Return everything but the label, for comparing two nodes. The order of the children does not count: if layers are
    spread over shards, each may have another."""
    inside = [(child.label, child.count, _shape_of(child)) for child in node.children]
    return node.line and (node.line.what, node.line.nbytes), sorted(inside, key=lambda child: child[0])


def _merge(run: Sequence[OutlineNode]) -> OutlineNode:
    first, last = run[0], run[-1]
    match, end = NUMBER.search(first.label), NUMBER.search(last.label)
    assert match
    assert end
    label = f"{first.label[: match.start()]}{match[0]}-{end[0]}{first.label[match.end() :]}"
    return OutlineNode(label, first.line, first.children, len(run))
