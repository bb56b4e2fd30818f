"""From leaves by name and a structure, as JSON or as a tree to be like, back to a tree."""

from __future__ import annotations

import dataclasses
import reprlib
from collections import OrderedDict, defaultdict
from typing import TYPE_CHECKING, Any

import jax

from eformer.checkpoint._leaf import unescape, with_nearest
from eformer.checkpoint._nodes import build_dataclass, build_node, resolve_class
from eformer.checkpoint._tree._flatten import FACTORIES, MAX_DEPTH, flatten
from eformer.checkpoint._value import value_from_json
from eformer.errors import MismatchError, StructureError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping


def unflatten(structure: Any, leaves: Mapping[str, Any]) -> Any:
    """The tree that `flatten` was given. Builds classes only as `resolve_class` allows."""
    unused = dict(leaves)
    missing: list[str] = []

    def take(name: str) -> Any:
        if name not in unused:
            missing.append(name)
        return unused.pop(name, None)

    # Parents first, so that backwards each node finds its children built.
    built: list[Any] = []
    for document, place, count in reversed(_preorder(structure)):
        children = [built.pop() for _ in range(count)]
        built.append(take(document) if isinstance(document, str) else _build(document, place, children))
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


# Where a node stands: None at the root, else the place of its parent and the step from there.
_Place = tuple["_Place", str] | None


def _preorder(structure: Any) -> list[tuple[Any, _Place, int]]:
    """Every node's JSON, its place and the number of its children; each node before its children."""
    nodes = []
    todo: list[tuple[Any, _Place, int]] = [(structure, None, 0)]
    while todo:
        document, place, depth = todo.pop()
        children = [] if document is None or isinstance(document, str) else _children(document, place)
        if children and depth >= MAX_DEPTH:
            raise StructureError(f"the recorded structure is nested more than {MAX_DEPTH} deep")
        nodes.append((document, place, len(children)))
        todo.extend((child, (place, str(step)), depth + 1) for step, child in reversed(children))
    return nodes


def _children(document: Any, place: _Place) -> list[tuple[Any, Any]]:
    try:
        return _kind(document).children(document)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise StructureError(f"{_at(place)}not a recorded structure: {reprlib.repr(document)}") from error


def _build(document: Any, place: _Place, children: list[Any]) -> Any:
    if document is None:
        return None
    try:
        return _kind(document).build(document, children)
    except StructureError as error:
        raise StructureError(f"{_at(place)}{error}") from error
    except Exception as error:  # a class's own unflatten function may raise anything
        raise StructureError(f"{_at(place)}cannot rebuild {reprlib.repr(document)}: {error!r}") from error


def _at(place: _Place) -> str:
    steps: list[str] = []
    while place is not None:
        place, step = place
        steps.append(step)
    return f"at {'.'.join(reversed(steps))[:400]!r}: " if steps else ""


@dataclasses.dataclass(frozen=True, slots=True)
class _Kind:
    """How one kind of node is read: the keys of its JSON, its children with the steps to them, itself."""

    keys: frozenset[str]
    children: Callable[[Any], list[tuple[Any, Any]]]
    build: Callable[[Any, list[Any]], Any]


def _kind(document: Any) -> _Kind:
    if isinstance(document, dict):
        for kind in _KINDS:
            if document.keys() == kind.keys:
                return kind
    raise ValueError("no kind of node has these keys")


def _listed(tag: str) -> Callable[[Any], list[tuple[Any, Any]]]:
    return lambda document: list(enumerate(_is(list, document[tag])))


def _paired(tag: str) -> Callable[[Any], list[tuple[Any, Any]]]:
    return lambda document: [(reprlib.repr(key), child) for key, child in _is(list, document[tag])]


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
    return dict(_pairs(keys, children))


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


_KINDS = (
    _Kind(frozenset({"dict"}), _of_dict, _build_dict),
    _Kind(frozenset({"list"}), _listed("list"), lambda document, children: children),
    _Kind(frozenset({"tuple"}), _listed("tuple"), lambda document, children: tuple(children)),
    _Kind(frozenset({"OrderedDict"}), _paired("OrderedDict"), _build_ordered_dict),
    _Kind(frozenset({"defaultdict", "factory"}), _paired("defaultdict"), _build_defaultdict),
    _Kind(frozenset({"namedtuple", "children"}), _named, _build_namedtuple),
    _Kind(frozenset({"dataclass", "static", "children"}), _named, _build_dataclass),
    _Kind(frozenset({"node", "aux", "children"}), _listed("children"), _build_node),
)
