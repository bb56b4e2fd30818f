"""Rebuild a tree from its leaves by name and its structure, given as JSON or as a tree like it.

Tests: tests/engine/trees/test_flatten.py, tests/engine/trees/test_plain.py, tests/compat/test_original_structure.py.
"""

from __future__ import annotations

import dataclasses
import reprlib
from collections import Counter, OrderedDict, defaultdict
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from eformer._engine.record.names import MAX_DEPTH, split_name, steps_to, unescape, with_nearest
from eformer._engine.record.values import value_from_json
from eformer._engine.trees.flatten import FACTORIES, flatten
from eformer._engine.trees.modules import with_leaves
from eformer._engine.trees.nodes import build_dataclass, build_node, resolve_class
from eformer.errors import MismatchError, StructureError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from eformer._engine.record.names import Place


def unflatten(structure: Any, leaves: Mapping[str, Any], *, plain: bool = False) -> Any:
    """Rebuild the tree that `flatten` was given. Only classes that `resolve_class` allows are built. With `plain`, a
    dict of its children is put in the place of an object that cannot be built."""
    containers, names = _containers(structure)
    _require_same_names(names, leaves)

    built: list[Any] = []
    for container in reversed(containers):  # children before their parents
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


def part_of(structure: Any, leaf: str, depth: int) -> Any:
    """Return the part of a structure `depth` levels below its root, on the way to a leaf; None without such a part."""
    part = structure
    for _ in range(depth):
        children = containers[0].children if (containers := _containers(part)[0]) else []
        part = next((child for child in children if leaf in leaves_of(child)), None)
    return part


def leaves_of(structure: Any) -> list[str]:
    """List the names of the leaves in a structure."""
    return _containers(structure)[1]


class _Container(Struct, gc=False):
    document: Any
    place: Place
    kind: _Kind
    children: list[Any]


def _containers(structure: Any) -> tuple[list[_Container], list[str]]:
    """Return the containers of a structure, parents before their children, and the names of the leaves."""
    containers = []
    names = [structure] if isinstance(structure, str) else []
    todo: list[tuple[Any, Place, int]] = [(structure, None, 0)]
    while todo:
        document, place, depth = todo.pop()
        if document is None or isinstance(document, str):
            continue
        try:
            kind = _kind(document)
            steps = kind.children(document)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise StructureError(f"{_at(place)}not a recorded structure: {reprlib.repr(document)}") from error
        if steps and depth >= MAX_DEPTH:
            raise StructureError(f"the recorded structure is nested more than {MAX_DEPTH} deep")
        containers.append(_Container(document, place, kind, [child for _, child in steps]))
        inner = []
        for step, child in steps:
            if type(child) is str:
                names.append(child)
            else:
                inner.append((child, (place, step), depth + 1))
        inner.reverse()
        todo += inner
    return containers, names


def _build(container: _Container, children: list[Any], *, plain: bool) -> Any:
    is_object = "children" in container.document
    try:
        return container.kind.build(container.document, children)
    except Exception as error:  # a class's own unflatten function may raise anything
        if is_object and plain:
            return _plain(container, children)
        shown = reprlib.repr(container.document)
        why = error if isinstance(error, StructureError) else f"cannot rebuild {shown}: {error!r}"
        hint = "; or pass plain=True for nested dicts" if is_object else ""
        raise StructureError(f"{_at(container.place)}{why}{hint}") from error


def _plain(container: _Container, children: list[Any]) -> dict[str, Any]:
    """Return the children of an object by their names: of its fields, or of the leaves below them."""
    steps = [step for step, _ in container.kind.children(container.document)]
    if isinstance(container.document["children"], list):
        parts = [_part_in_names(child) for child in container.children]
        steps = parts if all(parts) and len(set(parts)) == len(parts) else list(map(str, steps))
    return dict(zip(steps, children, strict=True))


def _part_in_names(child: Any) -> str:
    """Return the part that names of leaves have for the child of an object; "" if no leaf is below it."""
    if isinstance(child, str):
        return unescape(split_name(child)[-1])
    for container in _containers(child)[0]:
        if (leaf := next((one for one in container.children if type(one) is str), None)) is not None:
            parts = split_name(leaf)
            levels = len(steps_to(container.place)) + 2
            return unescape(parts[-levels]) if levels <= len(parts) else ""
    return ""


def _at(place: Place) -> str:
    return f"at {'.'.join(steps_to(place))[:400]!r}: " if place else ""


@dataclasses.dataclass(frozen=True, slots=True)
class _Kind:
    """A kind of container: how to list its children with the steps to them, and how to build it."""

    children: Callable[[Any], list[tuple[Any, Any]]]
    build: Callable[[Any, list[Any]], Any]


def _kind(document: Any) -> _Kind:
    keys = _is(dict, document)
    if len(keys) == 1:
        return _KINDS_OF_ONE_KEY[next(iter(keys))]
    return _KINDS[frozenset(keys)]


def _listed(tag: str) -> Callable[[Any], list[tuple[Any, Any]]]:
    return lambda document: list(enumerate(_is(list, document[tag])))


def _paired(tag: str) -> Callable[[Any], list[tuple[Any, Any]]]:
    return lambda document: [(key, child) for key, child in _is(list, document[tag])]


def _named(document: Any) -> list[tuple[Any, Any]]:
    return list(_is(dict, document["children"]).items())


def _of_dict(document: Any) -> list[tuple[Any, Any]]:
    content = document["dict"]
    return list(content.items()) if isinstance(content, dict) else _paired("dict")(document)


def _is(kind: type, value: Any) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"{kind.__name__} expected")
    return value


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


# The kinds of containers, by the keys of their JSON.
_KINDS = {
    frozenset({"dict"}): _Kind(_of_dict, _build_dict),
    frozenset({"list"}): _Kind(_listed("list"), lambda document, children: children),
    frozenset({"tuple"}): _Kind(_listed("tuple"), lambda document, children: tuple(children)),
    frozenset({"OrderedDict"}): _Kind(_paired("OrderedDict"), _build_ordered_dict),
    frozenset({"defaultdict", "factory"}): _Kind(_paired("defaultdict"), _build_defaultdict),
    frozenset({"namedtuple", "children"}): _Kind(_named, _build_namedtuple),
    frozenset({"dataclass", "static", "children"}): _Kind(_named, _build_dataclass),
    frozenset({"node", "aux", "children"}): _Kind(_listed("children"), _build_node),
}
_KINDS_OF_ONE_KEY = {key: kind for keys, kind in _KINDS.items() if len(keys) == 1 for key in keys}
