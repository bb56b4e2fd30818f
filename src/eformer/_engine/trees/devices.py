"""Access to the bytes of jax.Arrays from the host, copies on devices, and transfers between shardings."""

from __future__ import annotations

import logging
from collections import defaultdict
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from eformer._engine.record.dtypes import DTYPES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

logger = logging.getLogger("eformer")

# XLA packs these into less than a byte, so numpy cannot view them.
PACKED = {
    dtype for name, dtype in DTYPES.items() if name in ("int2", "int4", "uint2", "uint4", "float4_e2m1fn")
}


def is_host_memory(array: Any) -> bool:
    """Tell whether numpy can view the memory of an array that is on one device."""
    (device,) = array.devices()
    return device.platform == "cpu" and array.dtype not in PACKED


def on_host(array: Any) -> np.ndarray[Any, Any]:
    """Return the elements in host memory: a view if they are on one CPU device, else a copy.

    numpy's own conversion would cache its copy on the array, in host memory for as long as the array lives.
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
    # device_put does not copy an array that is already on the device.
    return array.copy() if cpu in array.devices() else jax.device_put(array, cpu)


def staged(array: Any) -> np.ndarray[Any, Any]:
    """Copy an array to page-locked host memory, which accelerators fill at full speed. The copy lives as long as the
    result."""
    import jax

    if array.sharding.memory_kind != "pinned_host":
        pinned = array.sharding.with_memory_kind("pinned_host")
        array = jax.device_put(array, pinned, may_alias=False)
    return np.asarray(array)


@lru_cache(64)
def takes_host_memory(device: Any) -> bool:
    """Tell whether `device_put` of aligned host memory uses that memory itself instead of a copy.

    The memory must then not be written to again. This holds for CPUs; it is found by trying, as JAX may change it.
    """
    import jax  # late, as above

    memory = np.zeros(256, np.uint8)
    aligned = memory[-memory.__array_interface__["data"][0] % 64 :][:64]
    aligned.flags.writeable = False
    array = jax.device_put(aligned, device).block_until_ready()
    return bool(array.unsafe_buffer_pointer() == aligned.__array_interface__["data"][0])


@contextmanager
def page_locked(memory: np.ndarray[Any, Any], device: Any) -> Iterator[None]:
    """Page-lock host memory during the block, so that an accelerator copies from it several times as fast.

    If the device does not support it, do nothing. Memory that was touched before is locked in a tenth of the time.
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
        device.client.dma_unmap(address)


# ------------------------------------------------------------------------------------------- copies

_MAX_COPIED = 4096  # arrays in one program, which takes half a millisecond to compile for each
_MAX_PROGRAMS = 64

_programs: dict[Any, Any] = {}  # None for one that is not compiled yet


def copied(arrays: Sequence[Any]) -> list[Any]:
    """Begin to copy arrays, each of which is on one device, on the same devices; return the copies.

    One program that copies them all starts in a tenth of the time of as many single copies. It takes longer to compile
    than to copy, so the first call does without it; see `compile_copies`.
    """
    groups: dict[Any, list[int]] = defaultdict(list)
    last: tuple[Any, bool] = (None, False)
    alike: list[int] = []
    for number, array in enumerate(arrays):
        kind = (array.sharding, array.dtype in PACKED)
        if kind[0] is not last[0] or kind[1] != last[1]:  # by identity: comparing shardings takes long
            last, alike = kind, groups[kind]
        alike.append(number)
    copies: list[Any] = [None] * len(arrays)
    for (sharding, is_packed), numbers in groups.items():
        some = [arrays[number] for number in numbers]
        together = None if is_packed else _copied_together(some, sharding)
        for number, copy in zip(numbers, together or _copied_singly(some, sharding), strict=True):
            copies[number] = copy
    return copies


def _copied_together(arrays: list[Any], sharding: Any) -> Sequence[Any] | None:
    """Copy by one program, if it is compiled; else note that it is needed and return None."""
    if len(arrays) > _MAX_COPIED or sharding.memory_kind not in (None, _default_memory(sharding)):
        return None
    key = (sharding, tuple((array.shape, array.dtype) for array in arrays))
    program = _programs.setdefault(key, None)
    try:
        return program(arrays) if program else None
    except (TypeError, ValueError) as error:  # compiled for another memory layout
        logger.debug("%d arrays do not fit the program that copies their shapes: %s", len(arrays), error)
        return None


def _copied_singly(arrays: list[Any], sharding: Any) -> Sequence[Any]:
    import jax  # late, as above

    return jax.device_put(arrays, sharding, may_alias=False)  # type: ignore[no-any-return]


def _default_memory(sharding: Any) -> str:
    return str(next(iter(sharding.device_set)).default_memory().kind)


def compile_copies() -> None:
    """Compile the programs that `copied` did without. Takes a fraction of a second; call it in the background."""
    import jax  # late, as above

    copy_all = jax.jit(lambda arrays: [array.copy() for array in arrays])
    for key in [key for key, program in list(_programs.items()) if program is None]:
        sharding, kinds = key
        described: Any = jax.ShapeDtypeStruct  # it has no type annotations
        shapes = [described(shape, dtype, sharding=sharding) for shape, dtype in kinds]
        try:
            _programs[key] = copy_all.lower(shapes).compile()
        except Exception as error:  # noqa: BLE001  a compiler may raise anything; single copies do as well
            logger.debug("%d arrays cannot be copied by one program: %s", len(kinds), error)
            _programs[key] = partial(_copied_singly, sharding=sharding)
    while len(_programs) > _MAX_PROGRAMS:
        _programs.pop(next(iter(_programs)), None)


def bits_of(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype as which elements travel between devices: floats as unsigned integers of the same size.

    XLA may compute with floats on the way, which changes the bits of a nan.
    """
    is_float = dtype.kind == "f" or (dtype.kind == "V" and dtype not in PACKED)
    return np.dtype(f"u{dtype.itemsize}") if is_float and dtype.itemsize <= 8 else dtype


def resharded(array: Any, sharding: Any, dtype: np.dtype[Any] | None = None) -> Any:
    """Move an array to another sharding, by a collective of all processes that hold it.

    If the array holds the `bits_of` another `dtype`, the result is of that dtype.
    """
    import jax  # late, as above

    dtype = dtype or array.dtype
    with jax.set_mesh(None):  # the mesh of the caller may have other axes or devices
        array = _as(bits_of(dtype), array.sharding)(array)
        # One at a time: CPUs that begin several collectives in different orders deadlock.
        array = _as(bits_of(dtype), sharding)(array).block_until_ready()
        return _as(dtype, sharding)(
            array
        )  # not in one program with the line before: then floats would travel


@lru_cache(1024)
def _as(dtype: np.dtype[Any], sharding: Any) -> Any:
    import jax  # late, as above

    def convert(array: Any) -> Any:
        return array if array.dtype == dtype else jax.lax.bitcast_convert_type(array, dtype)

    converted = jax.jit(convert, out_shardings=sharding)
    return lambda array: array if (array.dtype, array.sharding) == (dtype, sharding) else converted(array)


def is_key(leaf: Any) -> bool:
    """Tell whether a leaf is a typed PRNG key, which numpy does not support."""
    import jax  # late, as above

    return hasattr(leaf, "dtype") and bool(jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key))
