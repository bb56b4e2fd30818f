"""Take the metrics of a step: numbers, some of which are still on a device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from eformer._engine.record.policies import metric_from

if TYPE_CHECKING:
    from collections.abc import Mapping


def taken(metrics: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the metrics so that the caller may change or donate its own. Raise ValueError for one that is not a
    number. Those on a device begin to be copied to the host: nobody waits for them here."""
    return {name: _taken(name, value) for name, value in (metrics or {}).items()}


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return metrics that were `taken` as numbers. Wait for those on a device."""
    return {
        name: metric_from(name, value.item() if isinstance(value, jax.Array) else value)
        for name, value in metrics.items()
    }


def _taken(name: str, value: Any) -> Any:
    if isinstance(value, np.ndarray) or not hasattr(value, "__float__"):
        return metric_from(name, value)
    if not isinstance(value, jax.Array):  # perhaps of another library, and on a device, too
        return value
    if value.size != 1:
        raise ValueError(f"metrics[{name!r}] has the shape {value.shape}; expected a single number")
    shards = value.addressable_shards
    if not shards:  # it is on devices of other processes
        return value
    copy = jnp.copy(shards[0].data)  # the next step may be given the memory of this one
    copy.copy_to_host_async()
    return copy
