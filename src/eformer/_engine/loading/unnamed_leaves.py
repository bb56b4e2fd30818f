"""Name the leaves of a file without names after the leaves of `like`, in their order.

equinox stores arrays and numbers of a tree, and skips other leaves, such as functions.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import Sharding

from eformer._engine.loading.rules import PartitionSpec
from eformer._engine.loading.scalars import is_scalar, kind_of, kind_of_dtype
from eformer._engine.record.dtypes import dtype_from_name, is_floating

if TYPE_CHECKING:
    from collections.abc import Mapping

    from eformer._engine.loading.contents import Contents
    from eformer._engine.record.manifest import LeafEntry

_ARRAYS = (jax.Array, np.ndarray, jax.ShapeDtypeStruct, Sharding, PartitionSpec)


def by_order(
    contents: Contents, like: Mapping[str, Any], cast: str | None
) -> tuple[Contents, dict[str, Any]]:
    """Return the leaves under the names of `like`, and the leaves to compare them with.

    Numbers are stored as arrays without axes. Surplus arrays get impossible names, so the mismatch report lists them
    as unexpected.
    """
    wanted = {name: leaf for name, leaf in like.items() if _is_stored(leaf)}
    spare = (f"%array {number}" for number in itertools.count(len(wanted)))
    names = itertools.chain(wanted, spare)
    entries = dict(zip(names, contents.arrays.values(), strict=False))
    expected = {name: _expected(leaf, entries.get(name), cast) for name, leaf in wanted.items()}
    return replace(contents, arrays=entries), expected


def completed(arrays: Mapping[str, Any], like: Mapping[str, Any]) -> dict[str, Any]:
    """Return leaves for all of `like`: numpy scalars in its dtypes, and its own leaf where none is stored."""
    return {
        **{name: leaf for name, leaf in like.items() if not _is_stored(leaf)},
        **{name: _in_dtype_of(like.get(name), leaf) for name, leaf in arrays.items()},
    }


def _is_stored(leaf: Any) -> bool:
    if isinstance(leaf, np.flexible):  # numpy's text and bytes, which JAX does not have
        return False
    return isinstance(leaf, _ARRAYS) or is_scalar(leaf) or hasattr(leaf, "__jax_array__")


def _expected(leaf: Any, entry: LeafEntry | None, cast: str | None) -> Any:
    """Return the leaf to compare an entry with: numpy scalars may be of any size, as JAX stores 64 bits as 32."""
    if not isinstance(leaf, np.generic) or entry is None or entry.shape:
        return leaf
    if kind_of(leaf) is None or kind_of(leaf) is not kind_of_dtype(entry.dtype):
        return leaf
    dtype = cast if cast and is_floating(entry.dtype) else entry.dtype
    return np.zeros((), dtype_from_name(dtype))[()]


def _in_dtype_of(leaf: Any, found: Any) -> Any:
    """Cast a numpy scalar to the dtype of the leaf of `like`; return anything else unchanged."""
    are_scalars = isinstance(leaf, np.generic) and isinstance(found, np.generic)
    return found.astype(leaf.dtype) if are_scalars else found
