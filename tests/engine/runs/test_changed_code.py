"""A run that is resumed after its code has changed: another optimizer, a renamed layer, another dtype, another shape."""

import errno
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.training.train_state import TrainState

from eformer import checkpoint
from eformer.checkpoint import Near, Run
from eformer.errors import FormatError, MismatchError
from support.trees import assert_same

X = jnp.linspace(-1, 1, 12).reshape(3, 4)


class Model(linen.Module):
    """Two layers, of which the test names the first."""

    first: str = "dense"

    @linen.compact
    def __call__(self, x):
        return linen.Dense(2, name="head")(linen.Dense(5, name=self.first)(x))


def start(optimizer=None, **how):
    model = Model(**how)
    params = model.init(jax.random.key(0), X)["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=optimizer or optax.adam(1e-2))


@jax.jit
def train(state):
    grads = jax.grad(lambda params: jnp.square(state.apply_fn({"params": params}, X)).sum())(state.params)
    return state.apply_gradients(grads=grads)


def trained(path, state, until, **resume):
    """Resume the run, and train; return the state and what was resumed."""
    with Run(path, every=1, signals=()) as run:
        if found := run.resume(like=state, **resume):
            state = found.tree
        for step in range(run.step, until):
            state = train(state)
            run.after(step + 1, state)
    return state, found


@pytest.fixture(scope="module")
def three_steps(tmp_path_factory):
    path = tmp_path_factory.mktemp("changed_code") / "run"
    trained(path, start(), 3)
    return path


@pytest.fixture
def path(three_steps, tmp_path):
    return shutil.copytree(three_steps, tmp_path / "run")


@pytest.mark.thorough
def test_another_optimizer(path, caplog):
    before = checkpoint.load(path, root="params")
    state = start(optax.lion(1e-3))
    with pytest.raises(MismatchError, match=r"partial=True would leave \d of the checkpoint out"):
        trained(path, state, 3)
    _, found = trained(path, state, 3, partial=True)
    assert_same(found.tree.params, before)
    assert (found.step, int(found.tree.step)) == (3, 3)
    assert {name.rpartition(".")[0] for name in found.report.left_out} >= {"opt_state.0.nu.head"}
    assert "step 3: " in caplog.text
    assert "of the checkpoint left out (opt_state.0.nu" in caplog.text


def test_the_same_program_starts_again_with_the_same_arguments(path, caplog):
    trained(path, start(optax.lion(1e-3)), 4, partial=True)
    caplog.clear()
    state, found = trained(path, start(optax.lion(1e-3)), 5, partial=True)
    assert (found.step, found.report.left_out, int(state.step), caplog.text) == (4, (), 5, "")


def test_a_renamed_layer_goes_on_bit_for_bit(path, tmp_path):
    expected, _ = trained(tmp_path / "whole", start(), 6)
    rules = {r"(.*)\.dense\.(.*)": r"\1.hidden.\2"}  # in the parameters and in the moments
    found, _ = trained(path, start(first="hidden"), 5, rename=rules)
    found, _ = trained(path, start(first="hidden"), 6, rename=rules)  # where nothing is left to rename
    assert_same(found.params["hidden"], expected.params["dense"])
    assert_same(found.opt_state[0].mu["hidden"], expected.opt_state[0].mu["dense"])


def test_another_dtype(path):
    before = checkpoint.load(path, root="params")
    state = jax.tree.map(
        lambda x: jnp.bfloat16(x) if getattr(x, "dtype", None) == jnp.float32 else x, start()
    )
    _, found = trained(path, state, 3, dtype="bfloat16")
    assert found.tree.params["head"]["bias"].dtype == jnp.bfloat16
    assert_same(found.tree.params, jax.tree.map(lambda x: x.astype(jnp.bfloat16), before))


def test_another_mesh(path):
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    _, found = trained(path, start(), 3, mesh=mesh, rules={"bias": jax.P()})
    assert found.tree.params["head"]["bias"].sharding.mesh == mesh


def test_a_value_of_the_new_program_instead_of_the_saved_one(tmp_path):
    with Run(tmp_path, every=1) as run:
        run.after(1, {"w": jnp.ones(2), "learning_rate": 0.1})
    new = {"w": jnp.zeros(2), "learning_rate": 0.01}
    with Run(tmp_path) as run:
        found = run.resume(like=new, rename={"learning_rate": None}, partial=True)
    assert (found.tree["learning_rate"], found.tree["w"].tolist()) == (0.01, [1, 1])


def test_a_wider_layer(path):
    before = checkpoint.load(path, root="params")["head"]["bias"]
    with Run(path, signals=()) as run:
        like = {"bias": jnp.ones(4)}
        found = run.resume(
            like=like,
            root="params.head",
            resize={"bias": lambda old, new: new.at[:2].set(old)},
            partial=True,
            return_report=True,
        )
    assert found.report.resized == ("bias",)
    np.testing.assert_array_equal(found.tree["bias"], [*before, 1, 1])


def test_some_leaves_only(path):
    with Run(path, signals=()) as run:
        assert list(run.resume(keys=["params.head"]).tree) == ["params.head.bias", "params.head.kernel"]


def test_a_near_step_of_the_code_before(tmp_path):
    near = {"near": Near(tmp_path / "near", every=1), "signals": ()}
    with Run(tmp_path / "run", **near) as run:
        run.after(1, {"old": jnp.arange(3.0), "more": jnp.ones(2)})
    with Run(tmp_path / "run", **near) as run:
        like = {"new": jnp.zeros(3, jnp.bfloat16)}
        found = run.resume(like=like, rename={"old": "new"}, partial=True, dtype="bfloat16")
    assert_same(found.tree, {"new": jnp.arange(3, dtype=jnp.bfloat16)})


# ----------------------------------------------------------------------------------------------- messages


def test_the_report_is_returned_instead_of_logged(path, caplog):
    state = start(optax.lion(1e-3))
    _, found = trained(path, state, 3, partial=True, return_report=True)
    assert (len(found.report.left_out) > 0, caplog.text) == (True, "")


def test_the_message_names_the_argument_that_was_passed(tmp_path):
    with Run(tmp_path, signals=()) as run:
        run.save(1, nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
        with pytest.raises(MismatchError, match="the checkpoint does not fit `into`"):
            run.resume(into=nnx.Linear(2, 4, rngs=nnx.Rngs(0)))
        with pytest.raises(MismatchError, match="the checkpoint does not fit `like`"):
            run.resume(like={"kernel": jnp.zeros(1)})


@pytest.mark.parametrize("name", ["partail", "timeout", "store_options", "dequant", "duplicates"])
def test_an_argument_that_resume_lacks_is_an_error_that_names_both(path, name):
    with (
        Run(path, signals=()) as run,
        pytest.raises(TypeError, match=rf"Run\.resume\(\) got an unexpected keyword argument '{name}'"),
    ):
        run.resume(**{name: 1})


@pytest.mark.parametrize("option", [{"timeout": 5}, {"store_options": {"region": "x"}}])
def test_a_resume_has_the_timeout_and_the_store_options_of_its_run(path, option):
    with (
        Run(path, signals=()) as run,
        pytest.raises(ValueError, match=r"timeout or store_options: pass them in Run\(options=\)"),
    ):
        run.resume(options=option)


def test_a_leaf_without_a_value_is_not_looked_for_in_a_list_of_paths_which_resume_does_not_take(path):
    like = jax.eval_shape(lambda: start(optax.sgd(1e-3, momentum=0.9)))
    with Run(path, signals=()) as run, pytest.raises(MismatchError, match="not a value") as caught:
        run.resume(like=like, partial=True)
    assert "list of paths" not in str(caught.value)


def test_arguments_that_exclude_each_other_are_refused_before_anything_is_claimed(path):
    before = (path / "run.json").read_bytes()
    with Run(path, signals=()) as run:
        with pytest.raises(ValueError, match="pass like= or into=, not both"):
            run.resume(like=start(), into=start())
        with pytest.raises(ValueError, match="partial needs like= or into="):
            run.resume(partial=True)
    assert (path / "run.json").read_bytes() == before


ERRORS = [FileNotFoundError("mine"), OSError(errno.EIO, "mine"), FormatError("mine")]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("argument", ["callback", "progress", "resize", "shardings"])
def test_an_error_of_the_callers_function_is_not_taken_for_a_damaged_step(tmp_path, argument, error):
    def fail(*_):
        raise error

    with Run(tmp_path, signals=()) as run:
        for step in (1, 2):
            run.save(step, {"w": jnp.ones(3)})
    like = {"w": jnp.ones(5 if argument == "resize" else 3)}
    with Run(tmp_path, signals=()) as run, pytest.raises(type(error), match="mine"):
        run.resume(like=like, **{argument: fail})
    assert [step.number for step in checkpoint.steps(tmp_path)] == [1, 2]
