"""List the leaves of a checkpoint of any format that can be opened. Read no data.

Tests: tests/engine/pages/test_report.py, tests/engine/pages/test_verdicts.py.
"""

from __future__ import annotations

import math
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from eformer._engine.formats.find import look_at, signer_of
from eformer._engine.record.lazy import lazy_property
from eformer._engine.record.names import escape
from eformer._engine.record.origin import origin_text, parent_lines
from eformer._engine.record.text import few, printable, shortened
from eformer._engine.record.values import value_from_json
from eformer._engine.tools.compare import Plain
from eformer._engine.tools.view import open as open_view
from eformer._engine.tools.view import open_incomplete
from eformer.errors import CorruptionError, EformerError

if TYPE_CHECKING:
    import os

    from eformer._engine.formats.found import Found
    from eformer._engine.record.manifest import LeafEntry, RecordedSharding, TreeEntry
    from eformer._engine.tools.view import View

TREE = "%@"  # before a prefix if the checkpoint has several trees; no escaped name begins with it

_MOST_SHOWN = 200  # characters of a plain value
_MOST_METADATA = 2000


@dataclass(frozen=True, slots=True)
class Leaf:
    """An array or a plain value of a checkpoint.

    path    its name; after `%@prefix.`, if the checkpoint has several trees
    name    its name in the tree of `prefix`
    value   the text of a plain value; None for an array
    plain   a plain value, as it is compared
    """

    path: str
    prefix: str
    name: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    nbytes: int = 0
    value: str | None = None
    entry: LeafEntry | None = field(default=None, repr=False)
    plain: Plain | None = field(default=None, repr=False)

    @property
    def record(self) -> LeafEntry | Plain:
        """Return the record by which the leaf is compared."""
        found = self.entry or self.plain
        assert found
        return found

    @property
    def params(self) -> int:
        return math.prod(self.shape) if self.entry else 0

    @property
    def sharding(self) -> RecordedSharding | None:
        return self.entry.sharding if self.entry else None

    @property
    def kind(self) -> str:
        """Return the text that leaves of one dtype and shape have in common."""
        return f"{self.dtype}{list(self.shape)}" if self.entry else "value"


@dataclass
class PageContents:
    """The leaves of a checkpoint, and the facts about all of them.

    prefixes   the trees that are shown: all, or one
    problems   by prefix, why a tree cannot be read, or not as a whole

    Use it as a context manager: it keeps the files of the checkpoint open.
    """

    path: str
    format: str
    prefixes: list[str]
    left_out: tuple[str, ...] = ()
    signed_by: str | None = None
    leaves: list[Leaf] = field(default_factory=list)
    views: dict[str, View] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    stack: ExitStack = field(default_factory=ExitStack, repr=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()

    @property
    def is_one(self) -> bool:
        """Tell whether paths have no prefix, because one tree is shown."""
        return len(self.prefixes) == 1

    @property
    def trees(self) -> dict[str, TreeEntry]:
        return {prefix: view.tree for prefix, view in self.views.items()}

    @lazy_property
    def by_path(self) -> dict[str, Leaf]:
        return {leaf.path: leaf for leaf in self.leaves}

    @lazy_property
    def _by_prefix(self) -> dict[tuple[str, str], Leaf]:
        return {(leaf.prefix, leaf.name): leaf for leaf in self.leaves}

    def counterpart(self, leaf: Leaf, of: PageContents) -> Leaf | None:
        """Return the leaf here that a leaf of another checkpoint is compared with, as `diff` matches them.

        Leaves are matched by prefix and name; by name alone if both checkpoints are one tree.
        """
        if self.is_one and of.is_one:
            return self.by_path.get(leaf.path)
        return self._by_prefix.get((leaf.prefix, leaf.name))

    @property
    def nbytes(self) -> int:
        return sum(leaf.nbytes for leaf in self.leaves)

    def summary(self) -> dict[str, Any]:
        """Return the facts about the whole checkpoint, as JSON."""
        trees = list(self.trees.values())
        return {
            "title": printable(self.path.rstrip("/").rpartition("/")[2] or self.path),
            "path": printable(self.path),
            "format": self.format,
            "writer": ", ".join(dict.fromkeys(tree.written_by for tree in trees if tree.written_by)),
            "saved_at": max((tree.saved_at for tree in trees), default=""),
            "leaves": len(self.leaves),
            "values": sum(leaf.value is not None for leaf in self.leaves),
            "params": sum(leaf.params for leaf in self.leaves),
            "nbytes": self.nbytes,
            "files": sum(len(tree.files) for tree in trees),
            "trees": [prefix for prefix in self.trees if prefix],
            "dtypes": self._dtypes(),
            "metadata": self._metadata(),
            "origin": self._origin(),
            "signed_by": self.signed_by,
            "left_out": [printable(name) for name in self.left_out[:50]],
            "problems": self._problems(),
            "notes": self._notes(),
        }

    def brief(self) -> dict[str, Any]:
        """Return the facts that a comparison shows of the older checkpoint, as JSON."""
        summary = self.summary()
        return {name: summary[name] for name in ("title", "path", "saved_at", "format")}

    def _dtypes(self) -> list[dict[str, Any]]:
        leaves, nbytes, params = Counter[str](), Counter[str](), Counter[str]()
        for leaf in self.leaves:
            if leaf.entry:
                leaves[leaf.dtype] += 1
                nbytes[leaf.dtype] += leaf.nbytes
                params[leaf.dtype] += leaf.params
        return [
            {"dtype": name, "leaves": leaves[name], "nbytes": total, "params": params[name]}
            for name, total in nbytes.most_common()
        ]

    def _metadata(self) -> dict[str, str]:
        found = {}
        for prefix, tree in self.trees.items():
            for name, value in tree.metadata.items():
                key = f"{prefix}: {name}" if prefix and len(self.trees) > 1 else name
                found[printable(key)] = printable(shortened(_text(value), _MOST_METADATA))
        return found

    def _origin(self) -> list[list[str]]:
        """Return the tools that made the trees, and the parents of the trees, as pairs of a label and a text."""
        found: dict[tuple[str, str], None] = {}
        for prefix, tree in self.trees.items():
            label = f"[{prefix}] " if prefix else ""
            if tree.origin:
                found[f"{label}made by", origin_text(tree.origin)] = None
                found |= {(f"{label}parent", line): None for line in parent_lines(tree.origin)}
        return [[printable(label), printable(text)] for label, text in found]

    def _problems(self) -> list[str]:
        return [
            printable(f"{prefix or 'the tree'} cannot be read as a whole: {why}")
            for prefix, why in self.problems.items()
        ]

    def _notes(self) -> list[str]:
        left_out = [f"not read, and may hold leaves: {few(self.left_out)}"] if self.left_out else []
        return [*self._problems(), *map(printable, left_out)]


def page_contents(path: str | os.PathLike[str], prefix: str | None = None) -> PageContents:
    """Open the checkpoint at `path` and list its leaves; with a prefix, the leaves of one tree."""
    contents = look_at(path, lambda found: _contents(found, prefix))
    with ExitStack() as stack:
        for each in contents.prefixes:
            try:
                view = stack.enter_context(_view(path, each, contents.problems))
            except (EformerError, OSError) as error:
                contents.problems[each] = str(error)
                continue
            contents.views[each] = view
            contents.leaves += _leaves(view.tree, each, "" if contents.is_one else f"{TREE}{escape(each)}")
        if contents.problems and not contents.views:
            open_view(path, prefix=contents.prefixes[0]).close()  # raises its error again
        contents.stack = stack.pop_all()
    return contents


def _contents(found: Found, prefix: str | None) -> PageContents:
    """Return the contents before the trees are opened, without leaves."""
    prefixes = [prefix] if prefix is not None else [found.only] if found.only else list(found.trees)
    if prefix is not None or not prefixes:
        found.listed(prefix)  # raises for a prefix that is missing, or a checkpoint without trees
    return PageContents(
        str(found.path), found.manifest.format, prefixes, found.left_out(prefix), signer_of(found)
    )


def _view(path: str | os.PathLike[str], prefix: str, problems: dict[str, str]) -> View:
    """Open a tree. If files are missing, note the problem, and open the rest."""
    try:
        return open_view(path, prefix=prefix)
    except CorruptionError as error:
        view = open_incomplete(path, prefix=prefix)
        problems[prefix] = str(error)
        return view


def _leaves(tree: TreeEntry, prefix: str, above: str) -> list[Leaf]:
    start = f"{above}." if above else ""
    arrays = [
        Leaf(start + name, prefix, name, entry.logical_dtype, entry.logical_shape, entry.nbytes, entry=entry)
        for name, entry in tree.leaves.items()
    ]
    values = [
        Leaf(start + name, prefix, name, value=_value_text(value), plain=Plain(value))
        for name, value in tree.raw_values.items()
    ]
    return arrays + values


def _value_text(recorded: Any) -> str:
    try:
        text = _text(value_from_json(recorded))
    except (ValueError, RecursionError) as error:  # not recorded; or a number with too many digits to print
        text = str(error)
    return shortened(printable(text), _MOST_SHOWN)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else repr(value)
