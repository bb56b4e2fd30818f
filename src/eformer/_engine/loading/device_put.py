"""Put many arrays on devices, without the overhead of `jax.device_put` for each array.

For an array of a few kilobytes the overhead is ten times the transfer. This module calls `batched_device_put`, the
function below `jax.device_put`, which is not public. A trial for each sharding compares its results with the results of
`jax.device_put`, which is used instead if they differ.
"""

from __future__ import annotations

import importlib
import logging
import math
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import msgspec
import numpy as np
from jax.sharding import NamedSharding, Sharding, SingleDeviceSharding

from eformer._engine.trees.devices import PACKED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

Array = np.ndarray[Any, Any]

_config: Any = jax.config  # without types
wait_for: Any = jax.block_until_ready  # without types

# Without jax_enable_x64, JAX converts these dtypes to 32 bits.
_WIDE = {np.dtype(name) for name in ("float64", "int64", "uint64", "complex128")}

# Arrays of other kinds of shardings are put by public functions.
_KNOWN_SHARDINGS = (NamedSharding, SingleDeviceSharding)

logger = logging.getLogger("eformer")


class Transfer(NamedTuple):
    """Arrays on their way from page-locked memory to their devices, and the programs that read them afterwards.

    If several threads use the device, XLA may run a program on such an array before all of its bytes have arrived. The
    result is wrong, without an error. Therefore call `then` only after `jax.block_until_ready(arrays)` has returned in
    the same thread.
    """

    arrays: Sequence[Any]
    then: Callable[[], None] | None = None


def put_on_default(arrays: Sequence[Array]) -> list[Any]:
    """Put the arrays on the default device, uncommitted: JAX may move them."""
    device = default_device(_config.jax_default_device)
    if not arrays or not _is_usable(device):
        return jax.device_put(list(arrays))  # type: ignore[no-any-return]
    sharding = SingleDeviceSharding(device)
    put = _Put(committed=False)  # as `jax.device_put` without a device: a program may move the arrays
    return [put(array, sharding, device) for array in arrays]


def default_device(configured: Any) -> Any:
    """Return the device that the value of `jax_default_device` means: a device, a platform or None."""
    return configured if isinstance(configured, jax.Device) else jax.local_devices(backend=configured)[0]


def put_on(arrays: Sequence[Array], places: Sequence[Any]) -> list[Any]:
    """Put each array in its place: on a device, or in the memory of a device that a sharding names."""
    if not arrays or not all(isinstance(place, jax.Device) and _is_usable(place) for place in set(places)):
        return jax.device_put(list(arrays), list(places))  # type: ignore[no-any-return]
    shardings = {device: SingleDeviceSharding(device) for device in set(places)}
    put = _Put(committed=True)
    return [put(array, shardings[d], d) for array, d in zip(arrays, places, strict=True)]


class Shards(msgspec.Struct, gc=False):
    """An array on its way to several devices: the parts of this process, in the order of their devices."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    sharding: Sharding
    parts: Sequence[Array]
    devices: Sequence[Any]


def put_sharded(arrays: Sequence[Shards], put: PutShards | None = None) -> list[Any]:
    """Make an array of each, like `jax.make_array_from_single_device_arrays` of its parts on their devices.

    Calls for arrays of one tree can share a `put`, which keeps the abstract values that it has made.
    """
    put = put or PutShards()
    shardings = {
        id(array.sharding): array.sharding for array in arrays
    }  # ids are compared faster than shardings
    takes_parts = {number: _takes_parts(sharding) for number, sharding in shardings.items()}
    is_taken = [takes_parts[id(array.sharding)] and put.takes(array.dtype) for array in arrays]
    others = [array for array, taken in zip(arrays, is_taken, strict=True) if not taken]
    joined = iter(_joined_one_by_one(others))
    return [put(array) if taken else next(joined) for array, taken in zip(arrays, is_taken, strict=True)]


def _joined_one_by_one(arrays: Sequence[Shards]) -> Iterator[Any]:
    """Put all parts of all arrays on their devices by one call, then join them. Uses public functions of JAX only."""
    places = [_memory_of(device, array.sharding) for array in arrays for device in array.devices]
    put = iter(put_on([part for array in arrays for part in array.parts], places))
    for array in arrays:
        parts = [next(put) for _ in array.parts]
        dtype = parts[0].dtype if parts else array.dtype
        yield jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts, dtype=dtype)


def _memory_of(device: Any, sharding: Any) -> Any:
    """Return the device, or its memory of the kind that the sharding asks for."""
    kind = sharding.memory_kind
    if kind is None or kind == device.default_memory().kind:
        return device
    return SingleDeviceSharding(device, memory_kind=kind)


class PutShards:
    """Put all parts of an array on their devices by one call of `batched_device_put`.

    The call needs the abstract value (aval) of the array, which JAX has no public function to make. So the first array
    of each kind is made by public functions, and its aval serves for all arrays of the kind.
    """

    def __init__(self) -> None:
        self.converted = PACKED if _config.jax_enable_x64 else PACKED | _WIDE
        # Most arrays of a tree are alike. The keys hold the id of a sharding, so each value keeps its sharding alive:
        # otherwise a new sharding could get the same id.
        self.avals: dict[Any, tuple[Any, Sharding]] = {}
        # By number of axes, dtype and sharding: avals of one kind differ in their shape alone.
        self.kinds: dict[Any, Any] = {}
        self.put: Any = None

    def takes(self, dtype: np.dtype[Any]) -> bool:
        """Tell whether JAX holds the bytes of an array unchanged. `batched_device_put` does not convert them."""
        return dtype not in self.converted and dtype.isnative

    def __call__(self, array: Shards) -> Any:
        key = (array.shape, array.dtype, id(array.sharding))
        known = self.avals.get(key)
        if known is None:
            kind = (len(array.shape), array.dtype, id(array.sharding))
            if kind not in self.kinds:
                (made,) = _joined_one_by_one([array])
                self.put = _batched_device_put()
                self.avals[key] = made.aval, array.sharding
                self.kinds[kind] = made.aval
                return made
            known = self.avals[key] = self.kinds[kind].update(shape=array.shape), array.sharding
        return self.put(known[0], array.sharding, array.parts, array.devices, True)


@lru_cache(1024)
def _takes_parts(sharding: Sharding) -> bool:
    """Tell, by a trial, whether `batched_device_put` makes the same arrays as the public functions."""
    devices = list(sharding.addressable_devices)
    if not isinstance(sharding, _KNOWN_SHARDINGS) or not all(map(_is_usable, devices)):
        return False
    if any(_memory_of(device, sharding) is not device for device in devices):
        return False  # the call takes devices, not kinds of memory
    try:
        shape = _numbers_of_cuts(sharding)
        put = PutShards()
        # The second trial has another shape, so its aval is derived from the first: this path needs the trial, too.
        for columns in (1, 2):
            trial = _trial(sharding, (*shape, columns))
            (theirs,) = _joined_one_by_one([trial])
            put(trial)  # the first call for a kind uses the public functions
            _require_same(put(trial), theirs)
    except Exception as error:  # noqa: BLE001  a later JAX may raise anything
        logger.debug("arrays on %s are put part by part, which takes longer: %s", sharding, error)
        return False
    return True


def _numbers_of_cuts(sharding: Sharding) -> tuple[int, ...]:
    """Return the number of parts that the sharding cuts each axis of its spec into."""
    if not isinstance(sharding, NamedSharding):
        return ()
    sizes = sharding.mesh.shape
    return tuple(
        math.prod(sizes[axis] for axis in ((entry,) if isinstance(entry, str) else entry or ()))
        for entry in sharding.spec
    )


def _trial(sharding: Sharding, shape: tuple[int, ...]) -> Shards:
    whole = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    found = sharding.addressable_devices_indices_map(shape)
    return Shards(shape, whole.dtype, sharding, [whole[i].copy() for i in found.values()], list(found))


def _require_same(ours: Any, theirs: Any) -> None:
    """Raise TypeError if two arrays differ in any public attribute, or in their bytes on a device."""
    is_same = (
        type(ours) is type(theirs)
        and ours.aval == theirs.aval
        and ours.sharding == theirs.sharding
        and ours.committed == theirs.committed
        and ours.weak_type == theirs.weak_type
        and _contents(ours) == _contents(theirs)
    )
    if not is_same:
        raise TypeError(f"{ours!r} is not {theirs!r}")


def _contents(array: Any) -> list[Any]:
    return [
        (shard.device, shard.index, np.asarray(shard.data).tobytes()) for shard in array.addressable_shards
    ]


class _Put:
    """Put one array on one device by `batched_device_put`, or by `jax.device_put` if JAX converts its dtype."""

    def __init__(self, *, committed: bool) -> None:
        self.committed = committed
        self.converted = PACKED if _config.jax_enable_x64 else PACKED | _WIDE
        self.avals: dict[Any, Any] = {}  # most arrays of a tree are alike
        self.put = _batched_device_put()

    def __call__(self, array: Array, sharding: Any, device: Any) -> Any:
        dtype = array.dtype
        if dtype in self.converted or not dtype.isnative:
            return jax.device_put(array, device if self.committed else None)
        key = (array.shape, dtype)
        aval = self.avals.get(key)
        if aval is None:
            aval = self.avals[key] = jax.core.ShapedArray(array.shape, dtype)
        return self.put(aval, sharding, [array], [device], self.committed)


@lru_cache(1)
def _batched_device_put() -> Any:
    lib = importlib.import_module("jax._src.lib")  # not public: a later JAX may move or change it
    return lib.xla_client.batched_device_put


@lru_cache(64)
def _is_usable(device: Any) -> bool:
    """Tell, by a trial, whether `batched_device_put` returns the same arrays as `jax.device_put`."""
    sharding = SingleDeviceSharding(device)
    try:
        # Elements of several sizes, and a dtype that numpy does not have itself.
        for dtype in (np.float32, np.uint8, jax.numpy.bfloat16):
            array = np.arange(6).reshape(2, 3).astype(dtype)
            for committed in (True, False):
                ours = _Put(committed=committed)(array, sharding, device)
                with jax.default_device(device):  # an uncommitted array goes to this device
                    theirs = jax.device_put(array, device if committed else None)
                _require_same(ours, theirs)
    except Exception as error:  # noqa: BLE001  a later JAX may raise anything
        logger.debug("arrays on %s are put by jax.device_put, which takes longer: %s", device, error)
        return False
    return True


# ------------------------------------------------------------------------------------------ weak types


def as_weak(array: Any) -> Any:
    """Return the array with a weak type, without a copy.

    JAX has no public function for this. A trial examines the result of the constructor; if the trial fails, arrays stay
    strongly typed, with a warning.
    """
    return _weakened(array) if _can_be_weak() else array


def _weakened(array: Any) -> Any:
    shards = [shard.data for shard in array.addressable_shards]
    return type(array)(array.aval.update(weak_type=True), array.sharding, shards, committed=array.committed)


@lru_cache(1)
def _can_be_weak() -> bool:
    try:
        number = jax.numpy.asarray(1.5)  # JAX gives a Python number a weak type
        weak = _weakened(jax.device_put(np.asarray(1.5, number.dtype)))
        # The promotion proves the weak type: a strong float32 and a bfloat16 would make a float32.
        is_same = weak.aval == number.aval and weak.committed == number.committed and float(weak) == 1.5
        if not is_same or (weak + jax.numpy.ones((), jax.numpy.bfloat16)).dtype != jax.numpy.bfloat16:
            raise TypeError(f"{weak!r} is not {number!r}")
    except Exception as error:  # noqa: BLE001  a later JAX may raise anything
        logger.warning(
            "arrays with a weak type are returned with a strong type: this version of JAX cannot make them: %s",
            error,
        )
        return False
    return True
