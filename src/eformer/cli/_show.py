"""Facts on a terminal."""

from __future__ import annotations

import shutil
import sys
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from eformer.checkpoint._outline import Node, outline
from eformer.checkpoint._text import bar, count, printable, shortened, size

if TYPE_CHECKING:
    from eformer.checkpoint._manifest import TreeEntry
    from eformer.cli._facts import Facts

_BAR = 10
_MOST_ROWS = 400
_NARROW, _PIPED = 60, 120


def console() -> Console:
    """Colours and the terminal's width where there is one; else plain, and wide enough."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else _PIPED, soft_wrap=False)


def show_checkpoint(facts: Facts, trees: dict[str, TreeEntry], on: Console) -> None:
    on.print(Text(printable(facts["path"]), style="bold"))
    about = Table.grid(padding=(0, 2))
    about.add_row("format", Text(facts["format"]))
    if "steps" in facts:
        about.add_row("steps", Text(printable(f"{', '.join(facts['steps'])}; shown is {facts['steps'][-1]}")))
    on.print(about)
    for prefix, tree in trees.items():
        on.print()
        show_tree(prefix, facts["trees"][prefix], tree, on)
    for prefix, problem in facts["problems"].items():
        on.print(Text(printable(f"{prefix or 'the tree'} cannot be read: {problem}"), style="red"))


def show_tree(prefix: str, facts: Facts, tree: TreeEntry, on: Console) -> None:
    about = Table.grid(padding=(0, 2))
    if prefix:
        about.add_row("prefix", Text(printable(prefix), style="bold"))
    written = ", ".join(filter(None, (facts["written_by"], facts["saved_at"])))
    if written:
        about.add_row("written by", Text(printable(written)))
    amount = f"{count(facts['arrays'], 'array')}, {count(facts['parameters'], 'parameter')}, {size(facts['bytes'])}"
    if facts["values"]:
        amount += f", {count(facts['values'], 'plain value')}"
    about.add_row("holds", amount)
    dtypes = ", ".join(f"{name} {size(d['bytes'])}" for name, d in facts["dtypes"].items())
    about.add_row("dtypes", Text(printable(dtypes)))
    shardings = {text: number for text, number in facts["shardings"].items() if text != "one device"}
    for text, number in shardings.items():
        about.add_row("sharded", Text(printable(f"{text}: {count(number, 'array')}")))
    about.add_row("digests", "of every piece" if facts["digests"] else "none: damage cannot be noticed")
    for name, value in facts["metadata"].items():
        about.add_row("metadata", Text(printable(shortened(f"{name} = {value!r}", 100))))
    on.print(about)
    on.print(tree_of(tree, on.width))


def tree_of(tree: TreeEntry, width: int) -> Tree:
    """Folded, with the size of everything as a bar of the whole."""
    root = outline(tree.lines())
    whole = max(1, root.nbytes)
    shown = Tree("", guide_style="dim", hide_root=True)
    rows = 0

    def add(to: Tree, node: Node) -> None:
        nonlocal rows
        if rows >= _MOST_ROWS:
            return
        rows += 1
        below = to.add(_label(node, whole, width))
        for child in node.children:
            add(below, child)

    for child in root.children or [root]:
        add(shown, child)
    if (hidden := root.rows - 1 - rows) > 0:
        shown.add(f"... and {count(hidden, 'more row')}; `eformer ls` has one line a leaf")
    return shown


def _label(node: Node, whole: int, width: int) -> Text:
    text = Text(shortened(node.label, max(20, width // 2)), style="" if node.line else "bold")
    if node.count > 1:
        text.append(f" ×{node.count}", style="cyan")
    if node.line:
        text.append(f"  {node.line.what}", style="green" if node.line.nbytes else "magenta")
    if node.nbytes:
        text.append(f"  {size(node.nbytes)}", style="dim")
        if width >= _NARROW:
            text.append(f" {bar(node.nbytes / whole, _BAR)}", style="blue")
    return text


def list_leaves(leaves: list[Facts], on: Console) -> None:
    """One line each. Nothing is cut where a program reads it."""
    width = shutil.get_terminal_size().columns if on.is_terminal else 0
    names = [
        printable(f"{leaf['prefix']}: {leaf['name']}" if "prefix" in leaf else leaf["name"])
        for leaf in leaves
    ]
    longest = max(map(len, names), default=0)
    room = min(longest, max(20, width - 40)) if width else longest
    for leaf, whole in zip(leaves, names, strict=True):
        name = shortened(whole, room).ljust(room)
        if "value" in leaf:
            line = printable(f"{name}  = {leaf['value']!r}")
        else:
            shape = ",".join(map(str, leaf["shape"]))
            line = printable(f"{name}  {size(leaf['bytes']):>8}  {leaf['dtype']}[{shape}]")
        on.print(Text(line), overflow="ignore", no_wrap=True, crop=False)
