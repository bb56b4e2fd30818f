"""Modules, optimizers and states of flax NNX: saved by their names, loaded in place or as new objects."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from eformer import checkpoint
from eformer.errors import MismatchError
from support.meshes import grid, tall

pytestmark = pytest.mark.sample(2)

X = jnp.linspace(-1, 1, 24).reshape(6, 4)
Y = jnp.ones((6, 3))
TX = optax.adam(1e-2)  # one for all: another is another program to compile


class Model(nnx.Module):
    def __init__(self, seed, width=8):
        rngs = nnx.Rngs(seed)
        self.first = nnx.Linear(4, width, rngs=rngs)
        self.norm = nnx.BatchNorm(width, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.last = nnx.Linear(width, 3, rngs=rngs)

    def __call__(self, x):
        return self.last(self.dropout(self.norm(nnx.relu(self.first(x)))))


def optimizer_of(model):
    return nnx.Optimizer(model, TX, wrt=nnx.Param)


@nnx.jit
def step(model, optimizer):
    def loss(model):
        return ((model(X) - Y) ** 2).mean()

    optimizer.update(model, nnx.grad(loss)(model))


def train(model, optimizer, steps):
    for _ in range(steps):
        step(model, optimizer)


def values(module):
    """The arrays of a module's variables by path; keys as their numbers."""

    def plain(leaf):
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(leaf) if is_key else leaf)

    return {path: plain(leaf.get_raw_value()) for path, leaf in nnx.to_flat_state(nnx.state(module))}


def assert_same(found, expected):
    found, expected = values(found), values(expected)
    assert found.keys() == expected.keys()
    for path, value in expected.items():
        np.testing.assert_array_equal(found[path], value, str(path))


@pytest.fixture(params=["safetensors", "tensorstore"])
def path(request, tmp_path):
    return checkpoint.save(trained(), tmp_path / "model", format=request.param)


@functools.cache
def trained():
    """A model after two steps, for all tests, which do not change it."""
    model = Model(0)
    train(model, optimizer_of(model), 2)
    return model


def test_names_have_no_value_at_their_end(path):
    names = set(checkpoint.open(path))
    assert {"first.kernel", "norm.mean", "dropout.rngs.key", "dropout.rngs.count"} <= names
    assert not any("value" in name for name in names)


def test_a_load_into_a_model_updates_it_in_place(path):
    model = Model(1)
    kernel, first = model.first.kernel, model.first
    assert checkpoint.load(path, into=model) is model
    assert model.first is first
    assert model.first.kernel is kernel
    assert_same(model, trained())
    np.testing.assert_array_equal(
        nnx.view(model, deterministic=True)(X), nnx.view(trained(), deterministic=True)(X)
    )


def test_a_load_like_a_model_is_a_new_one_and_the_old_one_stays(path):
    model = Model(1)
    loaded = checkpoint.load(path, like=model)
    assert isinstance(loaded, Model)
    assert loaded.first is not model.first
    assert_same(loaded, trained())
    assert_same(model, Model(1))
    loaded.first.kernel[...] = loaded.first.kernel[...] + 1
    assert_same(model, Model(1))


def test_without_like_the_state_comes_back_in_dicts(path):
    tree = checkpoint.load(path)
    np.testing.assert_array_equal(tree["first"]["kernel"], trained().first.kernel[...])


def test_training_goes_on_bit_for_bit_with_dropout_and_statistics(tmp_path):
    model = Model(0)
    optimizer = optimizer_of(model)
    train(model, optimizer, 3)
    checkpoint.save({"model": model, "opt": optimizer}, tmp_path / "run")
    train(model, optimizer, 3)

    again = Model(1)
    fresh = optimizer_of(again)
    checkpoint.load(tmp_path / "run", into={"model": again, "opt": fresh})
    train(again, fresh, 3)
    assert_same(again, model)
    assert_same(fresh, optimizer)
    assert fresh.step[...] == 6


@pytest.mark.thorough
def test_training_goes_on_with_new_objects_too(tmp_path):
    model = Model(0)
    optimizer = optimizer_of(model)
    train(model, optimizer, 3)
    checkpoint.save({"model": model, "opt": optimizer}, tmp_path / "run")
    train(model, optimizer, 3)

    like = Model(1)
    loaded = checkpoint.load(tmp_path / "run", like={"model": like, "opt": optimizer_of(like)})
    train(loaded["model"], loaded["opt"], 3)
    assert_same(loaded["model"], model)
    assert_same(loaded["opt"], optimizer)


@pytest.mark.thorough
def test_an_optimizer_alone(tmp_path):
    model = Model(0)
    optimizer = optimizer_of(model)
    train(model, optimizer, 2)
    checkpoint.save(optimizer, tmp_path / "opt")
    fresh = optimizer_of(Model(1))
    checkpoint.load(tmp_path / "opt", into=fresh)
    assert_same(fresh, optimizer)


def test_a_save_in_the_background_keeps_the_values_of_its_call(tmp_path):
    model = Model(0)
    optimizer = optimizer_of(model)
    pending = checkpoint.save_async({"model": model, "opt": optimizer}, tmp_path / "run")
    train(model, optimizer, 2)
    pending.result()
    assert_same(checkpoint.load(tmp_path / "run", root="model", like=Model(1)), Model(0))


# --------------------------------------------------------------------------------------------- sharing


class Tied(nnx.Module):
    def __init__(self, seed):
        self.embed = nnx.Embed(5, 4, rngs=nnx.Rngs(seed))
        self.head = nnx.Linear(4, 5, rngs=nnx.Rngs(seed))
        self.table = self.embed.embedding


def are_tied(one, other):
    """Tell whether a change of one variable is a change of the other."""
    one[...] = one[...] + 1
    return one is other and np.array_equal(one[...], other[...])


@pytest.mark.parametrize("argument", ["like", "into"])
def test_a_shared_variable_is_stored_once_and_tied_after_the_load(tmp_path, argument):
    checkpoint.save(Tied(0), tmp_path / "tied")
    assert [name for name in checkpoint.open(tmp_path / "tied") if "table" in name] == []
    loaded = checkpoint.load(tmp_path / "tied", **{argument: Tied(1)})
    np.testing.assert_array_equal(loaded.table[...], Tied(0).table[...])
    assert are_tied(loaded.table, loaded.embed.embedding)


@pytest.mark.parametrize("argument", ["like", "into"])
def test_a_variable_shared_by_two_modules_of_a_tree_is_stored_once_and_tied(tmp_path, argument):
    def tree(seed):
        tied = Tied(seed)
        other = nnx.Linear(4, 5, rngs=nnx.Rngs(seed))
        other.kernel = tied.head.kernel
        return [tied, other]

    checkpoint.save(tree(0), tmp_path / "two")
    assert sorted(checkpoint.open(tmp_path / "two")) == [
        "0.embed.embedding", "0.head.bias", "0.head.kernel", "1.bias",
    ]  # fmt: skip
    loaded = checkpoint.load(tmp_path / "two", **{argument: tree(1)})
    np.testing.assert_array_equal(loaded[1].kernel[...], tree(0)[1].kernel[...])
    assert are_tied(loaded[1].kernel, loaded[0].head.kernel)


@pytest.mark.thorough
def test_a_module_twice_in_a_tree_is_one_object_after_the_load(tmp_path):
    one = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    checkpoint.save({"a": one, "b": one}, tmp_path / "twice")
    assert sorted(checkpoint.open(tmp_path / "twice")) == ["a.bias", "a.kernel"]
    other = nnx.Linear(2, 2, rngs=nnx.Rngs(1))
    loaded = checkpoint.load(tmp_path / "twice", like={"a": other, "b": other})
    assert are_tied(loaded["a"].kernel, loaded["b"].kernel)


# ---------------------------------------------------------------------------------------------- states


def test_a_state_loads_as_a_state_and_as_a_model(tmp_path):
    checkpoint.save(nnx.state(trained()), tmp_path / "state")
    state = checkpoint.load(tmp_path / "state", like=nnx.state(Model(1)))
    assert isinstance(state, nnx.State)
    model = Model(2)
    nnx.update(model, state)
    assert_same(model, trained())
    assert_same(checkpoint.load(tmp_path / "state", like=Model(1)), trained())


@pytest.mark.thorough
def test_the_parameters_alone(tmp_path):
    checkpoint.save(nnx.state(trained(), nnx.Param), tmp_path / "params")
    assert not any(name.startswith("dropout") for name in checkpoint.open(tmp_path / "params"))
    model = Model(1)
    nnx.update(model, checkpoint.load(tmp_path / "params", like=nnx.state(model, nnx.Param)))
    np.testing.assert_array_equal(model.last.kernel[...], trained().last.kernel[...])


def test_the_parameters_of_a_whole_model(path):
    model = Model(1)
    loaded, report = checkpoint.load(path, like=nnx.state(model, nnx.Param), partial=True, return_report=True)
    assert {"dropout.rngs.key", "norm.mean"} <= set(report.left_out)
    assert report.kept == ()
    nnx.update(model, loaded)
    np.testing.assert_array_equal(model.last.kernel[...], trained().last.kernel[...])


def test_a_state_is_updated_in_place(path):
    state = nnx.state(Model(1))
    assert checkpoint.load(path, into=state) is state
    np.testing.assert_array_equal(state["last"]["kernel"][...], trained().last.kernel[...])


def test_a_pure_dict_and_a_model_have_the_same_names(path):
    like = nnx.to_pure_dict(nnx.state(Model(1)))
    loaded = checkpoint.load(path, like=like)
    np.testing.assert_array_equal(loaded["last"]["kernel"], trained().last.kernel[...])


# ------------------------------------------------------------------------------------- other variables


@pytest.mark.thorough
def test_containers_of_modules(tmp_path):
    def make(seed):
        rngs = nnx.Rngs(seed)
        return nnx.Dict(
            a=nnx.List([nnx.Linear(2, 2, rngs=rngs), nnx.Linear(2, 3, rngs=rngs)]),
            b=nnx.Sequential(nnx.Linear(2, 3, rngs=rngs), nnx.relu, nnx.Linear(3, 1, rngs=rngs)),
        )

    checkpoint.save(make(0), tmp_path / "containers")
    assert {"a.0.kernel", "a.1.bias", "b.layers.2.kernel"} <= set(checkpoint.open(tmp_path / "containers"))
    loaded = checkpoint.load(tmp_path / "containers", like=make(1))
    assert_same(loaded, make(0))
    np.testing.assert_array_equal(loaded["b"](X[:, :2]), make(0)["b"](X[:, :2]))
    assert_same(checkpoint.load(tmp_path / "containers", into=make(1)), make(0))


@pytest.mark.thorough
def test_a_variable_whose_value_is_a_tree(tmp_path):
    def make(number):
        module = nnx.Module()
        module.cache = nnx.Cache({"k": jnp.full(2, number), "v": [jnp.full(3, number), number]})
        return module

    checkpoint.save(make(1.0), tmp_path / "cache")
    assert sorted(checkpoint.open(tmp_path / "cache")) == ["cache.k", "cache.v.0", "cache.v.1"]
    for argument in ("like", "into"):
        cache = checkpoint.load(tmp_path / "cache", **{argument: make(2.0)}).cache.get_raw_value()
        np.testing.assert_array_equal(cache["k"], [1, 1])
        np.testing.assert_array_equal(cache["v"][0], [1, 1, 1])
        assert cache["v"][1] == 1.0


def test_a_variable_alone_in_a_dict(tmp_path):
    checkpoint.save({"w": nnx.Param(jnp.ones(3)), "step": 3}, tmp_path / "variable")
    assert sorted(checkpoint.open(tmp_path / "variable")) == ["step", "w"]
    like = {"w": nnx.Param(jnp.zeros(3), note="kept"), "step": 0}
    loaded = checkpoint.load(tmp_path / "variable", like=like)
    assert isinstance(loaded["w"], nnx.Param)
    assert loaded["w"].note == "kept"
    np.testing.assert_array_equal(loaded["w"][...], [1, 1, 1])
    np.testing.assert_array_equal(like["w"][...], [0, 0, 0])
    assert checkpoint.load(tmp_path / "variable", into=like)["w"] is like["w"]
    np.testing.assert_array_equal(like["w"][...], [1, 1, 1])


@pytest.mark.thorough
def test_streams_of_random_numbers_go_on(tmp_path):
    rngs = nnx.Rngs(0, dropout=5)
    rngs.dropout(), rngs.params()
    checkpoint.save(rngs, tmp_path / "rngs")
    expected = jax.random.key_data(rngs.dropout())
    other = nnx.Rngs(1, dropout=6)
    checkpoint.load(tmp_path / "rngs", into=other)
    np.testing.assert_array_equal(jax.random.key_data(other.dropout()), expected)


# ----------------------------------------------------------------------------------------- differences


@pytest.mark.thorough
def test_differences_name_the_leaves(path):
    class Larger(Model):
        def __init__(self, seed):
            super().__init__(seed, width=9)
            self.extra = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
            del self.norm

    model = Larger(1)
    with pytest.raises(MismatchError) as raised:
        checkpoint.load(path, into=model)
    text = str(raised.value)
    assert "'first.kernel': expected float32[4, 9], found float32[4, 8]" in text
    assert "missing leaf 'extra.kernel'" in text
    assert "unexpected leaf 'norm.mean'" in text
    assert "does not fit `into`" in text
    assert_same(model, Larger(1))


@pytest.mark.thorough
def test_a_larger_model_keeps_what_the_checkpoint_lacks(path):
    class Larger(Model):
        def __init__(self, seed):
            super().__init__(seed)
            self.extra = nnx.Linear(1, 1, rngs=nnx.Rngs(seed))

    model, report = checkpoint.load(path, into=Larger(1), partial=True, return_report=True)
    assert sorted(report.kept) == ["extra.bias", "extra.kernel"]
    np.testing.assert_array_equal(model.extra.kernel[...], Larger(1).extra.kernel[...])
    np.testing.assert_array_equal(model.first.kernel[...], trained().first.kernel[...])


# ------------------------------------------------------------------------------------- other checkpoints


def test_a_state_that_orbax_saved(tmp_path):
    from orbax.checkpoint import v1 as ocp

    expected = trained()
    state = nnx.state(expected, nnx.Not(nnx.RngState))  # Orbax does not store typed keys by default
    ocp.save(tmp_path / "theirs", state)
    like = nnx.state(Model(1), nnx.Not(nnx.RngState))
    loaded = checkpoint.load(tmp_path / "theirs", like=like)
    np.testing.assert_array_equal(loaded["norm"]["mean"][...], expected.norm.mean[...])
    model = checkpoint.load(tmp_path / "theirs", into=Model(1), partial=True)
    np.testing.assert_array_equal(model.last.kernel[...], expected.last.kernel[...])


def test_a_checkpoint_whose_names_end_in_value(tmp_path):
    state = nnx.to_pure_dict(nnx.state(trained()))
    earlier = jax.tree.map(lambda array: {"value": array}, state)
    checkpoint.save(earlier, tmp_path / "earlier")
    assert_same(checkpoint.load(tmp_path / "earlier", like=Model(1)), trained())
    loaded = checkpoint.load(tmp_path / "earlier", like=nnx.state(Model(1)))
    np.testing.assert_array_equal(loaded["last"]["kernel"][...], trained().last.kernel[...])


# ---------------------------------------------------------------------------------------------- meshes


class Partitioned(nnx.Module):
    def __init__(self, seed=0):
        rngs = nnx.Rngs(seed)
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "model"))
        self.first = nnx.Linear(4, 8, kernel_init=init, rngs=rngs)
        self.last = nnx.Linear(8, 4, kernel_metadata={"out_sharding": ("ff", None)}, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)


RULES = [("ff", "model")]
LIKE_ITS_METADATA = {"first": P(None, "model"), "last": P("model", None)}


@pytest.fixture
def partitioned(tmp_path):
    """A model that was saved on one device, as somebody without a mesh would."""
    with nnx.use_eager_sharding(False):
        checkpoint.save(Partitioned(), tmp_path / "partitioned")
        yield tmp_path / "partitioned"


def abstract():
    model = nnx.eval_shape(Partitioned)
    assert model.first.kernel.get_raw_value().sharding is None
    return model


def assert_partitioned(model, mesh):
    for layer, spec in LIKE_ITS_METADATA.items():
        kernel, bias = getattr(model, layer).kernel[...], getattr(model, layer).bias[...]
        assert kernel.sharding.is_equivalent_to(NamedSharding(mesh, spec), 2)
        assert bias.sharding.is_equivalent_to(NamedSharding(mesh, P()), 1)
    assert_same(model, Partitioned())


@pytest.mark.parametrize("argument", ["like", "into"])
def test_an_abstract_model_is_placed_by_its_metadata(partitioned, argument):
    with nnx.logical_axis_rules(RULES):
        model = checkpoint.load(partitioned, **{argument: abstract()}, mesh=grid())
        assert_partitioned(model, grid())
        like = abstract()
        with jax.set_mesh(grid()):
            assert_partitioned(checkpoint.load(partitioned, like=like), grid())
        state = checkpoint.load(partitioned, like=nnx.state(abstract()), mesh=grid())
        assert state["first"]["kernel"].get_raw_value().sharding.spec == P(None, "model")


def test_metadata_have_no_effect_without_a_mesh(partitioned):
    model = checkpoint.load(partitioned, like=abstract())
    assert_same(model, Partitioned())
    assert model.first.kernel[...].sharding.device_set == {jax.devices()[0]}


def test_abstract_variables_that_the_checkpoint_lacks_are_named(partitioned):
    def larger():
        model = Partitioned()
        model.extra = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
        return model

    with pytest.raises(MismatchError, match=r"'extra.bias'.* has a ShapeDtypeStruct, not a value"):
        checkpoint.load(partitioned, like=nnx.eval_shape(larger), partial=True)


def test_names_of_axes_that_the_mesh_lacks_are_one_error(partitioned):
    with pytest.raises(MismatchError, match=r"leaf 'last.kernel' \[8, 4\]: .*'ff'.* does not fit"):
        checkpoint.load(partitioned, like=abstract(), mesh=grid())


def test_shardings_of_values_and_arguments_win_over_metadata(partitioned):
    model = abstract()
    shape = model.first.kernel.get_raw_value()
    rows = NamedSharding(grid(), P("data"))
    model.first.kernel.set_raw_value(jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=rows))
    columns = {"last.kernel": P(None, "data")}
    loaded = checkpoint.load(partitioned, like=model, mesh=grid(), shardings=columns)
    assert loaded.first.kernel[...].sharding == rows
    assert loaded.last.kernel[...].sharding.spec == P(None, "data")


@pytest.mark.thorough
def test_an_abstract_optimizer_is_placed_like_its_model(tmp_path):
    def make():
        model = Partitioned()
        return {"model": model, "opt": optimizer_of(model)}

    with nnx.use_eager_sharding(False), nnx.logical_axis_rules(RULES):
        checkpoint.save(make(), tmp_path / "run")
        loaded = checkpoint.load(tmp_path / "run", like=nnx.eval_shape(make), mesh=grid())
        assert_partitioned(loaded["model"], grid())
    assert loaded["opt"].opt_state[0].mu["first"]["kernel"][...].sharding.spec == P(None, "model")


@pytest.mark.thorough
def test_a_model_made_on_a_mesh_loads_on_another(tmp_path):
    def on(mesh, make=lambda: Partitioned()):
        with jax.set_mesh(mesh), nnx.logical_axis_rules(RULES):
            return make()

    checkpoint.save(on(grid()), tmp_path / "model")
    wanted = on(tall())
    shardings = {layer: getattr(wanted, layer).kernel[...].sharding for layer in LIKE_ITS_METADATA}
    abstract = on(tall(), lambda: nnx.eval_shape(Partitioned))  # with shardings on an AbstractMesh
    for loaded in (
        checkpoint.load(tmp_path / "model", into=wanted),
        checkpoint.load(tmp_path / "model", like=abstract, mesh=tall()),
    ):
        assert {layer: getattr(loaded, layer).kernel[...].sharding for layer in shardings} == shardings
        assert_same(loaded, on(grid()))
