"""Shardings of JAX in the form that a checkpoint records, and axes that modules name.

Tests: tests/models/test_nnx.py, tests/engine/loading/test_preview.py.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from eformer._engine.record.manifest import RecordedSharding


def recorded_sharding(sharding: Sharding) -> RecordedSharding | None:
    """Return the record of a sharding.

    Return None without a mesh and a memory kind of its own, and for a partition spec that is not plain.
    """
    device: Any = next(iter(sharding.addressable_devices), None)
    is_default = device is None or sharding.memory_kind == device.default_memory().kind
    kind = None if is_default else sharding.memory_kind
    if not isinstance(sharding, NamedSharding):
        return RecordedSharding((), {}, kind) if kind else None
    spec = tuple(sharding.spec)
    if not all(axes is None or isinstance(axes, (str, tuple)) for axes in spec):
        return None  # such as UNCONSTRAINED, which names no axis
    return RecordedSharding(spec, dict(sharding.mesh.shape), kind)


class AnnotatedShape(jax.ShapeDtypeStruct):
    """An abstract array for which a module names axes of a mesh. Without a mesh they have no effect."""

    axes: PartitionSpec

    def __init__(self, shape: jax.ShapeDtypeStruct, axes: PartitionSpec) -> None:
        super().__init__(shape.shape, shape.dtype, weak_type=shape.weak_type)  # type: ignore[no-untyped-call]
        object.__setattr__(self, "axes", axes)  # the class is frozen
