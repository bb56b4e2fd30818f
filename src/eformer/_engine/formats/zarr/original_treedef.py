"""The tree definition in the original's `<prefix>_structure.json`: a pickle of JAX's list of nodes, read as data.

A node is (kind, arity, data, class or None, number of leaves, number of nodes); children come before their parents:

    0 leaf      2 tuple                         4 list                           6 custom, data: auxiliary data
    1 None      3 namedtuple, data: the class   5 dict, data: the sorted keys    7 dataclass, data: static values
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from eformer._engine.formats.pickles import Object, refuse
from eformer._engine.formats.zarr.original_pickles import NotPlainError, unpickle

if TYPE_CHECKING:
    from collections.abc import Sequence

LEAF = 0

_MAX_DEPTH = 250  # as of every tree: docs/format/structure.md


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
    if depth > _MAX_DEPTH:
        refuse(f"the tree is nested more than {_MAX_DEPTH} deep")
    if kind == LEAF and children:
        refuse("a leaf has children")
    leaves = 1 if kind == LEAF else sum(child.leaves for child in children)
    first_leaf = children[0].first_leaf if children else leaf_count
    return Node(kind, data, node_class, children, first_leaf, leaves, depth)
