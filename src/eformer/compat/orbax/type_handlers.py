"""How single leaves are saved and restored: `SaveArgs`, `RestoreArgs` and their kin.

Tests: tests/compat_orbax/test_restore.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from eformer.compat.orbax._alike import Alike

PLACEHOLDER = ...


@dataclass
class SaveArgs(Alike):
    """How a leaf is saved: cast to `dtype`. The other fields concern Orbax's files, and are ignored."""

    alike = ("SaveArgs",)

    aggregate: bool = False
    dtype: Any = None
    chunk_byte_size: int | None = None
    shard_axes: tuple[int, ...] = ()


@dataclass
class RestoreArgs(Alike):
    """How a leaf is restored: as `np.ndarray`, `jax.Array`, `int`, `float` or `str`, or as it was saved (None); cast to
    `dtype`."""

    alike = ("RestoreArgs",)

    restore_type: Any = None
    dtype: Any = None


@dataclass
class ArrayRestoreArgs(RestoreArgs):
    """How a leaf becomes a `jax.Array`: on `sharding`, or on `mesh` by `mesh_axes`; else as it was saved.

    Without `strict`, an array of another shape than `global_shape` is padded with zeros, or cut.
    """

    alike = ("ArrayRestoreArgs",)

    restore_type: Any = jax.Array
    mesh: Any = None
    mesh_axes: Any = None
    sharding: Any = None
    global_shape: tuple[int, ...] | None = None
    shape: tuple[int, ...] | None = None
    strict: bool = True


@dataclass
class SingleReplicaArrayRestoreArgs(ArrayRestoreArgs):
    """Like `ArrayRestoreArgs`. A load reads shared data once for all processes by itself."""

    alike = ("SingleReplicaArrayRestoreArgs",)

    single_replica_sharding: Any = None


class TypeHandler:
    """The base of Orbax's type handlers."""


class ArrayHandler(TypeHandler):
    """Names the kind of leaves that JAX makes. eformer stores them without a handler."""

    def __init__(self, *_: Any, **__: Any) -> None: ...


class SingleReplicaArrayHandler(ArrayHandler):
    """Accepted, and without effect: eformer decides by itself who reads what."""


class NumpyHandler(TypeHandler):
    """Names the kind of numpy arrays. eformer stores them without a handler."""


class ScalarHandler(NumpyHandler):
    """Names the kind of plain numbers. eformer stores them without a handler."""


class StringHandler(TypeHandler):
    """Names the kind of texts. eformer stores them without a handler."""


_KNOWN = (ArrayHandler, NumpyHandler, StringHandler)
_TYPES = (int, float, bytes, np.number, np.ndarray, jax.Array, str)


def register_type_handler(ty: Any, handler: Any, func: Any = None, override: bool = False) -> None:
    """Accept the handlers of known kinds. Raise NotImplementedError for a handler of the caller's own."""
    if not override and has_type_handler(ty):
        raise ValueError(f'A TypeHandler for "{ty}" is already registered.')
    name = type(handler).__name__
    if isinstance(handler, _KNOWN) or any(
        kind.__name__ == name for kind in (*_KNOWN, SingleReplicaArrayHandler)
    ):
        return
    raise NotImplementedError(
        f"a TypeHandler for {ty} cannot be registered: eformer stores leaves itself. Use "
        "checkpoint.register_module for "
        "objects with arrays, or convert the leaves before the save"
    )


def has_type_handler(ty: Any) -> bool:
    """Tell whether leaves of a type are supported."""
    return isinstance(ty, type) and issubclass(ty, _TYPES)


def supported_types(*_: Any) -> list[Any]:
    """List the types of leaves that are supported."""
    return list(_TYPES)


def is_supported_type(value: Any, *_: Any) -> bool:
    """Tell whether a leaf is supported."""
    return isinstance(value, _TYPES)


def is_placeholder(value: Any) -> bool:
    """Tell whether a leaf of a target is left as it is."""
    return value is ...


def default_restore_type(args: Any) -> Any:
    """Return the type that arguments stand for without a type."""
    return jax.Array if isinstance(args, ArrayRestoreArgs) else np.ndarray
