"""Several processes of one training run, one of which is told to end. `make faults` has four, and more moments."""

import os
import signal
import time
from contextlib import contextmanager

import pytest

from eformer import checkpoint
from multihost.test_runs import succeed
from support.faults import STRIDE
from support.processes import Failed, Job

pytestmark = pytest.mark.xdist_group("processes")

IS_THOROUGH = STRIDE == 1
PROCESSES = 4 if IS_THOROUGH else 2
MOMENTS = (
    ["step", "compile", "tick", "save", "deletion", "resumed", "twice"]
    if IS_THOROUGH
    else ["save", "resumed"]
)
thorough = pytest.mark.skipif(not IS_THOROUGH, reason="make faults")


@contextmanager
def told(folder, kind, rank, number=signal.SIGTERM, **arguments):
    """Begin a run, and send a signal to one process when all are where `kind` says."""
    with Job(PROCESSES, 1, folder / "log") as job:
        job.start("run_until_told", folder, kind, *arguments.values())
        deadline = time.monotonic() + 60
        while len(list(folder.glob("ready-*"))) < PROCESSES:
            assert time.monotonic() < deadline, "\n".join(job.told(one) for one in range(PROCESSES))
            time.sleep(0.01)
        for _ in range(2 if kind == "twice" else 1):
            os.kill(job.ranks[rank].pid, number)
            time.sleep(0.05)
        (folder / "sent").touch()
        yield job


def ended(job):
    deadline = time.monotonic() + 60
    return succeed([job.answer(rank, deadline) for rank in range(PROCESSES)])


@pytest.mark.parametrize("kind", MOMENTS)
@pytest.mark.sample(2)
def test_a_signal_in_one_process_stops_all_at_one_step(tmp_path, kind):
    with told(tmp_path, kind, MOMENTS.index(kind) % PROCESSES) as job:
        outcomes = ended(job)
    assert len(set(outcomes)) == 1
    assert outcomes[0] > (5000 if kind == "resumed" else 0)
    last = checkpoint.steps(tmp_path / "run")[-1]
    assert (last.number, last.reason) == (outcomes[0], "signal")
    assert checkpoint.verify(last.path).ok


@thorough
@pytest.mark.parametrize("seconds", [0, 0.5, 1, 2, 5])
def test_a_kill_after_the_signal_leaves_a_whole_step(tmp_path, seconds):
    with told(tmp_path, "save", 1) as job:
        time.sleep(seconds)
        for rank in range(PROCESSES):
            job.kill(rank)
    found = [step.number for step in checkpoint.steps(tmp_path / "run")]
    assert all(checkpoint.verify(tmp_path / "run" / f"step-{number}").ok for number in found)
    assert found or seconds < 2  # the save that was under way
    with checkpoint.Run(tmp_path / "run") as run:
        resumed = run.resume()
        assert (resumed.step if resumed else None) == (found[-1] if found else None)


@thorough
@pytest.mark.parametrize("rank", [0, 1])
def test_another_signal_in_one_process_stops_all(tmp_path, rank):
    with told(tmp_path, "step", rank, signal.SIGUSR1, signals=[signal.SIGUSR1]) as job:
        outcomes = ended(job)
    assert len(set(outcomes)) == 1
    assert checkpoint.steps(tmp_path / "run")[-1].reason == "signal"


@thorough
def test_without_the_service_named_signals_are_refused(tmp_path):
    with Job(2, 1, tmp_path / "log", preemption=False) as job:
        refused = job.run("make_run", tmp_path, [signal.SIGTERM])
        warned = succeed(job.run("make_run", tmp_path, None))
    assert all(isinstance(one, Failed) and "jax_enable_preemption_service" in one.text for one in refused)
    assert [messages[0] for messages in warned] == [
        "no signals: several processes need JAX's preemption service, which is off"
    ] * 2
