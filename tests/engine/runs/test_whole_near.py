"""Near steps in another bucket: whole steps, saved more often than the steps of the run."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from eformer import checkpoint
from eformer._engine.stores.locate import store_at
from eformer.checkpoint import Near, Run
from support.buckets import objects, overwrite
from support.trees import assert_same

_numbers = itertools.count()


def tree(number):
    return {"step": number, "w": jnp.full(8, number)}


@pytest.fixture
def near():
    return Near(f"memory://near-{next(_numbers)}/tmp", every=2)


def run_on(path, near, **arguments):
    return Run(path, every=10, near=near, signals=(), **arguments)


def train(path, near, until, **arguments):
    with run_on(path, near, **arguments) as run:
        run.resume(like=tree(0))
        for number in range(run.step + 1, until + 1):
            run.after(number, tree(number), metrics={"loss": number})


def near_steps(near):
    store = store_at(near.path)
    return [
        step.number for epoch in sorted(store.kinds()) for step in checkpoint.steps(f"{near.path}/{epoch}")
    ]


@pytest.mark.parametrize("place", ["disk", "memory"])
def test_a_run_resumes_from_the_newest_step_of_both_buckets(tmp_path, near, place):
    path = tmp_path / "run" if place == "disk" else f"memory://far-{next(_numbers)}/run"
    train(path, near, 17)
    assert [step.number for step in checkpoint.steps(path)] == [10]
    with run_on(path, near) as run:
        found = run.resume(like=tree(0))
    assert found.step == 16
    assert_same(found.tree, tree(16))


def test_two_near_steps_stay_and_those_of_the_job_before_go_with_the_first_new_one(tmp_path, near):
    train(tmp_path / "run", near, 9)
    assert near_steps(near) == [6, 8]
    train(tmp_path / "run", near, 14)
    assert near_steps(near) == [12, 14]


def test_a_near_step_is_loaded_on_another_mesh(tmp_path, near):
    train(tmp_path / "run", near, 6)
    sharding = NamedSharding(jax.make_mesh((8,), ("x",)), P("x"))
    like = {"step": 0, "w": jax.ShapeDtypeStruct((8,), jnp.int32, sharding=sharding)}
    with run_on(tmp_path / "run", near) as run:
        found = run.resume(like=like)
    assert found.tree["w"].sharding == sharding
    np.testing.assert_array_equal(found.tree["w"], np.full(8, 6))


def test_a_damaged_near_step_is_passed_over(tmp_path, near):
    train(tmp_path / "run", near, 6)
    (data,) = (key for key in objects(near.path) if "/step-6/" in key and key.endswith(".safetensors"))
    overwrite(near.path, data, lambda data: data[:-1] + bytes([data[-1] ^ 1]))
    with run_on(tmp_path / "run", near) as run:
        found = run.resume(like=tree(0))
    assert (found.step, list(found.skipped)) == (4, [6])


def test_a_near_step_that_is_not_whole_is_named(tmp_path, near, caplog):
    train(tmp_path / "run", near, 6)
    (manifest,) = (key for key in objects(near.path) if key.endswith("/step-6/manifest.json"))
    overwrite(near.path, manifest, lambda data: data[:50])
    with run_on(tmp_path / "run", near) as run:
        assert run.resume(like=tree(0)).step == 4
    assert "step-6 is not used" in caplog.text


def test_near_steps_of_another_run_do_not_count_and_stay(tmp_path, near):
    train(tmp_path / "other", near, 6)
    train(tmp_path / "run", near, 3)
    assert sorted(near_steps(near)) == [2, 4, 6]
    with run_on(tmp_path / "run", near) as run:
        assert run.resume(like=tree(0)).step == 2


def test_a_fresh_run_and_a_rewound_one_leave_later_near_steps_behind(tmp_path, near):
    train(tmp_path / "run", near, 16)
    with run_on(tmp_path / "run", near) as run:
        assert run.resume(like=tree(0), step=10, rewind=True).step == 10
    with run_on(tmp_path / "run", near) as run:
        assert run.resume(like=tree(0)).step == 10
    with run_on(tmp_path / "run", near, fresh=True) as run:
        run.after(2, tree(2))
    with run_on(tmp_path / "run", near) as run:
        assert run.resume(like=tree(0)).step == 2


def test_a_near_save_that_fails_is_logged_alone(tmp_path, near, monkeypatch, caplog):
    with run_on(tmp_path / "run", near) as run:
        run.after(2, tree(2))
        run.wait()
        monkeypatch.setattr(run._near._series, "_refuse_link", lambda _: 1 / 0)
        run.after(4, tree(4))
        run.after(10, tree(10))
    assert "are tolerated" in caplog.text
    assert [step.number for step in checkpoint.steps(tmp_path / "run")] == [10]


def test_copies_are_of_local_near_steps(tmp_path):
    with pytest.raises(ValueError, match="a bucket needs no copies"):
        run_on(tmp_path / "run", Near("memory://near/x", every=2, copies=1))
