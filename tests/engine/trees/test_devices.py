"""What a device does with host memory, and moves between shardings."""

import jax
import jax.extend.backend
import numpy as np
import pytest

from eformer._engine.trees import devices as _device
from support.trees import assert_same


def test_a_cpu_takes_aligned_memory_as_it_is():
    assert _device.takes_host_memory(
        jax.devices()[0]
    )  # if JAX changes this, loads need a copy more: look at _transfer


@pytest.mark.parametrize("platforms", [["cpu"], ["cpu", "cuda"], ["cuda", "cpu"]])
def test_arrays_are_waited_for_if_any_device_is_an_accelerator(monkeypatch, platforms):
    """The default device may be a CPU, with a mesh of accelerators beside it."""
    waited = []
    monkeypatch.setattr(jax.extend.backend, "backends", lambda: dict.fromkeys(platforms))
    monkeypatch.setattr(jax, "block_until_ready", waited.append)
    assert _device.arrived("arrays") == "arrays"
    assert waited == ([] if platforms == ["cpu"] else ["arrays"])


@pytest.mark.parametrize("kind", [jax.sharding.AxisType.Explicit, jax.sharding.AxisType.Auto], ids=str)
def test_an_array_moves_between_devices_whatever_mesh_is_current(kind):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("z",), axis_types=(kind,))
    array = np.arange(64, dtype=np.float32).reshape(8, 8)
    rows, columns = (jax.NamedSharding(mesh, jax.P(*spec)) for spec in (("z",), (None, "z")))
    with jax.set_mesh(jax.make_mesh((2, 4), ("x", "y"))):
        moved = _device.resharded(jax.device_put(array, rows), columns)
    assert moved.sharding == columns
    assert_same(np.asarray(moved), array)
