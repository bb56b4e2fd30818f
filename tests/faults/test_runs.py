"""A training run that is killed again and again: the loss goes on as if nothing had happened."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from eformer import checkpoint

SCRIPT = Path(__file__).parents[2] / "examples" / "run.py"
KILLS = int(os.environ.get("EFORMER_KILLS", "2"))
LINE = re.compile(r"step (\d+) loss (\S+)")


def started(path, pause):
    return subprocess.Popen([sys.executable, SCRIPT, path, str(pause)], stdout=subprocess.PIPE, text=True)


def losses(text):
    return {int(step): loss for step, loss in LINE.findall(text)}


def test_the_script_of_the_guide_survives_being_killed(tmp_path):
    whole = losses(started(tmp_path / "whole", 0).communicate(timeout=120)[0])
    assert len(whole) == 300
    chance, seen = random.Random(0), {}
    for _ in range(KILLS):
        process = started(tmp_path / "killed", 0.005)
        assert process.stdout
        first = process.stdout.readline()  # it has begun
        time.sleep(chance.uniform(0.05, 1.2))
        process.send_signal(chance.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM]))
        seen |= losses(first + process.communicate(timeout=60)[0])
        if (tmp_path / "killed").exists():
            assert all(step.problem() is None for step in checkpoint.steps(tmp_path / "killed"))
            assert len(checkpoint.steps(tmp_path / "killed")) <= 4  # two are kept, one resumed from, one new
    seen |= losses(started(tmp_path / "killed", 0).communicate(timeout=120)[0])
    assert seen == whole
    assert not [path.name for path in (tmp_path / "killed").iterdir() if path.name.startswith(".")]
