"""Training states of flax linen: resumed, from shapes alone, boxed, and fine-tuned."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from eformer.checkpoint import load, save
from eformer.errors import MismatchError
from support.meshes import grid

X = jnp.linspace(-1, 1, 24).reshape(6, 4)


class Model(nn.Module):
    classes: int = 3

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.classes, name="head")(nn.relu(nn.Dense(8, name="body")(x)))


MODEL = Model()
OPTIMIZERS = {
    "adam": optax.adam(1e-2),
    "masked": optax.chain(
        optax.masked(optax.sgd(1e-2, momentum=0.9), {"params": {"body": True, "head": False}}),
        optax.scale_by_adam(),
    ),
    "inject": optax.inject_hyperparams(optax.adamw)(learning_rate=optax.linear_schedule(1e-2, 0, 100)),
}


def start(tx, seed=0, model=MODEL):
    return TrainState.create(apply_fn=model.apply, params=model.init(jax.random.key(seed), X), tx=tx)


@jax.jit
def step(state):
    grads = jax.grad(lambda params: (state.apply_fn(params, X) ** 2).mean())(state.params)
    return state.apply_gradients(grads=grads)


def assert_same(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)
        assert jnp.asarray(a).dtype == jnp.asarray(b).dtype


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_bit_for_bit(tmp_path, name):
    tx = OPTIMIZERS[name]
    state = step(step(start(tx)))
    save(state, tmp_path / "run")
    fresh = start(tx, seed=1)  # whose step is a plain int
    resumed = [
        load(tmp_path / "run", like=fresh),
        load(tmp_path / "run", like=step(fresh)),
        load(tmp_path / "run", like=jax.eval_shape(lambda: start(tx))),
    ]
    expected = step(step(state))
    for found in resumed:
        assert found.tx is tx
        assert_same(step(step(found)), expected)


def test_a_mesh_and_rules_for_shapes_alone(tmp_path):
    tx = OPTIMIZERS["adam"]
    save(step(start(tx)), tmp_path / "run")
    rules = [("body/kernel", P(None, "model"))]
    like = jax.eval_shape(lambda: start(tx))
    state = load(tmp_path / "run", like=like, mesh=grid(), rules=rules)
    for tree in (state.params["params"], state.opt_state[0].mu["params"]):
        assert tree["body"]["kernel"].sharding == NamedSharding(grid(), P(None, "model"))
    assert_same(state.params, step(start(tx)).params)


def test_boxes_of_partitioned_parameters(tmp_path):
    class Boxed(nn.Module):
        @nn.compact
        def __call__(self, x):
            init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
            return nn.Dense(8, kernel_init=init)(x)

    def make(seed):
        return Boxed().init(jax.random.key(seed), X)

    save(make(0), tmp_path / "boxed")
    shapes = jax.eval_shape(lambda: make(1))
    assert_same(load(tmp_path / "boxed", like=shapes), make(0))
    assert_same(load(tmp_path / "boxed"), make(0))
    shardings = nn.get_sharding(shapes, grid())
    found = load(tmp_path / "boxed", like=shapes, mesh=grid(), shardings=shardings)
    kernel = found["params"]["Dense_0"]["kernel"]
    assert isinstance(kernel, nn.Partitioned)
    assert kernel.value.sharding == NamedSharding(grid(), P(None, "model"))
    unboxed = nn.meta.unbox(make(0))
    assert_same(load(tmp_path / "boxed", like=nn.meta.unbox(shapes)), unboxed)
    save(unboxed, tmp_path / "unboxed")
    assert_same(load(tmp_path / "unboxed", like=shapes), make(0))


@pytest.mark.thorough
def test_fine_tuning_with_another_head(tmp_path):
    tx = OPTIMIZERS["adam"]
    pretrained = step(start(tx))
    save(pretrained, tmp_path / "pretrained")
    state = start(tx, seed=1, model=Model(classes=5))
    with pytest.raises(MismatchError, match=r"head.kernel': expected float32\[8, 5\], found float32\[8, 3\]"):
        load(tmp_path / "pretrained", like=state.params, root="params")
    params, report = load(
        tmp_path / "pretrained",
        like=state.params,
        root="params",
        rename={r"params\.head\..*": None},
        partial=True,
        return_report=True,
    )
    assert sorted(report.kept) == ["params.head.bias", "params.head.kernel"]
    np.testing.assert_array_equal(
        params["params"]["body"]["kernel"], pretrained.params["params"]["body"]["kernel"]
    )
    np.testing.assert_array_equal(
        params["params"]["head"]["kernel"], state.params["params"]["head"]["kernel"]
    )
