"""Shardings of JAX, in the form that a checkpoint records."""

from __future__ import annotations

from jax.sharding import NamedSharding, Sharding

from eformer._engine.record.manifest import RecordedSharding


def recorded_sharding(sharding: Sharding) -> RecordedSharding | None:
    """Return the record of a sharding, or None if it is not a mesh with a plain partition spec."""
    if not isinstance(sharding, NamedSharding):
        return None
    spec = tuple(sharding.spec)
    if not all(axes is None or isinstance(axes, (str, tuple)) for axes in spec):
        return None  # such as UNCONSTRAINED
    return RecordedSharding(spec, dict(sharding.mesh.shape))
