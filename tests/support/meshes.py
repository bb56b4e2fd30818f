"""Make meshes of the eight virtual devices, and shardings on them."""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P


def line() -> Mesh:
    return Mesh(np.array(jax.devices()), ("model",))


def grid() -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))


def tall() -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))


def on(mesh: Mesh, *spec: str | None) -> NamedSharding:
    return NamedSharding(mesh, P(*spec))


def meshes() -> tuple[Mesh, Mesh, Mesh]:
    """Return a mesh with one axis, and a wide and a tall one with two."""
    devices = np.array(jax.devices())
    return (
        Mesh(devices, ("x",)),
        Mesh(devices.reshape(2, 4), ("x", "y")),
        Mesh(devices.reshape(4, 2), ("x", "y")),
    )


def layouts() -> dict[str, jax.sharding.Sharding]:
    line, wide, tall = meshes()
    return {
        "rows": NamedSharding(line, P("x")),
        "columns": NamedSharding(line, P(None, "x")),
        "2x4": NamedSharding(wide, P("x", "y")),
        "4x2 turned": NamedSharding(tall, P("y", "x")),
        "rows by both": NamedSharding(wide, P(("x", "y"))),
        "replicated": NamedSharding(line, P()),
        "one device": SingleDeviceSharding(jax.devices()[3]),
    }
