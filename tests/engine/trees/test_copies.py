"""Copies of many arrays at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eformer._engine.trees import copies as _copies
from support.trees import assert_same


@pytest.fixture(autouse=True)
def programs(monkeypatch):
    found = {}
    monkeypatch.setattr(_copies, "_programs", found)
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
    are_copies(_copies.copied(_copies.Kinds(arrays)), arrays)
    assert list(programs.values()) == [None, None]  # one for each device, and none for what is packed
    _copies.compile_copies()
    assert None not in programs.values()
    are_copies(_copies.copied(_copies.Kinds(arrays)), arrays)
    assert len(programs) == 2


def test_a_copy_outlives_the_donation_of_its_array(arrays):
    _copies.copied(_copies.Kinds(arrays[:1]))
    _copies.compile_copies()
    (copy,) = _copies.copied(_copies.Kinds(arrays[:1]))
    jax.jit(lambda x: x * 0, donate_argnums=0)(arrays[0])
    np.testing.assert_array_equal(copy, np.arange(5))


def test_what_cannot_be_compiled_is_copied_one_by_one(arrays, programs, monkeypatch):
    class NoCompiler:
        def __init__(self, function):
            pass

        def lower(self, shapes):
            raise NotImplementedError("no such thing here")

    _copies.copied(_copies.Kinds(arrays))
    with monkeypatch.context() as patch:
        patch.setattr(jax, "jit", NoCompiler)
        _copies.compile_copies()
    are_copies(_copies.copied(_copies.Kinds(arrays)), arrays)


def test_programs_of_old_trees_are_forgotten(programs, monkeypatch):
    monkeypatch.setattr(_copies, "_MAX_PROGRAMS", 3)
    for size in range(1, 6):
        _copies.copied(_copies.Kinds([jnp.zeros(size)]))
        _copies.compile_copies()
    assert len(programs) == 3


def test_many_arrays_of_one_kind_share_a_program_that_is_compiled_at_once(programs, monkeypatch):
    monkeypatch.setattr(_copies, "_TOGETHER", 4)
    monkeypatch.setattr(_copies, "_WORTH_WAITING", 3)
    arrays = [jnp.full((2, 3), number, jnp.bfloat16) for number in range(13)]
    arrays[5:5] = [jnp.arange(7) + number for number in range(9)]
    are_copies(_copies.copied(_copies.Kinds(arrays)), arrays)
    sizes = {tuple(shape for shape, _ in kinds): program for (_, kinds), program in programs.items()}
    assert sizes[((2, 3),) * 4] is not None  # three batches
    assert sizes[((7,),) * 4] is None  # two batches: these are copied one by one
    assert sizes[((2, 3), (7,))] is None  # the rest
    _copies.compile_copies()
    assert None not in programs.values()
    are_copies(_copies.copied(_copies.Kinds(arrays)), arrays)
    assert len(programs) == 3


def test_arrays_in_another_memory_are_copied_there(programs):
    (device, *_) = jax.devices()
    pinned = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
    arrays = [jax.device_put(jnp.arange(9.0), pinned), jax.device_put(jnp.arange(9.0), device)]
    are_copies(_copies.copied(_copies.Kinds(arrays)), arrays)
    assert len(programs) == 1


@pytest.mark.parametrize("kind", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit])
def test_programs_are_compiled_whatever_mesh_is_current(programs, monkeypatch, kind):
    monkeypatch.setattr(_copies, "_TOGETHER", 4)
    monkeypatch.setattr(_copies, "_WORTH_WAITING", 1)
    arrays = [jax.device_put(np.full(3, number, np.float32), jax.devices()[1]) for number in range(8)]
    with jax.set_mesh(jax.make_mesh((2,), ("x",), (kind,))):
        are_copies(_copies.copied(_copies.Kinds(arrays)), arrays)
    assert _copies._copied_singly not in programs.values()
    are_copies(_copies.copied(_copies.Kinds(arrays)), arrays)


def test_arrays_of_64_bits_that_one_thread_has_are_copied_by_a_program(programs, monkeypatch):
    fits = []
    monkeypatch.setattr(_copies, "_copied_singly", fits.append)
    with jax.enable_x64(True):
        array = jnp.arange(5) + 2**40
    kinds = _copies.Kinds([array])
    programs.update(dict.fromkeys(key for key, _ in _copies._batches(kinds)))
    _copies.compile_copies()
    are_copies(_copies.copied(kinds), [array])
    assert fits == []
