"""A training run that is killed again and again: the loss goes on as if nothing had happened.

EFORMER_RUN_KILLS says how often: once, or 100 times by `make faults`.
"""

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from eformer import checkpoint

SCRIPT = Path(__file__).parents[2] / "examples" / "run.py"
KILLS = int(os.environ.get("EFORMER_RUN_KILLS", "1"))
LINE = re.compile(r"step (\d+) loss (\S+)")


def started(path, pause):
    return subprocess.Popen([sys.executable, SCRIPT, path, str(pause)], stdout=subprocess.PIPE, text=True)


def losses(text):
    return {int(step): loss for step, loss in LINE.findall(text)}


@pytest.mark.thorough
def test_the_script_of_the_guide_survives_being_killed(tmp_path):
    whole = losses(started(tmp_path / "whole", 0).communicate(timeout=120)[0])
    assert len(whole) == 300
    chance, kills, runs = random.Random(0), 0, 0
    while kills < KILLS:
        runs += 1
        kills += check_run(tmp_path / f"killed-{runs}", whole, chance, KILLS - kills)


def check_run(path, whole, chance, most):
    """Kill a run until it is done, at most so many times, and compare its losses; return how often it was killed."""
    seen, kills = {}, 0
    while kills < most and 300 not in seen:
        process = started(path, 0.01)
        seen |= losses(killed(process, chance))
        kills += process.returncode != 0 or 300 not in seen  # 0 after a SIGTERM
        if path.exists():
            assert all(step.problem() is None for step in checkpoint.steps(path))
            assert len(checkpoint.steps(path)) <= 4  # two are kept, one resumed from, one new
    seen |= losses(started(path, 0).communicate(timeout=120)[0])
    assert seen == whole
    assert not [entry.name for entry in path.iterdir() if entry.name.startswith(".")]
    return kills


def killed(process, chance):
    """Kill a process while it starts, or while it trains; return what it has said."""
    if chance.random() < 0.2:
        first = ""
        time.sleep(chance.uniform(0.4, 1.2))
    else:
        first = process.stdout.readline()  # it has begun
        time.sleep(chance.uniform(0, 0.8))
    process.send_signal(chance.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM]))
    return first + process.communicate(timeout=60)[0]
