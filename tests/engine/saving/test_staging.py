"""Elements on their way from a device to the disk."""

import numpy as np

from eformer._engine.record.boxes import Box
from eformer._engine.saving import staging


def test_an_array_is_there_before_a_program_cuts_it(monkeypatch):
    """A snapshot in host memory may still be on its way there."""
    events = []

    class Array:
        shape = (4,)

        def block_until_ready(self):
            events.append("wait")

        def __getitem__(self, index):
            events.append("cut")
            return np.arange(4)[index]

    monkeypatch.setattr(staging, "staged", lambda array: array)
    assert staging.box_on_host(Array(), Box((1,), (3,))).tolist() == [1, 2]
    assert events == ["wait", "cut"]
