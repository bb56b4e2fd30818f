"""The documented helpers for saving and loading: names, sizes, shard layouts, gathering and resharding."""

from __future__ import annotations

import logging
import math
import os
import re
from collections import Counter
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from eformer._engine.formats.safetensors.layout import group_by_file, stored_nbytes
from eformer._engine.formats.safetensors.names import INDEX_SUFFIX, SUFFIX, shard_name, split_shard
from eformer._engine.record.dtypes import dtype_from_name, floating_dtype, is_floating
from eformer._engine.record.names import with_nearest
from eformer._engine.tasks.memory import available_memory
from eformer._engine.trees.devices import arrived, is_key, on_host, resharded
from eformer.paths import GCSPath
from eformer.serialization._keys import is_array_like, leaf_key_paths

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "apply_gather_functions",
    "broadcast_tensor",
    "chunk_tensor_by_memory",
    "derive_base_prefix_from_path",
    "estimate_array_nbytes",
    "estimate_available_memory",
    "flatten_for_broadcast",
    "group_keys_by_shard_size",
    "index_filename",
    "is_gcs_path",
    "optimize_shard_layout",
    "parse_gcs_path",
    "read_process_array",
    "reshard",
    "shard_filename",
    "to_host",
]

logger = logging.getLogger("eformer")

_SAVE_ID = re.compile(r"\.[0-9a-f]{16}$")  # follows the base name in files of later saves


# --------------------------------------------------------------------------------------------- names


def is_gcs_path(path: Any) -> bool:
    """Tell whether the path, as text or as an object, is in Google Cloud Storage."""
    return isinstance(path, (str, os.PathLike, GCSPath)) and str(path).startswith("gs://")


def parse_gcs_path(gcs_path: str) -> tuple[str, str]:
    """Split `gcs_path`, which begins with gs://, into the bucket and the name inside it."""
    bucket, _, name = str(gcs_path).removeprefix("gs://").partition("/")
    if not is_gcs_path(gcs_path) or not bucket:
        raise ValueError(f"Invalid GCS path: {gcs_path}; expected gs://bucket/name")
    return bucket, name


def shard_filename(base_prefix: str, idx: int, total: int) -> str:
    """Return the file name of shard `idx`, counted from 1, of `total`: `base_prefix` with a number and a suffix."""
    if not 1 <= idx <= total:
        raise ValueError(f"shard {idx} of {total}: shards are counted from 1 to the total")
    return shard_name(str(base_prefix), idx, total)


def index_filename(base_prefix: str) -> str:
    """Return the file name of the index that maps the tensors of `base_prefix` to shards."""
    return str(base_prefix) + INDEX_SUFFIX


def derive_base_prefix_from_path(path_str: str) -> str:
    """Strip the suffix of a safetensors file, a shard or an index from `path_str`."""
    text = str(path_str)
    if text.endswith(INDEX_SUFFIX):
        return text.removesuffix(INDEX_SUFFIX)
    stem = _SAVE_ID.sub("", text.removesuffix(SUFFIX)) if text.endswith(SUFFIX) else text
    shard = split_shard(stem)
    return shard[0] if shard else stem


# --------------------------------------------------------------------------------------------- sizes


def estimate_array_nbytes(array: Any) -> int:
    """Compute the bytes of an array, a ShapeDtypeStruct, a typed PRNG key or a number, without reading its values."""
    if is_array_like(array):
        if is_key(array):
            array = jax.eval_shape(jax.random.key_data, array)
        return int(math.prod(array.shape) * np.dtype(array.dtype).itemsize)
    found = np.asarray(array)
    if found.dtype.kind not in "biufc":
        raise TypeError(f"a {type(array).__name__} is not an array or a number")
    return found.nbytes


def group_keys_by_shard_size(flat_state: dict[str, Any], max_shard_size_bytes: int) -> list[list[str]]:
    """Group the keys of `flat_state` in their order into shards of at most `max_shard_size_bytes`.

    A larger tensor gets a shard of its own.
    """
    _require_positive(max_shard_size_bytes, "max_shard_size_bytes")
    groups: list[list[str]] = []
    used = 0
    for key, array in flat_state.items():
        nbytes = estimate_array_nbytes(array)
        if not groups or used + nbytes > max_shard_size_bytes:
            groups.append([])
            used = 0
        groups[-1].append(key)
        used += nbytes
    return groups


def optimize_shard_layout(state: dict[str, Any], max_shard_size_bytes: int) -> list[list[str]]:
    """Group the keys of arrays in `state` into shards as `save` does: tensors of one module stay together.

    A shard has at most `max_shard_size_bytes`; a larger tensor gets one of its own.
    """
    _require_positive(max_shard_size_bytes, "max_shard_size_bytes")
    is_nested = any(isinstance(value, dict) for value in state.values())
    flat = flatten_for_broadcast(state) if is_nested else state
    sizes = {key: _stored_nbytes(array) for key, array in flat.items() if is_array_like(array)}
    return group_by_file(sizes, max_shard_size_bytes)


def _stored_nbytes(array: Any) -> int:
    is_plain = isinstance(array.dtype, np.dtype)
    return stored_nbytes(array.dtype.name, array.shape) if is_plain else estimate_array_nbytes(array)


def estimate_available_memory() -> int:
    """Estimate the available memory in bytes: the least of the machine, the control group and the devices."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    free = [s["bytes_limit"] - s.get("bytes_in_use", 0) for s in stats if "bytes_limit" in s]
    return max(0, min(available_memory(), sum(free))) if free else available_memory()


def _require_positive(limit: int, name: str) -> None:
    if limit <= 0:
        raise ValueError(f"{name} must be positive, not {limit}")


# -------------------------------------------------------------------------------------------- states


def flatten_for_broadcast(state: dict[Any, Any]) -> dict[Any, Any]:
    """Flatten a state to leaves by dotted key. A state with tuples as keys is already flat, and returned unchanged."""
    if any(isinstance(key, tuple) for key in state):
        return state
    keys, leaves = jax.tree.leaves(leaf_key_paths(state)), jax.tree.leaves(state)
    flat = dict(zip(keys, leaves, strict=True))
    if len(flat) < len(keys):
        twice = sorted(key for key, count in Counter(keys).items() if count > 1)
        raise ValueError(f"different leaves have the same dotted key: {', '.join(map(repr, twice))}")
    return flat


def apply_gather_functions(
    state: Any, gather_fns: dict[str, Any] | bool, mismatch_allowed: bool, verbose: bool
) -> Any:
    """Replace each leaf of `state` by the result of its function in `gather_fns`.

    `gather_fns=True` gathers every leaf to the host, False none. Functions and state may be nested, or flat by dotted
    key; the structure of the state is kept. With `mismatch_allowed`, leaves without a function are kept, and `verbose`
    logs their number; without it, a KeyError names all of them.
    """
    if gather_fns is True:
        return jax.tree.map(_on_host, state)
    if gather_fns is False or gather_fns is None:
        return state
    functions = flatten_for_broadcast(gather_fns)
    names = leaf_key_paths(state)
    missing = [name for name in jax.tree.leaves(names) if name not in functions]
    if missing and not mismatch_allowed:
        hints = [f"{name!r}{hint}" for name, hint in with_nearest(missing, functions)]
        raise KeyError(f"no gather function for {', '.join(hints)}")
    if missing and verbose:
        logger.warning("no gather function for %d leaves, the first is %r", len(missing), missing[0])
    return jax.tree.map(lambda name, leaf: functions[name](leaf) if name in functions else leaf, names, state)


def _on_host(x: Any) -> Any:
    """Return a numpy array, gathered if it spans several processes. Return a typed PRNG key unchanged."""
    if is_key(x):
        return x
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        everywhere = NamedSharding(mesh_of(x), PartitionSpec())  # type: ignore[no-untyped-call]
        return np.asarray(reshard(x, everywhere).addressable_data(0))
    return jax.device_get(x)


def mesh_of(array: jax.Array) -> jax.sharding.Mesh:
    """Return the mesh of an array, or a mesh of all its devices."""
    mesh = getattr(array.sharding, "mesh", None)
    if isinstance(mesh, jax.sharding.Mesh):
        return mesh
    devices: set[Any] = array.sharding.device_set  # untyped
    return jax.sharding.Mesh(np.array(sorted(devices, key=lambda device: device.id)), ("all",))


def read_process_array(
    key: str,
    shard_fns: dict[str, Any] | None,
    mismatch_allowed: bool,
    manager: Any,
    callback: Callable[[Any, str], Any] | None = None,
    dtype: Any = None,
) -> tuple[str, Any, int]:
    """Read the tensor `key` of an open checkpoint, and apply its function in `shard_fns`, the cast and the `callback`.

    `manager` is the open checkpoint: an object with `get_tensor`, such as a safetensors file, or a mapping, such as
    `eformer.checkpoint.open` returns. Floating tensors are cast to `dtype`. Returns the key, the tensor, and 1 if there
    are shard functions but none for this key, else 0; without `mismatch_allowed` that is a KeyError. Errors of the
    caller's functions are raised unchanged.
    """
    tensor = manager.get_tensor(key) if hasattr(manager, "get_tensor") else manager[key]
    tensor, mismatch = _as_array(tensor), 0
    functions = flatten_for_broadcast(shard_fns) if shard_fns else {}
    function = functions.get(key)
    if function is not None:
        tensor = arrived(reshard(tensor, function)) if isinstance(function, Sharding) else function(tensor)
    elif functions:
        mismatch = 1
        if not mismatch_allowed:
            hint = next(with_nearest([key], functions))[1]
            raise KeyError(f"no shard function for {key!r}{hint}")
    if callback is not None:
        tensor = callback(tensor, key)
    return key, tensor if dtype is None else _cast(tensor, dtype), mismatch


# ------------------------------------------------------------------------------------------- arrays


def _as_array(x: Any) -> Any:
    """Convert to a jax.Array, and wait until it is on its device; or to a numpy array, if JAX would truncate it to 32
    bits."""
    if isinstance(x, jax.Array):
        return jnp.asarray(x)
    if isinstance(x, (bool, int, float, complex)):  # Python's numbers have no fixed width
        return arrived(jnp.asarray(x))
    host = np.asarray(x)
    is_cut = jax.dtypes.canonicalize_dtype(host.dtype) != host.dtype
    return host if is_cut else arrived(jnp.asarray(host))


def _as_jax(x: Any) -> jax.Array:
    array = _as_array(x)
    if not isinstance(array, jax.Array):
        raise ValueError(
            f"JAX would truncate {array.dtype} to 32 bits; set jax_enable_x64, or cast the array first"
        )
    return array


def _cast(x: Any, dtype: Any) -> Any:
    """Cast a floating array to `dtype`; return any other array unchanged."""
    name = floating_dtype(dtype)
    return (
        x.astype(dtype_from_name(name)) if isinstance(x.dtype, np.dtype) and is_floating(x.dtype.name) else x
    )


def reshard(x: Any, target_sharding: Any) -> jax.Array:
    """Move `x` to `target_sharding`. Raises if the array cannot be sharded that way."""
    if isinstance(x, jax.core.Tracer):
        constrain: Any = jax.lax.with_sharding_constraint  # untyped
        return jnp.asarray(constrain(x, target_sharding))
    array = _as_jax(x)
    with jax.enable_x64(True):  # else 64-bit arrays would silently be truncated to 32 bits
        if isinstance(target_sharding, Sharding) and _are_shared(array, target_sharding):
            array = resharded(array, target_sharding)
        else:
            array = jnp.asarray(jax.device_put(array, target_sharding))
    reached = array.sharding
    if isinstance(target_sharding, Sharding) and not reached.is_equivalent_to(target_sharding, array.ndim):
        raise ValueError(
            f"an array of shape {array.shape} cannot be sharded as {target_sharding}; JAX placed it as {reached}"
        )
    return array


def _are_shared(array: jax.Array, sharding: Sharding) -> bool:
    """Tell whether several processes hold the array, on the same devices before and after."""
    return (
        not array.is_fully_addressable
        and array.sharding.device_set == sharding.device_set
        and not is_key(array)
    )


def to_host(x: Any, float_dtype: Any, mesh: jax.sharding.Mesh, cpu_offload: bool) -> jax.Array:
    """Replicate `x` on every device of the mesh, or with `cpu_offload` put it on a CPU device.

    Floats are cast to `float_dtype`, unless it is None.
    """
    array = _as_jax(x)
    if float_dtype is not None:
        array = _cast(array, float_dtype)
    spec: Any = PartitionSpec
    array = reshard(array, NamedSharding(mesh, spec()))
    if cpu_offload:
        array = array if array.is_fully_addressable else array.addressable_data(0)
        array = jax.device_put(array, jax.local_devices(backend="cpu")[0])
    return array


def chunk_tensor_by_memory(tensor: Any, memory_limit: int) -> list[Any]:
    """Split `tensor` along its first axis into slices of at most `memory_limit` bytes, and at least one row."""
    _require_positive(memory_limit, "memory_limit")
    nbytes = estimate_array_nbytes(tensor)
    if not tensor.shape or nbytes <= memory_limit:
        return [tensor]
    rows = max(1, memory_limit // (nbytes // tensor.shape[0]))
    return [tensor[start : start + rows] for start in range(0, tensor.shape[0], rows)]


def broadcast_tensor(
    tensor: Any, memory_limit_bytes: int, target_sharding: NamedSharding | None = None
) -> jax.Array:
    """Send the tensor of the first process to all processes, and move it to `target_sharding` unless that is None.

    The tensor is sent in chunks of at most `memory_limit_bytes`. A single process sends nothing.
    """
    array = _as_jax(tensor)
    _require_positive(memory_limit_bytes, "memory_limit_bytes")
    if jax.process_count() > 1 and array.is_fully_addressable:  # else they already share it
        array = _of_first_process(array, memory_limit_bytes)
    return array if target_sharding is None else reshard(array, target_sharding)


def _of_first_process(array: jax.Array, limit: int) -> jax.Array:
    """Broadcast the array as bytes: JAX broadcasts by a sum with zeros, which would turn -0.0 into 0.0."""
    from jax.experimental import multihost_utils

    if is_key(array):
        data = _of_first_process(jax.random.key_data(array), limit)
        keys: jax.Array = jax.random.wrap_key_data(data, impl=jax.random.key_impl(array))
        return keys
    host = np.ascontiguousarray(on_host(array)).reshape(-1)
    received = np.empty(host.nbytes, np.uint8)
    for start in range(0, host.nbytes, limit):
        piece = slice(start, start + limit)
        received[piece] = multihost_utils.broadcast_one_to_all(host.view(np.uint8)[piece])
    return _as_jax(received.view(host.dtype).reshape(array.shape))
