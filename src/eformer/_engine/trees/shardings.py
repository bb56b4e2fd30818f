"""Shardings of JAX, as a checkpoint records them."""

from __future__ import annotations

from jax.sharding import NamedSharding, Sharding

from eformer._engine.record.manifest import RecordedSharding


def recorded_sharding(sharding: Sharding) -> RecordedSharding | None:
    """How an array lies on its mesh; None for one that lies on none."""
    if not isinstance(sharding, NamedSharding):
        return None
    spec = tuple(sharding.spec)
    if not all(axes is None or isinstance(axes, (str, tuple)) for axes in spec):
        return None  # such as UNCONSTRAINED
    return RecordedSharding(spec, dict(sharding.mesh.shape))
