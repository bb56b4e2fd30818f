"""Read the pickles in the original's `<prefix>_structure.json` as data: the tree definition, and plain values.

The definition is JAX's list of nodes, (kind, arity, data, class or None, number of leaves, number of nodes); children
come before their parents:

    0 leaf      2 tuple                         4 list                           6 custom, data: auxiliary data
    1 None      3 namedtuple, data: the class   5 dict, data: the sorted keys    7 dataclass, data: static values
"""

from __future__ import annotations

import base64
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from eformer._engine.formats.pickles import (
    ACTIONS,
    Global,
    Machine,
    Object,
    PickledDict,
    PickledFrozenSet,
    PickledSet,
    refuse,
    run,
)
from eformer._engine.record.dtypes import DTYPES
from eformer._engine.record.names import MAX_DEPTH
from eformer._engine.record.values import value_to_json
from eformer.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_HINT = "; pass template= (a tree of the same structure)"

LEAF = 0

_MAX_VALUE_DEPTH = 64


class NotPlainError(FormatError):
    """A pickle holds an object that is not a plain value, made by `found`."""

    def __init__(self, found: Global) -> None:
        super().__init__(
            f"it holds {str(found)[:200]}, which is not a plain value, and is neither imported nor run{_HINT}"
        )
        self.found = found


_COMPLEX = "builtins:complex"
_PLAIN_TYPES = (list, dict, set, tuple, int, float, complex, bool, str, bytes)
FACTORIES = {f"builtins:{kind.__name__}" for kind in _PLAIN_TYPES} | {"collections:OrderedDict"}


class _Machine(Machine):
    def find(self, module: Any, name: Any) -> Global:
        """Return the name of a class; refuse the names that attacks use and trees do not, though none is imported."""
        found: Global = super().find(module, name)
        is_tool = module.partition(".")[0] in sys.stdlib_module_names or module.startswith("numpy.")
        if is_tool and str(found) not in FACTORIES | {"collections:defaultdict"}:
            raise NotPlainError(found)
        return found


def unpickle(encoded: str) -> Any:
    """Read a pickle, in base64, into plain values, `Global`s and `Object`s. Nothing is imported or called."""
    data = base64.b64decode(encoded, validate=True)
    value, end = run(_Machine(), data, ACTIONS, _HINT)
    if end != len(data):
        refuse("a pickle has more in it than one value")
    return value


def _pairs(items: list[Any]) -> dict[Any, Any]:
    return dict(zip(items[::2], items[1::2], strict=True))


_ATOMS = frozenset({type(None), bool, int, float, str, bytes})
_CONTAINERS: dict[type, Callable[[list[Any]], Any]] = {
    tuple: tuple,
    list: list,
    PickledSet: set,
    PickledFrozenSet: frozenset,
    PickledDict: _pairs,
}


@dataclass(slots=True)
class PlainDecoder:
    """A decoder of plain values from the contents of pickles.

    It stops when the values have used up `budget`: references let a short pickle stand for a huge value.
    """

    budget: int

    def decode(self, found: Any, depth: int = 0) -> Any:
        """Return the plain value; raise a NotPlainError if it is not one."""
        self.budget -= 1 + sys.getsizeof(found) // 64
        if self.budget < 0 or depth > _MAX_VALUE_DEPTH:
            refuse("a value is far larger than its pickle, nested too deep, or contains itself")
        kind = type(found)
        if kind in _ATOMS:
            return found
        if kind in _CONTAINERS:
            return _CONTAINERS[kind]([self.decode(item, depth + 1) for item in found])
        if kind is Object and str(found.made_by) == _COMPLEX:
            return complex(*self.decode(found.arguments, depth + 1))
        raise NotPlainError(found if kind is Global else found.made_by)

    def to_json(self, found: Any) -> Any:
        """Encode auxiliary data. Unlike a leaf or a key it may be opaque; the tree then needs a `like`."""
        if type(found) is Global and found.module in _DTYPE_MODULES and found.name in DTYPES:
            return {found.module: found.name}
        try:
            return value_to_json(self.decode(found))
        except NotPlainError as error:
            return {"opaque": str(error.found)[:200]}


_DTYPE_MODULES = ("numpy", "ml_dtypes", "jax.numpy")


# ------------------------------------------------------------------------------- the tree definition


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """A node of the tree, with the number of its leaves and the index of the first."""

    kind: int
    data: Any
    node_class: Any
    children: Sequence[Node]
    first_leaf: int
    leaves: int
    depth: int


def parse_treedef(encoded: str) -> Node:
    """Parse a pickled tree definition, in base64, and return its root. Nothing in it is run or imported."""
    return _assemble(_node_list(unpickle(encoded)))


def _node_list(treedef: Any) -> list[Any]:
    if type(treedef) is not Object:
        refuse("treedef_b64 holds no tree definition")
    if not treedef.made_by.module.startswith("jaxlib.") or treedef.made_by.name != "PyTreeDef":
        raise NotPlainError(treedef.made_by)
    registry, nodes = treedef.state
    if not registry.module.startswith(("jax.", "jaxlib.")) or not registry.name.endswith("registry"):
        raise NotPlainError(registry)
    if treedef.arguments or type(nodes) is not list:
        refuse("treedef_b64 holds no list of nodes")
    return nodes


def _assemble(nodes: list[Any]) -> Node:
    waiting: list[Node] = []
    leaf_count = 0
    for kind, arity, data, node_class, leaves, _ in nodes:
        if not type(kind) is type(arity) is type(leaves) is int:
            refuse("a node has something else where its numbers are")
        if not 0 <= arity <= len(waiting):
            refuse(f"a node wants {arity} children, there are {len(waiting)}")
        start = len(waiting) - arity
        children, waiting[start:] = waiting[start:], []
        waiting.append(_node(kind, data, node_class, children, leaf_count))
        leaf_count += kind == LEAF
        if leaves != waiting[-1].leaves:
            refuse(f"a node of {waiting[-1].leaves} leaves says that it has {leaves!r}")
    if len(waiting) != 1:
        refuse(f"treedef_b64 holds {len(waiting)} trees")
    return waiting[0]


def _node(kind: Any, data: Any, node_class: Any, children: list[Node], leaf_count: int) -> Node:
    depth = 1 + max((child.depth for child in children), default=-1)
    if depth > MAX_DEPTH:
        refuse(f"the tree is nested more than {MAX_DEPTH} deep")
    if kind == LEAF and children:
        refuse("a leaf has children")
    leaves = 1 if kind == LEAF else sum(child.leaves for child in children)
    first_leaf = children[0].first_leaf if children else leaf_count
    return Node(kind, data, node_class, children, first_leaf, leaves, depth)
