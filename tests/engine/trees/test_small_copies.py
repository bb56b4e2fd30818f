"""Copies of small arrays out of the memory of a CPU device."""

import contextlib
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout

from eformer._engine.trees import devices

OPAQUE = ["bfloat16", "float8_e4m3fn", "float8_e5m2"]  # numpy has no buffer format for them
DTYPES = [*OPAQUE, "bool", "uint8", "int8", "int32", "float16", "float32", "complex64"]
SHAPES = [(), (1,), (7,), (4, 5), (2, 1, 3)]


def array_of(dtype: str, shape: tuple[int, ...] = (4, 5)) -> jax.Array:
    return jax.device_put(np.arange(np.prod(shape)).reshape(shape).astype(jnp.dtype(dtype)))


def copier(array):
    (device,) = array.devices()
    copy = devices.copier(array.dtype, array.ndim, device)
    return lambda array: copy(array, array.nbytes)


def is_viewed(array) -> bool:
    (device,) = array.devices()
    return devices.copier(array.dtype, array.ndim, device) is devices._by_view


@pytest.fixture
def forgetful():
    devices.copier.cache_clear()
    yield
    devices.copier.cache_clear()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_copy_has_the_elements_in_c_order(dtype, shape):
    array = array_of(dtype, shape)
    assert copier(array)(array) == np.asarray(array).tobytes()


@pytest.mark.parametrize("dtype", OPAQUE)
def test_arrays_without_a_buffer_format_are_copied_by_address(dtype):
    assert not is_viewed(array_of(dtype))  # if JAX changes this, saves only take longer


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_an_array_in_another_order_than_the_first_is_copied_in_c_order(dtype):
    first = array_of(dtype)
    turned = jax.device_put(first, Format(Layout((1, 0)), first.sharding))
    assert copier(first)(turned) == np.asarray(first).tobytes()
    assert copier(turned)(turned) == np.asarray(first).tobytes()


def test_a_copy_waits_until_the_array_is_computed():
    @jax.jit
    def late(x):
        return x + jax.lax.fori_loop(0, 50, lambda _, y: jnp.tanh(y @ y), jnp.ones((300, 300)))[0, 0].astype(
            x.dtype
        )

    array = array_of("bfloat16")
    assert copier(array)(late(array)) == np.asarray(late(array)).tobytes()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_deleted_array_is_refused(dtype):
    array = array_of(dtype)
    copy = copier(array)
    array.delete()
    with pytest.raises(RuntimeError, match="deleted"):
        copy(array)


def test_an_array_that_is_donated_while_it_is_copied_is_refused(monkeypatch):
    array = array_of("bfloat16")
    copy, memory = copier(array), devices._memory

    class Donating:
        def __getitem__(self, where: slice) -> bytes:
            found = memory[where]
            jax.jit(lambda x: x + 1, donate_argnums=0)(array)
            return found

    monkeypatch.setattr(devices, "_memory", Donating())
    with pytest.raises(RuntimeError, match="deleted"):
        copy(array)


def test_copies_are_whole_while_another_thread_donates_the_arrays():
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    states, is_over = [jnp.zeros((64, 64), jnp.bfloat16)], threading.Event()
    copy, found = copier(states[0]), set[bytes]()

    def train() -> None:
        while not is_over.is_set():
            states[0] = step(states[0])

    training = threading.Thread(target=train)
    training.start()
    try:
        for _ in range(3000):
            with contextlib.suppress(RuntimeError):  # it was donated before
                found.add(copy(states[0]))
    finally:
        is_over.set()
        training.join()
    assert found
    assert all(data == data[:2] * 64 * 64 for data in found)


@pytest.mark.usefixtures("forgetful")
def test_arrays_are_viewed_if_the_trial_finds_other_bytes(monkeypatch):
    monkeypatch.setattr(devices, "_memory", bytes(2**16))
    array = array_of("bfloat16")
    assert is_viewed(array)
    assert copier(array)(array) == np.asarray(array).tobytes()


@pytest.mark.usefixtures("forgetful")
def test_arrays_are_viewed_if_jax_tells_no_address(monkeypatch):
    monkeypatch.setattr(devices, "_by_address", lambda *_, **__: lambda array: array.no_such_method())
    array = array_of("bfloat16")
    assert is_viewed(array)
    assert copier(array)(array) == np.asarray(array).tobytes()
