"""The best step of a run, and other steps than the newest, by number."""

import functools
import math
import os
import pickle
import shutil

import numpy as np
import pytest

from eformer import checkpoint
from eformer._engine.formats.find import look_at
from eformer._engine.formats.run_steps import path_of_step
from eformer.checkpoint import Keep, Run, best, load, save
from eformer.errors import CorruptionError, NotFoundError

READERS = {
    "load": lambda run, **how: load(run, **how)["w"][0],
    "abstract": lambda run, **how: checkpoint.abstract(run, **how)["step"],
    "open": lambda run, **how: checkpoint.open(run, **how)["step"],
    "inspect": lambda run, **how: checkpoint.inspect(run, **how).trees[""].values["step"],
    "verify": lambda run, **how: number(checkpoint.verify(run, **how).path),
    "report": lambda run, **how: number(checkpoint.report(run, **how).path),
    "convert": lambda run, **how: number(
        checkpoint.convert(run, "out.safetensors", dry_run=True, **how).source
    ),
}


def number(path):
    return int(path.rpartition("-")[2])


def tree(step):
    return {"w": np.full(3, step), "step": step}


@pytest.fixture
def run(tmp_path):
    """Four steps, of which step 3 has no number, and step 4 no metric."""
    losses = {1: 0.5, 2: 0.25, 3: math.nan, 4: None}
    with Run(tmp_path / "run", keep=[Keep(last=9), Keep(best=1, by="loss")]) as made:
        for step, loss in losses.items():
            made.save(step, tree(step), metrics={} if loss is None else {"loss": loss, "acc": 1 - loss})
    return tmp_path / "run"


def test_the_best_step_is_a_path_like_the_latest(run):
    assert best(run, by="loss") == f"{run}/step-2"
    assert best(run, by="loss", mode="max") == f"{run}/step-1"
    assert best(run, by="acc", mode="max") == f"{run}/step-2"
    assert best(run) == f"{run}/step-2"


def test_scores_of_another_job_count_and_of_equal_steps_the_later_is_better(run):
    checkpoint.score(run, 4, {"loss": 0.25})
    assert best(run, by="loss") == f"{run}/step-4"


def test_a_run_without_steps_has_no_best_step(tmp_path):
    assert best(tmp_path / "nowhere") is None
    with pytest.raises(NotFoundError, match="nowhere has no steps"):
        load(tmp_path / "nowhere", step="best")


def test_an_unknown_metric_is_an_error_that_names_the_known_ones(run):
    with pytest.raises(
        NotFoundError, match=r"run: no step has a number for the metric los; .* have acc; loss"
    ):
        best(run, by="los")


def test_a_run_that_records_no_metric_says_how_to_name_one(tmp_path):
    with Run(tmp_path / "run", keep=3) as made:
        made.save(1, tree(1), metrics={"loss": 1})
    with pytest.raises(
        ValueError, match=r"checkpoint.best\('.*run', by='loss'\) returns the path.* have loss"
    ):
        load(tmp_path / "run", step="best")
    save(tree(1), tmp_path / "bare" / "step-1")
    with pytest.raises(ValueError, match=r"by='eval.loss'\) returns .* have no metrics"):
        best(tmp_path / "bare")


def test_damaged_steps_are_never_the_best(run, caplog):
    os.truncate(run / "step-2" / "model.safetensors", 5)
    assert best(run) == f"{run}/step-1"
    assert "step-2 is left out: model.safetensors is 5 bytes long" in caplog.text
    (run / "step-1" / "manifest.json").write_bytes(b"{")
    with pytest.raises(CorruptionError, match="step-2 and all other steps with the metric are damaged"):
        best(run)


def test_a_mode_needs_a_metric_and_is_one_of_two(run):
    with pytest.raises(ValueError, match="mode='max' needs by="):
        best(run, mode="max")
    with pytest.raises(ValueError, match="expected 'min' or 'max'"):
        best(run, by="loss", mode="least")


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_every_reader_takes_a_step_by_number_or_the_best(run, read):
    assert (read(run, step=3), read(run, step="best")) == (3, 2)


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_every_reader_refuses_a_step_that_is_not_there(run, read):
    with pytest.raises(NotFoundError, match="run has no step 7"):
        read(run, step=7)
    with pytest.raises(ValueError, match="step='newest': expected the number of a step, or 'best'"):
        read(run, step="newest")


def test_a_step_is_for_one_run(run):
    with pytest.raises(ValueError, match="step=3 is for the path of one run, not for a list of paths"):
        load([run, run], step=3)
    with pytest.raises(NotFoundError, match="is a checkpoint, not a run with steps: leave step=3 out"):
        load(run / "step-3", step=3)


def test_a_step_that_is_being_saved_is_waited_for(tmp_path):
    with Run(tmp_path / "run") as made:
        made.save(5, tree(5))
        assert load(tmp_path / "run", step=5)["step"] == 5


def test_a_best_step_that_is_removed_while_it_is_read_is_chosen_again(run):
    def use(found):
        if found.path.endswith("step-2"):
            shutil.rmtree(found.path)
        found.store.read("model.safetensors")
        return found.path

    choose = functools.partial(path_of_step, step="best")
    assert look_at(run, use, choose=choose) == f"{run}/step-1"


def test_a_view_of_the_best_step_is_pickled_as_the_path_of_that_step(run):
    with checkpoint.open(run, step="best") as view:
        checkpoint.score(run, 1, {"loss": 0})
        assert pickle.loads(pickle.dumps(view))["step"] == 2


def test_resume_says_what_it_would_put_aside(run):
    with Run(run, keep=[Keep(last=9), Keep(best=1, by="loss")]) as again:
        with pytest.raises(
            ValueError,
            match=r"run: the best step is 2, and 2 newer steps would be put aside \(step-3; step-4\). "
            r"resume\(step='best', rewind=True\) does that and goes on from step 2; resume\(\) goes on from the newest",
        ):
            again.resume(step="best")
        assert again.resume(step="best", rewind=True).step == 2
