"""The original's `<prefix>_structure.json`. Its pickles are read as data: nothing in them is run or imported.

The treedef is a pickle of JAX's own list of nodes, children before parents:

    (kind, arity, data, class or None, how many leaves, how many nodes)

    0 leaf      2 tuple                         4 list                           6 custom, data: auxiliary data
    1 None      3 namedtuple, data: the class   5 dict, data: the sorted keys    7 dataclass, data: static values
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass, field, fields, is_dataclass
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from eformer._engine.formats.zarr.original_pickles import (
    FACTORIES,
    Global,
    NotPlainError,
    Object,
    Plain,
    refuse,
    unpickle,
)
from eformer._engine.record.names import escape, escape_siblings, join_name
from eformer._engine.record.values import value_to_json
from eformer.errors import FormatError, StructureError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_MAX_DEPTH = 250  # as of every tree: docs/format/structure.md


@dataclass(frozen=True, slots=True)
class OriginalStructure:
    """A tree that the original saved, described as if it were ours.

    `document` is its structure. Of the leaves that this names, `arrays` has the paths, below the directory of
    the checkpoint, and `values` has those that are no arrays, as JSON.
    """

    prefix: str
    document: Any
    arrays: dict[str, str]
    values: dict[str, Any]
    extras: dict[str, Any]


def parse_structure(data: bytes, origin: str) -> OriginalStructure:
    """What the bytes of the file `origin` describe; a FormatError if they are not of that format."""
    try:
        # Not msgspec's reader: Python writes NaN and lone surrogates, which are no JSON, and extras may hold.
        file = msgspec.convert(json.loads(data), _File)
        plain = Plain(room=8 * len(data))
        root = _assemble(_node_list(unpickle(file.treedef_b64)))
        leaves = list(_leaves(file, plain))
        if root.leaves != len(leaves):
            refuse(f"the tree has {root.leaves} leaves, leaf_keys_full has {len(leaves)}")
        tree = _Tree(file.prefix, leaves, plain)
        return OriginalStructure(file.prefix, tree.describe(root), tree.arrays, tree.values, file.extras)
    except FormatError as error:
        raise FormatError(f"{origin}: {error}") from error
    except Exception as error:  # bytes that are no such file may raise anything where they are taken for one
        raise FormatError(f"{origin} is damaged, or not the structure of a tree: {error!r}") from error


# ------------------------------------------------------------------------------------------- the file


class _File(msgspec.Struct):
    format: Literal["pytree-structure"]
    prefix: str
    treedef_b64: str
    leaf_keys_full: list[str]
    arr_mask: list[bool]
    array_keys: list[str]
    array_relpaths: list[str]
    nonarray_payload: dict[str, str]
    extras: dict[str, Any] = {}


@dataclass(frozen=True, slots=True)
class _Leaf:
    """The original's key of a leaf; then the path of an array, or the JSON of a value. None has neither."""

    key: str
    path: str | None = None
    value: Any = None


def _leaves(file: _File, plain: Plain) -> Iterator[_Leaf]:
    if len(file.leaf_keys_full) != len(file.arr_mask):
        refuse(f"leaf_keys_full has {len(file.leaf_keys_full)} entries, arr_mask has {len(file.arr_mask)}")
    _check_arrays(file)
    paths = iter(file.array_relpaths)
    for index, (key, is_array) in enumerate(zip(file.leaf_keys_full, file.arr_mask, strict=True)):
        if is_array:
            yield _Leaf(key, path=_inside(next(paths)))
        else:
            yield _Leaf(key, value=value_to_json(plain(unpickle(file.nonarray_payload[str(index)]))))


def _check_arrays(file: _File) -> None:
    if file.array_keys != [k for k, array in zip(file.leaf_keys_full, file.arr_mask, strict=True) if array]:
        refuse("array_keys are not the leaf_keys_full of the arrays in arr_mask")
    if len(file.array_keys) != len(file.array_relpaths):
        refuse(f"array_keys has {len(file.array_keys)} entries, array_relpaths {len(file.array_relpaths)}")
    if file.nonarray_payload.keys() != {str(i) for i, array in enumerate(file.arr_mask) if not array}:
        refuse("nonarray_payload does not have exactly the leaves that are no arrays in arr_mask")
    if len(set(file.array_relpaths)) < len(file.array_relpaths):
        refuse("two leaves have one path in array_relpaths: one was overwritten when they were saved")


def _inside(path: str) -> str:
    if any(part in ("", ".", "..") for part in path.split("/")) or any(c in path for c in "\\:\0"):
        refuse(f"{path[:200]!r} does not lead into the checkpoint")
    return path


# --------------------------------------------------------------------------------------- the treedef

_LEAF = 0


@dataclass(frozen=True, slots=True, eq=False)
class _Node:
    kind: int
    data: Any
    node_class: Any
    children: Sequence[_Node]
    first_leaf: int
    leaves: int
    depth: int


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


def _assemble(nodes: list[Any]) -> _Node:
    waiting: list[_Node] = []
    leaf_count = 0
    for kind, arity, data, node_class, leaves, _ in nodes:
        if not type(kind) is type(arity) is type(leaves) is int:
            refuse("a node has something else where its numbers are")
        if not 0 <= arity <= len(waiting):
            refuse(f"a node wants {arity} children, there are {len(waiting)}")
        start = len(waiting) - arity
        children, waiting[start:] = waiting[start:], []
        waiting.append(_node(kind, data, node_class, children, leaf_count))
        leaf_count += kind == _LEAF
        if leaves != waiting[-1].leaves:
            refuse(f"a node of {waiting[-1].leaves} leaves says that it has {leaves!r}")
    if len(waiting) != 1:
        refuse(f"treedef_b64 holds {len(waiting)} trees")
    return waiting[0]


def _node(kind: Any, data: Any, node_class: Any, children: list[_Node], leaf_count: int) -> _Node:
    depth = 1 + max((child.depth for child in children), default=-1)
    if depth > _MAX_DEPTH:
        refuse(f"the tree is nested more than {_MAX_DEPTH} deep")
    if kind == _LEAF and children:
        refuse("a leaf has children")
    leaves = 1 if kind == _LEAF else sum(child.leaves for child in children)
    first_leaf = children[0].first_leaf if children else leaf_count
    return _Node(kind, data, node_class, children, first_leaf, leaves, depth)


# ------------------------------------------------------------------------------------------- our JSON


@dataclass(frozen=True, slots=True)
class _Level:
    """A node's JSON, whose `slots` wait for its children; the keys of these, and what the original calls them."""

    document: Any
    slots: Sequence[tuple[Any, Any]] = ()
    keys: Sequence[Any] = ()
    texts: Sequence[str] | None = None

    def below(self, children: Sequence[_Node], texts: _Path, parts: _Path) -> Iterator[_Todo]:
        if len(children) != len(self.keys):
            refuse(f"a node of {len(children)} children has {len(self.keys)} keys")
        own_texts = self.texts or [str(key) for key in self.keys]
        own_parts = escape_siblings(self.keys)
        for (holder, slot), child, text, part in zip(self.slots, children, own_texts, own_parts, strict=True):
            yield holder, slot, child, (*texts, text), (*parts, part)


_Path = tuple[str, ...]
_Todo = tuple[Any, Any, _Node, _Path, _Path]


def _in_list(document: Any, tag: str, keys: Sequence[Any], texts: Sequence[str] | None = None) -> _Level:
    content = document[tag] = [None] * len(keys)
    return _Level(document, [(content, index) for index in range(len(keys))], keys, texts)


def _in_dict(document: Any, tag: str, keys: Sequence[str]) -> _Level:
    content = document[tag] = dict.fromkeys(map(escape, keys))
    return _Level(document, [(content, part) for part in content], keys)


def _in_pairs(document: Any, tag: str, keys: Sequence[Any]) -> _Level:
    pairs = document[tag] = [[value_to_json(key), None] for key in keys]
    return _Level(document, [(pair, 1) for pair in pairs], keys)


# What JAX calls a child that its class gives no key.
_FLAT_INDEX = re.compile(r"<flat index (\d+)>")


@dataclass(slots=True)
class _Tree:
    """Gives the nodes our JSON, and the leaves our names."""

    prefix: str
    leaves: list[_Leaf]
    plain: Plain
    arrays: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)

    def describe(self, root: _Node) -> Any:
        top = [None]
        todo: list[_Todo] = [(top, 0, root, (), ())]
        while todo:
            holder, slot, node, texts, parts = todo.pop()
            if node.kind == _LEAF:
                holder[slot] = self.leaf(self.leaves[node.first_leaf], texts, join_name(parts))
            else:
                level = self.level(node, texts)
                holder[slot] = level.document
                todo.extend(reversed(list(level.below(node.children, texts, parts))))
        return top[0]

    def leaf(self, leaf: _Leaf, texts: _Path, name: str) -> str | None:
        key = ".".join(text for text in (self.prefix, ".".join(texts)) if text)
        if key != leaf.key:
            refuse(f"leaf_keys_full has {leaf.key[:200]!r} where the tree has {key[:200]!r}")
        if leaf.path is not None:
            self.arrays[name] = leaf.path
        elif leaf.value is not None:
            self.values[name] = leaf.value
        else:  # None is a leaf to the original, and a node to us
            return None
        return name

    def level(self, node: _Node, texts: _Path) -> _Level:
        if node.kind not in _LEVELS:
            refuse(f"the tree has a node of the unknown kind {node.kind!r}")
        return _LEVELS[node.kind](self, node, texts)

    def of_dict(self, node: _Node, texts: _Path) -> _Level:
        keys = self.keys(node.data)
        return (_in_dict if all(type(key) is str for key in keys) else _in_pairs)({}, "dict", keys)

    def of_namedtuple(self, node: _Node, texts: _Path) -> _Level:
        name = _class_name(node.data)
        names = self.child_names(node, texts, getattr(_resolve(name), "_fields", ()))
        return _in_dict({"namedtuple": name}, "children", names)

    def of_custom(self, node: _Node, texts: _Path) -> _Level:
        name = _class_name(node.node_class)
        if name == "collections:OrderedDict":
            return _in_pairs({}, "OrderedDict", self.keys(node.data))
        if name == "collections:defaultdict":
            factory, keys = node.data
            return _in_pairs({"factory": self.factory(factory)}, "defaultdict", self.keys(keys))
        return self.of_class(node, texts, name)

    def of_class(self, node: _Node, texts: _Path, name: str) -> _Level:
        known, aux = _prototype(name)
        names = self.child_names(node, texts, known)
        static = self.static_fields(aux, node.data) if names == known else None
        if static is not None:
            return _in_dict({"dataclass": name, "static": static}, "children", names)
        keys = [_FLAT_INDEX.sub(r"\1", text) for text in names]
        return _in_list({"node": name, "aux": self.plain.to_json(node.data)}, "children", keys, names)

    def keys(self, found: Any) -> Sequence[Any]:
        keys: Sequence[Any] = self.plain(found)
        if len(dict.fromkeys(keys)) < len(keys):
            refuse("a dict has one key twice")
        return keys

    def factory(self, found: Any) -> Any:
        is_known = type(found) is Global and str(found) in FACTORIES
        return found.name if is_known else self.plain.to_json(found)

    def static_fields(self, names: Any, values: Any) -> dict[str, Any] | None:
        """A dataclass's auxiliary data by field; None if there is anything else in it."""
        if type(names) is not tuple or type(values) is not tuple or len(names) != len(values):
            return None
        pairs = list(zip(names, values, strict=True))
        if not all(type(name) is _Field or _is_bare(value, type(name)) for name, value in pairs):
            return None
        return {str(name): self.plain.to_json(value) for name, value in pairs if type(name) is _Field}

    def child_names(self, node: _Node, texts: _Path, known: Sequence[str]) -> list[str]:
        """As leaf_keys_full calls the children; those without leaves as their class does, else by position."""
        others = known if len(known) == len(node.children) else range(len(node.children))
        above = ".".join((*filter(None, [self.prefix]), *texts, "")) if node.leaves else ""
        names = [
            self.next_part(child, above) if child.leaves else str(other)
            for child, other in zip(node.children, others, strict=True)
        ]
        if len(set(names)) < len(names):
            refuse(f"two children have the same name, below {above[:200]!r}")
        return names

    def next_part(self, child: _Node, above: str) -> str:
        key = self.leaves[child.first_leaf].key
        if not key.startswith(above):
            refuse(f"leaf_keys_full has {key[:200]!r} where the tree has something below {above[:200]!r}")
        below = key[len(above) :]
        return below if child.kind == _LEAF else below.partition(".")[0]


_LEVELS: dict[Any, Callable[[_Tree, _Node, _Path], _Level]] = {
    1: lambda tree, node, texts: _Level(None),
    2: lambda tree, node, texts: _in_list({}, "tuple", range(len(node.children))),
    3: _Tree.of_namedtuple,
    4: lambda tree, node, texts: _in_list({}, "list", range(len(node.children))),
    5: _Tree.of_dict,
    6: _Tree.of_custom,
    7: _Tree.of_custom,
}


# ---------------------------------------------------------------------------------------- the classes


class _Field(str):
    """The name of a field, in the place of its value."""

    __slots__ = ()


def _class_name(found: Any) -> str:
    if type(found) is not Global:
        refuse("a node has no class")
    return str(found)


def _resolve(name: str) -> Any:
    """The class that a tree may be built of under that name; None if there is none, or no tree is being built."""
    # What only looks at files runs without jax, and so without this module; what loads trees has it.
    nodes = sys.modules.get("eformer._engine.trees.nodes")
    try:
        return nodes and nodes.resolve_class(name)
    except StructureError:
        return None


def _prototype(name: str) -> tuple[list[str], Any]:
    """Which fields of a dataclass are children, and its auxiliary data with the names of the others in it."""
    kind = _resolve(name)
    if not is_dataclass(kind):
        return [], None
    names = {member.name: _Field(member.name) for member in fields(kind)}
    try:
        level = sys.modules["eformer._engine.trees.nodes"].dataclass_level(kind, names, {})
        return list(level.keys), level.aux
    except Exception:  # noqa: BLE001  the class's own functions may raise anything: then nobody knows
        return [], None


def _is_bare(found: Any, kind: type) -> bool:
    """Whether a pickle made `found` of this class, and of nothing else."""
    is_of_kind = type(found) is Object and str(found.made_by) == f"{kind.__module__}:{kind.__qualname__}"
    return is_of_kind and not found.arguments and found.state is None
