"""A job that is told to end saves its last step in the tier that will be done before the job is killed."""

import os
import signal
from datetime import timedelta

import numpy as np
import pytest

from eformer import checkpoint
from eformer._engine.runs.near import NearTier
from eformer.checkpoint import Near, Run


def tree(number):
    return {"w": np.full(3, number)}


def told_to_end(tmp_path, *, notice, far, near=0.01, has_near=True, last=False):
    """Save two steps, pretend that saves take so long, send SIGTERM, and do one more step."""
    tier = Near(tmp_path / "near", every=1) if has_near else None
    with Run(tmp_path / "run", every=2, near=tier, notice=notice, last=last) as run:
        for number in (1, 2):
            run.after(number, tree(number))
        run.wait()
        run._main.took = far
        if has_near:
            run._near.took = near
        os.kill(os.getpid(), signal.SIGTERM)
        run.after(3, tree(3))
        assert run.stopping
    return [step.number for step in checkpoint.steps(tmp_path / "run")]


MINUTE = timedelta(minutes=1)


def test_a_save_that_will_not_be_done_in_time_goes_to_the_near_tier(tmp_path, caplog):
    assert told_to_end(tmp_path, notice=MINUTE, far=300.0) == [2]
    assert (
        "s of the notice are left, a save takes about 300.0 s: the last step is saved to the near tier"
        in caplog.text
    )
    with Run(tmp_path / "run", near=Near(tmp_path / "near", every=1), signals=()) as run:
        found = run.resume()
    assert (found.step, found.tree["w"][0]) == (3, 3)


def test_a_last_step_in_the_near_tier_is_not_saved_again_at_the_end(tmp_path):
    assert told_to_end(tmp_path, notice=MINUTE, far=300.0, last=True) == [2]


@pytest.mark.parametrize(
    ("notice", "arguments"),
    [
        (MINUTE, {"far": 3.0}),
        (MINUTE, {"far": None}),
        (MINUTE, {"far": 300.0, "near": None}),
        (MINUTE, {"far": 300.0, "near": 400.0}),
        (MINUTE, {"far": 300.0, "has_near": False}),
        (None, {"far": 300.0}),
    ],
)
def test_any_other_last_step_goes_to_the_run(tmp_path, notice, arguments):
    assert told_to_end(tmp_path, notice=notice, **arguments) == [2, 3]


def test_a_near_step_that_fails_is_followed_by_a_step_of_the_run(tmp_path, monkeypatch):
    save = NearTier.save

    def fails_at_the_end(self, done, late):
        if done.step < 3:
            save(self, done, late)

    monkeypatch.setattr(NearTier, "save", fails_at_the_end)
    assert told_to_end(tmp_path, notice=MINUTE, far=300.0) == [2, 3]


def test_a_notice_is_a_time(tmp_path):
    with pytest.raises(TypeError, match=r"notice=90: expected a timedelta, such as timedelta\(seconds=90\)"):
        Run(tmp_path, notice=90)


def test_the_signal_stays_with_the_program(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    told_to_end(tmp_path, notice=MINUTE, far=1.0)
    assert signal.getsignal(signal.SIGTERM) == before
