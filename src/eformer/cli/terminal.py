"""Show facts about a checkpoint on a terminal.

Tests: tests/cli/test_commands.py, tests/cli/test_steps.py.
"""

from __future__ import annotations

import io
import re
import shutil
import sys
from datetime import datetime
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from eformer._engine.record.outline import LeafLine, OutlineNode, outline
from eformer._engine.record.text import bar, count, few, printable, shortened, size

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from eformer._engine.record.manifest import TreeEntry
    from eformer.cli.facts import Facts

_BAR, _SIZE, _INDENT = 10, 7, 4  # columns
_BAR_COLUMN, _SIZE_COLUMN = _BAR + 1, _SIZE + 2  # with the space before them
_LEAST_NAME = 5
_MOST_ROWS = 400
_PIPED, _PICTURE = 120, 92


def console() -> Console:
    """Use the colours and the width of the terminal. Piped output is plain text of a fixed width."""
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    return Console(highlight=False, width=None if is_terminal else _PIPED, soft_wrap=False)


def picture(facts: Facts, trees: dict[str, TreeEntry], title: str) -> str:
    """Render the output of `show_checkpoint` as a self-contained SVG."""
    on = Console(record=True, file=io.StringIO(), width=_PICTURE, force_terminal=True, highlight=False)
    show_checkpoint(facts, trees, on)
    return re.sub(r"@font-face \{.*?\}\s*", "", on.export_svg(title=title), flags=re.DOTALL)


def show_checkpoint(facts: Facts, trees: dict[str, TreeEntry], on: Console) -> None:
    """Print a checkpoint: its facts, then every tree."""
    on.print(Text(printable(facts["path"]), style="bold"))
    about = Table.grid(padding=(0, 2))
    about.add_row("format", Text(facts["format"]))
    if "steps" in facts:
        about.add_row("steps", Text(printable(f"{few(facts['steps'])}; {facts['steps'][-1]} is shown")))
    if facts["left_out"]:
        text = f"{few(facts['left_out'])}: not read, may hold leaves"
        about.add_row("left out", Text(printable(text), style="red"))
    if facts["signed_by"]:
        text = f"by {facts['signed_by']}; `eformer verify --signed-by` checks it"
        about.add_row("signed", Text(printable(text)))
    on.print(about)
    for prefix, tree in trees.items():
        on.print()
        more = {"checksums": facts.get("checksums"), "marks": facts["quantized"].get(prefix)}
        show_tree(prefix, facts["trees"][prefix] | more, tree, on)
    for prefix, problem in facts["problems"].items():
        on.print(Text(printable(f"{prefix or 'the tree'} cannot be read: {problem}"), style="red"))
    if "damage" in facts:
        on.print(Text(printable(facts["damage"]), style="red"))


def show_tree(prefix: str, facts: Facts, tree: TreeEntry, on: Console) -> None:
    """Print one tree: its facts, then the folded outline."""
    about = Table.grid(padding=(0, 2))
    summary = tree.summary(prefix, facts["marks"])
    for label, text in summary.facts():
        about.add_row(label, Text(printable(text), style="bold" if label == "prefix" else ""))
    if not summary.dtypes:
        about.add_row("dtypes", "")
    shardings = {text: number for text, number in facts["shardings"].items() if text != "one device"}
    for text, number in shardings.items():
        about.add_row("sharded", Text(printable(f"{text}: {count(number, 'array')}")))
    about.add_row("digests", _digests(facts))
    for name, value in _settings(facts["metadata"]):
        about.add_row("metadata", Text(printable(shortened(f"{name} = {value!r}", 100))))
    on.print(about)
    on.print()
    on.print(tree_of(summary.lines, on))


def _settings(metadata: Facts) -> Iterator[tuple[str, Any]]:
    """Yield the metadata. A dict, such as the configuration of an adapter, yields one entry for each value in it."""
    for name, value in metadata.items():
        if isinstance(value, dict):
            yield from ((f"{name}.{key}", inner) for key, inner in value.items() if inner not in (None, {}))
        else:
            yield name, value


def _digests(facts: Facts) -> str:
    if facts["digests"]:
        return "of all bytes"
    if facts["checksums"]:
        return "none, but checksums of whole arrays, which `eformer verify` compares"
    return "none: damage cannot be detected"


def tree_of(lines: Sequence[LeafLine], on: Console) -> Tree:
    """Build the folded tree, with sizes and bars in aligned columns. A narrow terminal drops the bars first, then the
    sizes."""
    root = outline(lines)
    whole = max(1, root.nbytes)
    every = root.rows() or [(0, root)]
    rows = every[:_MOST_ROWS]
    needed = max(
        (_INDENT * depth + _label(node, on).cell_len for depth, node in rows if node.nbytes), default=0
    )
    with_size = needed + _SIZE_COLUMN <= on.width
    with_bar = needed + _SIZE_COLUMN + _BAR_COLUMN <= on.width
    shown = Tree("", guide_style="dim", hide_root=True)
    branches = [shown]  # the last branch at each depth
    for depth, node in rows:
        label = _label(node, on, on.width - _INDENT * depth)
        if node.nbytes and with_size:
            label.pad_right(needed - _INDENT * depth - label.cell_len)
            label.append(f"  {size(node.nbytes):>{_SIZE}}", style="dim")
        if node.nbytes and with_bar:
            part = bar(node.nbytes / whole, _BAR, ascii_only=on.options.ascii_only)
            label.append(f" {part}", style="blue")
        branches[depth + 1 :] = [branches[depth].add(label)]
    if hidden := len(every) - len(rows):
        shown.add(f"... and {count(hidden, 'more row')}; `eformer ls` lists every leaf")
    return shown


def _label(node: OutlineNode, on: Console, room: int | None = None) -> Text:
    """Return the name, the count, and the dtype and shape of a node. The name is shortened to fit into the room."""
    rest = Text()
    if node.count > 1:
        rest.append(f" {'x' if on.options.ascii_only else '×'}{node.count}", style="cyan")
    if node.line:
        rest.append(f"  {node.line.text}", style="green" if node.line.nbytes else "magenta")
    most = max(20, on.width // 2)
    if room is not None and node.nbytes:
        most = min(most, max(_LEAST_NAME, room - rest.cell_len))
    name = Text(shortened(node.label, most), style="" if node.line else "bold")
    return name + rest


def list_leaves(leaves: list[Facts], spellings: dict[str, dict[str, str]], on: Console) -> None:
    """Print one line for each leaf, under its readable name. Piped output is not shortened."""
    width = shutil.get_terminal_size().columns if on.is_terminal else 0
    names = []
    for leaf in leaves:
        prefix = leaf.get("prefix", "")
        name = spellings[prefix][leaf["name"]]
        names.append(printable(f"{prefix}: {name}" if prefix else name))
    longest = max(map(cell_len, names), default=0)
    room = min(longest, max(20, width - 40)) if width else longest
    for leaf, whole in zip(leaves, names, strict=True):
        name = set_cell_size(shortened(whole, room), room)
        if "value" in leaf:
            line = printable(f"{name}  = {leaf['value']!r}")
        else:
            mark = f" {leaf['quantized']}" if "quantized" in leaf else ""
            line = printable(f"{name}  {size(leaf['bytes']):>8}  {leaf['dtype']}{leaf['shape']}{mark}")
        on.print(Text(line), overflow="ignore", no_wrap=True, crop=False)


def list_steps(steps: list[Facts], on: Console) -> None:
    """Print a table of the steps of a run, with a column for each metric.

    On a terminal, leave out the metrics that do not fit and name them at the end; a note that does not fit follows its
    row. Piped output is complete, with one line for each step.
    """
    metrics = list(dict.fromkeys(name for step in steps for name in step["metrics"]))
    rows = [[*_STEP_COLUMNS, *map(printable, metrics)], *(_step_row(step, metrics) for step in steps)]
    notes = ["", *map(_step_notes, steps)]
    styles = ["bold", *map(_step_style, steps)]
    widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
    room = on.width if on.is_terminal else sys.maxsize
    while len(widths) > len(_STEP_COLUMNS) and _table_width(widths) > room:
        widths.pop()
    for row, note, style in zip(rows, notes, styles, strict=True):
        line = _aligned(row, widths)
        if note and _table_width([*widths, cell_len(note)]) > room:
            _print_line(line, style, on)
            on.print(Padding(Text(note, style=style), (0, 0, 0, _INDENT)))
        else:
            _print_line(f"{line}  {note}", style, on)
    if left_out := metrics[len(widths) - len(_STEP_COLUMNS) :]:
        on.print(Text(f"... and {few(list(map(printable, left_out)))}: see --json", style="dim"))


_STEP_COLUMNS = ("Step", "Saved", "Size", "Why")
_TEXTS = {1, 3}  # columns that begin at the left; numbers end at the right


def _table_width(widths: Sequence[int]) -> int:
    return sum(widths) + 2 * len(widths) - 2


def _aligned(row: Sequence[str], widths: Sequence[int]) -> str:
    """Join the cells of a row, as far as there are widths."""
    cells = [
        set_cell_size(row[at], width) if at in _TEXTS else " " * (width - cell_len(row[at])) + row[at]
        for at, width in enumerate(widths)
    ]
    return "  ".join(cells)


def _print_line(line: str, style: str, on: Console) -> None:
    on.print(Text(line.rstrip(), style=style), overflow="ignore", no_wrap=True, crop=False)


def _step_row(step: Facts, metrics: list[str]) -> list[str]:
    saved = datetime.fromisoformat(step["saved_at"]).astimezone() if step["saved_at"] else None
    when = f"{saved:%Y-%m-%d %H:%M:%S}" if saved else ""
    values = [f"{step['metrics'][name]:.6g}" if name in step["metrics"] else "" for name in metrics]
    return [str(step["number"]), when, size(step["nbytes"]), printable(step["why"]), *values]


def _step_notes(step: Facts) -> str:
    notes = [
        "resumed from" if step["is_resumed_from"] else "",
        "would be removed" if step["is_removed"] else "",
        f"damaged: {printable(step['problem'])}" if step["problem"] else "",
    ]
    return ", ".join(filter(None, notes))


def _step_style(step: Facts) -> str:
    if step["problem"]:
        return "red"
    return "yellow" if step["is_removed"] else ""
