"""A tree of leaves as people want to see it: modules inside of modules, and what repeats only once. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from eformer._engine.record.names import split_name, unescape
from eformer._engine.record.text import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


_DEEPEST = 64  # modules inside of each other; what is deeper is one name: nobody looks, and Python would not go there


@dataclass(frozen=True, slots=True)
class Line:
    """A leaf as it is shown. `what` is its dtype and shape, or the text of a plain value."""

    name: str
    what: str
    nbytes: int = 0


@dataclass(slots=True)
class Node:
    """A leaf, or a module with what is in it; `count` of them that are alike but for a number in their label."""

    label: str
    line: Line | None = None
    children: list[Node] = field(default_factory=list)
    count: int = 1

    def lines(self) -> Iterator[Line]:
        if self.line:
            yield self.line
        for child in self.children:
            yield from child.lines()

    @property
    def nbytes(self) -> int:
        """Of all that the node stands for."""
        return self.count * (self.line.nbytes if self.line else sum(child.nbytes for child in self.children))

    @property
    def rows(self) -> int:
        return 1 + sum(child.rows for child in self.children)

    @property
    def leaves(self) -> int:
        return self.count * (1 if self.line else sum(child.leaves for child in self.children))


def outline(lines: Iterable[Line]) -> Node:
    """The root, with everything below it folded."""
    root = Node("")
    inner: dict[tuple[str, ...], Node] = {(): root}
    for line in lines:
        parts = split_name(line.name) if line.name else ()
        parts = (*parts[:_DEEPEST], ".".join(parts[_DEEPEST:])) if len(parts) > _DEEPEST else parts
        for depth in range(len(parts)):
            here = parts[: depth + 1]
            if here not in inner:
                inner[here] = Node(printable(unescape(here[-1])))
                inner[here[:-1]].children.append(inner[here])
        inner[parts].line = line
    return _folded(root)


def _folded(node: Node) -> Node:
    """The node with its children folded, innermost first; a module with one child is one with it."""
    children = _together([_folded(child) for child in node.children])
    if len(children) == 1 and node.label and not node.line and children[0].count == 1:
        (only,) = children
        return Node(f"{node.label}.{only.label}", only.line, only.children)
    return Node(node.label, node.line, children)


def _together(nodes: Sequence[Node]) -> list[Node]:
    """Those that differ in one number are one node, which says from where to where."""
    runs: list[list[Node]] = []
    for node in _in_order(nodes):
        if runs and _follows(runs[-1][-1], node):
            runs[-1].append(node)
        else:
            runs.append([node])
    return [run[0] if len(run) == 1 else _as_one(run) for run in runs]


_NUMBER = re.compile(r"(?<!\d)\d{1,9}(?!\d)")


def _in_order(nodes: Sequence[Node]) -> list[Node]:
    """Numbered ones by their numbers, where the first of them is: by the alphabet, 10 comes before 2."""
    alike: dict[str | tuple[str, str], list[tuple[int, int, Node]]] = {}
    for position, node in enumerate(nodes):
        match = _NUMBER.search(node.label)
        kind = (node.label[: match.start()], node.label[match.end() :]) if match else node.label
        alike.setdefault(kind, []).append((int(match[0]) if match else 0, position, node))
    return [node for some in alike.values() for _, _, node in sorted(some, key=lambda one: one[:2])]


def _follows(before: Node, node: Node) -> bool:
    """Whether the label counts on, and what is inside is the same."""
    a, b = _NUMBER.search(before.label), _NUMBER.search(node.label)
    if not a or not b:
        return False
    is_next = int(b[0]) == int(a[0]) + 1
    same = (before.label[: a.start()], before.label[a.end() :]) == (
        node.label[: b.start()],
        node.label[b.end() :],
    )
    return is_next and same and _shape_of(before) == _shape_of(node)


def _shape_of(node: Node) -> object:
    """What two nodes have to share to be alike."""
    inside = tuple((child.label, child.count, _shape_of(child)) for child in node.children)
    return node.line and (node.line.what, node.line.nbytes), inside


def _as_one(run: Sequence[Node]) -> Node:
    first, last = run[0], run[-1]
    match, end = _NUMBER.search(first.label), _NUMBER.search(last.label)
    assert match
    assert end
    label = f"{first.label[: match.start()]}{match[0]}-{end[0]}{first.label[match.end() :]}"
    return Node(label, first.line, first.children, len(run))
