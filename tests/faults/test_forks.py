"""Forks while other threads save and load: the child is not held up by what they held.

EFORMER_FORKS says how many: 30, or 10,000 by `make faults`.
"""

import os
import subprocess
import sys
from pathlib import Path

from support.forking import PATIENCE

FORKS = int(os.environ.get("EFORMER_FORKS", "30"))
TESTS = Path(__file__).parent.parent


def test_a_child_that_is_forked_while_others_save_and_load_saves_and_loads(place):
    command = [sys.executable, "-W", "ignore", "-m", "support.forking", str(place), str(FORKS)]
    told = subprocess.run(
        command, cwd=TESTS, capture_output=True, text=True, timeout=2 * PATIENCE + FORKS, check=False
    )
    assert told.returncode == 0, told.stdout + told.stderr
    assert f"{FORKS} forks, 0 bad" in told.stdout
