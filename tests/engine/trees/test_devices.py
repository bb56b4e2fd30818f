"""Copies of many arrays at once, and what a device does with host memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eformer._engine.trees import devices as _device
from support.trees import assert_same


@pytest.fixture(autouse=True)
def programs(monkeypatch):
    found = {}
    monkeypatch.setattr(_device, "_programs", found)
    return found


@pytest.fixture
def arrays():
    first, second = jax.devices()[:2]
    return [
        jax.device_put(jnp.arange(5), first),
        jax.device_put(jnp.ones((3, 2), jnp.bfloat16), second),
        jax.device_put(jnp.arange(16).astype(jnp.int4), first),
    ]


def are_copies(copies, arrays):
    for copy, array in zip(copies, arrays, strict=True):
        assert copy.sharding == array.sharding
        assert copy.unsafe_buffer_pointer() != array.unsafe_buffer_pointer()
        assert_same(copy, array)


def test_copies_are_made_before_and_after_there_is_a_program(arrays, programs):
    are_copies(_device.copied(arrays), arrays)
    assert list(programs.values()) == [None, None]  # one for each device, and none for what is packed
    _device.compile_copies()
    assert None not in programs.values()
    are_copies(_device.copied(arrays), arrays)
    assert len(programs) == 2


def test_a_copy_outlives_the_donation_of_its_array(arrays):
    _device.copied(arrays[:1])
    _device.compile_copies()
    (copy,) = _device.copied(arrays[:1])
    jax.jit(lambda x: x * 0, donate_argnums=0)(arrays[0])
    np.testing.assert_array_equal(copy, np.arange(5))


def test_what_cannot_be_compiled_is_copied_one_by_one(arrays, programs, monkeypatch):
    class NoCompiler:
        def __init__(self, function):
            pass

        def lower(self, shapes):
            raise NotImplementedError("no such thing here")

    _device.copied(arrays)
    with monkeypatch.context() as patch:
        patch.setattr(jax, "jit", NoCompiler)
        _device.compile_copies()
    are_copies(_device.copied(arrays), arrays)


def test_programs_of_old_trees_are_forgotten(programs, monkeypatch):
    monkeypatch.setattr(_device, "_MAX_PROGRAMS", 3)
    for size in range(1, 6):
        _device.copied([jnp.zeros(size)])
        _device.compile_copies()
    assert len(programs) == 3


def test_a_cpu_takes_aligned_memory_as_it_is():
    assert _device.takes_host_memory(
        jax.devices()[0]
    )  # if JAX changes this, loads need a copy more: look at _transfer


@pytest.mark.parametrize("kind", [jax.sharding.AxisType.Explicit, jax.sharding.AxisType.Auto], ids=str)
def test_an_array_moves_between_devices_whatever_mesh_is_current(kind):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("z",), axis_types=(kind,))
    array = np.arange(64, dtype=np.float32).reshape(8, 8)
    rows, columns = (jax.NamedSharding(mesh, jax.P(*spec)) for spec in (("z",), (None, "z")))
    with jax.set_mesh(jax.make_mesh((2, 4), ("x", "y"))):
        moved = _device.resharded(jax.device_put(array, rows), columns)
    assert moved.sharding == columns
    assert_same(np.asarray(moved), array)
