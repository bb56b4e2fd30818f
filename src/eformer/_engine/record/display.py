"""Show a checkpoint as a few lines of text, or as HTML that folds. Pure."""

from __future__ import annotations

import html
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from eformer._engine.record.outline import LeafLine, OutlineNode, outline
from eformer._engine.record.text import count, few, printable, shortened, size

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_MOST_TREES = 8
_MOST_LINES = 40  # of text
_MOST_ROWS = 1000  # of HTML, most of them folded
_LEAST_ROWS = 4  # of each of several trees
_WIDTH = 80

# Sizes form a column at the right, and shapes are pale. Without styles the rows are still readable.
_STYLE = """<style>
.eformer-tree {font: 13px/1.6 ui-monospace, monospace; max-width: 48em}
.eformer-tree details > div, .eformer-tree details > details {margin-left: 1.5em}
.eformer-tree summary {cursor: pointer}
.eformer-tree summary:hover, .eformer-tree details > div:hover {background: #8882}
.eformer-tree i {font-style: normal; opacity: .65}
.eformer-tree span {float: right; margin-left: 2em}
</style>"""


@dataclass(frozen=True, slots=True)
class TreeSummary:
    """Summarize a tree, for display.

    dtypes    bytes by dtype, the largest first
    lines     one line for each leaf
    origin    the tool, the rules and the checkpoints that the tree was made by
    parents   a line for each of these checkpoints
    problem   why the tree cannot be read; the other facts are then unknown
    """

    prefix: str = ""
    written_by: str = ""
    saved_at: str = ""
    parameters: int = 0
    arrays: int = 0
    nbytes: int = 0
    dtypes: Mapping[str, int] = field(default_factory=dict)
    lines: Sequence[LeafLine] = ()
    problem: str = ""
    origin: str = ""
    parents: Sequence[str] = ()

    def facts(self) -> Iterator[tuple[str, str]]:
        """Yield pairs of a label and a text."""
        if self.prefix:
            yield "prefix", self.prefix
        if written := ", ".join(filter(None, (self.written_by, self.saved_at))):
            yield "written by", written
        if self.origin:
            yield "origin", self.origin
        yield from (("parent", parent) for parent in self.parents)
        if self.problem:
            yield "cannot be read", self.problem
            return
        amount = f"{count(self.arrays, 'array')}, {count(self.parameters, 'parameter')}, {size(self.nbytes)}"
        if values := len(self.lines) - self.arrays:
            amount += f", {count(values, 'plain value')}"
        yield "holds", amount
        if self.dtypes:
            yield "dtypes", ", ".join(f"{name} {size(nbytes)}" for name, nbytes in self.dtypes.items())


class Shown:
    """Show itself as text at a prompt, and as HTML in a notebook."""

    __slots__ = ()

    def _shown(self) -> tuple[str, Sequence[TreeSummary], Sequence[str]]:
        """Return a title, the trees, and the files that are not read."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return as_text(*self._shown())

    def _repr_html_(self) -> str:
        return as_html(*self._shown())


def as_text(title: str, trees: Sequence[TreeSummary], left_out: Sequence[str] = ()) -> str:
    """Render a few dozen lines at most, even for many leaves."""
    lines = [_fit(title)]
    if left_out:
        lines.append(f"  left out  {_fit(few(left_out))}")
    for tree in trees[:_MOST_TREES]:
        facts = list(tree.facts())
        width = max((len(name) for name, _ in facts), default=0)
        lines += [f"  {name:{width}}  {_fit(text)}" for name, text in facts]
        every = outline(tree.lines).rows()
        rows = every[: _share(_MOST_LINES, trees)]
        lines += [f"    {'  ' * depth}{_label(node)}  {_rest(node)}".rstrip() for depth, node in rows]
        lines += _more(every[len(rows) :], "    ... and {}", "more row")
    return "\n".join([*lines, *_more(trees[_MOST_TREES:], "... and {}", "more tree")])


def as_html(title: str, trees: Sequence[TreeSummary], left_out: Sequence[str] = ()) -> str:
    """Render HTML for a notebook. Modules fold. The HTML has no scripts, loads nothing, and escapes every name."""
    parts = [f"<div><b>{_escaped(title)}</b></div>"]
    if left_out:
        parts.append(f"<div><i>left out:</i> {_escaped(few(left_out))}</div>")
    for tree in trees[:_MOST_TREES]:
        parts += [f"<div><i>{name}:</i> {_escaped(text)}</div>" for name, text in tree.facts()]
        every = outline(tree.lines).rows()
        rows = every[: _share(_MOST_ROWS, trees)]
        parts += [*_folding(rows), *_more(every[len(rows) :], "<div>... and {}</div>", "more row")]
    parts += _more(trees[_MOST_TREES:], "<div>... and {}</div>", "more tree")
    return f'<div class="eformer-tree">{_STYLE}{"".join(parts)}</div>'


def _folding(rows: Sequence[tuple[int, OutlineNode]]) -> Iterator[str]:
    """Render rows as nested details; the outermost level is open."""
    inside = 0
    for depth, node in rows:
        yield "</details>" * (inside - depth)
        inside = depth + bool(node.children)
        if node.children:
            is_open = "" if depth else " open"
            yield f"<details{is_open}><summary>{_row(node)}</summary>"
        else:
            yield f"<div>{_row(node)}</div>"
    yield "</details>" * inside


def _row(node: OutlineNode) -> str:
    nbytes = f"<span>{size(node.nbytes)}</span> " if node.nbytes else ""
    detail = f" <i>{html.escape(_detail(node))}</i>" if node.line else ""
    return f"{nbytes}{html.escape(_label(node))}{detail}"


def _share(most: int, trees: Sequence[TreeSummary]) -> int:
    return max(_LEAST_ROWS, most // max(1, len(trees)))


def _label(node: OutlineNode) -> str:
    times = f" ×{node.count}" if node.count > 1 else ""
    return shortened(node.label, _WIDTH) + times


def _rest(node: OutlineNode) -> str:
    detail = [_detail(node)] if node.line else []
    return "  ".join([*detail, size(node.nbytes)] if node.nbytes else detail)


def _detail(node: OutlineNode) -> str:
    return shortened(node.line.text, _WIDTH) if node.line else ""


def _more(hidden: Sequence[object], line: str, noun: str) -> list[str]:
    return [line.format(count(len(hidden), noun))] if hidden else []


def _fit(text: str) -> str:
    return shortened(printable(text), 2 * _WIDTH)


def _escaped(text: str) -> str:
    return html.escape(_fit(text))
