"""Modules of Equinox: arrays are stored, functions and static fields are those of the code."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from eformer import checkpoint
from eformer.checkpoint import abstract, convert, diff, inspect, load, save, verify
from eformer.errors import MismatchError, StructureError

pytestmark = pytest.mark.sample(2)

X = jnp.linspace(-1, 1, 8).reshape(4, 2)


def mlp(seed=0, out=3, activation=jax.nn.gelu):
    return eqx.nn.MLP(2, out, 4, depth=1, activation=activation, key=jax.random.key(seed))


def assert_same(found, expected):
    assert eqx.tree_equal(found, expected)


@pytest.fixture(params=["safetensors", "tensorstore"])
def path(request, tmp_path):
    return save(mlp(), tmp_path / "mlp", format=request.param)


def test_a_model_with_an_activation_comes_back_and_computes_the_same(path):
    loaded = load(path, like=mlp(seed=1))
    assert_same(loaded, mlp())
    assert loaded.activation is mlp().activation
    np.testing.assert_array_equal(jax.vmap(loaded)(X), jax.vmap(mlp())(X))


def test_functions_and_static_fields_are_those_of_like(path):
    loaded = load(path, like=mlp(seed=1, activation=jnp.tanh))
    assert loaded.activation is jnp.tanh
    assert loaded.layers[0].in_features == 2
    np.testing.assert_array_equal(loaded.layers[0].weight, mlp().layers[0].weight)


def test_like_may_be_abstract(path):
    like = eqx.filter_eval_shape(mlp)
    assert isinstance(like.layers[0].weight, jax.ShapeDtypeStruct)
    assert_same(load(path, like=like), mlp())


def test_inspect_says_which_leaves_are_left_to_the_code(path):
    assert "activation  = <jax._src.nn.functions.gelu, left to the code>" in str(inspect(path))
    report = load(path, like=mlp(1), return_report=True)[1]
    assert report.code == ("activation", "final_activation")


def test_without_like_the_error_names_the_functions(path):
    with pytest.raises(StructureError, match=r"are functions.*activation; final_activation; pass like="):
        load(path)
    assert load(path, keys="layers").keys() == {
        f"layers.{i}.{name}" for i in range(2) for name in ("weight", "bias")
    }


@pytest.mark.thorough
def test_tools_take_such_a_checkpoint(path, tmp_path):
    assert verify(path).ok
    save(mlp(1), tmp_path / "other")
    assert [change.name for change in diff(path, tmp_path / "other").changed] == [
        "layers.0.weight", "layers.0.bias", "layers.1.weight", "layers.1.bias",
    ]  # fmt: skip
    assert abstract(path).layers[1].weight == jax.ShapeDtypeStruct((3, 4), jnp.float32)


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", ["new", "new.safetensors"])
def test_a_conversion_keeps_the_names_of_functions(path, tmp_path, name):
    convert(path, tmp_path / name, to="safetensors")
    assert_same(load(tmp_path / name, like=mlp(1)), mlp())
    assert str(inspect(tmp_path / name)).count("left to the code") == 2


@pytest.mark.sample(4)
@pytest.mark.parametrize("form", ["msgpack", "npz"])
def test_a_conversion_to_a_format_without_functions_says_what_it_leaves_out(path, tmp_path, form):
    done = convert(path, tmp_path / f"new.{form}")
    assert f"{form} has no functions, which are left to the code: activation; final_activation" in done.notes
    assert_same(load(tmp_path / f"new.{form}", like=mlp(1)), mlp())


# ----------------------------------------------------------------------------------- state and sharing


class Normed(eqx.Module):
    linear: eqx.nn.Linear
    norm: eqx.nn.BatchNorm

    def __init__(self, key):
        self.linear = eqx.nn.Linear(2, 3, key=key)
        self.norm = eqx.nn.BatchNorm(3, axis_name="batch", mode="batch")

    def __call__(self, x, state):
        return self.norm(self.linear(x), state)


def normed(seed):
    return eqx.nn.make_with_state(Normed)(jax.random.key(seed))


def run(model, state):
    return jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(X, state)


@pytest.mark.parametrize("like", [lambda: normed(1), lambda: eqx.filter_eval_shape(normed, 1)])
def test_statistics_of_a_batch_norm_go_on(tmp_path, like):
    model, state = normed(0)
    _, state = run(model, state)
    save((model, state), tmp_path / "normed")
    again = load(tmp_path / "normed", like=like())
    for found, expected in zip(run(*again), run(model, state), strict=True):
        assert_same(jax.tree.leaves(found), jax.tree.leaves(expected))
    inference = eqx.nn.inference_mode(again[0])
    np.testing.assert_array_equal(run(inference, again[1])[0], run(eqx.nn.inference_mode(model), state)[0])


class Language(eqx.Module):
    shared: eqx.nn.Shared

    def __init__(self, seed):
        keys = jax.random.split(jax.random.key(seed))
        embed, head = eqx.nn.Embedding(5, 3, key=keys[0]), eqx.nn.Linear(3, 5, use_bias=False, key=keys[1])
        self.shared = eqx.nn.Shared((embed, head), lambda pair: pair[1].weight, lambda pair: pair[0].weight)

    def __call__(self, token):
        embed, head = self.shared()
        return head(embed(token))


def test_shared_layers_are_stored_once_and_stay_shared(tmp_path):
    save(Language(0), tmp_path / "language")
    assert inspect(tmp_path / "language").trees[""].nbytes == 5 * 3 * 4
    loaded = load(tmp_path / "language", like=Language(1))
    np.testing.assert_array_equal(loaded(2), Language(0)(2))
    embed, head = loaded.shared()
    assert embed.weight is head.weight


# -------------------------------------------------------------------------------------------- training


def test_training_goes_on_bit_for_bit(tmp_path):
    tx = optax.adam(1e-2)

    @eqx.filter_jit
    def step(model, opt):
        grads = eqx.filter_grad(lambda model: (jax.vmap(model)(X) ** 2).mean())(model)
        updates, opt = tx.update(grads, opt, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, updates), opt

    def start(seed):
        model = mlp(seed)
        return model, tx.init(eqx.filter(model, eqx.is_array))

    state = step(*step(*start(0)))
    checkpoint.save(state, tmp_path / "run")
    resumed = checkpoint.load(tmp_path / "run", like=start(1))
    assert_same(step(*step(*resumed)), step(*step(*state)))


@pytest.mark.thorough
def test_another_head_of_the_same_name_has_to_be_left_out(path):
    head = eqx.nn.Linear(4, 7, key=jax.random.key(9))
    like = eqx.tree_at(lambda model: model.layers[-1], mlp(1), head)
    with pytest.raises(
        MismatchError, match=r"'layers.1.weight': expected float32\[7, 4\], found float32\[3, 4\]"
    ):
        load(path, like=like, partial=True)
    loaded = load(path, like=like, partial=True, rename={r"layers\.1\..*": None})
    assert_same(loaded.layers, (mlp().layers[0], head))


class Classifier(eqx.Module):
    body: eqx.nn.MLP
    head: eqx.nn.Linear

    def __init__(self, seed):
        self.body, self.head = mlp(seed), eqx.nn.Linear(3, 7, key=jax.random.key(seed))


@pytest.mark.thorough
def test_a_pretrained_body_below_a_new_head(tmp_path):
    save({"body": mlp(0), "old_head": jnp.ones(3)}, tmp_path / "pretrained")
    like = Classifier(1)
    loaded, report = load(tmp_path / "pretrained", like=like, partial=True, return_report=True)
    assert_same(loaded.body, mlp(0))
    assert_same(loaded.head, like.head)
    assert report.kept == ("head.weight", "head.bias")
    assert report.left_out == ("old_head",)
