"""Flatten a pytree into {escaped name: leaf} and its structure as JSON, from which it can be rebuilt exactly.

The structure, by kind of node (`docs/format/structure.md` has the whole grammar):

    "layers.0.w"                                    a leaf, by its name
    null                                            None
    {"dict": {"a": ..., "b": ...}}                  a dict of string keys; other keys: [[key, child], ...]
    {"list": [...]}  {"tuple": [...]}
    {"OrderedDict": [[key, child], ...]}
    {"defaultdict": [[key, child], ...], "factory": "list"}
    {"namedtuple": "module:Class", "children": {"mu": ..., "nu": ...}}
    {"dataclass": "module:Class", "static": {"name": value}, "children": {"w": ...}}
    {"node": "module:Class", "aux": value, "children": [...]}
"""

from __future__ import annotations

import dataclasses
import reprlib
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
from msgspec import Struct

from eformer._engine.record.names import BARE_LEAF, MAX_DEPTH, escape, escape_siblings
from eformer._engine.record.values import is_recorded, value_to_json
from eformer._engine.trees.modules import is_module, states_of, transient_of
from eformer._engine.trees.nodes import Level, class_name, dataclass_level, is_namedtuple, is_node, take_apart
from eformer.errors import StructureError

if TYPE_CHECKING:
    from collections.abc import Sequence

_STRINGS = frozenset({str})

FACTORIES = {
    f.__name__: f for f in (list, dict, set, tuple, int, float, complex, bool, str, bytes, OrderedDict)
}


def flatten(tree: Any) -> tuple[dict[str, Any], Any]:
    """Return the leaves by escaped name, in JAX's order, and the structure as JSON.

    Modules are replaced by their state. A node that cannot be described raises a StructureError that says where it is.
    """
    leaves, structure, modules = _walk(tree, ())
    if modules:
        leaves, structure, _ = _walk(tree, states_of(modules))
    return leaves, structure


def transient_in(tree: Any) -> tuple[str, ...]:
    """Name the parts of a tree that modules make and reset by themselves: metrics of Keras."""
    parts = [transient_of(module) for module in _walk(tree, ())[2]]
    if not any(parts):
        return ()
    part = object()
    leaves, _, _ = _walk(tree, [dict.fromkeys(names, part) for names in parts])
    return tuple(name for name, leaf in leaves.items() if leaf is part)


def _walk(tree: Any, states: Sequence[Any]) -> tuple[dict[str, Any], Any, list[Any]]:
    """Return the leaves, the structure and the modules of a tree; the leaves of modules only if `states` has theirs."""
    leaves: dict[str, Any] = {}
    modules: list[Any] = []
    module_kinds: set[type] = set()
    describers: dict[type, _Describe | None] = {}  # one decision for each type met
    leaf_kinds: set[type] = set()
    root = [None]
    todo: list[_Todo] = [(root, 0, tree, "", 0)]
    while todo:
        holder, slot, node, name, depth = todo.pop()
        kind = type(node)
        if kind not in describers:
            describers[kind] = _BUILTIN.get(kind) or _describer(kind)
            if kind not in _BUILTIN and is_module(node):
                module_kinds.add(kind)
            elif describers[kind] is None:
                leaf_kinds.add(kind)
        describe = describers[kind]
        if kind in module_kinds:
            if states:
                todo.append((holder, slot, states[len(modules)], name, depth))
            modules.append(node)
        elif describe is None:
            holder[slot] = name = name or BARE_LEAF
            leaves[name] = node
        else:
            try:
                level = describe(node)
                names = level.names_below(name, depth)
            except StructureError as error:
                raise StructureError(f"at {(name or BARE_LEAF)[:400]!r}: {error}") from error
            holder[slot] = level.document
            below = zip(level.slots, level.children, names, strict=True)
            if leaf_kinds.issuperset(
                map(type, level.children)
            ):  # nearly all of very many leaves are below such a node
                for (inner, key), leaf, called in below:
                    inner[key] = called
                    leaves[called] = leaf
            else:
                todo += [(inner, key, child, called, depth + 1) for (inner, key), child, called in below][
                    ::-1
                ]
    return leaves, root[0], modules


_Todo = tuple[Any, Any, Any, str, int]
"""The container and the key for the JSON of a node; the node, its name and its depth."""


class _Described(Struct, gc=False):
    """The JSON of a node, with empty `slots` for its children; the keys and the children, in the order of JAX."""

    document: Any
    slots: Sequence[tuple[Any, Any]] = ()
    keys: Sequence[Any] = ()
    children: Sequence[Any] = ()

    def names_below(self, name: str, depth: int) -> list[str]:
        """Return a name for each child that no sibling has."""
        if self.children and depth >= MAX_DEPTH:
            raise StructureError(f"the tree is nested more than {MAX_DEPTH} deep, or contains itself")
        start = f"{name}." if depth else ""
        return [start + part for part in escape_siblings(self.keys)]


def _describer(kind: type) -> _Describe | None:
    """Return the function that describes nodes of a type that is not builtin, or None for leaves."""
    if not is_node(kind):
        return None
    return _namedtuple if is_namedtuple(kind) else _custom


def _dict(node: dict[Any, Any]) -> _Described:
    if not _STRINGS.issuperset(map(type, node)):
        return _sorted_pairs("dict", node)
    keys = sorted(node)
    content = dict.fromkeys(map(escape, node))  # in the dict's own order
    slots = [(content, escape(key)) for key in keys]
    return _Described({"dict": content}, slots, keys, [node[key] for key in keys])


def _keys_of(node: dict[Any, Any]) -> list[Any]:
    treedef: Any = jax.tree_util.tree_structure(node)
    return list(treedef.node_data()[1])


def _sorted_pairs(tag: str, node: dict[Any, Any]) -> _Described:
    try:
        # The order of JAX: for keys that are not totally ordered (nan, sets), Python would sort differently.
        keys = _keys_of(dict.fromkeys(node, 0))
    except (TypeError, ValueError) as error:
        raise StructureError(f"JAX cannot sort the keys of the dict: {reprlib.repr(list(node))}") from error
    pairs = {key: [value_to_json(key), None] for key in node}
    document = {tag: list(pairs.values())}
    return _Described(document, [(pairs[k], 1) for k in keys], keys, [node[k] for k in keys])


def _ordered_dict(node: OrderedDict[Any, Any]) -> _Described:
    pairs = [[value_to_json(key), None] for key in node]
    return _Described({"OrderedDict": pairs}, [(p, 1) for p in pairs], list(node), list(node.values()))


def _defaultdict(node: defaultdict[Any, Any]) -> _Described:
    described = _sorted_pairs("defaultdict", node)
    factory: Any = node.default_factory
    name = getattr(factory, "__name__", "")
    known = name in FACTORIES and FACTORIES[name] is factory
    described.document["factory"] = name if known else value_to_json(factory)
    return described


def _sequence(node: Any) -> _Described:
    return _in_list({type(node).__name__: None}, type(node).__name__, range(len(node)), node)


def _in_list(document: Any, tag: str, keys: Sequence[Any], children: Sequence[Any]) -> _Described:
    content = document[tag] = [None] * len(children)
    return _Described(document, [(content, i) for i in range(len(children))], keys, children)


def _in_dict(document: Any, keys: Sequence[str], children: Sequence[Any]) -> _Described:
    content = document["children"] = dict.fromkeys(keys)
    return _Described(document, [(content, key) for key in keys], keys, children)


def _namedtuple(node: Any) -> _Described:
    if len(node) != len(node._fields):
        raise StructureError(
            f"{len(node)} elements in a {class_name(type(node))} of {len(node._fields)} fields"
        )
    return _in_dict({"namedtuple": class_name(type(node))}, node._fields, node)


def _custom(node: Any) -> _Described:
    level = take_apart(node)
    name = class_name(type(node))
    static = _static_fields(node, level)
    if static is None:
        document = {"node": name, "aux": value_to_json(level.aux)}
        return _in_list(document, "children", level.keys, level.children)
    return _in_dict({"dataclass": name, "static": static}, level.keys, level.children)


def _static_fields(node: Any, level: Level) -> dict[str, Any] | None:
    """Return the fields, as JSON, that suffice to rebuild a dataclass node from its children; None if none suffice.

    Leave out fields that cannot be recorded if JAX does not keep them either.
    """
    if not dataclasses.is_dataclass(node):
        return None
    names = [field.name for field in dataclasses.fields(node)]
    static = {name: getattr(node, name) for name in names if name not in level.keys and hasattr(node, name)}
    documents = {name: value_to_json(value) for name, value in static.items()}
    recorded = {name: static[name] for name in static if is_recorded(documents[name])}
    for fields in (recorded, static):
        if _fields_suffice(node, level, fields):
            return {name: documents[name] for name in fields}
    return None


def _fields_suffice(node: Any, level: Level, static: dict[str, Any]) -> bool:
    """Tell whether these fields and the children are all that JAX needs to rebuild the node."""
    children = dict(zip(level.keys, level.children, strict=True))
    try:
        again = dataclass_level(type(node), static, children)
        return again.keys == level.keys and bool(again.treedef == level.treedef)
    except Exception:  # noqa: BLE001  the class's own functions may raise anything
        return False


_Describe = Callable[[Any], _Described]

_BUILTIN: dict[type, _Describe] = {
    dict: _dict,
    list: _sequence,
    tuple: _sequence,
    OrderedDict: _ordered_dict,
    defaultdict: _defaultdict,
    type(None): lambda node: _Described(None),
}
