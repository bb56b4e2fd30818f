"""Several processes of one training run are asked for a save, and agree on the step."""

import time

import pytest

from eformer import checkpoint
from multihost.test_runs import succeed

pytestmark = pytest.mark.xdist_group("processes")


def test_all_processes_save_the_same_step_when_they_are_asked(two, tmp_path):
    run, stop = tmp_path / "run", tmp_path / "stop"
    two.start("run_until_stopped", run, stop)
    deadline = time.monotonic() + 60
    while not (run / "step-1" / "manifest.json").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    asked = [checkpoint.request_save(run, timeout=60) for _ in range(3)]
    stop.touch()
    first, second = succeed([two.answer(rank, time.monotonic() + 60) for rank in range(2)])
    assert first == second
    steps = {step.path: step for step in checkpoint.steps(run)}
    assert len(set(asked)) == 3
    reasons = [steps[path].reason for path in asked]
    assert "asked" in reasons
    assert {*reasons} <= {"asked", "every"}  # a rule may be due at the same step
    assert all(checkpoint.verify(path).ok for path in asked)


@pytest.mark.thorough
def test_a_process_that_is_behind_saves_at_the_step_of_each_request(two, tmp_path):
    first, second = succeed(two.run("run_asked_often", tmp_path / "run"))
    assert len(first) > 1
    assert first == second
