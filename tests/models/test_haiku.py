"""Parameters and state of Haiku, whose names have slashes."""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from eformer import checkpoint
from eformer.checkpoint import load, save

X = jnp.linspace(-1, 1, 24).reshape(6, 4)
TX = optax.adam(1e-2)


@hk.transform_with_state
def network(x):
    x = hk.nets.MLP([8])(x)
    x = hk.BatchNorm(create_scale=True, create_offset=True, decay_rate=0.9)(x, is_training=True)
    return hk.Linear(1)(hk.dropout(hk.next_rng_key(), 0.5, x))


INIT = jax.jit(network.init)


def start(seed):
    key = jax.random.key(seed)
    params, state = INIT(key, X)
    return {"params": params, "state": state, "opt": TX.init(params), "rng": key}


@jax.jit
def step(run):
    rng, key = jax.random.split(run["rng"])

    def loss(params):
        out, state = network.apply(params, run["state"], key, X)
        return (out**2).mean(), state

    grads, state = jax.grad(loss, has_aux=True)(run["params"])
    updates, opt = TX.update(grads, run["opt"])
    return {"params": optax.apply_updates(run["params"], updates), "state": state, "opt": opt, "rng": rng}


def numbers(leaf):
    return jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf


def assert_same(found, expected):
    found, expected = (jax.tree.map(numbers, tree) for tree in (found, expected))
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)


def test_training_goes_on_bit_for_bit_with_dropout_and_statistics(tmp_path):
    run = step(step(start(0)))
    save(run, tmp_path / "run")
    expected = step(step(run))
    for resumed in (
        load(tmp_path / "run"),
        load(tmp_path / "run", like=start(1)),
        load(tmp_path / "run", like=jax.eval_shape(lambda: start(1))),
    ):
        assert_same(step(step(resumed)), expected)


def test_names_have_slashes_as_haiku_has_them(tmp_path):
    save(start(0), tmp_path / "run")
    with checkpoint.open(tmp_path / "run") as view:
        assert view["params.mlp/~/linear_0.w"].shape == (4, 8)
    assert "mlp/~/linear_0" in str(checkpoint.inspect(tmp_path / "run"))


@pytest.mark.thorough
def test_a_pretrained_network_below_a_new_layer(tmp_path):
    save(start(0), tmp_path / "pretrained")
    fresh = start(1)["params"] | {"head": {"w": jnp.ones((1, 2))}}
    params, report = load(
        tmp_path / "pretrained", like=fresh, root="params", partial=True, return_report=True
    )
    assert report.kept == ("head.w",)
    assert_same(params, start(0)["params"] | {"head": {"w": jnp.ones((1, 2))}})
