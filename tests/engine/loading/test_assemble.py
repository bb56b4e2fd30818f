"""Arrays made of the memory that was read."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from eformer._engine.loading.assemble import assemble, change_shapes
from eformer._engine.loading.fetch import aligned
from eformer._engine.loading.placement import DeviceBoxes
from eformer._engine.loading.select import LeafTarget
from eformer._engine.record.manifest import LeafEntry
from eformer.errors import FormatError
from support.meshes import meshes
from support.trees import assert_same


def line():
    return meshes()[0]


def target(array, *, parts=None, key=None, **more):
    """A target that has been read: whole, or in the parts of each device."""
    entry = LeafEntry(array.dtype.name, array.shape, (), key=key)
    return LeafTarget("w", entry, array.dtype.name, arrays=parts or [array], **more)


def one_each():
    return DeviceBoxes(None, jax.devices(), list(range(8)))


NUMBERS = np.arange(8, dtype=np.float32)


def test_a_numpy_array_is_the_memory_itself_and_may_be_written_to():
    leaf = assemble([target(NUMBERS, as_numpy=True)])["w"]
    assert leaf is NUMBERS
    assert leaf.flags.writeable


def test_an_array_on_a_cpu_may_be_the_memory_itself():
    memory = aligned(32).view(np.float32)
    memory[:] = NUMBERS
    leaf = assemble([target(memory)])["w"]
    assert_same(leaf, jnp.asarray(NUMBERS))
    assert leaf.unsafe_buffer_pointer() == memory.__array_interface__["data"][0]
    assert not memory.flags.writeable


def test_shards_are_joined_and_a_box_that_many_devices_hold_is_read_once():
    rows, whole = NamedSharding(line(), P("x")), NamedSharding(line(), P())
    cut = target(NUMBERS.copy(), sharding=rows, parts=list(NUMBERS.reshape(8, 1)), device_boxes=one_each())
    copied = target(NUMBERS.copy(), sharding=whole, device_boxes=DeviceBoxes(None, jax.devices(), [0] * 8))
    cuts = [(slice(n, n + 1),) for n in range(8)]
    later = target(
        NUMBERS.copy(), sharding=rows, device_boxes=DeviceBoxes(None, jax.devices(), list(range(8)), cuts)
    )
    for leaf, sharding in ((cut, rows), (copied, whole), (later, rows)):
        found = assemble([leaf])["w"]
        assert found.sharding == sharding
        np.testing.assert_array_equal(found, NUMBERS)


def test_a_leaf_that_is_broadcast_ends_where_it_belongs():
    rows, whole = NamedSharding(line(), P("x")), NamedSharding(line(), P())
    read = target(
        NUMBERS,
        sharding=whole,
        read_sharding=rows,
        device_boxes=one_each(),
        parts=list(NUMBERS.reshape(8, 1)),
    )
    found = assemble([read])["w"]
    assert found.sharding.is_equivalent_to(whole, 1)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, NUMBERS)


@pytest.mark.parametrize("place", [None, SingleDeviceSharding(jax.devices()[1])])
def test_a_leaf_is_reshaped_wherever_it_goes(place):
    reshaped = target(NUMBERS, new_shape=(2, 4), sharding=place)
    change_shapes([reshaped])
    found = assemble([reshaped])["w"]
    assert_same(np.asarray(found), NUMBERS.reshape(2, 4))
    assert found.devices() == {jax.devices()[0 if place is None else 1]}


def test_keys_are_wrapped_wherever_they_lie():
    keys = jax.random.split(jax.random.key(3), 8)
    data = np.asarray(jax.random.key_data(keys))
    assert_same(assemble([target(data.copy(), key="threefry2x32")])["w"], keys)
    rows = NamedSharding(line(), P("x"))
    parts = [data[n : n + 1].copy() for n in range(8)]
    found = assemble([target(data, key="threefry2x32", sharding=rows, device_boxes=one_each(), parts=parts)])[
        "w"
    ]
    assert found.sharding.is_equivalent_to(rows, 1)
    np.testing.assert_array_equal(jax.random.key_data(found), data)


def test_keys_that_jax_does_not_know_are_named():
    with pytest.raises(FormatError, match=r"leaf 'w': JAX cannot make PRNG keys of kind 'dice': "):
        assemble([target(np.zeros(2, np.uint32), key="dice")])
