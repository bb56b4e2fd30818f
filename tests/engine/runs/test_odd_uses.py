"""A run that is used oddly: arguments, links, newer steps, a checkpoint as a run."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eformer import checkpoint
from eformer._engine.stores.local import LocalStore
from eformer.checkpoint import Run
from eformer.errors import StructureError
from support.trees import assert_same


def numbers(path):
    return [step.number for step in checkpoint.steps(path)]


class Place:
    def get_state(self):
        return 0

    def set_state(self, state):
        pass


class Data:
    def get_state(self):
        return 0

    def set_state(self, state):
        raise AssertionError(state)


@pytest.mark.parametrize("step", [100.0, "100", None])
def test_a_step_that_is_not_a_whole_number_is_refused(tmp_path, step):
    with Run(tmp_path, every=1) as run:
        with pytest.raises(TypeError, match=r"step=.*: expected a whole number"):
            run.save(step, {"w": np.ones(1)})
        with pytest.raises(TypeError, match=r"step=.*: expected a whole number"):
            run.after(step, {"w": np.ones(1)})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("step", [-1, 10**18])
def test_a_step_whose_name_would_not_be_listed_is_refused(tmp_path, step):
    with Run(tmp_path) as run, pytest.raises(ValueError, match=f"step={step}: expected a number from 0 on"):
        run.save(step, {"w": np.ones(1)})


def test_numbers_of_numpy_and_jax_are_numbers(tmp_path):
    with Run(tmp_path, every=np.int64(1), keep=np.int64(3)) as run:
        for step in (np.int64(1), jnp.int32(2), np.array(3), 10**18 - 1):
            run.after(step, {"w": np.ones(1)})
            assert type(run.step) is int
    assert numbers(tmp_path) == [2, 3, 10**18 - 1]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"every": 1.5}, TypeError, "every=1.5: expected a number of steps"),
        ({"every": "100"}, TypeError, "every=.100.: expected a number of steps"),
        ({"keep": "3"}, TypeError, "keep='3': expected a number of last steps"),
        ({"keep": []}, ValueError, r"keep=\[\]: no rule says which steps stay; None keeps all"),
    ],
)
def test_rules_that_are_none_are_refused(tmp_path, arguments, error, message):
    with pytest.raises(error, match=message):
        Run(tmp_path, **arguments)


@pytest.mark.parametrize("value", ["low", None, {"loss": 1.0}, np.ones(2), jnp.ones(2)])
def test_a_metric_that_is_not_a_number_is_refused_at_once(tmp_path, value):
    with Run(tmp_path) as run:
        with pytest.raises(ValueError, match=r"metrics\['eval'\] .*; expected a single number"):
            run.save(1, {"w": np.ones(1)}, metrics={"eval": value})
        run.save(1, {"w": np.ones(1)}, metrics={"eval": np.ones(1)[0]})
    assert checkpoint.steps(tmp_path)[0].metrics == {"eval": 1.0}


def test_metrics_may_be_donated_to_the_next_step(tmp_path):
    loss = jnp.float32(2) + 1
    with Run(tmp_path) as run:
        run.save(1, {"w": np.ones(1)}, metrics={"loss": loss})
        loss.delete()
    assert checkpoint.steps(tmp_path)[0].metrics == {"loss": 3.0}


def test_a_jitted_function_may_return_the_tree(tmp_path):
    with Run(tmp_path) as run:
        run.save(1, jax.jit(lambda: {"w": jnp.ones(2)}))
    assert_same(checkpoint.load(tmp_path), {"w": jnp.ones(2)})


def test_a_step_is_not_a_run(tmp_path):
    with Run(tmp_path / "run") as run:
        run.save(1, {"w": np.ones(1)})
    step = tmp_path / "run" / "step-1"
    before = sorted(os.listdir(step))
    with Run(step) as run, pytest.raises(ValueError, match="step-1 is a checkpoint, not a run"):
        run.resume()
    assert sorted(os.listdir(step)) == before


def test_a_step_that_a_link_points_to_stays(tmp_path):
    with Run(tmp_path, every=1, keep=1) as run:
        run.after(1, {"w": np.ones(1)}).result()
        (tmp_path / "best").symlink_to("step-1")
        run.after(2, {"w": np.ones(1)})
        run.after(3, {"w": np.ones(1)})
    assert numbers(tmp_path) == [1, 3]


def test_the_caller_is_told_of_a_step_even_if_another_cannot_be_removed(tmp_path, monkeypatch, caplog):
    def fail(*_, **__):
        raise PermissionError("not allowed")

    monkeypatch.setattr("eformer._engine.runs.series.remove_others", fail)
    monkeypatch.setattr("eformer._engine.runs.upkeep._PAUSES", ())
    seen = []
    with Run(tmp_path, every=1, keep=1, on_saved=lambda step: seen.append(step.number)) as run:
        run.after(1, {"w": np.ones(1)})
    assert seen == [1]
    assert "not allowed" in caplog.text


def test_an_error_of_a_save_is_logged_if_the_block_has_raised_another(tmp_path, caplog):
    def fail():
        with Run(tmp_path) as run:
            run.save(1, {"w": np.ones(1)}).result()
            (tmp_path / "run.json").unlink()
            run.save(2, {"w": np.ones(1)})
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert "run.json is gone: the run was removed or moved while this job wrote it" in caplog.text


def test_a_step_to_resume_from_is_a_number_or_a_word_that_is_known(tmp_path):
    with Run(tmp_path) as run:
        run.save(1, {"w": np.ones(1)}).result()
        with pytest.raises(ValueError, match=r"step='latest'.*: expected a number, 'newest' or 'best'"):
            run.resume(step="latest")


def test_a_step_that_was_saved_without_data_says_so(tmp_path):
    with Run(tmp_path) as run:
        run.save(1, {"w": np.ones(1)}).result()
        with pytest.raises(ValueError, match=r"step 1 of .* was saved without data="):
            run.resume(data=Data())


@pytest.mark.parametrize(("data", "message"), [(Data(), "saved without data="), (3, "data= is a int")])
def test_a_rewind_with_data_that_cannot_be_placed_puts_nothing_aside(tmp_path, data, message):
    with Run(tmp_path, every=1) as run:
        for step in (1, 2, 3):
            run.save(step, {"w": np.ones(1)}, data=None if message.startswith("saved") else Place())
    with Run(tmp_path) as run:
        with pytest.raises((ValueError, StructureError), match=message):
            run.resume(step=1, rewind=True, data=data)
        assert run.step == 0
    assert numbers(tmp_path) == [1, 2, 3]


def test_a_save_looks_into_no_other_steps_than_the_last(tmp_path, monkeypatch):
    with Run(tmp_path) as run:
        for step in range(1, 6):
            run.save(step, {"w": np.ones(1)})
        run.wait()
        looked = []
        kind = LocalStore.kind
        monkeypatch.setattr(LocalStore, "kind", lambda store, name: looked.append(name) or kind(store, name))
        run.save(6, {"w": np.ones(1)}).result()
    assert {name.partition("/")[0] for name in looked} & {"step-1", "step-2", "step-3", "step-4"} == set()


def test_resume_waits_for_the_save_under_way(tmp_path):
    with Run(tmp_path) as run:
        run.save(1, {"w": jnp.ones(2**22)})
        found = run.resume()
    assert found is not None
    assert found.step == 1


@pytest.fixture
def moved(tmp_path):
    """A run of which step 2 was moved to another disk, with a link in its place."""
    with Run(tmp_path / "run") as run:
        for step in (1, 2):
            run.save(step, {"w": np.full(2, step)})
    (tmp_path / "run" / "step-2").rename(tmp_path / "archived")
    (tmp_path / "run" / "step-2").symlink_to("../archived")
    return tmp_path / "run"


def test_a_step_that_was_moved_and_linked_is_resumed_from_and_is_never_removed(moved):
    assert numbers(moved) == [1, 2]
    assert checkpoint.load(moved)["w"][0] == 2
    with Run(moved, every=1, keep=1) as run:
        assert run.resume().tree["w"][0] == 2
        for step in (3, 4, 5):
            run.after(step, {"w": np.full(2, step)})
    assert numbers(moved) == [2, 5]
    assert checkpoint.verify(moved / "step-2").ok


def test_a_link_is_not_saved_through(moved):
    with Run(moved) as run:
        run.resume()
        with pytest.raises(FileExistsError, match="step-2 is a file or a link"):
            run.save(2, {"w": np.full(2, 7)})
    assert checkpoint.load(moved)["w"][0] == 2


def test_a_step_whose_disk_is_missing_is_skipped_with_a_reason(moved):
    (moved.parent / "archived").rename(moved.parent / "unmounted")
    with Run(moved) as run:
        found = run.resume()
    assert found.step == 1
    assert list(found.skipped) == [2]
    assert (moved / "step-2.damaged").is_symlink()
