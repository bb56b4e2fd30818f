"""The structure of an Orbax tree, as JSON, from the keys of its leaves."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import msgspec

from eformer._engine.record.names import BARE_LEAF, escape
from eformer.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from eformer._engine.formats.others.orbax_metadata import LeafMetadata

# Kinds of leaves that are empty containers, with their JSON: nothing is stored of them.
EMPTY_CONTAINERS: dict[str, Any] = {
    "None": None, "NamedTuple": None, "Dict": {"dict": {}}, "List": {"list": []}, "Tuple": {"tuple": []},
}  # fmt: skip

_MAX_DEPTH = 100


class _Container(msgspec.Struct):
    """The children of a container by key; `is_sequence` tells whether the keys are indices."""

    children: dict[str, Any]
    is_sequence: bool


def build_structure(leaves: Sequence[LeafMetadata], origin: str) -> Any:
    """Build the structure of dicts and lists that holds these leaves.

    Orbax does not record tuples, namedtuples and classes: they come back as lists and dicts. Leaves that do not form
    a tree raise a FormatError that names `origin`.
    """
    if len(leaves) == 1 and not leaves[0].key_metadata:
        return _leaf_to_json(leaves[0])
    root = _Container(
        {}, is_sequence=all(leaf.key_metadata[:1] and leaf.key_metadata[0].is_index for leaf in leaves)
    )
    for leaf in leaves:
        _add(root, leaf, origin)
    return _container_to_json(root)


def _add(root: _Container, leaf: LeafMetadata, origin: str) -> None:
    keys = leaf.key_metadata
    if not 0 < len(keys) <= _MAX_DEPTH:
        raise FormatError(
            f"{origin}: leaf {leaf.name[:200]!r} is nested {len(keys)} deep; the depth must be 1 to {_MAX_DEPTH}"
        )
    container = root
    for key, following in itertools.pairwise(keys):
        inner = container.children.setdefault(key.key, _Container({}, is_sequence=following.is_index))
        if not isinstance(inner, _Container):
            raise FormatError(f"{origin}: leaf {leaf.name[:200]!r} is inside of another leaf")
        container = inner
    if keys[-1].key in container.children:
        raise FormatError(f"{origin} has the leaf {leaf.name[:200]!r} twice")
    container.children[keys[-1].key] = _leaf_to_json(leaf)


def _leaf_to_json(leaf: LeafMetadata) -> Any:
    return EMPTY_CONTAINERS.get(leaf.value_metadata.value_type, leaf.name or BARE_LEAF)


def _container_to_json(node: Any) -> Any:
    if not isinstance(node, _Container):
        return node
    children = node.children
    has_indices = node.is_sequence and all(key.isdecimal() and len(key) < 10 for key in children)
    indices = sorted(children, key=int) if has_indices else []
    if indices and indices == [str(index) for index in range(len(children))]:
        return {"list": [_container_to_json(children[index]) for index in indices]}
    return {"dict": {escape(key): _container_to_json(child) for key, child in children.items()}}
