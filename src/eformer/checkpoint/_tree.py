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
from collections import OrderedDict, defaultdict
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
    from collections.abc import Callable, Iterable, Mapping

# JSON readers stop near a thousand levels, and a level of the tree is two of JSON.
MAX_DEPTH = 256

_FACTORIES = {
    f.__name__: f for f in (list, dict, set, tuple, int, float, complex, bool, str, bytes, OrderedDict)
}


# --------------------------------------------------------------------------------------------- flatten


def flatten(tree: Any) -> tuple[dict[str, Any], Any]:
    """The leaves by escaped name, in JAX's order, and the structure as JSON."""
    walk = _Walk({}, {})
    structure = walk.node(tree, ())
    return walk.leaves, structure


@dataclasses.dataclass(frozen=True, slots=True)
class _Walk:
    leaves: dict[str, Any]
    describers: dict[type, Callable[[_Walk, Any, tuple[str, ...]], Any]]  # one decision for each type met

    def node(self, node: Any, path: tuple[str, ...]) -> Any:
        describe = self.describers.get(type(node))
        if describe is None:
            describe = self.describers[type(node)] = _describer(type(node))
        return describe(self, node, path)

    def children(self, keys: Iterable[Any], children: Iterable[Any], path: tuple[str, ...]) -> list[Any]:
        """Descends into each child under a name that no sibling has."""
        if len(path) >= MAX_DEPTH:
            raise StructureError(f"the tree is nested more than {MAX_DEPTH} deep (or contains itself)")
        siblings: dict[str, int] = {}
        described = []
        for key, child in zip(keys, children, strict=True):
            text = str(key)
            count = siblings[text] = siblings.get(text, -1) + 1
            described.append(self.node(child, (*path, escape(text, count))))
        return described


def _describer(kind: type) -> Callable[[_Walk, Any, tuple[str, ...]], Any]:
    if not is_node(kind):
        return _leaf
    if kind in _BUILTIN:
        return _BUILTIN[kind]
    return _namedtuple if is_namedtuple(kind) else _custom


def _leaf(walk: _Walk, node: Any, path: tuple[str, ...]) -> str:
    name = join_name(path)
    walk.leaves[name] = node
    return name


def _dict(walk: _Walk, node: dict[Any, Any], path: tuple[str, ...]) -> Any:
    keys = _sorted_as_jax_does(node, path)
    described = dict(zip(keys, walk.children(keys, map(node.__getitem__, keys), path), strict=True))
    if all(type(key) is str for key in node):
        return {"dict": {escape(key): described[key] for key in node}}  # in the order of the dict itself
    return {"dict": [[value_to_json(key), described[key]] for key in node]}


def _sorted_as_jax_does(keys: Iterable[Any], path: tuple[str, ...]) -> list[Any]:
    try:
        return sorted(keys)
    except TypeError as error:
        raise StructureError(
            f"the keys of the dict at {join_name(path)!r} cannot be sorted, which JAX needs ({error})"
        ) from error


def _sequence(walk: _Walk, node: Any, path: tuple[str, ...]) -> Any:
    return {type(node).__name__: walk.children(range(len(node)), node, path)}


def _ordered_dict(walk: _Walk, node: OrderedDict[Any, Any], path: tuple[str, ...]) -> Any:
    described = walk.children(node.keys(), node.values(), path)
    return {"OrderedDict": [[value_to_json(k), d] for k, d in zip(node, described, strict=True)]}


def _defaultdict(walk: _Walk, node: defaultdict[Any, Any], path: tuple[str, ...]) -> Any:
    keys = _sorted_as_jax_does(node, path)
    described = dict(zip(keys, walk.children(keys, map(node.__getitem__, keys), path), strict=True))
    return {"defaultdict": [[value_to_json(key), described[key]] for key in node], "factory": _factory(node)}


def _factory(node: defaultdict[Any, Any]) -> Any:
    factory: Any = node.default_factory
    name = getattr(factory, "__name__", "")
    return name if _FACTORIES.get(name) is factory else value_to_json(factory)


def _namedtuple(walk: _Walk, node: Any, path: tuple[str, ...]) -> Any:
    described = walk.children(node._fields, node, path)
    return {
        "namedtuple": class_name(type(node)),
        "children": dict(zip(node._fields, described, strict=True)),
    }


def _custom(walk: _Walk, node: Any, path: tuple[str, ...]) -> Any:
    level = take_apart(node)
    described = walk.children(level.keys, level.children, path)
    name = class_name(type(node))
    if _is_plain_dataclass(node, level.keys):
        static = {
            field.name: value_to_json(getattr(node, field.name))
            for field in dataclasses.fields(node)
            if field.name not in level.keys and hasattr(node, field.name)
        }
        return {
            "dataclass": name,
            "static": static,
            "children": dict(zip(level.keys, described, strict=True)),
        }
    return {"node": name, "aux": value_to_json(level.aux), "children": described}


def _is_plain_dataclass(node: Any, keys: tuple[Any, ...]) -> bool:
    """Whether each child is a field, so that the fields alone say what the node is."""
    if not dataclasses.is_dataclass(node):
        return False
    names = {field.name for field in dataclasses.fields(node)}
    return len(set(keys)) == len(keys) and names.issuperset(keys)


_BUILTIN: dict[type, Callable[[_Walk, Any, tuple[str, ...]], Any]] = {
    dict: _dict,
    list: _sequence,
    tuple: _sequence,
    OrderedDict: _ordered_dict,
    defaultdict: _defaultdict,
    type(None): lambda walk, node, path: None,
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

    try:
        tree = _build(structure, take)
    except RecursionError as error:
        raise StructureError("the recorded structure is nested too deeply") from error
    _require_all(missing, unused, leaves)
    return tree


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


def _build(node: Any, take: Callable[[str], Any]) -> Any:
    if node is None:
        return None
    if isinstance(node, str):
        return take(node)
    try:
        kind = next(iter(node))
        return _BUILDERS[kind](node, take)
    except StructureError:
        raise
    except RecursionError:
        raise
    except Exception as error:  # a class's own unflatten function may raise anything
        raise StructureError(f"cannot rebuild {str(node)[:200]}: {error!r}") from error


def _all(children: Iterable[Any], take: Callable[[str], Any]) -> list[Any]:
    return [_build(child, take) for child in children]


def _by_name(children: Mapping[str, Any], take: Callable[[str], Any]) -> dict[str, Any]:
    return {name: _build(child, take) for name, child in children.items()}


def _pairs(pairs: Any, take: Callable[[str], Any]) -> list[tuple[Any, Any]]:
    return [(_recorded(key, "a dict's key"), _build(child, take)) for key, child in pairs]


def _build_dict(node: Any, take: Callable[[str], Any]) -> dict[Any, Any]:
    content = node["dict"]
    if isinstance(content, list):
        return dict(_pairs(content, take))
    return {unescape(key): _build(child, take) for key, child in content.items()}


def _build_defaultdict(node: Any, take: Callable[[str], Any]) -> defaultdict[Any, Any]:
    factory = node["factory"]
    made = _FACTORIES[factory] if isinstance(factory, str) else _recorded(factory, "defaultdict's factory")
    return defaultdict(made, _pairs(node["defaultdict"], take))


def _build_namedtuple(node: Any, take: Callable[[str], Any]) -> Any:
    kind: Any = resolve_class(node["namedtuple"])
    children = _by_name(node["children"], take)
    if tuple(children) != kind._fields:
        raise StructureError(
            f"{node['namedtuple']} was saved with fields {tuple(children)}, it now has {kind._fields}"
        )
    return kind(*children.values())


def _build_dataclass(node: Any, take: Callable[[str], Any]) -> Any:
    name = node["dataclass"]
    kind = resolve_class(name)
    static = {field: _recorded(value, f"{name}.{field}") for field, value in node["static"].items()}
    return build_dataclass(kind, static, _by_name(node["children"], take))


def _build_node(node: Any, take: Callable[[str], Any]) -> Any:
    name = node["node"]
    kind = resolve_class(name)
    return build_node(kind, _recorded(node["aux"], f"{name}, auxiliary data"), _all(node["children"], take))


def _recorded(value: Any, where: str) -> Any:
    try:
        return value_from_json(value)
    except StructureError as error:
        raise StructureError(f"{where}: {error}; pass like= with a tree of that structure") from error


_BUILDERS: dict[str, Callable[[Any, Callable[[str], Any]], Any]] = {
    "dict": _build_dict,
    "list": lambda node, take: _all(node["list"], take),
    "tuple": lambda node, take: tuple(_all(node["tuple"], take)),
    "OrderedDict": lambda node, take: OrderedDict(_pairs(node["OrderedDict"], take)),
    "defaultdict": _build_defaultdict,
    "namedtuple": _build_namedtuple,
    "dataclass": _build_dataclass,
    "node": _build_node,
}


# ------------------------------------------------------------------------------------------- questions


def is_array_like(x: Any) -> bool:
    """Whether `x` has both a shape and a dtype."""
    return hasattr(x, "shape") and hasattr(x, "dtype")


def join_key(prefix: str | None, key: str | None) -> str:
    """`prefix.key`, or whichever of the two is not empty."""
    return ".".join(part for part in (prefix, key) if part)


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
