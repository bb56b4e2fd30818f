"""Describe a tree in a directory, by eformer or by Orbax, as Orbax's callers see it. No leaf is read.

Tests: tests/compat_orbax/test_metadata.py.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from eformer import checkpoint
from eformer._engine.loading.select import key_dtype
from eformer._engine.record.dtypes import dtype_from_name
from eformer._engine.record.indexes import MANIFEST, ORBAX_CHECKPOINT
from eformer._engine.record.manifest import parse_structure
from eformer._engine.record.names import split_name, unescape
from eformer._engine.trees.unflatten import unflatten
from eformer.compat.orbax._alike import on_disk
from eformer.compat.orbax.metadata import (
    ArrayMetadata,
    NamedShardingMetadata,
    ScalarMetadata,
    SingleDeviceShardingMetadata,
    StorageMetadata,
    StringMetadata,
    TreeMetadata,
)
from eformer.compat.orbax.tree import plain, to_flat, to_nested
from eformer.errors import NotFoundError

if TYPE_CHECKING:
    from eformer._engine.record.manifest import LeafEntry, TreeEntry

Kind = Literal["jax", "numpy", "scalar", "string", "value"]

CUSTOM = "eformer.compat.orbax"  # the entry of a tree's metadata that has the caller's, as JSON


@dataclass(frozen=True)
class StoredLeaf:
    """A leaf: its kind, shape and dtype, or its value. `key` is the generator of a PRNG key, whose data has `shape`."""

    name: str
    kind: Kind
    shape: tuple[int, ...] = ()
    dtype: Any = None
    sharding: Any = None
    key: str | None = None
    value: Any = None

    @property
    def own_dtype(self) -> Any:
        """The dtype of the leaf itself: for a PRNG key not the dtype of its data."""
        return key_dtype(self.key) if self.key else self.dtype

    @property
    def own_shape(self) -> tuple[int, ...]:
        """The shape of the leaf itself: for a PRNG key not the shape of its data."""
        return self.shape[:-1] if self.key else self.shape


@dataclass(frozen=True)
class Stored:
    """A tree in a directory: `tree` has dicts and lists of `StoredLeaf`s and empty containers."""

    path: str
    prefix: str | None
    tree: Any
    custom_metadata: Any = None

    @property
    def flat(self) -> dict[tuple[str, ...], Any]:
        """The leaves and empty containers, by their paths."""
        return to_flat(self.tree)


def describe(directory: Any) -> Stored:
    """Describe the tree in a directory. Raise NotFoundError if it has none."""
    path = on_disk(directory)
    if not path.exists():
        raise NotFoundError(f"Checkpoint at {path} not found: the directory does not exist")
    trees = checkpoint.inspect(path).trees
    if len(trees) != 1:
        raise NotFoundError(
            f"No tree at {path}: it has the items {sorted(trees)}; pass the path of one of them"
        )
    prefix, entry = next(iter(trees.items()))
    if prefix and (path / ORBAX_CHECKPOINT).is_file() and not (path / MANIFEST).is_file():
        raise NotFoundError(f"No tree at {path}, but the item {prefix!r}; pass the path of the item")
    custom = entry.raw_metadata.get(CUSTOM)
    return Stored(
        str(path), prefix or None, _tree(entry), json.loads(custom) if isinstance(custom, str) else None
    )


def _tree(entry: TreeEntry) -> Any:
    leaves = {name: _leaf(name, one) for name, one in entry.leaves.items()}
    leaves |= {name: _value(name, value) for name, value in entry.values.items()}
    structure = parse_structure(bytes(entry.structure))
    if structure is None and leaves:
        return to_nested({tuple(map(unescape, split_name(name))): leaf for name, leaf in leaves.items()})
    return plain(unflatten(structure, leaves, plain=True))


def _leaf(name: str, entry: LeafEntry) -> StoredLeaf:
    kind: Kind = "numpy" if entry.home == "numpy" else "jax"
    dtype = dtype_from_name(entry.dtype)
    return StoredLeaf(name, kind, tuple(entry.shape), dtype, _sharding(entry, kind), entry.key)


def _sharding(entry: LeafEntry, kind: Kind) -> Any:
    if kind == "numpy":
        return None
    if (found := entry.sharding) is None or not found.mesh:
        return SingleDeviceShardingMetadata()
    names, sizes = tuple(found.mesh), tuple(found.mesh.values())
    return NamedShardingMetadata(sizes, names, tuple(found.spec), memory_kind=found.memory_kind)


def _value(name: str, value: Any) -> StoredLeaf:
    if isinstance(value, str):
        return StoredLeaf(name, "string", value=value)
    if isinstance(value, (bool, int, float, np.generic)):
        return StoredLeaf(name, "scalar", (), np.asarray(value).dtype, value=value)
    return StoredLeaf(name, "value", value=value)


def tree_metadata(directory: Any) -> TreeMetadata:
    """Return the metadata of the tree in a directory. Raise NotFoundError if it has none."""
    stored = describe(directory)
    return TreeMetadata(_described(stored.tree, (), directory), stored.custom_metadata)


def _described(node: Any, path: tuple[str, ...], directory: Any) -> Any:
    if type(node) is dict:
        return {key: _described(child, (*path, key), directory) for key, child in node.items()}
    if type(node) is list:
        return [_described(child, (*path, str(number)), directory) for number, child in enumerate(node)]
    return leaf_metadata(node, ".".join(path), directory) if isinstance(node, StoredLeaf) else node


def leaf_metadata(leaf: StoredLeaf, name: str, directory: Any) -> Any:
    """Return the metadata of a leaf."""
    if leaf.kind == "scalar":
        return ScalarMetadata(name, directory, (), None, leaf.dtype, StorageMetadata((), ()))
    if leaf.kind in ("string", "value"):
        return StringMetadata(name, directory)
    storage = StorageMetadata(leaf.shape, leaf.shape if leaf.kind == "jax" else None)
    return ArrayMetadata(name, directory, leaf.shape, leaf.sharding, leaf.dtype, storage)
