"""Build nested dicts from dotted names or paths, for checkpoints that do not record their structure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, TypeVar

from eformer._engine.record.names import (
    BARE_LEAF,
    escape,
    join_name,
    name_to_path,
    path_to_name,
    split_name,
    unescape,
)
from eformer.errors import FormatError, MismatchError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

# A name with more parts keeps its last dots: no model has dicts nested that deep.
_MAX_PARTS = 100

Parts = tuple[str, ...]
T = TypeVar("T")


def parts_of_name(name: str) -> Parts:
    """Split a name that another program joined with dots into escaped parts."""
    return tuple(escape(part) for part in name.split(".", _MAX_PARTS))


def split_spelled(name: str) -> Parts:
    """Split the name of a leaf, or a name that a person wrote, into escaped parts."""
    try:
        name_to_path(name)
    except FormatError:
        return parts_of_name(name)
    return split_name(name)


def components_of(path: str) -> Parts:
    """Split a path into escaped parts."""
    return tuple(map(escape, path.split("/")))


def parts_of_path(path: str) -> Parts:
    """Split the path of a directory that stands for a leaf into escaped parts."""
    components = path.split("/", _MAX_PARTS)
    try:
        return split_name(path_to_name(components))
    except FormatError:  # not a path that eformer would write
        return tuple(escape(part) for part in components)


def nested_spelled(names: Mapping[str, str]) -> tuple[Any, dict[str, str]]:
    """Return the structure for names that people wrote, and the new name of each leaf. Raise MismatchError if two of
    them spell one name."""
    structure, final = nested_dicts({leaf: split_spelled(name) for leaf, name in names.items()})
    seen: dict[str, str] = {}
    problems = []
    for leaf, name in final.items():
        if seen.setdefault(name, leaf) != leaf:
            problems.append(f"leaves {seen[name]!r} and {leaf!r} would both be called {name!r}")
    if problems:
        raise MismatchError(problems, context="names of leaves")
    return structure, final


def nest(leaves: Mapping[str, T], split: Callable[[str], Parts]) -> tuple[Any, dict[str, T]]:
    """Return the structure of nested dicts that holds the leaves, and the leaves by their new names."""
    structure, names = nested_dicts({leaf: split(leaf) for leaf in leaves})
    return structure, {names[leaf]: found for leaf, found in leaves.items()}


def nested_dicts(leaves: Mapping[str, Parts]) -> tuple[Any, dict[str, str]]:
    """Return the structure of nested dicts that holds the leaves, and the new name of each leaf.

    If both "a" and "a.b" are leaves, "a.b" keeps its dot: {"a": ..., "a.b": ...}.
    """
    taken = set(leaves.values())
    root: dict[str, Any] = {}
    names: dict[str, str] = {}
    for leaf, parts in sorted(leaves.items(), key=lambda item: item[1]):
        for depth in range(1, len(parts)):
            if parts[:depth] in taken:
                parts = (*parts[: depth - 1], escape(".".join(map(unescape, parts[depth - 1 :]))))
                break
        names[leaf] = join_name(parts)
        holder = root
        for part in parts[:-1]:
            holder = holder.setdefault(part, {"dict": {}})["dict"]
        if parts:
            holder[parts[-1]] = names[leaf]
    if list(names.values()) == [BARE_LEAF]:
        return BARE_LEAF, names
    return {"dict": root}, names


# ----------------------------------------------------------------------------------- by paths of keys


class SequenceIndex(str):
    """A key of a sequence, as text."""

    __slots__ = ()


class _Holder(dict[Any, Any]):
    """A dict or a list on the way to items. Containers that are items are of other classes."""


def tree_of_paths(items: Iterable[tuple[Sequence[Any], Any]]) -> Any:
    """Return nested dicts that hold items at paths of keys, with lists in place of dicts whose keys count from 0.

    Only ints and texts of the class `SequenceIndex` can count. Raise FormatError for items that do not form a tree.
    """
    root = _Holder()
    for path, item in items:
        name = ".".join(map(str, path))[:200]
        if not 0 < len(path) <= _MAX_PARTS:
            raise FormatError(
                f"leaf {name!r} is nested {len(path)} deep; the depth must be 1 to {_MAX_PARTS}"
            )
        holder = root
        for key in path[:-1]:
            holder = holder.setdefault(key, _Holder())
            if type(holder) is not _Holder:
                raise FormatError(f"leaf {name!r} is inside another leaf")
        if path[-1] in holder:
            raise FormatError(f"leaf {name!r} is listed twice")
        holder[path[-1]] = item
    return _with_lists(root)


def _with_lists(node: Any) -> Any:
    if type(node) is not _Holder:
        return node
    inside = {key: _with_lists(child) for key, child in node.items()}
    numbered = {_number(key): child for key, child in inside.items()}
    if inside and numbered.keys() == set(range(len(inside))):
        return [numbered[number] for number in range(len(inside))]
    return {str(key) if type(key) is SequenceIndex else key: child for key, child in inside.items()}


def _number(key: Any) -> int | None:
    if type(key) is SequenceIndex:
        return int(key) if re.fullmatch(r"0|[1-9]\d{0,8}", key, re.ASCII) else None
    return key if type(key) is int else None
