"""A run, seen from another job."""

import math
import shutil
import threading

import numpy as np
import pytest

from eformer import checkpoint
from eformer._engine.stores.locate import store_at
from eformer.checkpoint import Keep, Run, follow, load, score, steps
from eformer.errors import NotFoundError, VersionError
from support.damage import newer_version
from support.trees import assert_same


def tree(number):
    return {"w": np.full(3, number, np.float32)}


def test_every_step_is_seen_once_in_order(tmp_path):
    def write():
        with Run(tmp_path / "run", every=1, signals=()) as run:
            for step in range(1, 21):
                run.after(step, tree(step)).result()

    writer = threading.Thread(target=write)
    writer.start()
    seen = []
    for step in follow(tmp_path / "run", poll=0.01, timeout=5):
        assert_same(load(step.path), tree(step.number))
        seen.append(step.number)
        if step.number == 20:
            break
    writer.join()
    assert seen == list(range(1, 21))


def test_it_begins_after_a_step_and_ends_when_nothing_comes(tmp_path):
    with Run(tmp_path, every=1) as run:
        for step in (1, 2, 3):
            run.after(step, tree(step))
    assert [step.number for step in follow(tmp_path, after=1, poll=0.01, timeout=0.05)] == [2, 3]
    assert list(follow(tmp_path / "nothing", poll=0.01, timeout=0.05)) == []


def test_a_step_that_has_gone_while_the_one_before_was_used_is_passed_over(tmp_path):
    with Run(tmp_path, every=1) as run:
        for step in (1, 2, 3):
            run.after(step, tree(step))
    seen = []
    for step in follow(tmp_path, poll=0.01, timeout=0.05):
        seen.append(step.number)
        shutil.rmtree(tmp_path / "step-2", ignore_errors=True)
    assert seen == [1, 3]


@pytest.mark.parametrize("fmt", ["safetensors", "tensorstore"])
def test_what_is_held_survives_its_removal_and_leaves_nothing(tmp_path, fmt):
    with Run(tmp_path, every=1, format=fmt) as run:
        run.after(1, tree(1))
    (step,) = steps(tmp_path)
    with step.hold() as path:
        shutil.rmtree(step.path)
        assert_same(load(path), tree(1))
        assert steps(tmp_path) == ()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["run.json"]


def test_scores_are_metrics_and_decide_what_stays(tmp_path):
    with Run(tmp_path, every=1, keep=[Keep(last=1), Keep(best=1, by="eval.loss")]) as run:
        run.after(1, tree(1), metrics={"loss": 1.0}).result()
        score(tmp_path, 1, {"eval.loss": np.float32(0.5), "bad": math.nan})
        score(tmp_path, 1, {"eval.accuracy": 0.9})
        assert steps(tmp_path)[0].metrics == {"loss": 1.0, "eval.loss": 0.5, "eval.accuracy": 0.9}
        assert checkpoint.verify(tmp_path / "step-1").ok
        for number in (2, 3):
            run.after(number, tree(number))
        run.wait()
        assert [step.number for step in steps(tmp_path)] == [1, 3]
        score(tmp_path, 3, {"eval.loss": 0.1})
        run.after(4, tree(4)).result()
    assert [step.number for step in steps(tmp_path)] == [3, 4]
    assert sorted(p.name for p in tmp_path.glob("*.json")) == ["run.json", "step-3.scores.json"]
    with pytest.raises(NotFoundError, match="has no step 9"):
        score(tmp_path, 9, {"x": 1})


@pytest.mark.parametrize("how", ["replaced", "rewound"])
def test_scores_are_of_the_step_that_was_scored_and_of_no_later_one(tmp_path, how):
    with Run(tmp_path, signals=()) as run:
        for number in (1, 2):
            run.save(number, tree(number)).result()
        score(tmp_path, 2, {"eval.loss": 0.5})
        if how == "rewound":
            assert run.resume(step=1, rewind=True).step == 1
        run.save(2, tree(2), metrics={"loss": 1.0}).result()
        assert steps(tmp_path)[-1].metrics == {"loss": 1.0}
        score(tmp_path, 2, {"eval.loss": 0.7})
    assert steps(tmp_path)[-1].metrics == {"loss": 1.0, "eval.loss": 0.7}


def test_what_a_dead_follower_held_is_removed_when_the_next_job_begins(tmp_path):
    with Run(tmp_path, signals=()) as run:
        run.save(1, tree(1)).result()
    upload = store_at(tmp_path).begin()
    upload.put([("step-1/model.safetensors", b"linked")])
    upload.abandon()
    with Run(tmp_path, signals=()) as run:
        run.resume()
        run.save(2, tree(2))
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["run.json", "step-1", "step-2"]


def test_following_ends_in_time_though_the_next_look_is_far(tmp_path, monkeypatch):
    slept = []
    monkeypatch.setattr("eformer._engine.runs.follow.time.sleep", slept.append)
    list(checkpoint.follow(tmp_path, poll=10, timeout=0.01))
    assert slept
    assert max(slept) <= 0.01


def test_a_score_that_is_not_finite_takes_the_one_before_away_and_one_that_is_no_number_is_refused(tmp_path):
    checkpoint.save({"w": np.ones(1)}, tmp_path / "step-1")
    checkpoint.score(tmp_path, 1, {"loss": 1.0, "other": 2.0})
    checkpoint.score(tmp_path, 1, {"loss": float("nan")})
    assert checkpoint.steps(tmp_path)[0].metrics == {"other": 2.0}
    with pytest.raises(ValueError, match=r"metrics\['loss'\] is 'low'; expected a single number"):
        checkpoint.score(tmp_path, 1, {"loss": "low"})


def test_a_damaged_step_is_logged_once_and_left_out(tmp_path, caplog):
    with Run(tmp_path, signals=()) as run:
        for number in (1, 2, 3):
            run.save(number, tree(number))
    (tmp_path / "step-2" / "manifest.json").write_bytes(b"{")
    assert [step.number for step in follow(tmp_path, poll=0.01, timeout=0.05)] == [1, 3]
    assert len([text for text in caplog.messages if "step 2 is left out" in text]) == 1


def test_a_step_of_a_newer_version_is_an_error(tmp_path):
    with Run(tmp_path, signals=()) as run:
        run.save(1, tree(1))
    newer_version(tmp_path / "step-1")
    with pytest.raises(VersionError, match="version"):
        next(follow(tmp_path, timeout=10))
