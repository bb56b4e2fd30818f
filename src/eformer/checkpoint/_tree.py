"""A pytree as {escaped name: leaf} plus its structure in JSON, and back exactly.

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

from eformer.checkpoint._leaf import escape, join_name, unescape, with_nearest
from eformer.checkpoint._nodes import (
    build_dataclass,
    build_node,
    class_name,
    is_namedtuple,
    is_node,
    plain_key,
    resolve_class,
    take_apart,
)
from eformer.checkpoint._value import value_from_json, value_to_json
from eformer.errors import MismatchError, StructureError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

# JSON readers stop near a thousand levels, and a level of the tree is two of JSON. Nothing here recurses, so
# that this is the only limit.
MAX_DEPTH = 400

_FACTORIES = {
    f.__name__: f for f in (list, dict, set, tuple, int, float, complex, bool, str, bytes, OrderedDict)
}


# --------------------------------------------------------------------------------------------- flatten


def flatten(tree: Any) -> tuple[dict[str, Any], Any]:
    """The leaves by escaped name, in JAX's order, and the structure as JSON."""
    leaves: dict[str, Any] = {}
    describers: dict[type, _Describe | None] = {}  # one decision for each type met
    root = [None]
    todo: list[tuple[Any, Any, Any, tuple[str, ...]]] = [(root, 0, tree, ())]
    while todo:
        holder, slot, node, path = todo.pop()
        kind = type(node)
        if kind not in describers:
            describers[kind] = _describer(kind)
        describe = describers[kind]
        if describe is None:
            holder[slot] = name = join_name(path)
            leaves[name] = node
        else:
            try:
                level = describe(node)
                todo.extend(reversed(list(level.children_below(path))))
            except StructureError as error:
                raise StructureError(f"at {join_name(path)[:400]!r}: {error}") from error
            holder[slot] = level.document
    return leaves, root[0]


@dataclasses.dataclass(frozen=True, slots=True)
class _Described:
    """A node's JSON, whose `slots` wait for the JSON of its children, in JAX's order."""

    document: Any
    slots: Sequence[tuple[Any, Any]] = ()
    keys: Sequence[Any] = ()
    children: Sequence[Any] = ()

    def children_below(self, path: tuple[str, ...]) -> Iterator[tuple[Any, Any, Any, tuple[str, ...]]]:
        """Each child with its slot and a name that no sibling has."""
        if self.children and len(path) >= MAX_DEPTH:
            raise StructureError(f"the tree is nested more than {MAX_DEPTH} deep, or contains itself")
        seen: dict[str, int] = {}
        for (holder, slot), key, child in zip(self.slots, self.keys, self.children, strict=True):
            text = str(key)
            count = seen[text] = seen.get(text, -1) + 1
            yield holder, slot, child, (*path, escape(text, count))


def _describer(kind: type) -> _Describe | None:
    """How to describe nodes of this type; None for leaves."""
    if not is_node(kind):
        return None
    return _BUILTIN.get(kind) or (_namedtuple if is_namedtuple(kind) else _custom)


def _dict(node: dict[Any, Any]) -> _Described:
    if not all(type(key) is str for key in node):
        return _sorted_pairs("dict", node)
    keys = sorted(node)
    content = dict.fromkeys(map(escape, node))  # in the dict's own order
    return _Described({"dict": content}, [(content, escape(k)) for k in keys], keys, [node[k] for k in keys])


def _sorted_pairs(tag: str, node: dict[Any, Any]) -> _Described:
    try:
        keys = sorted(node)
    except TypeError as error:
        raise StructureError(f"the dict's keys cannot be sorted, which JAX needs ({error})") from error
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
    known = name in _FACTORIES and _FACTORIES[name] is factory
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
    return _in_dict({"namedtuple": class_name(type(node))}, node._fields, node)


def _custom(node: Any) -> _Described:
    level = take_apart(node)
    name = class_name(type(node))
    if not _is_plain_dataclass(node, level.keys):
        return _in_list(
            {"node": name, "aux": value_to_json(level.aux)}, "children", level.keys, level.children
        )
    static = {
        field.name: value_to_json(getattr(node, field.name))
        for field in dataclasses.fields(node)
        if field.name not in level.keys and hasattr(node, field.name)
    }
    return _in_dict({"dataclass": name, "static": static}, level.keys, level.children)


def _is_plain_dataclass(node: Any, keys: tuple[Any, ...]) -> bool:
    """Whether each child is a field, so that the fields alone say what the node is."""
    if not dataclasses.is_dataclass(node):
        return False
    names = {field.name for field in dataclasses.fields(node)}
    return len(set(keys)) == len(keys) and names.issuperset(keys)


_Describe = Callable[[Any], _Described]

_BUILTIN: dict[type, _Describe] = {
    dict: _dict,
    list: _sequence,
    tuple: _sequence,
    OrderedDict: _ordered_dict,
    defaultdict: _defaultdict,
    type(None): lambda node: _Described(None),
}


# ------------------------------------------------------------------------------------------- unflatten


def unflatten(structure: Any, leaves: Mapping[str, Any]) -> Any:
    """The tree that `flatten` was given. Builds classes only as `resolve_class` allows."""
    unused = dict(leaves)
    missing: list[str] = []

    def take(name: str) -> Any:
        if name not in unused:
            missing.append(name)
        return unused.pop(name, None)

    # Parents first, so that backwards each node finds its children built.
    nodes = _preorder(structure)
    built: list[Any] = []
    for document, count in reversed(nodes):
        children = [built.pop() for _ in range(count)]
        built.append(take(document) if isinstance(document, str) else _build(document, children))
    _require_all(reversed(missing), unused, leaves)
    return built[0]


def unflatten_like(like: Any, leaves: Mapping[str, Any]) -> Any:
    """A tree of the structure of `like`, whose own leaves only mark places."""
    wanted, _ = flatten(like)
    _require_all([n for n in wanted if n not in leaves], [n for n in leaves if n not in wanted], leaves)
    treedef = jax.tree_util.tree_structure(like)
    return jax.tree_util.tree_unflatten(treedef, [leaves[name] for name in wanted])


def _require_all(missing: Iterable[str], unexpected: Iterable[str], leaves: Iterable[str]) -> None:
    problems = [f"missing leaf {name!r}{hint}" for name, hint in with_nearest(missing, leaves)]
    problems += [f"unexpected leaf {name!r}" for name in unexpected]
    if problems:
        raise MismatchError(problems, context="the leaves do not fit the structure")


def _preorder(structure: Any) -> list[tuple[Any, int]]:
    """Every node's JSON with the number of its children, each before its children, and those in order."""
    nodes = []
    todo = [(structure, 0)]
    while todo:
        document, depth = todo.pop()
        children = [] if document is None or isinstance(document, str) else _children(document)
        if children and depth >= MAX_DEPTH:
            raise StructureError(f"the recorded structure is nested more than {MAX_DEPTH} deep")
        nodes.append((document, len(children)))
        todo.extend((child, depth + 1) for child in reversed(children))
    return nodes


def _children(document: Any) -> list[Any]:
    try:
        content = document["children"] if "children" in document else document[_kind(document)]
        if isinstance(content, dict):
            return list(content.values())
        return [child for _, child in content] if _kind(document) in _WITH_KEYS else list(content)
    except (KeyError, TypeError, ValueError) as error:
        raise StructureError(f"not a recorded structure: {reprlib.repr(document)}") from error


def _kind(document: Any) -> str:
    kind = next(iter(document), None) if isinstance(document, dict) else None
    if kind not in _BUILDERS:
        raise StructureError(f"not a recorded structure: {reprlib.repr(document)}")
    return str(kind)


def _build(document: Any, children: list[Any]) -> Any:
    if document is None:
        return None
    try:
        return _BUILDERS[_kind(document)](document, children)
    except StructureError:
        raise
    except Exception as error:  # a class's own unflatten function may raise anything
        raise StructureError(f"cannot rebuild {reprlib.repr(document)}: {error!r}") from error


def _build_dict(document: Any, children: list[Any]) -> dict[Any, Any]:
    content = document["dict"]
    keys = map(unescape, content) if isinstance(content, dict) else _keys(content)
    return dict(zip(keys, children, strict=True))


def _keys(pairs: Any) -> list[Any]:
    return [_recorded(key, "a dict's key") for key, _ in pairs]


def _build_ordered_dict(document: Any, children: list[Any]) -> OrderedDict[Any, Any]:
    return OrderedDict(zip(_keys(document["OrderedDict"]), children, strict=True))


def _build_defaultdict(document: Any, children: list[Any]) -> defaultdict[Any, Any]:
    name = document["factory"]
    factory = _FACTORIES[name] if isinstance(name, str) else _recorded(name, "a defaultdict's factory")
    return defaultdict(factory, zip(_keys(document["defaultdict"]), children, strict=True))


def _build_namedtuple(document: Any, children: list[Any]) -> Any:
    name, fields = document["namedtuple"], tuple(document["children"])
    kind: Any = resolve_class(name)
    if fields != kind._fields:
        raise StructureError(f"{name} was saved with fields {fields}, it now has {kind._fields}")
    return kind(*children)


def _build_dataclass(document: Any, children: list[Any]) -> Any:
    name = document["dataclass"]
    kind = resolve_class(name)
    static = {field: _recorded(value, f"{name}.{field}") for field, value in document["static"].items()}
    return build_dataclass(kind, static, dict(zip(document["children"], children, strict=True)))


def _build_node(document: Any, children: list[Any]) -> Any:
    name = document["node"]
    kind = resolve_class(name)
    return build_node(kind, _recorded(document["aux"], f"{name}, auxiliary data"), children)


def _recorded(value: Any, where: str) -> Any:
    try:
        return value_from_json(value)
    except StructureError as error:
        raise StructureError(f"{where}: {error}; pass like= with a tree of that structure") from error


_BUILDERS: dict[str, Callable[[Any, list[Any]], Any]] = {
    "dict": _build_dict,
    "list": lambda document, children: children,
    "tuple": lambda document, children: tuple(children),
    "OrderedDict": _build_ordered_dict,
    "defaultdict": _build_defaultdict,
    "namedtuple": _build_namedtuple,
    "dataclass": _build_dataclass,
    "node": _build_node,
}
_WITH_KEYS = {"dict", "OrderedDict", "defaultdict"}


# ------------------------------------------------------------------------------------------- questions


def is_array_like(x: Any) -> bool:
    """Whether `x` has both a shape and a dtype."""
    return hasattr(x, "shape") and hasattr(x, "dtype")


def join_key(prefix: str | None, k: str | None) -> str:
    """`prefix.k`, or whichever of the two is not empty."""
    return ".".join(part for part in (prefix, k) if part)


def leaf_key_paths(
    pytree: Any, prefix: str | None = "", *, is_leaf: Callable[[Any], bool] | None = None
) -> Any:
    """A tree of the same structure whose leaves are their own dotted paths, for people to read.

    Unlike the names under which leaves are stored, these are not escaped: {"a.b": x, "a": {"b": y}} has
    the path "a.b" twice.
    """
    pairs, treedef = jax.tree_util.tree_flatten_with_path(pytree, is_leaf=is_leaf)
    paths = (".".join(str(plain_key(entry)) for entry in path) for path, _ in pairs)
    return jax.tree_util.tree_unflatten(treedef, [join_key(prefix, path) for path in paths])
