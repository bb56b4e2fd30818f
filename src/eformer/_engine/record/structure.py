"""Walk the recorded structure of a tree, which is JSON: its containers, the leaves in them, and a part of it. Pure.

Tests: tests/engine/trees/test_flatten.py, tests/engine/loading/test_contents.py, tests/engine/tools/test_convert.py.
"""

from __future__ import annotations

import reprlib
from typing import TYPE_CHECKING, Any

import msgspec

from eformer._engine.record.manifest import UNREADABLE
from eformer._engine.record.names import MAX_DEPTH, Place, readable, split_name, steps_to
from eformer.errors import StructureError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping


class Container(msgspec.Struct, gc=False):
    """A container of a structure: its kind, its JSON, its place and its children."""

    kind: str
    document: Any
    place: Place
    children: list[Any]


def containers(structure: Any) -> tuple[list[Container], list[str]]:
    """Return the containers of a structure, parents before their children, and the names of the leaves."""
    found = []
    names = [structure] if isinstance(structure, str) else []
    todo: list[tuple[Any, Place, int]] = [(structure, None, 0)]
    while todo:
        document, place, depth = todo.pop()
        if document is None or isinstance(document, str):
            continue
        try:
            kind = _kind(document)
            pairs = _CHILDREN[kind](document)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise StructureError(
                f"{text_of(place)}not a recorded structure: {reprlib.repr(document)}"
            ) from error
        if pairs and depth >= MAX_DEPTH:
            raise StructureError(f"the recorded structure is nested more than {MAX_DEPTH} deep")
        found.append(Container(kind, document, place, [child for _, child in pairs]))
        inner = []
        for step, child in pairs:
            if type(child) is str:
                names.append(child)
            else:
                inner.append((child, (place, step), depth + 1))
        inner.reverse()
        todo += inner
    return found, names


def steps_of(container: Container) -> list[Any]:
    """Return the steps that lead to the children of a container."""
    return [step for step, _ in _CHILDREN[container.kind](container.document)]


def text_of(place: Place) -> str:
    """Return the beginning of a message about a place in a structure; "" for the root."""
    return f"at {'.'.join(steps_to(place))[:400]!r}: " if place else ""


def leaves_of(structure: Any) -> list[str]:
    """List the names of the leaves in a structure."""
    return containers(structure)[1]


# ------------------------------------------------------------------------------------------------ parts


def part_below(structure: Any, root: str, names: Collection[str]) -> tuple[Any, int] | None:
    """Return the subtree of a structure that has the leaves `names`, and how many parts of their names are above it.

    Return None if no node of the structure is the root: in a flat dict, names only read as if they lay below a node.
    """
    one = next(iter(names))
    parts = split_name(one)
    starts = [".".join(parts[:depth]) for depth in range(1, len(parts) + 1)]
    depth = next((n for n, name in enumerate(starts, 1) if root in (name, readable(name))), 0)
    if not depth or UNREADABLE in structure:
        return None
    part = _part_of(structure, one, depth)
    return (part, depth) if set(leaves_of(part)) == set(names) else None


def _part_of(structure: Any, leaf: str, depth: int) -> Any:
    """Return the part of a structure `depth` levels below its root, on the way to a leaf; None without such a part."""
    part = structure
    for _ in range(depth):
        children = found[0].children if (found := containers(part)[0]) else []
        part = next((child for child in children if leaf in leaves_of(child)), None)
    return part


def with_names(structure: Any, names: Mapping[str, str]) -> Any:
    """Return a structure with other names of its leaves."""
    if isinstance(structure, str):
        return names[structure]
    copy = msgspec.json.decode(msgspec.json.encode(structure))
    for container in containers(copy)[0]:
        content = container.document.get("children", container.document.get(container.kind))
        for key, item in list(content.items() if isinstance(content, dict) else enumerate(content)):
            if isinstance(item, str):
                content[key] = names[item]
            elif isinstance(item, list) and isinstance(item[1], str):  # a key and its child
                item[1] = names[item[1]]
    return copy


# ------------------------------------------------------------------------------------------------ kinds


def _kind(document: Any) -> str:
    keys = _is(dict, document)
    return _ONE_KEY[next(iter(keys))] if len(keys) == 1 else _SEVERAL_KEYS[frozenset(keys)]


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


# How to list the children of each kind of container, with the steps to them.
_CHILDREN = {
    "dict": _of_dict,
    "list": _listed("list"),
    "tuple": _listed("tuple"),
    "OrderedDict": _paired("OrderedDict"),
    "defaultdict": _paired("defaultdict"),
    "namedtuple": _named,
    "dataclass": _named,
    "node": _listed("children"),
}
_ONE_KEY = {kind: kind for kind in ("dict", "list", "tuple", "OrderedDict")}
_SEVERAL_KEYS = {
    frozenset({"defaultdict", "factory"}): "defaultdict",
    frozenset({"namedtuple", "children"}): "namedtuple",
    frozenset({"dataclass", "static", "children"}): "dataclass",
    frozenset({"node", "aux", "children"}): "node",
}
