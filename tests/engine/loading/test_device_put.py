"""Arrays on devices, made by JAX's own call or by the one underneath: nobody can tell."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from eformer._engine.loading import device_put
from support.trees import assert_same

pytestmark = pytest.mark.sample(3)


@pytest.fixture(params=["underneath", "device_put", "gone"])
def way(request, monkeypatch):
    """The call underneath as it is, one that does something else, and none."""

    def other(aval, sharding, arrays, devices, committed):
        return jax.device_put(arrays[0] + 1, devices[0])

    def gone():
        raise AttributeError("batched_device_put")

    forget()
    if request.param == "device_put":
        monkeypatch.setattr(device_put, "_batched_device_put", lambda: other)
    if request.param == "gone":
        monkeypatch.setattr(device_put, "_batched_device_put", gone)
    yield request.param
    forget()


def forget():
    device_put._is_usable.cache_clear()
    device_put._takes_parts.cache_clear()


DTYPES = [np.float32, np.int8, np.bool_, np.complex64, jnp.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.int4]


@pytest.fixture
def arrays():
    return [np.arange(2 * n).reshape(2, n).astype(d) for n in (0, 1, 5) for d in DTYPES] + [
        np.float32(3) * np.ones(())
    ]


def same(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        assert_same(a, b)
        assert (a.aval, a.sharding, a.committed, a.weak_type) == (
            b.aval,
            b.sharding,
            b.committed,
            b.weak_type,
        )
        assert_same(a + a, b + b)


def test_on_the_default_device(arrays, way):
    same(device_put.put_on_default(arrays), jax.device_put(arrays))
    assert device_put._is_usable(jax.devices()[0]) == (way == "underneath")


@pytest.mark.thorough
def test_on_a_default_device_that_somebody_chose(arrays, way):
    with jax.default_device(jax.devices()[3]):
        found = device_put.put_on_default(arrays)
        same(found, jax.device_put(arrays))
    assert found[0].devices() == {jax.devices()[3]}


@pytest.mark.thorough
def test_each_on_its_own_device(arrays, way):
    devices = [jax.devices()[n % 4] for n in range(len(arrays))]
    same(device_put.put_on(arrays, devices), jax.device_put(arrays, devices))


def test_in_a_memory_of_a_device(arrays, way):
    device = jax.devices()[0]
    place = jax.sharding.SingleDeviceSharding(device, memory_kind=device.default_memory().kind)
    places = [place if n % 2 else device for n in range(len(arrays))]
    same(device_put.put_on(arrays, places), jax.device_put(arrays, places))


@pytest.mark.sample(5)
@pytest.mark.parametrize("spec", [jax.P(), jax.P("x"), jax.P(None, "x"), jax.P("y", "x"), jax.P(("x", "y"))])
def test_parts_on_the_devices_of_a_sharding(spec, way):
    mesh = jax.make_mesh((4, 2), ("x", "y"))
    kinds = DTYPES if spec == jax.P("y", "x") else DTYPES[:2]
    arrays = [np.arange(64 * n).reshape(8, 8 * n).astype(d) for n in (1, 2, 2) for d in kinds]
    shardings = [jax.NamedSharding(mesh, spec) for _ in arrays]
    same(put_parts(arrays, shardings), jax.device_put(arrays, shardings))
    assert device_put._takes_parts(shardings[0]) == (way == "underneath")


def put_parts(arrays, shardings):
    found = []
    for array, sharding in zip(arrays, shardings, strict=True):
        parts = sharding.addressable_devices_indices_map(array.shape)
        cut = [array[index].copy() for index in parts.values()]
        found.append(device_put.Shards(array.shape, array.dtype, sharding, cut, list(parts)))
    return device_put.put_sharded(found)


def test_parts_in_other_orders_places_and_memories_are_those_of_jax(way):
    device = jax.devices()[5]
    kind = device.default_memory().kind
    backwards = jax.sharding.Mesh(np.array(jax.devices()[::-1]).reshape(2, 4), ("x", "y"))
    places = [
        jax.NamedSharding(backwards, jax.P("y", "x")),
        jax.NamedSharding(backwards, jax.P("y"), memory_kind=kind),
        jax.sharding.SingleDeviceSharding(device),
        jax.sharding.SingleDeviceSharding(device, memory_kind=kind),
    ]
    arrays = [np.arange(64, dtype=np.float32).reshape(8, 8) + n for n in range(8)]
    same(put_parts(arrays, places * 2), jax.device_put(arrays, places * 2))


def test_arrays_of_one_device_take_the_short_way_too():
    device = jax.devices()[1]
    assert device_put._takes_parts(jax.sharding.SingleDeviceSharding(device))
    host = [np.full((2, n), n, np.float32) for n in range(4)]
    shards = [
        device_put.Shards(a.shape, a.dtype, jax.sharding.SingleDeviceSharding(device), [a], [device])
        for a in host
    ]
    same(device_put.put_sharded(shards), jax.device_put(host, device))


def test_a_sharding_that_has_the_address_of_an_earlier_one_is_not_taken_for_it():
    mesh = jax.make_mesh((4, 2), ("x", "y"))
    put, array = device_put.PutShards(), np.arange(64, dtype=np.float32).reshape(8, 8)
    for spec in [jax.P("x"), jax.P("y"), jax.P(None, "x"), jax.P("y", "x")] * 5:
        sharding = jax.NamedSharding(mesh, spec)
        for _ in range(2):
            parts = sharding.addressable_devices_indices_map(array.shape)
            cut = [array[index].copy() for index in parts.values()]
            (found,) = device_put.put_sharded(
                [device_put.Shards(array.shape, array.dtype, sharding, cut, list(parts))], put
            )
            same([found], [jax.device_put(array, sharding)])
        del sharding, found


def test_nothing_at_all(way):
    assert device_put.put_sharded([]) == []
    assert device_put.put_on_default([]) == []
    assert device_put.put_on([], []) == []


def test_aligned_memory_is_taken_as_it_is():
    memory = np.zeros(4096, np.uint8)
    aligned = memory[-memory.__array_interface__["data"][0] % 64 :][:1024]
    aligned.flags.writeable = False
    (array,) = device_put.put_on_default([aligned])
    assert array.unsafe_buffer_pointer() == aligned.__array_interface__["data"][0]


# ------------------------------------------------------------------------------------------ weak types


@pytest.fixture
def forget_weak():
    device_put._can_be_weak.cache_clear()
    yield
    device_put._can_be_weak.cache_clear()


@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.complex64, jnp.bfloat16])
def test_an_array_is_made_weak_where_it_is(dtype, forget_weak):
    mesh = jax.make_mesh((8,), ("x",))
    places = [jax.devices()[3], jax.NamedSharding(mesh, jax.P("x")), jax.NamedSharding(mesh, jax.P())]
    for place in (None, *places):
        strong = jax.device_put(np.arange(8).astype(dtype), place)
        weak = device_put.as_weak(strong)
        assert_same(weak, strong)
        assert weak.weak_type
        assert (weak.sharding, weak.committed) == (strong.sharding, strong.committed)


def test_an_array_is_made_weak_with_numbers_of_64_bits(forget_weak):
    with jax.enable_x64(True):
        assert device_put.as_weak(jnp.float64(1)).weak_type


def test_an_array_stays_strong_if_jax_cannot_make_a_weak_one(forget_weak, monkeypatch, caplog):
    monkeypatch.setattr(device_put, "_weakened", lambda array: array)
    array = jnp.float32(1)
    assert device_put.as_weak(array) is array
    assert "are returned with a strong type" in caplog.text


def test_arrays_of_many_shapes_are_those_of_jax():
    from eformer._engine.loading.device_put import PutShards, _joined_one_by_one, _trial

    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
    sharding, put = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x")), PutShards()
    for columns in (1, 2, 3):
        trial = _trial(sharding, (len(jax.devices()), columns))
        made, (theirs,) = put(trial), _joined_one_by_one([trial])
        assert (made.aval, made.sharding) == (theirs.aval, theirs.sharding)
        np.testing.assert_array_equal(made, theirs)
