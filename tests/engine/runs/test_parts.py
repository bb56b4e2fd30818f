"""A part of the state that is saved more often than the whole, with rules of its own."""

import flax.nnx as nnx
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from eformer import checkpoint
from eformer.checkpoint import Every, Keep, Run
from eformer.errors import StructureError
from support.trees import assert_same


def state(number):
    params = {"layer": {"b": jnp.zeros(2), "w": jnp.full(4, number)}}
    return {"opt": optax.adam(1e-3).init(params), "params": params, "step": number}


def numbers(path):
    return [step.number for step in checkpoint.steps(path)]


def train(path, until, **arguments):
    with Run(path, signals=(), **arguments) as run:
        run.resume(like=state(0))
        for number in range(run.step + 1, until + 1):
            run.after(number, state(number), metrics={"loss": abs(number - 5)})


BEST = [Every(8), Every(2, only="params", keep=Keep(best=1, by="loss"))]


def test_a_part_is_saved_more_often_and_kept_by_its_own_rules(tmp_path):
    train(tmp_path, 12, every=BEST, keep=1)
    assert numbers(tmp_path) == [8]
    assert numbers(tmp_path / "params") == [6, 12]  # the best, and the newest
    assert_same(checkpoint.load(tmp_path / "params" / "step-6"), {"params": state(6)["params"]})
    assert checkpoint.steps(tmp_path / "params")[0].metrics == {"loss": 1.0}


def test_a_run_resumes_from_whole_steps_alone(tmp_path):
    train(tmp_path, 12, every=BEST)
    with Run(tmp_path, every=BEST, signals=()) as run:
        found = run.resume(like=state(0))
    assert found.step == 8
    assert_same(found.tree, state(8))


def test_parts_of_steps_that_are_done_again_are_replaced(tmp_path):
    train(tmp_path, 12, every=BEST)
    train(tmp_path, 14, every=BEST)
    assert numbers(tmp_path / "params") == [6, 14]
    assert checkpoint.verify(tmp_path / "params" / "step-14").ok


def test_a_part_without_rules_keeps_all_its_steps(tmp_path):
    train(tmp_path, 6, every=[Every(6), Every(2, only="params")], keep=1)
    assert numbers(tmp_path / "params") == [2, 4, 6]


def test_a_part_may_lie_deeper_and_be_of_a_module(tmp_path):
    class Model(nnx.Module):
        def __init__(self):
            self.head = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
            self.body = nnx.Linear(2, 2, rngs=nnx.Rngs(1))

    model = Model()
    with Run(tmp_path, every=[Every(1, only="params.layer"), Every(1, only="model.head")], signals=()) as run:
        run.after(1, {**state(1), "model": model})
    assert_same(checkpoint.load(tmp_path / "params.layer")["params"], {"layer": state(1)["params"]["layer"]})
    head = checkpoint.load(tmp_path / "model.head", keys="model.head")
    np.testing.assert_array_equal(head["model.head.kernel"], model.head.kernel[...])


def test_a_part_that_the_tree_does_not_have_is_named(tmp_path):
    missing = pytest.raises(StructureError, match="the tree has no part 'weights': it has opt; params; step")
    with Run(tmp_path, every=Every(1, only="weights"), signals=()) as run, missing:
        run.after(1, state(1))


def test_a_fresh_run_puts_the_parts_aside_too(tmp_path):
    train(tmp_path, 4, every=[Every(4), Every(2, only="params")])
    with Run(tmp_path, every=[Every(4), Every(2, only="params")], fresh=True, signals=()) as run:
        run.after(2, state(2))
    assert numbers(tmp_path) == []
    assert {path.name for path in (tmp_path / "params").iterdir()} == {"step-2", "step-2.old", "step-4.old"}


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"only": "params", "minutes": 5}, "pass steps= or at=, not minutes="),
        ({"only": "params", "continuous": True}, "pass steps= or at=, not minutes="),
        ({"steps": 1, "only": "../params"}, "can be the name of a directory"),
        ({"steps": 1, "only": "step-3"}, "would be a step of the run"),
        ({"steps": 1, "keep": 3}, "pass only=, or keep= to the Run"),
    ],
)
def test_rules_for_parts_that_make_no_sense_are_errors(arguments, problem):
    with pytest.raises(ValueError, match=problem):
        Every(**arguments)
