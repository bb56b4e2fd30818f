"""Ctrl-C while a save is under way: it has committed or never will, and gives its turn back."""

import fcntl
import os
import signal
import threading

import numpy as np
import pytest

from eformer._engine.saving.save import Save
from eformer._engine.stores.locate import store_at
from eformer._engine.tasks import interrupts
from eformer._engine.tasks.turns import Turn, turns
from eformer.checkpoint import Pending, Run, load, save, save_async, wait
from eformer.serialization import AsyncCheckpointManager
from support.interrupting import pressed_at

OLD, INTERRUPTED, NEW = ({"w": np.full(9, value)} for value in (1.0, 2.0, 3.0))


@pytest.fixture
def path(tmp_path):
    save(OLD, tmp_path / "run")
    return tmp_path / "run"


def press(*_):
    signal.raise_signal(signal.SIGINT)


def test_a_save_that_waits_for_its_turn_is_interrupted(path):
    turn = turns.take(store_at(path).key, "process 0")
    with pytest.raises(KeyboardInterrupt):
        save(INTERRUPTED, path, progress=press)
    turn.end()
    assert load(path)["w"][0] == 1.0
    save(NEW, path)
    assert load(path)["w"][0] == 3.0


def test_a_save_that_waits_for_another_process_is_interrupted(path):
    """It waits for a lock of the system, which no save takes its turn at."""
    other = os.open(path, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        save(INTERRUPTED, path, progress=lambda done, total: timer.start() if done == total else None)
    os.close(other)
    assert load(path)["w"][0] == 1.0
    save(NEW, path)
    assert load(path)["w"][0] == 3.0


@pytest.mark.parametrize("begin", [save_async, AsyncCheckpointManager(use_tensorstore=False).save_async])
def test_a_background_save_that_the_caller_did_not_get_never_commits(path, begin):
    turn = turns.take(store_at(path).key, "process 0")
    with pytest.raises(KeyboardInterrupt):
        pressed_at(Pending.start, lambda: begin(INTERRUPTED, path))
    turn.end()
    wait()  # and its error is none of the caller's
    assert load(path)["w"][0] == 1.0
    save(NEW, path)
    assert load(path)["w"][0] == 3.0


def test_a_wait_that_is_interrupted_leaves_the_save_alone(path):
    turn = turns.take(store_at(path).key, "process 0")
    pending = save_async(INTERRUPTED, path)
    for waiting in (pending.result, wait, lambda: load(path)):
        with pytest.raises(KeyboardInterrupt):
            pressed_at(interrupts.wait_until, waiting)
    turn.end()
    assert pending.result() == str(path)
    assert load(path)["w"][0] == 2.0


def test_a_save_that_has_committed_says_so_by_its_checkpoint(path):
    with pytest.raises(KeyboardInterrupt):
        pressed_at(Turn.end, lambda: save(INTERRUPTED, path))
    assert load(path)["w"][0] == 2.0


def test_a_save_in_a_function_that_a_run_calls_is_given_up_like_any_other(path, tmp_path):
    turn = turns.take(store_at(path).key, "process 0")

    def state():
        pressed_at(Save.__init__, lambda: save_async(INTERRUPTED, path))

    with Run(tmp_path / "steps", every=1) as run, pytest.raises(KeyboardInterrupt):
        run.after(1, state)
    turn.end()
    wait()
    assert load(path)["w"][0] == 1.0
    save(NEW, path)
    assert load(path)["w"][0] == 3.0
