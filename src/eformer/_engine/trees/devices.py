"""Where the bytes of a jax.Array are, and how to see them from the host without leaving a copy behind."""

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


@lru_cache(64)
def takes_host_memory(device: Any) -> bool:
    """Whether an array that is put on the device is the host memory it was put from, if that is aligned: no copy is
    made, but the memory may not be written to again. So it is with CPUs; found out by trying, for JAX may change it."""
    import jax  # late, as above

    memory = np.zeros(256, np.uint8)
    aligned = memory[-memory.__array_interface__["data"][0] % 64 :][:64]
    aligned.flags.writeable = False
    array = jax.device_put(aligned, device).block_until_ready()
    return bool(array.unsafe_buffer_pointer() == aligned.__array_interface__["data"][0])


@contextmanager
def page_locked(memory: np.ndarray[Any, Any], device: Any) -> Iterator[None]:
    """An accelerator copies from this memory by itself meanwhile, several times as fast; if it can be arranged.

    Memory that was touched before is locked in a tenth of the time.
    """
    address = memory.__array_interface__["data"][0]
    try:
        device.client.dma_map(address, memory.nbytes)
    except Exception as error:  # noqa: BLE001  whatever a backend raises that cannot: it only takes longer
        logger.debug("host memory cannot be page-locked for %s, loading takes longer: %s", device, error)
        yield
        return
    try:
        yield
    finally:
        device.client.dma_unmap(address)


# ------------------------------------------------------------------------------------------- copies

_MOST_COPIED = 4096  # arrays in one program: its compilation takes half a millisecond for each
_MOST_PROGRAMS = 64

_programs: dict[Any, Any] = {}  # None for one that is wanted


def copied(arrays: Sequence[Any]) -> list[Any]:
    """Copies on the same devices, of arrays that lie on one device each, under way when this returns.

    One program that copies them all starts in a tenth of the time of so many copies. It takes longer to compile than
    to copy, so the first time does without; see `compile_copies`.
    """
    groups: dict[Any, list[int]] = defaultdict(list)
    for number, array in enumerate(arrays):
        groups[array.sharding, array.dtype in PACKED].append(number)
    copies: list[Any] = [None] * len(arrays)
    for (sharding, is_packed), numbers in groups.items():
        some = [arrays[number] for number in numbers]
        together = None if is_packed else _copied_together(some, sharding)
        for number, copy in zip(numbers, together or _copied_singly(some, sharding), strict=True):
            copies[number] = copy
    return copies


def _copied_together(arrays: list[Any], sharding: Any) -> Sequence[Any] | None:
    """By one program, if there is one that fits; else it is noted that one is wanted."""
    if len(arrays) > _MOST_COPIED or sharding.memory_kind not in (None, _default_memory(sharding)):
        return None
    key = (sharding, tuple((array.shape, array.dtype) for array in arrays))
    program = _programs.setdefault(key, None)
    try:
        return program(arrays) if program else None
    except (TypeError, ValueError) as error:  # compiled for another layout in the device's memory
        logger.debug("%d arrays do not fit the program that copies such: %s", len(arrays), error)
        return None


def _copied_singly(arrays: list[Any], sharding: Any) -> Sequence[Any]:
    import jax  # late, as above

    return jax.device_put(arrays, sharding, may_alias=False)  # type: ignore[no-any-return]


def _default_memory(sharding: Any) -> str:
    return str(next(iter(sharding.device_set)).default_memory().kind)


def compile_copies() -> None:
    """Compiles what `copied` has done without; takes a fraction of a second, and belongs into the background."""
    import jax  # late, as above

    copy_all = jax.jit(lambda arrays: [array.copy() for array in arrays])
    for key in [key for key, program in list(_programs.items()) if program is None]:
        sharding, kinds = key
        described: Any = jax.ShapeDtypeStruct  # which has no types
        shapes = [described(shape, dtype, sharding=sharding) for shape, dtype in kinds]
        try:
            _programs[key] = copy_all.lower(shapes).compile()
        except Exception as error:  # noqa: BLE001  whatever a compiler raises: copies one by one do as well
            logger.debug("%d arrays cannot be copied by one program: %s", len(kinds), error)
            _programs[key] = partial(_copied_singly, sharding=sharding)
    while len(_programs) > _MOST_PROGRAMS:
        _programs.pop(next(iter(_programs)), None)


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
