"""Forks while other threads save and load: the child is not held up by what they held.

EFORMER_FORKS says how many: 30, or 10,000 by `make faults`.
"""

import os

from support import forking, forkserver
from support.forking import PATIENCE

FORKS = int(os.environ.get("EFORMER_FORKS", "30"))


def test_a_child_that_is_forked_while_others_save_and_load_saves_and_loads(place):
    told = forkserver.run(forking.main, str(place), FORKS, limit=2 * PATIENCE + FORKS)
    assert told.returncode == 0, told.stdout + told.stderr
    assert f"{FORKS} forks, 0 bad" in told.stdout
