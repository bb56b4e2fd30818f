"""The job script of the guide requeues itself: a double of Slurm sends the signal, and runs the script again with bash.

Tests of the page: docs/guides/integrations.md.
"""

import time

import pytest

from eformer import checkpoint
from support.pages import blocks
from support.slurm import Slurm

FILES = {block.file: block.text for block in blocks("docs/guides/integrations.md") if block.file}

# Step 7 of the first start waits for the signal; `early` waits while the program is still being imported.
MODEL = """
import os, signal, sys
from pathlib import Path
import numpy as np

state = {"w": np.zeros(4, np.float32)}
place = Path(sys.argv[1]).name
is_first = os.environ["SLURM_RESTART_COUNT"] == "0" and place in os.environ["TOLD"].split()
ready, sent = os.pipe()
os.set_blocking(sent, False)

def wait():
    signal.set_wakeup_fd(sent)
    Path(f"ready-{place}").touch()
    os.read(ready, 1)

if is_first and "EARLY" in os.environ:
    wait()

def train_step(state):
    if is_first and state["w"][0] == 6:
        wait()
    return {"w": state["w"] + 1}
"""


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text(FILES["train.py"])
    (tmp_path / "model.py").write_text(MODEL)
    monkeypatch.setenv("TOLD", "task-0 task-1")
    return Slurm(tmp_path)


def tell(task):
    """Send the signal of the time limit once the program is ready for it."""
    ready, deadline = task.slurm.folder / f"ready-task-{task.index or 0}", time.monotonic() + 60
    while not ready.exists():
        assert time.monotonic() < deadline, task.log.read_text()
        time.sleep(0.01)
    task.near_limit()


def reasons(path):
    return {step.number: step.reason for step in checkpoint.steps(path)}


def test_a_job_that_is_told_saves_requeues_itself_and_goes_on_to_the_end(slurm):
    [task] = slurm.sbatch(FILES["job.sh"].replace(" --array=0-1", ""))
    tell(task)
    assert task.wait() == 0
    assert task.starts == 2
    assert (slurm.folder / "requeued").read_text() == "41\n"
    assert reasons(slurm.folder / "runs/task-0") == {7: "signal", 1000: "every", 2000: "every", 3000: "every"}
    assert checkpoint.load(slurm.folder / "runs/task-0")["w"][0] == 3000


@pytest.mark.thorough
def test_a_job_that_is_told_before_it_has_a_run_is_requeued(slurm, monkeypatch):
    monkeypatch.setenv("EARLY", "1")
    [task] = slurm.sbatch(FILES["job.sh"].replace(" --array=0-1", ""))
    tell(task)
    assert task.wait() == 0
    assert task.starts == 2
    assert checkpoint.load(slurm.folder / "runs/task-0")["w"][0] == 3000


@pytest.mark.thorough
def test_each_task_of_an_array_requeues_itself_alone(slurm, monkeypatch):
    monkeypatch.setenv("TOLD", "task-0")
    first, second = slurm.sbatch(FILES["job.sh"])
    tell(first)
    assert (first.wait(), second.wait()) == (0, 0)
    assert (first.starts, second.starts) == (2, 1)
    for task in ("task-0", "task-1"):
        assert checkpoint.load(slurm.folder / "runs" / task)["w"][0] == 3000


def test_a_job_that_fails_is_not_requeued(slurm):
    (slurm.folder / "model.py").write_text("raise SystemExit(3)")
    [task] = slurm.sbatch(FILES["job.sh"].replace(" --array=0-1", ""))
    assert task.wait() == 3
    assert task.starts == 1
