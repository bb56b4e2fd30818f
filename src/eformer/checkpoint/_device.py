"""Where the bytes of a jax.Array are, and how to see them from the host without leaving a copy behind."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from eformer.checkpoint._ndarray import DTYPES

# XLA keeps these in less than a byte, so that numpy has to unpack them.
PACKED = {
    dtype for name, dtype in DTYPES.items() if name in ("int2", "int4", "uint2", "uint4", "float4_e2m1fn")
}


def is_host_memory(array: Any) -> bool:
    """Whether numpy can look at the memory of this array of one device as it is."""
    (device,) = array.devices()
    return device.platform == "cpu" and array.dtype not in PACKED


def on_host(array: Any) -> np.ndarray[Any, Any]:
    """The elements in host memory: where they are if on one CPU device, else in a copy that does not stay.

    numpy's own conversion would leave its copy on the array, in host memory for as long as that lives.
    """
    if not array.is_fully_addressable or (len(array.devices()) == 1 and is_host_memory(array)):
        return np.asarray(array)
    whole = np.empty(array.shape, array.dtype)
    for shard in array.addressable_shards:
        if shard.replica_id == 0:
            part = shard.data if is_host_memory(shard.data) else _host_copy(shard.data)
            whole[shard.index] = np.asarray(part)
    return whole


def _host_copy(array: Any) -> Any:
    import jax  # late: numpy trees are read and written without it

    try:
        (cpu, *_) = jax.local_devices(backend="cpu")
    except RuntimeError:  # JAX was started without a CPU backend
        return array
    # device_put does not copy what is there already.
    return array.copy() if cpu in array.devices() else jax.device_put(array, cpu)


def staged(array: Any) -> np.ndarray[Any, Any]:
    """A copy in page-locked host memory, which accelerators fill at full speed. It stays as long as the result."""
    import jax

    if array.sharding.memory_kind != "pinned_host":
        pinned = array.sharding.with_memory_kind("pinned_host")
        array = jax.device_put(array, pinned, may_alias=False)
    return np.asarray(array)


def bits_of(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """As what numbers travel between devices, bit for bit: XLA may compute with floats on the way, and a nan is not the
    nan it was. Others as they are."""
    is_float = dtype.kind == "f" or (dtype.kind == "V" and dtype not in PACKED)
    return np.dtype(f"u{dtype.itemsize}") if is_float and dtype.itemsize <= 8 else dtype


def resharded(array: Any, sharding: Any, dtype: np.dtype[Any] | None = None) -> Any:
    """The array under another sharding, by a collective of all processes that hold it; as `dtype` if these are the
    `bits_of` it."""
    dtype = dtype or array.dtype
    array = _as(bits_of(dtype), array.sharding)(array)
    # One after the other: CPUs that begin several collectives at once, each in its own order, wait for ever.
    array = _as(bits_of(dtype), sharding)(array).block_until_ready()
    return _as(dtype, sharding)(array)  # not in one go with the line before: then floats would travel


@lru_cache(1024)
def _as(dtype: np.dtype[Any], sharding: Any) -> Any:
    import jax  # late, as above

    def convert(array: Any) -> Any:
        return array if array.dtype == dtype else jax.lax.bitcast_convert_type(array, dtype)

    converted = jax.jit(convert, out_shardings=sharding)
    return lambda array: array if (array.dtype, array.sharding) == (dtype, sharding) else converted(array)


def is_key(leaf: Any) -> bool:
    """Whether a leaf is a typed PRNG key, which numpy does not know."""
    import jax  # late, as above

    return hasattr(leaf, "dtype") and bool(jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key))
