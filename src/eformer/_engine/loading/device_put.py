"""Many arrays onto devices at once, without what `jax.device_put` does for each of them besides.

For an array of a few kilobytes that takes ten times as long as the transfer. The call underneath is JAX's own, but not
public: whether it does the same is tried out, once, and if it does not, `jax.device_put` is called after all.
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

_config: Any = jax.config  # whose attributes have no types

_WIDE = {
    np.dtype(name) for name in ("float64", "int64", "uint64", "complex128")
}  # unless JAX is told, it has them not

logger = logging.getLogger("eformer")


def put_on_default(arrays: Sequence[Array]) -> list[Any]:
    """The arrays on the default device, from where JAX may move them."""
    default = _config.jax_default_device
    device = default if isinstance(default, jax.Device) else jax.local_devices(backend=default)[0]
    if not arrays or not _is_usable(device):
        return jax.device_put(list(arrays))  # type: ignore[no-any-return]
    sharding = jax.sharding.SingleDeviceSharding(device)
    put = _Put(committed=False)
    return [put(array, sharding, device) for array in arrays]


def put_on(arrays: Sequence[Array], places: Sequence[Any]) -> list[Any]:
    """Each array on its device, or in that memory of one that a sharding says."""
    if not arrays or not all(isinstance(place, jax.Device) and _is_usable(place) for place in set(places)):
        return jax.device_put(list(arrays), list(places))  # type: ignore[no-any-return]
    shardings = {device: jax.sharding.SingleDeviceSharding(device) for device in set(places)}
    put = _Put(committed=True)
    return [put(array, shardings[d], d) for array, d in zip(arrays, places, strict=True)]


class _Put:
    def __init__(self, *, committed: bool) -> None:
        self.committed = committed
        self.others = PACKED if _config.jax_enable_x64 else PACKED | _WIDE
        self.avals: dict[Any, Any] = {}  # most arrays of a tree are alike
        self.put = _batched_device_put()

    def __call__(self, array: Array, sharding: Any, device: Any) -> Any:
        dtype = array.dtype
        if dtype in self.others or not dtype.isnative:
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
    """Whether what the call underneath makes cannot be told from what `jax.device_put` makes."""
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
    except Exception as error:  # noqa: BLE001  whatever a later JAX makes of it
        logger.debug("arrays are put on %s one by one, which takes longer: %s", device, error)
        return False
    return True
