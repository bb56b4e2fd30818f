"""A run on a disk that is full now and then, or slower than its steps."""

import errno
import time
from contextlib import nullcontext

import numpy as np
import pytest

from eformer import checkpoint
from eformer.checkpoint import Run
from support.run_faults import tree_of
from support.trees import assert_same


def run_on(disk, every, tolerate, fmt):
    """Train 12 steps; the disk is full at each `every`-th. Return the steps at which errors were raised."""
    raised = []
    run = Run(disk.place / "run", every=1, keep=1, tolerate=tolerate, format=fmt, signals=())
    for step in range(1, 13):
        run._upkeep.wait()  # or the deletion of an old step makes room
        try:
            with disk.filled_but_for(pages=1) if step % every == 0 else nullcontext():
                if pending := run.after(step, tree_of(step)):
                    pending.exception()
        except OSError as error:
            raised.append((step, error.errno))
        there = checkpoint.latest(disk.place / "run")
        assert_same(checkpoint.load(there), tree_of(int(there.rpartition("-")[2])))
    return raised, run


@pytest.mark.sample(3)
@pytest.mark.parametrize("fmt", ["safetensors", "tensorstore"])
@pytest.mark.parametrize("every", [2, 3, 5])
def test_a_save_without_room_is_tolerated_and_training_goes_on(small_disk, every, fmt):
    raised, run = run_on(small_disk, every, 1, fmt)
    run.wait()
    assert raised == []
    assert [step.number for step in checkpoint.steps(small_disk.place / "run")][-1] == max(
        step for step in range(1, 13) if step % every
    )


@pytest.mark.parametrize("fmt", ["safetensors", "tensorstore"])
def test_a_save_without_room_is_an_error_of_the_next_call(small_disk, fmt):
    raised, run = run_on(small_disk, 4, 0, fmt)
    assert raised == [(5, errno.ENOSPC), (9, errno.ENOSPC)]
    with pytest.raises(OSError, match="No space left"):
        run.wait()
    assert checkpoint.verify(small_disk.place / "run").ok


def test_so_many_in_a_row_are_tolerated_and_no_more(small_disk):
    run = Run(small_disk.place / "run", every=1, tolerate=2, signals=())
    run.after(1, tree_of(1)).result()
    with small_disk.filled_but_for(pages=1):
        for step in (2, 3, 4):
            run.after(step, tree_of(step)).exception()
        with pytest.raises(OSError, match="No space left"):
            run.after(5, tree_of(5))
    run.after(6, tree_of(6)).result()
    assert [step.number for step in checkpoint.steps(small_disk.place / "run")] == [1, 6]


def test_saves_that_are_slower_than_the_steps_are_waited_for_and_none_is_lost(tmp_path, caplog):
    class Slow:
        def __float__(self):
            time.sleep(1.1)
            return 1.0

    under_way = []
    with Run(tmp_path, every=1, signals=()) as run:
        for step in (1, 2, 3):
            pending = run.after(step, {"w": np.full(2, step)}, metrics={"slow": Slow() if step == 1 else 0})
            under_way.append(not pending.done() or step > 1)
    assert under_way[0]
    assert [step.number for step in checkpoint.steps(tmp_path)] == [1, 2, 3]
    assert all(checkpoint.verify(step.path).ok for step in checkpoint.steps(tmp_path))
    assert caplog.text.count("s for the previous save") == 1
