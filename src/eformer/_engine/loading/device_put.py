"""Put many arrays on devices at once, without the overhead of `jax.device_put` for each of them.

For an array of a few kilobytes the overhead is ten times the transfer. The function underneath is JAX's own, but not
public: its results are compared once with those of `jax.device_put`, which is used instead if they differ.
"""

from __future__ import annotations

import importlib
import logging
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from eformer._engine.trees.devices import PACKED

if TYPE_CHECKING:
    from collections.abc import Sequence

Array = np.ndarray[Any, Any]

_config: Any = jax.config  # its attributes have no types

# JAX has these only with jax_enable_x64.
_WIDE = {np.dtype(name) for name in ("float64", "int64", "uint64", "complex128")}

logger = logging.getLogger("eformer")


def put_on_default(arrays: Sequence[Array]) -> list[Any]:
    """Put the arrays on the default device, uncommitted: JAX may move them."""
    device = default_device(_config.jax_default_device)
    if not arrays or not _is_usable(device):
        return jax.device_put(list(arrays))  # type: ignore[no-any-return]
    sharding = jax.sharding.SingleDeviceSharding(device)
    put = _Put(committed=False)
    return [put(array, sharding, device) for array in arrays]


def default_device(configured: Any) -> Any:
    """Return the device that the value of `jax_default_device` means: a device, a platform or None."""
    return configured if isinstance(configured, jax.Device) else jax.local_devices(backend=configured)[0]


def put_on(arrays: Sequence[Array], places: Sequence[Any]) -> list[Any]:
    """Put each array in its place: on a device, or in the memory of a device that a sharding names."""
    if not arrays or not all(isinstance(place, jax.Device) and _is_usable(place) for place in set(places)):
        return jax.device_put(list(arrays), list(places))  # type: ignore[no-any-return]
    shardings = {device: jax.sharding.SingleDeviceSharding(device) for device in set(places)}
    put = _Put(committed=True)
    return [put(array, shardings[d], d) for array, d in zip(arrays, places, strict=True)]


class _Put:
    """Put one array on one device by the function underneath, or by `jax.device_put` where that converts the data."""

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


def _batched_device_put() -> Any:
    lib = importlib.import_module("jax._src.lib")  # not public, hence all this care
    return lib.xla_client.batched_device_put


@lru_cache(64)
def _is_usable(device: Any) -> bool:
    """Tell whether the function underneath returns the same arrays as `jax.device_put`."""
    sharding = jax.sharding.SingleDeviceSharding(device)
    try:
        for dtype in (np.float32, np.uint8, jax.numpy.bfloat16):
            array = np.arange(6).reshape(2, 3).astype(dtype)
            for committed in (True, False):
                ours = _Put(committed=committed)(array, sharding, device)
                with jax.default_device(device):
                    theirs = jax.device_put(array, device if committed else None)
                is_same = (
                    type(ours) is type(theirs)
                    and ours.aval == theirs.aval
                    and ours.sharding == theirs.sharding
                    and ours.committed == committed
                    and ours.weak_type == theirs.weak_type
                    and np.array_equal(np.asarray(ours), array)
                )
                if not is_same:
                    raise TypeError(f"{ours!r} is not {theirs!r}")
    except Exception as error:  # noqa: BLE001  a later JAX may raise anything
        logger.debug("arrays are put on %s by jax.device_put, which takes longer: %s", device, error)
        return False
    return True


# ------------------------------------------------------------------------------------------ weak types


def as_weak(array: Any) -> Any:
    """Return the array as a weakly typed one, without a copy.

    JAX has no public function for this, so the result of the constructor is examined once; if it is not as expected,
    arrays stay strongly typed.
    """
    return _weakened(array) if _can_be_weak() else array


def _weakened(array: Any) -> Any:
    shards = [shard.data for shard in array.addressable_shards]
    return type(array)(array.aval.update(weak_type=True), array.sharding, shards, committed=array.committed)


@lru_cache(1)
def _can_be_weak() -> bool:
    try:
        number = jax.numpy.asarray(1.5)
        weak = _weakened(jax.device_put(np.float32(1.5)))
        is_same = weak.aval == number.aval and weak.committed == number.committed and float(weak) == 1.5
        if not is_same or (weak + jax.numpy.ones((), jax.numpy.bfloat16)).dtype != jax.numpy.bfloat16:
            raise TypeError(f"{weak!r} is not {number!r}")
    except Exception as error:  # noqa: BLE001  a later JAX may raise anything
        logger.warning(
            "weakly typed arrays are returned strongly typed, this JAX cannot make them: %s", error
        )
        return False
    return True
