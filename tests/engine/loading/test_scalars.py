"""Numbers and arrays without axes: which become each other, and the training states that need it."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, serialization
from flax.training.train_state import TrainState

from eformer import checkpoint
from eformer._engine.loading.select import as_array, fitted, kind_of_dtype, kind_of_number
from eformer.errors import MismatchError
from eformer.serialization.async_manager import AsyncCheckpointManager
from support.trees import assert_same


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [("bool", bool), ("uint4", int), ("int64", int), ("bfloat16", float), ("float64", float), ("complex64", complex),
     ("float128", None), ("datetime64[ns]", None), ("key<fry>", None)],
)  # fmt: skip
def test_every_dtype_is_of_a_kind_that_holds_all_of_it(dtype, kind):
    assert kind_of_dtype(dtype) is kind


def test_a_scalar_of_numpy_is_of_the_kind_of_its_dtype():
    found = [
        kind_of_number(number) for number in (True, 1, np.float64(1), np.bool_(1), np.uint8(1), "1", None)
    ]
    assert found == [bool, int, float, bool, int, None, None]


@pytest.mark.parametrize(
    ("value", "dtype"),
    [(7, "int4"), (-8, "int4"), (2**64 - 1, "uint64"), (0.5, "float8_e4m3fn"), (-0.0, "bfloat16"), (math.inf, "float16"),
     (math.nan, "float32"), (True, "bool"), (1 - 0j, "complex64"), (5e-324, "float64")],
)  # fmt: skip
def test_a_number_goes_into_a_dtype_that_holds_it(value, dtype):
    array = as_array(value, dtype)
    assert (array.shape, array.dtype.name) == ((), dtype)
    assert repr(array.item()) == repr(value)


@pytest.mark.parametrize(
    ("value", "dtype"),
    [(8, "int4"), (-1, "uint8"), (2**64, "uint64"), (10**400, "int32"), (0.1, "float32"), (1e300, "float32"),
     (math.inf, "float8_e4m3fn"), (-0.0, "float8_e4m3fnuz"), (0.1j, "complex64"), (1, "bool"), (True, "int32"),
     (1, "float32"), (1.0, "int32"), (1.0, "complex64"), ("1", "int32"), (np.int32(1), "int64")],
)  # fmt: skip
def test_a_number_goes_into_no_other(value, dtype):
    assert as_array(value, dtype) is None


def test_a_scalar_of_numpy_becomes_the_plain_number_and_the_other_way_round():
    assert_same(fitted(np.float32(0.1), 0.0), float(np.float32(0.1)))
    assert_same(fitted(3, np.int16(0)), np.int16(3))
    assert_same(fitted(np.int16(3), np.int16(0)), np.int16(3))
    assert fitted(np.int16(3), np.int32(0)) is None
    assert fitted(b"3", "3") is None


# --------------------------------------------------------- the table of docs/guides/numbers.md, cell by cell


NUMBERS = {bool: (True, "bool"), int: (3, "int32"), float: (0.5, "float32"), complex: (0.5j, "complex64")}
FORMS = {
    "number": lambda number, dtype: number,
    "numpy scalar": lambda number, dtype: np.dtype(dtype).type(number),
    "numpy array": np.array,
    "jax array": jnp.array,
    "weak jax array": lambda number, dtype: jnp.asarray(number),
}


def is_weak(leaf):
    return isinstance(leaf, jax.Array) and leaf.weak_type


@pytest.mark.parametrize("kind", NUMBERS)
@pytest.mark.parametrize("stored", FORMS)
def test_without_like_a_number_comes_back_in_its_own_form(tmp_path, stored, kind):
    number = FORMS[stored](*NUMBERS[kind])
    found = checkpoint.load(checkpoint.save(number, tmp_path / "x"))
    assert_same(found, number)
    assert is_weak(found) == is_weak(number)


@pytest.mark.sample(4)
@pytest.mark.parametrize("kind", NUMBERS)
@pytest.mark.parametrize("like", FORMS)
@pytest.mark.parametrize("stored", FORMS)
def test_with_like_a_number_comes_back_in_the_form_of_like(tmp_path, stored, like, kind):
    number, dtype = NUMBERS[kind]
    path = checkpoint.save(FORMS[stored](number, dtype), tmp_path / "x")
    found = checkpoint.load(path, like=FORMS[like](kind(0), dtype))
    assert_same(found, FORMS[like](number, dtype))
    assert is_weak(found) == is_weak(FORMS[like](number, dtype))


@pytest.mark.sample(4)
@pytest.mark.parametrize("like", FORMS)
@pytest.mark.parametrize("stored", FORMS)
def test_a_number_of_another_kind_or_dtype_is_refused_in_every_form(tmp_path, stored, like):
    for kind, (number, dtype) in NUMBERS.items():
        path = checkpoint.save(FORMS[stored](number, dtype), tmp_path / kind.__name__)
        for other in NUMBERS.keys() - {kind}:
            with pytest.raises(MismatchError, match=r"leaf '%': expected .*, found "):
                checkpoint.load(path, like=FORMS[like](*NUMBERS[other]))
    if "weak" in like or like == "number" or stored == "number":
        return
    path = checkpoint.save(FORMS[stored](0.5, "float32"), tmp_path / "narrow")
    with pytest.raises(MismatchError, match=r"float16.*dtype=\"like\" casts it"):
        checkpoint.load(path, like=FORMS[like](0.5, "float16"))
    assert_same(
        checkpoint.load(path, like=FORMS[like](0.0, "float16"), dtype="f16"), FORMS[like](0.5, "float16")
    )


# ---------------------------------------------------------------------------------------- training states


TX = optax.adam(1e-3)


def apply(variables, x):
    return x @ variables["w"]


def fresh(**changes):
    return TrainState.create(apply_fn=apply, params={"w": jnp.ones((4, 4))}, tx=TX).replace(**changes)


def trained(steps=3):
    step = jax.jit(lambda state: state.apply_gradients(grads=state.params))
    state = fresh()
    for _ in range(steps):
        state = step(state)
    return state


@pytest.fixture(params=["safetensors", "tensorstore", "msgpack"])
def saved(request, tmp_path):
    """Saves a state, and says where."""

    def save(state):
        if request.param != "msgpack":
            return checkpoint.save(state, tmp_path / "state", format=request.param)
        (tmp_path / "state.msgpack").write_bytes(serialization.to_bytes(state))
        return tmp_path / "state.msgpack"

    return save


@pytest.mark.sample(3)
def test_a_fresh_state_of_flax_takes_what_a_trained_one_has(saved):
    state = checkpoint.load(saved(trained()), like=fresh())
    assert_same(state.step, 3)
    assert_same(state.opt_state[0].count, jnp.int32(3))
    assert_same(state.params, trained().params)
    assert jax.jit(lambda s: s.apply_gradients(grads=s.params))(state).step == 4


@pytest.mark.sample(3)
def test_a_trained_state_of_flax_takes_what_a_fresh_one_has(saved):
    state = checkpoint.load(saved(fresh()), like=trained())
    assert_same(state.step, jnp.int32(0))
    assert_same(state.opt_state[0].count, jnp.int32(0))
    abstract = jax.eval_shape(trained)
    assert_same(checkpoint.load(saved(fresh(step=5)), like=abstract).step, jnp.int32(5))


@pytest.mark.sample(3)
def test_a_step_beyond_32_bits_is_not_cut(saved):
    with pytest.raises(MismatchError, match=r"'step': expected int32\[\], found the int 4294967303"):
        checkpoint.load(saved(fresh(step=2**32 + 7)), like=trained())


@pytest.mark.parametrize("use_tensorstore", [True, False])
def test_the_manager_takes_a_fresh_state_for_a_template(tmp_path, use_tensorstore):
    manager = AsyncCheckpointManager(use_tensorstore=use_tensorstore)
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    for name, state, template, step in [
        ("fresh", fresh(), trained(), jnp.int32(0)),
        ("trained", trained(), fresh(), 3),
    ]:
        manager.save_pytree(state, str(tmp_path / name), prefix="state")
        loaded, _ = manager.load_pytree(str(tmp_path / name), mesh, prefix="state", template=template)
        assert type(loaded.step) is int or len(loaded.step.sharding.device_set) == 8
        assert loaded.step == step
        assert type(loaded.step) is type(step)


def test_a_counter_of_nnx_may_be_a_number_or_an_array(tmp_path):
    class Model(nnx.Module):
        def __init__(self, count):
            self.count = nnx.Variable(count)

    for stored, like in ((jnp.int32(7), 0), (7, jnp.int32(0))):
        checkpoint.save(nnx.state(Model(stored)), tmp_path / "model")
        state = checkpoint.load(tmp_path / "model", like=nnx.state(Model(like)))
        (found,) = jax.tree.leaves(state)
        assert (type(found), int(found)) == (type(like), 7)


def test_foreign_arrays_without_axes_become_numbers(tmp_path):
    np.savez(tmp_path / "x.npz", on=np.True_, scale=np.float16(0.5), step=np.int64(7))
    like = {"on": False, "scale": 0.0, "step": 0}
    assert_same(checkpoint.load(tmp_path / "x.npz", like=like), {"on": True, "scale": 0.5, "step": 7})


def test_what_a_callback_makes_of_a_number_stays(tmp_path):
    checkpoint.save({"step": jnp.int32(7)}, tmp_path / "c")
    (found,) = checkpoint.load(
        tmp_path / "c", like={"step": 0}, callback=lambda array, name: [array]
    ).values()
    assert_same(found, [np.array(7, np.int32)])


@pytest.mark.sample(3)
def test_a_resumed_optimizer_with_rates_in_its_state_is_not_compiled_again(saved):
    tx = optax.inject_hyperparams(optax.adam)(learning_rate=0.1)
    compiled = []

    @jax.jit
    def step(params, state):
        compiled.append(state)
        updates, state = tx.update(params, state)
        return optax.apply_updates(params, updates), state

    start = {"w": jnp.ones(4, jnp.bfloat16)}
    params, state = step(start, tx.init(start))
    params, state = step(params, state)
    before = len(compiled)
    resumed = checkpoint.load(saved([params, state]), like=[params, state])
    assert jax.tree.map(jax.typeof, resumed) == jax.tree.map(jax.typeof, [params, state])
    step(*resumed)
    assert len(compiled) == before
