"""A save in the background is cancelled: it has committed or never will, and leaves nothing behind."""

import asyncio
import threading
import weakref
from concurrent.futures import CancelledError

import numpy as np
import pytest

from eformer._engine.saving.pending import run_in_background
from eformer._engine.saving.start import start
from eformer._engine.stores.locate import store_at
from eformer._engine.tasks.turns import turns
from eformer.checkpoint import Pending, Run, load, save, save_async, wait
from eformer.serialization import AsyncCheckpointManager
from support.cancelling import held
from support.faults import hooked
from support.links import contents

OLD, CANCELLED, NEW = ({"w": np.full(9, value)} for value in (1.0, 2.0, 3.0))


@pytest.fixture
def path(tmp_path):
    save(OLD, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def queued(path):
    """A save that waits for its turn."""
    turn = turns.take(store_at(path).key, "process 0")
    yield save_async(CANCELLED, path)
    turn.end()


def check_next_save(path):
    save(NEW, path)
    assert load(path)["w"][0] == 3.0


def test_a_save_that_waits_for_its_turn_is_cancelled_and_leaves_nothing(path):
    before = contents(path.parent)
    turn = turns.take(store_at(path).key, "process 0")
    pending = save_async(CANCELLED, path)
    assert pending.cancel()
    with pytest.raises(CancelledError, match=r"saving to .*run was cancelled; nothing was committed"):
        pending.result(10)
    assert contents(path.parent) == before
    turn.end()
    check_next_save(path)


def test_the_next_save_does_not_wait_for_a_cancelled_one(path):
    with held(path):
        pending, following = save_async(CANCELLED, path), save_async(NEW, path)
        pending.cancel()
        pending.exception(10)
    following.result(10)
    assert load(path)["w"][0] == 3.0


def test_a_save_that_waits_for_another_process_is_cancelled(path):
    before = contents(path.parent)
    with held(path):
        pending = save_async(CANCELLED, path)
        with pytest.raises(TimeoutError):
            pending.result(0.2)
        assert pending.cancel()
        assert isinstance(pending.exception(10), CancelledError)
    assert contents(path.parent) == before
    check_next_save(path)


def test_a_save_is_cancelled_twice_and_stays_cancelled(queued):
    assert queued.cancel()
    assert queued.cancel()
    assert isinstance(queued.exception(10), CancelledError)
    assert queued.cancel()
    assert repr(queued) == f"<Pending save to {queued.path}: cancelled>"


def test_a_save_that_is_over_cannot_be_cancelled(path, tmp_path):
    done = save_async(NEW, path)
    assert done.result(10)
    assert not done.cancel()
    (tmp_path / "file").touch()
    failed = save_async(NEW, tmp_path / "file" / "x")
    assert isinstance(failed.exception(10), NotADirectoryError)
    assert not failed.cancel()
    assert isinstance(failed.exception(), NotADirectoryError)


def test_a_save_whose_commit_has_begun_goes_on_to_its_end(path):
    answers = []
    with hooked(before=lambda _, call: call == "rename" and answers.append(pending.cancel())):
        pending = save_async(NEW, path)
        pending.result(10)
    assert answers
    assert not any(answers)
    assert load(path)["w"][0] == 3.0


def test_awaiting_a_cancelled_save_raises_the_error_of_asyncio(queued):
    async def main():
        queued.cancel()
        with pytest.raises(asyncio.CancelledError, match="was cancelled"):
            await queued

    asyncio.run(main())


def test_a_cancelled_save_is_no_error_that_anyone_has_to_retrieve(queued, caplog):
    queued.cancel()
    wait(10)
    queued.complain()
    assert not caplog.records


def test_an_error_beside_the_cancellation_is_only_its_cause(path):
    def fail(*_):
        assert pending.cancel()
        raise OSError("no such disk")

    begun = threading.Event()
    with hooked(before=lambda *_: begun.wait(10) and fail()):
        pending = save_async(NEW, path)
        begun.set()
        with pytest.raises(CancelledError):
            pending.result(10)
    check_next_save(path)


def test_a_cancelled_save_lets_its_arrays_go(path):
    turn = turns.take(store_at(path).key, "process 0")
    array = np.ones(9)
    kept = weakref.ref(array)
    save = start({"w": array}, path)
    pending = Pending(str(path))
    run_in_background(save, pending)
    del array, save
    pending.cancel()
    pending.exception(10)
    turn.end()
    assert kept() is None


def test_a_manager_and_a_run_go_on_after_a_cancelled_save(path, tmp_path):
    manager = AsyncCheckpointManager(use_tensorstore=False)
    with held(path):
        manager.save_async(CANCELLED, path).cancel()
        manager.wait_until_finished()
    with Run(tmp_path / "steps", every=1) as run:
        run.after(1, OLD)
        run.wait()
        with held(tmp_path / "steps"):
            run.after(2, CANCELLED).cancel()
            run.wait(10)
        run.after(3, NEW)
    assert load(tmp_path / "steps")["w"][0] == 3.0
    assert not (tmp_path / "steps" / "step-2").exists()
