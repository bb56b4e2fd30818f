"""Restore leaves by the rules of Orbax: as they were saved, or as `RestoreArgs` ask, cast, padded and placed.

Tests: tests/compat_orbax/test_restore.py.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eformer import checkpoint
from eformer.compat.orbax._stored import Stored, StoredLeaf
from eformer.compat.orbax.tree import Keys, to_nested

logger = logging.getLogger("eformer")

_SCALARS = (bool, int, float)


@dataclass(frozen=True)
class Wish:
    """How the caller wants a leaf: as `kind` ("jax", "numpy", "scalar", "string", "placeholder" or, as it was saved,
    None), of a type, cast, placed, of a shape."""

    kind: str | None = None
    scalar: Any = None
    dtype: Any = None
    sharding: Any = None
    shape: tuple[int, ...] | None = None
    strict: bool = True


def wish_of(args: Any) -> Wish:
    """Return the wish of `RestoreArgs`, of ours or of Orbax; anything else asks for nothing."""
    if args is None or not hasattr(args, "restore_type"):
        return Wish()
    dtype = None if args.dtype is None else np.dtype(args.dtype) if not _is_key(args.dtype) else None
    if hasattr(args, "global_shape"):
        return _wish_of_array(args, dtype)
    kind = args.restore_type
    if kind is None:
        return Wish(dtype=dtype)
    if kind is type(...):
        return Wish("placeholder")
    if kind is str:
        return Wish("string")
    if isinstance(kind, type) and (issubclass(kind, _SCALARS) or issubclass(kind, np.generic)):
        return Wish("scalar", kind, dtype)
    return Wish("jax" if _is_jax(kind) else "numpy", None, dtype)


def _wish_of_array(args: Any, dtype: Any) -> Wish:
    sharding = args.sharding
    if args.mesh is not None and args.mesh_axes is not None:
        sharding = jax.sharding.NamedSharding(args.mesh, args.mesh_axes)
    if hasattr(sharding, "to_jax_sharding"):
        sharding = sharding.to_jax_sharding()
    if (
        sharding is not None
        and not isinstance(sharding, jax.sharding.Sharding)
        and hasattr(sharding, "sharding")
    ):
        sharding = sharding.sharding  # a Format
    shape = args.global_shape if args.global_shape is not None else args.shape
    is_numpy = args.restore_type is np.ndarray
    return Wish(
        "numpy" if is_numpy else "jax",
        None,
        dtype,
        sharding,
        None if shape is None else tuple(shape),
        args.strict,
    )


def _is_jax(kind: Any) -> bool:
    return kind is jax.Array or (isinstance(kind, type) and issubclass(kind, jax.Array))


def _is_key(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jax.dtypes.prng_key))


def read(stored: Stored, wishes: Mapping[Keys, Wish], fallback: Any = None) -> dict[Keys, Any]:
    """Read the wanted leaves of a tree, by their paths. Leaves that are not wanted are not read."""
    flat = stored.flat
    plans = {path: _plan(path, flat[path], wish, fallback) for path, wish in wishes.items()}
    loaded = _load(stored, {path: plan for path, plan in plans.items() if plan.like is not None})
    return {path: plan.finish(loaded.get(path)) for path, plan in plans.items()}


@dataclass(frozen=True)
class _Plan:
    """How a leaf is read: the leaf of `like` that the load gets (None: nothing is read), and what follows."""

    path: Keys
    leaf: Any
    wish: Wish
    kind: str
    like: Any = None
    sharding: Any = None

    def finish(self, loaded: Any) -> Any:
        leaf, wish = self.leaf, self.wish
        if self.kind == "as is":
            return leaf.value if isinstance(leaf, StoredLeaf) else leaf
        if self.kind == "placeholder":
            return ...
        if leaf.kind == "scalar":
            loaded = np.asarray(leaf.value)
        if self.kind == "scalar":
            return _as_scalar(loaded, wish)
        if leaf.key:
            return np.asarray(jax.random.key_data(loaded)) if self.kind == "numpy" else loaded
        if self.kind == "numpy":
            return _fitted(loaded, leaf, wish)
        return self._as_jax(loaded)

    def _as_jax(self, loaded: Any) -> Any:
        dtype = self.wish.dtype
        if isinstance(loaded, jax.Array):
            return loaded if dtype is None or loaded.dtype == dtype else _cast(loaded, dtype)
        return _placed(_fitted(loaded, self.leaf, self.wish), self.sharding)


def _cast(array: Any, dtype: Any) -> Any:
    return jax.device_put(array.astype(dtype), array.sharding)


def _placed(array: Any, sharding: Any) -> Any:
    array = array.astype(jax.dtypes.canonicalize_dtype(array.dtype))
    if sharding is None:
        return jax.device_put(array)
    if sharding.is_fully_addressable:
        return jax.device_put(array, sharding)
    return jax.make_array_from_callback(array.shape, sharding, array.__getitem__)


def _as_scalar(value: Any, wish: Wish) -> Any:
    array = np.asarray(value)
    if array.ndim:
        raise ValueError("Restored result is not a scalar.")
    if wish.dtype is not None:
        array = array.astype(wish.dtype)
    return array.item() if wish.scalar is None else wish.scalar(array.item())


def _fitted(array: Any, leaf: StoredLeaf, wish: Wish) -> Any:
    """Return a numpy array of the wanted shape, padded with zeros or cut, and of the wanted dtype."""
    array = np.asarray(array)
    if wish.shape is not None and wish.shape != array.shape:
        if len(wish.shape) != array.ndim:
            raise ValueError(
                f"Ranks do not match: stored {array.shape}, requested {wish.shape} for {leaf.name!r}"
            )
        fitted = np.zeros(wish.shape, array.dtype)
        common = tuple(slice(min(sizes)) for sizes in zip(wish.shape, array.shape, strict=True))
        fitted[common] = array[common]
        array = fitted
    return array if wish.dtype is None else array.astype(wish.dtype)


def _plan(path: Keys, leaf: Any, wish: Wish, fallback: Any) -> _Plan:
    if not isinstance(leaf, StoredLeaf):
        return _Plan(path, leaf, wish, "as is")
    if wish.kind == "placeholder":
        return _Plan(path, leaf, wish, "placeholder")
    if leaf.kind in ("string", "value") or wish.kind == "string":
        return _plan_of_text(path, leaf, wish)
    kind = wish.kind or leaf.kind
    if leaf.kind == "scalar" and kind == "scalar":
        return _Plan(path, leaf, wish, kind)
    _require_shape(path, leaf, wish)
    if kind != "jax":
        return _Plan(path, leaf, wish, kind, _stub(leaf))
    sharding = wish.sharding if wish.sharding is not None else _saved_sharding(path, leaf, fallback)
    is_direct = leaf.kind != "scalar" and (wish.shape is None or leaf.key or wish.shape == leaf.shape)
    if is_direct and (leaf.key or jax.dtypes.canonicalize_dtype(leaf.dtype) == leaf.dtype):
        like = jax.ShapeDtypeStruct(leaf.own_shape, leaf.own_dtype, sharding=sharding)
        return _Plan(path, leaf, wish, kind, like, sharding)
    return _Plan(path, leaf, wish, kind, _stub(leaf), sharding)


def _plan_of_text(path: Keys, leaf: StoredLeaf, wish: Wish) -> _Plan:
    if (leaf.kind in ("string", "value")) != (wish.kind in (None, "string")):
        raise ValueError(
            f"leaf {'.'.join(path)!r} was saved as {leaf.kind!r}, and cannot be restored as {wish.kind!r}; ask for "
            "its own kind"
        )
    return _Plan(path, leaf, wish, "as is")


def _stub(leaf: StoredLeaf) -> Any:
    """Return a leaf that makes the load return a numpy array, and takes no memory; None if nothing is read."""
    if leaf.kind == "scalar":
        return None
    if leaf.key:
        return jax.ShapeDtypeStruct(leaf.own_shape, leaf.own_dtype)
    return np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)


def _require_shape(path: Keys, leaf: StoredLeaf, wish: Wish) -> None:
    if wish.shape is None or wish.shape == leaf.shape or not wish.strict:
        return
    raise ValueError(
        f"Requested shape: {wish.shape} is not compatible with the stored shape: {leaf.shape}. Truncating/padding is "
        f"disabled; pass strict=False to allow it for {'.'.join(path)!r}"
    )


def _saved_sharding(path: Keys, leaf: StoredLeaf, fallback: Any) -> Any:
    if leaf.kind != "jax":
        raise ValueError(
            f"leaf {'.'.join(path)!r} was not saved as a jax.Array, so it needs a sharding to become one"
        )
    try:
        return leaf.sharding.to_jax_sharding()
    except ValueError as error:
        if fallback is not None:
            return fallback
        logger.warning("leaf %r is restored to the default device: %s", ".".join(path), error)
        return jax.sharding.SingleDeviceSharding(jax.devices()[0])


def _load(stored: Stored, plans: Mapping[Keys, _Plan]) -> dict[Keys, Any]:
    """Load arrays by one call: `like` has dicts of the wanted leaves alone."""
    if not plans:
        return {}
    like = to_nested({path: plan.like for path, plan in plans.items()})
    loaded, _ = checkpoint.load(
        stored.path, prefix=stored.prefix, like=like, partial=True, return_report=True
    )
    return {path: _at(loaded, path) for path in plans}


def _at(tree: Any, path: Keys) -> Any:
    for key in path:
        tree = tree[key]
    return tree
