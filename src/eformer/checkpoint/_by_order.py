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

from eformer.checkpoint._manifest import encode_leaves
from eformer.checkpoint._ndarray import dtype_from_name, floating_dtype, is_floating
from eformer.checkpoint._rules import PartitionSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from eformer.checkpoint._manifest import LeafEntry, TreeEntry

_NUMBERS = (bool, int, float, complex, np.generic)
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


def is_number(leaf: Any) -> bool:
    """Whether it is plain, and lies on no device."""
    return isinstance(leaf, _NUMBERS)


def completed(arrays: Mapping[str, Any], like: Mapping[str, Any]) -> dict[str, Any]:
    """The leaves for the whole of `like`: numbers as it has them, and its own where nothing is stored."""
    return {
        **{name: leaf for name, leaf in like.items() if not _is_stored(leaf)},
        **{name: _as_number(array, like.get(name)) for name, array in arrays.items()},
    }


def _is_stored(leaf: Any) -> bool:
    if isinstance(leaf, np.flexible):  # numpy's text and bytes, which JAX has not
        return False
    return isinstance(leaf, (*_ARRAYS, *_NUMBERS)) or hasattr(leaf, "__jax_array__")


def _expected(leaf: Any, entry: LeafEntry | None, dtype: Any) -> Any:
    """For a number an array without axes, of whatever size of its kind; 64 bits become 32 where JAX has no others."""
    if not isinstance(leaf, _NUMBERS) or entry is None or entry.shape or _kind(entry.dtype) != _kind_of(leaf):
        return leaf
    is_cast = dtype is not None and is_floating(entry.dtype)
    return np.empty((), dtype_from_name(floating_dtype(dtype) if is_cast else entry.dtype))


def _kind_of(number: Any) -> str:
    if isinstance(number, np.generic):
        return _kind(number.dtype.name)
    kinds = {bool: "b", int: "i", float: "f", complex: "c"}  # in this order: a bool is an int, too
    return next(kind for python, kind in kinds.items() if isinstance(number, python))


def _kind(dtype: str) -> str:
    if is_floating(dtype):
        return "f"
    return dtype_from_name(dtype).kind.replace("u", "i")


def _as_number(array: Any, leaf: Any) -> Any:
    """What a caller's function has made of it stays."""
    is_plain = is_number(leaf) and isinstance(array, np.ndarray) and not array.shape
    return type(leaf)(array.item()) if is_plain else array
