"""Dicts out of dotted names or paths, for checkpoints that do not say what their trees were."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from eformer._engine.record.names import BARE_LEAF, escape, join_name, path_to_name, split_name, unescape
from eformer.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Mapping

# A name of more parts keeps its last dots: nested dicts that deep are no model, and no tree of ours.
_MOST_PARTS = 100

Parts = tuple[str, ...]


def parts_of_name(name: str) -> Parts:
    """What others join by dots."""
    return tuple(escape(part) for part in name.split(".", _MOST_PARTS))


def parts_of_path(path: str) -> Parts:
    """What others, or we, have made directories of."""
    components = path.split("/", _MOST_PARTS)
    try:
        return split_name(path_to_name(components))
    except FormatError:  # none that we would make
        return tuple(escape(part) for part in components)


def nested(leaves: Mapping[str, Parts]) -> tuple[Any, dict[str, str]]:
    """Dicts of the leaves, and the name that each got.

    Where "a" and "a.b" are both there, the latter keeps its dot: {"a": ..., "a.b": ...}.
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
