"""Access to the bytes of jax.Arrays from the host, and transfers between shardings.

Tests: tests/engine/trees/test_devices.py, tests/engine/trees/test_small_copies.py,
tests/engine/loading/test_pinned_stream.py.
"""

from __future__ import annotations

import ctypes
import logging
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from eformer._engine.record.dtypes import DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

logger = logging.getLogger("eformer")

T = TypeVar("T")

# XLA packs elements of these dtypes into less than a byte, so numpy cannot view them.
PACKED = {
    dtype for name, dtype in DTYPES.items() if name in ("int2", "int4", "uint2", "uint4", "float4_e2m1fn")
}


def is_host_memory(array: Any) -> bool:
    """Tell whether numpy can view the memory of an array on one device."""
    (device,) = array.devices()
    return device.platform == "cpu" and array.dtype not in PACKED


def view_of(array: Any) -> np.ndarray[Any, Any]:
    """Return the memory of an array on a CPU device as a numpy array.

    `np.asarray` first asks for a buffer. Arrays of dtypes that are not numpy's own have none, and finding that out
    takes longer than the view.
    """
    return np.asarray(array) if array.dtype.isbuiltin == 1 else array.__array__()


def on_host(array: Any) -> np.ndarray[Any, Any]:
    """Return the elements in host memory: a view if they are on one CPU device, else a copy.

    The conversion by numpy would cache its copy on the array, and hold that host memory as long as the array lives.
    """
    # numpy itself refuses an array that lies partly in other processes, and says so.
    if not array.is_fully_addressable or (len(array.devices()) == 1 and is_host_memory(array)):
        return np.asarray(array)
    whole = np.empty(array.shape, array.dtype)
    for shard in array.addressable_shards:
        if shard.replica_id == 0:  # one of several equal copies
            part = shard.data if is_host_memory(shard.data) else _host_copy(shard.data)
            whole[shard.index] = np.asarray(part)
    return whole


def _host_copy(array: Any) -> Any:
    import jax  # late: numpy trees are read and written without it

    try:
        (cpu, *_) = jax.local_devices(backend="cpu")
    except RuntimeError:  # JAX was started without a CPU backend
        return array
    # `device_put` does not copy an array that is already on the device.
    return array.copy() if cpu in array.devices() else jax.device_put(array, cpu)


def staged(array: Any) -> np.ndarray[Any, Any]:
    """Copy an array to page-locked host memory, which accelerators fill at full speed.

    Into other memory a driver copies through a small locked buffer, at a fraction of the speed. The copy lives as long
    as the result.
    """
    import jax

    if array.sharding.memory_kind != "pinned_host":
        pinned = array.sharding.with_memory_kind("pinned_host")
        # Never an alias: the memory must stay as it is when the caller donates the array.
        array = jax.device_put(array, pinned, may_alias=False)
    return np.asarray(array)  # a view, which keeps the memory


@lru_cache(64)
def takes_host_memory(device: Any) -> bool:
    """Tell whether `device_put` of aligned host memory uses that memory itself instead of a copy.

    Such memory must not be written to again. JAX does this on CPUs today and documents it nowhere, so one small array
    is tried.
    """
    import jax  # late, as above

    memory = np.zeros(256, np.uint8)
    # Aligned to 64 bytes, as XLA needs it.
    aligned = memory[-memory.__array_interface__["data"][0] % 64 :][:64]
    aligned.flags.writeable = False
    array = jax.device_put(aligned, device).block_until_ready()
    return bool(array.unsafe_buffer_pointer() == aligned.__array_interface__["data"][0])


def arrived(arrays: T) -> T:
    """Wait until arrays that were put on devices have arrived, and return them.

    Call this in the thread that then runs a program on them: XLA may start the program before all bytes of a transfer
    have arrived. Arrays on CPUs are complete when they are made; a process without other devices does not wait.
    """
    import jax  # late, as above

    if has_accelerator():
        jax.block_until_ready(arrays)  # type: ignore[no-untyped-call]
    return arrays


def has_accelerator() -> bool:
    """Tell whether this process has devices that are no CPUs. The default device says nothing about the mesh."""
    from jax.extend import backend  # late, as above

    return any(platform != "cpu" for platform in backend.backends())


@contextmanager
def page_locked(memory: np.ndarray[Any, Any], device: Any) -> Iterator[None]:
    """Page-lock host memory during the block, so that an accelerator copies from it several times as fast.

    On a device that does not support it, do nothing. Write to the memory before: pages that exist are locked in a
    tenth of the time.
    """
    address = memory.__array_interface__["data"][0]
    try:
        device.client.dma_map(address, memory.nbytes)
    except Exception as error:  # noqa: BLE001  a backend may raise anything; the copy only takes longer
        logger.debug("host memory cannot be page-locked for %s, loading takes longer: %s", device, error)
        yield
        return
    try:
        yield
    finally:
        # Before the memory is freed: an address that is still registered cannot be locked for the next load.
        device.client.dma_unmap(address)


def bits_of(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype under which elements travel between devices: unsigned integers in the place of floats.

    XLA may compute with floats on the way, which changes the bits of a nan.
    """
    is_float = dtype.kind == "f" or (dtype.kind == "V" and dtype not in PACKED)
    return np.dtype(f"u{dtype.itemsize}") if is_float and dtype.itemsize <= 8 else dtype


def resharded(array: Any, sharding: Any, dtype: np.dtype[Any] | None = None) -> Any:
    """Move an array to another sharding, by a collective of all processes that hold it.

    The array may hold the `bits_of` the dtype that is given: the result then has that dtype.
    """
    import jax  # late, as above

    dtype = dtype or array.dtype
    with jax.set_mesh(None):  # the mesh of the caller may have other axes or devices
        array = _as(bits_of(dtype), array.sharding)(array)
        # Wait for each: CPUs that begin several collectives in different orders deadlock.
        array = _as(bits_of(dtype), sharding)(array).block_until_ready()
        # Not in one program with the line before: the compiler could convert first, and floats would travel.
        return _as(dtype, sharding)(array)


@lru_cache(1024)
def _as(dtype: np.dtype[Any], sharding: Any) -> Any:
    # Cached, since `jit` compiles anew for each new function.
    import jax  # late, as above

    def convert(array: Any) -> Any:
        return array if array.dtype == dtype else jax.lax.bitcast_convert_type(array, dtype)

    converted = jax.jit(convert, out_shardings=sharding)
    return lambda array: array if (array.dtype, array.sharding) == (dtype, sharding) else converted(array)


def gathered(
    array: Any, boxes: Iterable[tuple[tuple[int, ...], tuple[int, ...]]]
) -> Iterator[np.ndarray[Any, Any]]:
    """Yield boxes of an array that several processes hold, given as starts and shapes, by collectives of all of them.

    The elements travel as their bits.
    """
    import jax  # late, as above

    dtype, sharding = array.dtype, array.sharding
    mesh = getattr(sharding, "mesh", None)
    if mesh is None:
        mesh = jax.sharding.Mesh(np.array(list(sharding.devices_indices_map(array.shape))), ("every",))
    whole: Any = jax.sharding.PartitionSpec  # without types
    everywhere = jax.sharding.NamedSharding(mesh, whole())
    with jax.set_mesh(None):  # the mesh of the caller may have other axes or devices
        bits = _as(bits_of(dtype), sharding)(array).block_until_ready()
        for start, shape in boxes:
            # Wait for each: CPUs that begin several collectives in different orders deadlock.
            part = _slicing(shape, everywhere)(bits, np.array(start, np.int32)).block_until_ready()
            yield np.asarray(part.addressable_data(0)).view(dtype)


@lru_cache(1024)
def _slicing(shape: tuple[int, ...], sharding: Any) -> Any:
    # Cached, since `jit` compiles anew for each new function.
    import jax  # late, as above

    def part(array: Any, start: Any) -> Any:
        return jax.lax.dynamic_slice(array, tuple(start), shape)

    return jax.jit(part, out_shardings=sharding)


def is_key(leaf: Any) -> bool:
    """Tell whether a leaf is a typed PRNG key, which numpy does not support."""
    import jax  # late, as above

    return hasattr(leaf, "dtype") and bool(jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key))


# ---------------------------------------------------------------------------------------- small arrays

# For an array of a dtype that the buffer protocol knows, JAX takes 2 microseconds for a view. For bfloat16, say, it
# takes 8, through an array object for each shard. The address of the memory takes half of that.

_MOST_AXES = 8  # of an array whose copy by address is tried: the trial has 2 elements along each axis

# The memory of this process, indexed by address. A slice of it is a copy.
_memory: Any = (ctypes.c_char * 2**62).from_address(0)


@lru_cache(1024)
def copier(dtype: np.dtype[Any], ndim: int, device: Any) -> Callable[[Any, int], bytes]:
    """Return the fastest function that copies arrays on a CPU in C order, given an array and its size in bytes.

    The size is at least 1. The function waits until an array is computed, and raises a RuntimeError if it was deleted
    or donated.
    """
    if dtype.isbuiltin == 1:
        return _by_buffer
    if ndim > _MOST_AXES:
        return _by_view
    layout = _default_layout(dtype, ndim, device)
    # With one axis or none, every layout is in C order, and need not be compared.
    return _by_view if layout is None else _by_address(layout, has_order=ndim > 1)


def _by_buffer(array: Any, _: int) -> bytes:
    return np.asarray(array).tobytes()


def _by_view(array: Any, _: int) -> bytes:
    return view_of(array).tobytes()


def _by_address(layout: Any, *, has_order: bool = True) -> Callable[[Any, int], bytes]:
    def copy(array: Any, nbytes: int) -> bytes:
        array.block_until_ready()  # the address is known before the elements are computed
        start = array.unsafe_buffer_pointer()
        data: bytes = _memory[start : start + nbytes]
        # An address does not keep the memory: another thread may have donated the array before or during the copy. JAX
        # marks a donated array as deleted before it writes to its memory, so an array that is not deleted now had its
        # own elements during the whole copy.
        if array.is_deleted() or (has_order and array._pjrt_layout != layout):
            return _by_view(array, nbytes)
        return data

    return copy


def _default_layout(dtype: np.dtype[Any], ndim: int, device: Any) -> Any:
    """Return the layout that JAX gives to arrays in C order if a trial copy by address is right; None otherwise.

    The address and the layout are not documented by JAX: a version that changes them must cost time, never bytes.
    """
    import jax  # late: numpy trees are read and written without it

    # Two elements along each axis, all of them different, show any order of the axes.
    sample = np.arange(2**ndim).astype(dtype).reshape((2,) * ndim)
    try:
        array: Any = jax.device_put(sample, device)
        copied = _by_address(array._pjrt_layout)(array, sample.nbytes)
        address = view_of(array).__array_interface__["data"][0]
        if copied == sample.tobytes() and array.unsafe_buffer_pointer() == address:
            return array._pjrt_layout
        reason: object = "other bytes"
    except Exception as error:  # noqa: BLE001  a version of JAX without these may raise anything
        reason = error
    logger.debug("arrays of %s are not copied by address, saving takes longer: %s", dtype, reason)
    return None
