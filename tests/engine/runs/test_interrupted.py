"""Ctrl-C while a run saves: the run knows of every save that goes on."""

import numpy as np
import pytest

from eformer.checkpoint import Pending, Run
from support.interrupting import pressed_at


def test_the_run_waits_for_the_save_that_an_interrupted_call_has_begun(tmp_path):
    with Run(tmp_path, every=1) as run:
        with pytest.raises(KeyboardInterrupt):
            pressed_at(Pending.start, lambda: run.after(1, {"w": np.ones(3)}))
        assert run.step == 1
        run.wait()
        assert [step.number for step in run.steps] == [1]
        run.after(2, {"w": np.ones(3)})
    assert [step.number for step in run.steps] == [1, 2]
