"""Rebuild a tree from its leaves by name and its structure, given as JSON or as a tree like it.

Tests: tests/engine/trees/test_flatten.py, tests/engine/trees/test_plain.py, tests/compat/test_original_structure.py.
"""

from __future__ import annotations

import reprlib
from collections import Counter, OrderedDict, defaultdict
from typing import TYPE_CHECKING, Any

from eformer._engine.record.names import split_name, steps_to, unescape, with_nearest
from eformer._engine.record.structure import Container, containers, steps_of, text_of
from eformer._engine.record.values import value_from_json
from eformer._engine.trees.flatten import FACTORIES, flatten
from eformer._engine.trees.modules import with_leaves
from eformer._engine.trees.nodes import build_dataclass, build_node, resolve_class
from eformer.errors import MismatchError, StructureError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def unflatten(structure: Any, leaves: Mapping[str, Any], *, plain: bool = False) -> Any:
    """Rebuild the tree that `flatten` was given. Only classes that `resolve_class` allows are built. With `plain`, a
    dict of its children is put in the place of an object that cannot be built."""
    found, names = containers(structure)
    _require_same_names(names, leaves)

    built: list[Any] = []
    for container in reversed(found):  # children before their parents
        children = [
            leaves[child] if type(child) is str else None if child is None else built.pop()
            for child in container.children
        ]
        built.append(_build(container, children, plain=plain))
    return leaves[structure] if isinstance(structure, str) else built.pop() if built else None


def unflatten_like(like: Any, leaves: Mapping[str, Any], *, in_place: bool = False) -> Any:
    """Build a tree of the structure of `like`, whose own leaves are not used. `in_place` updates its modules."""
    wanted, _ = flatten(like)
    _require_same_names(list(wanted), leaves)
    return with_leaves(like, [leaves[name] for name in wanted], in_place=in_place)


def _require_same_names(names: list[str], leaves: Mapping[str, Any]) -> None:
    """Refuse leaves that are missing, unexpected, or named twice."""
    if len(names) == len(leaves) and leaves.keys() == set(names):
        return
    known = Counter(names)
    if len(known) < len(names):
        raise StructureError(f"leaves in two places: {[n for n, count in known.items() if count > 1]}")
    missing = [name for name in names if name not in leaves]
    problems = [f"missing leaf {name!r}{hint}" for name, hint in with_nearest(missing, leaves)]
    problems += [f"unexpected leaf {name!r}" for name in leaves if name not in known]
    if problems:
        raise MismatchError(problems, context="the leaves do not fit the structure")


def _build(container: Container, children: list[Any], *, plain: bool) -> Any:
    is_object = "children" in container.document
    try:
        return _BUILD[container.kind](container.document, children)
    except Exception as error:  # a class's own unflatten function may raise anything
        if is_object and plain:
            return _plain(container, children)
        shown = reprlib.repr(container.document)
        why = error if isinstance(error, StructureError) else f"cannot rebuild {shown}: {error!r}"
        hint = "; or pass plain=True for nested dicts" if is_object else ""
        raise StructureError(f"{text_of(container.place)}{why}{hint}") from error


def _plain(container: Container, children: list[Any]) -> dict[str, Any]:
    """Return the children of an object by their names: of its fields, or of the leaves below them."""
    steps = steps_of(container)
    if isinstance(container.document["children"], list):
        parts = [_part_in_names(child) for child in container.children]
        steps = parts if all(parts) and len(set(parts)) == len(parts) else list(map(str, steps))
    return dict(zip(steps, children, strict=True))


def _part_in_names(child: Any) -> str:
    """Return the part that names of leaves have for the child of an object; "" if no leaf is below it."""
    if isinstance(child, str):
        return _part_from_end(child, 1)
    for container in containers(child)[0]:
        if (leaf := next((one for one in container.children if type(one) is str), None)) is not None:
            return _part_from_end(leaf, len(steps_to(container.place)) + 2)
    return ""


def _part_from_end(name: str, number: int) -> str:
    parts = split_name(name)
    return unescape(parts[-number]) if number <= len(parts) else ""


def _build_dict(document: Any, children: list[Any]) -> dict[Any, Any]:
    content = document["dict"]
    keys = list(map(unescape, content)) if isinstance(content, dict) else _keys(content)
    built = dict(zip(keys, children, strict=True))
    return built if len(built) == len(keys) else dict(_pairs(keys, children))


def _keys(pairs: Any) -> list[Any]:
    return [_recorded(key, "a dict's key") for key, _ in pairs]


def _pairs(keys: list[Any], children: list[Any]) -> list[tuple[Any, Any]]:
    if len(dict.fromkeys(keys)) < len(keys):
        raise StructureError(f"duplicate keys: {reprlib.repr(keys)}")
    return list(zip(keys, children, strict=True))


def _build_ordered_dict(document: Any, children: list[Any]) -> OrderedDict[Any, Any]:
    return OrderedDict(_pairs(_keys(document["OrderedDict"]), children))


def _build_defaultdict(document: Any, children: list[Any]) -> defaultdict[Any, Any]:
    name = document["factory"]
    factory = FACTORIES[name] if isinstance(name, str) else _recorded(name, "a defaultdict's factory")
    return defaultdict(factory, _pairs(_keys(document["defaultdict"]), children))


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


# How to build each kind of container.
_BUILD: dict[str, Callable[[Any, list[Any]], Any]] = {
    "dict": _build_dict,
    "list": lambda document, children: children,
    "tuple": lambda document, children: tuple(children),
    "OrderedDict": _build_ordered_dict,
    "defaultdict": _build_defaultdict,
    "namedtuple": _build_namedtuple,
    "dataclass": _build_dataclass,
    "node": _build_node,
}
