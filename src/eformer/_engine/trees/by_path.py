"""Build nested dicts from values by path, and look values up in them, for the states of modules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def nested(flat: Mapping[tuple[Any, ...], Any]) -> Any:
    """Return values by path in nested dicts. A value whose path is empty is the whole tree."""
    if list(flat) == [()]:
        return flat[()]
    tree: dict[Any, Any] = {}
    for (*path, last), value in flat.items():
        inner = tree
        for key in path:
            inner = inner.setdefault(key, {})
        inner[last] = value
    return tree


def at(tree: Any, path: Sequence[Any]) -> Any:
    """Return what is in nested dicts at a path."""
    for key in path:
        tree = tree[key]
    return tree
