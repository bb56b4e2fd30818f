"""Leaves of a file without names: they get those of the tree that they are to be like, in its order.

equinox stores arrays and numbers, and of a tree's other leaves, such as functions, nothing.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import jax
import msgspec
import numpy as np
from jax.sharding import Sharding

from eformer._engine.loading.rules import PartitionSpec
from eformer._engine.loading.scalars import is_scalar, kind_of, kind_of_dtype
from eformer._engine.record.dtypes import dtype_from_name, floating_dtype, is_floating
from eformer._engine.record.manifest import encode_leaves

if TYPE_CHECKING:
    from collections.abc import Mapping

    from eformer._engine.record.manifest import LeafEntry, TreeEntry

_ARRAYS = (jax.Array, np.ndarray, jax.ShapeDtypeStruct, Sharding, PartitionSpec)


def by_order(tree: TreeEntry, like: Mapping[str, Any], dtype: Any) -> tuple[TreeEntry, dict[str, Any]]:
    """The tree with the names of `like`, and what `like` expects of it. Numbers are stored as arrays without axes.

    Arrays that `like` has no leaf for get names that no leaf can have, so that they are seen to be too many.
    """
    wanted = {name: leaf for name, leaf in like.items() if _is_stored(leaf)}
    spare = (f"%array {number}" for number in itertools.count(len(wanted)))
    names = itertools.chain(wanted, spare)
    entries = dict(zip(names, tree.leaves.values(), strict=False))
    expected = {name: _expected(leaf, entries.get(name), dtype) for name, leaf in wanted.items()}
    return msgspec.structs.replace(tree, raw_leaves=encode_leaves(entries)), expected


def completed(arrays: Mapping[str, Any], like: Mapping[str, Any]) -> dict[str, Any]:
    """The leaves for the whole of `like`: scalars of numpy as it has them, and its own where nothing is stored."""
    return {
        **{name: leaf for name, leaf in like.items() if not _is_stored(leaf)},
        **{name: _of_size(leaf, like.get(name)) for name, leaf in arrays.items()},
    }


def _is_stored(leaf: Any) -> bool:
    if isinstance(leaf, np.flexible):  # numpy's text and bytes, which JAX has not
        return False
    return isinstance(leaf, _ARRAYS) or is_scalar(leaf) or hasattr(leaf, "__jax_array__")


def _expected(leaf: Any, entry: LeafEntry | None, dtype: Any) -> Any:
    """For a scalar of numpy one of whatever size of its kind; 64 bits become 32 where JAX has no others."""
    if not isinstance(leaf, np.generic) or entry is None or entry.shape:
        return leaf
    if kind_of(leaf) is None or kind_of(leaf) is not kind_of_dtype(entry.dtype):
        return leaf
    is_cast = dtype is not None and is_floating(entry.dtype)
    return np.zeros((), dtype_from_name(floating_dtype(dtype) if is_cast else entry.dtype))[()]


def _of_size(found: Any, leaf: Any) -> Any:
    """What a caller's function has made of it stays."""
    is_scalar_of_numpy = isinstance(leaf, np.generic) and isinstance(found, np.generic)
    return found.astype(leaf.dtype) if is_scalar_of_numpy else found
