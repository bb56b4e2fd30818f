"""Work of a run in the background: deletions that fail or hang, several saves at a time, saves one after another."""

import contextlib
import os
import signal
import threading

import numpy as np
import pytest

from eformer import checkpoint
from eformer._engine.runs import retention, upkeep
from eformer._engine.saving import save as saving
from eformer._engine.stores import objects
from eformer.checkpoint import Every, Run
from support.trees import assert_same

WITHIN = 20  # seconds, for events that come within milliseconds on a machine that is not busy


def tree(number):
    return {"w": np.full(3, number), "frozen": np.arange(5)}


def numbers(path):
    return [step.number for step in checkpoint.steps(path)]


@pytest.fixture
def removals(monkeypatch):
    """Let the test decide when a step is removed, and with which outcome."""
    gate = type("Gate", (), {"open": threading.Event(), "reached": threading.Event(), "errors": []})()
    remove = retention.remove_checkpoint

    def gated(*arguments):
        gate.reached.set()
        assert gate.open.wait(WITHIN)
        if gate.errors:
            raise gate.errors.pop()
        return remove(*arguments)

    monkeypatch.setattr(retention, "remove_checkpoint", gated)
    monkeypatch.setattr(upkeep, "_PAUSES", (0.01, 0.01, 0.01))
    yield gate
    gate.open.set()


# -------------------------------------------------------------------------------------- the caller's thread


@pytest.mark.parametrize("resumes", [True, False])
def test_after_asks_a_bucket_for_nothing_in_the_thread_of_the_caller(monkeypatch, resumes):
    asked, request = [], objects.Objects._request

    def noted(self, *arguments, **more):
        asked.append(threading.current_thread() is threading.main_thread())
        return request(self, *arguments, **more)

    with Run(f"memory://background-{resumes}/run", every=2, keep=1, signals=()) as run:
        if resumes:
            run.resume(like=tree(0))
        monkeypatch.setattr(objects.Objects, "_request", noted)
        for number in range(1, 9):
            run.after(number, tree(number))
        assert not any(asked)
    assert len(asked) > 20
    assert [step.number for step in checkpoint.steps(run.path)] == [8]


# ----------------------------------------------------------------------------------------- deletions


def test_no_save_waits_for_a_deletion_that_hangs(tmp_path, removals):
    with Run(tmp_path, every=1, keep=1, signals=()) as run:
        for number in range(1, 7):
            run.after(number, tree(number)).result(WITHIN)
        assert removals.reached.wait(WITHIN)
        assert numbers(tmp_path) == [1, 2, 3, 4, 5, 6]
        removals.open.set()
    assert numbers(tmp_path) == [6]


def test_a_run_ends_although_a_deletion_hangs(tmp_path, removals, monkeypatch, caplog):
    monkeypatch.setattr(upkeep, "_PATIENCE", 0.05)
    with Run(tmp_path, every=1, keep=1, signals=()) as run:
        run.after(1, tree(1))
        run.after(2, tree(2))
    assert "old steps are still being removed; the next job that saves there goes on with it" in caplog.text
    assert_same(checkpoint.load(tmp_path), tree(2))


def test_a_deletion_that_fails_is_repeated_and_logged(tmp_path, removals, caplog):
    removals.open.set()
    removals.errors = [OSError("no answer"), OSError("no answer")]
    with Run(tmp_path, every=1, keep=1, signals=()) as run:
        for number in (1, 2, 3):
            run.after(number, tree(number)).result()
        run.wait()
        assert numbers(tmp_path) == [3]
    assert "old steps could not be removed: no answer" in caplog.text


def test_a_step_that_cannot_be_removed_does_not_keep_the_others(tmp_path, monkeypatch):
    remove = retention.remove_checkpoint
    monkeypatch.setattr(upkeep, "_PAUSES", ())

    def fails_for_the_first(store, name, *arguments):
        if name == "step-1":
            raise PermissionError(f"{name}: not allowed")
        return remove(store, name, *arguments)

    monkeypatch.setattr(retention, "remove_checkpoint", fails_for_the_first)
    with Run(tmp_path, every=1, keep=1, signals=()) as run:
        for number in (1, 2, 3, 4):
            run.after(number, tree(number))
    assert numbers(tmp_path) == [1, 4]


def test_a_deletion_that_is_given_up_is_tried_again_after_the_next_save(tmp_path, removals):
    removals.open.set()
    removals.errors = [OSError("no answer")] * 4
    with Run(tmp_path, every=1, keep=1, signals=()) as run:
        run.after(1, tree(1))
        run.after(2, tree(2))
        run.wait()
        assert numbers(tmp_path) == [1, 2]
        run.after(3, tree(3))
    assert numbers(tmp_path) == [3]


def test_a_part_is_cleared_although_a_step_of_the_run_cannot_be_removed(tmp_path, monkeypatch):
    remove = retention.remove_checkpoint
    monkeypatch.setattr(upkeep, "_PAUSES", ())

    def fails_for_the_run(store, name, *arguments):
        if not store.url.endswith("frozen"):
            raise PermissionError(f"{name}: not allowed")
        return remove(store, name, *arguments)

    monkeypatch.setattr(retention, "remove_checkpoint", fails_for_the_run)
    with Run(tmp_path, every=[1, Every(1, only="frozen", keep=1)], keep=1, signals=()) as run:
        for number in (1, 2, 3):
            run.after(number, tree(number))
    assert (numbers(tmp_path), numbers(tmp_path / "frozen")) == ([1, 2, 3], [3])


@pytest.mark.parametrize("is_same", [True, False])
def test_a_step_that_a_run_goes_back_to_is_not_removed_by_an_earlier_plan(
    tmp_path, removals, is_same, monkeypatch
):
    monkeypatch.setattr(upkeep, "_PATIENCE", 0.05)
    for number in (1, 2, 3):
        checkpoint.save(tree(number), tmp_path / f"step-{number}")
    run = Run(tmp_path, every=1, keep=1, signals=())
    run.resume()
    run.after(4, tree(4)).result(WITHIN)
    assert removals.reached.wait(WITHIN)
    after = run if is_same else Run(tmp_path, every=1, keep=1, signals=())
    assert after.resume(step=2, rewind=True).step == 2
    monkeypatch.setattr(upkeep, "_PATIENCE", WITHIN)
    removals.open.set()
    assert run._upkeep.wait()
    assert 2 in numbers(tmp_path)
    after.close()
    run.close()


def test_a_run_that_is_told_to_end_waits_for_a_deletion_once(tmp_path, removals, monkeypatch, caplog):
    monkeypatch.setattr(upkeep, "_PATIENCE", 0.05)
    with Run(tmp_path, every=1, keep=1, signals=()) as run:
        run.after(1, tree(1))
        run.after(2, tree(2))
    upkeep._end_all()
    assert caplog.text.count("old steps are still being removed") == 1


def interrupt_at_the_end(path, removals):
    with Run(path, every=1, keep=1) as run:
        run.after(1, tree(1))
        run.after(2, tree(2)).result(WITHIN)
        assert removals.reached.wait(WITHIN)
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()


def test_ctrl_c_at_the_end_leaves_signals_to_the_program(tmp_path, removals):
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)  # perhaps of a run that another test has left open
    with pytest.raises(KeyboardInterrupt):
        interrupt_at_the_end(tmp_path, removals)
    assert signal.signal(signal.SIGTERM, before) is signal.SIG_DFL


# ------------------------------------------------------------------------------ several saves at a time


@pytest.fixture
def writes(monkeypatch):
    """Let saves write their files only when the test has opened a gate: one for each step."""
    gates = {number: threading.Event() for number in range(1, 20)}
    write = saving.Save.write

    def gated(self, meter):
        number = int(self.store.url.rpartition("-")[2])
        assert gates[number].wait(WITHIN)
        return write(self, meter)

    monkeypatch.setattr(saving.Save, "write", gated)
    yield gates
    for gate in gates.values():
        gate.set()


def test_so_many_saves_are_under_way_and_no_more(tmp_path, writes):
    with Run(tmp_path, every=1, max_pending=3, signals=()) as run:
        saves = [run.after(number, tree(number)) for number in (1, 2, 3)]
        assert not any(save.done() for save in saves)
        late = threading.Thread(target=run.after, args=(4, tree(4)))
        late.start()
        late.join(0.1)
        assert late.is_alive()
        writes[1].set()
        late.join(WITHIN)
        assert not late.is_alive()
        for gate in writes.values():
            gate.set()
    assert numbers(tmp_path) == [1, 2, 3, 4]


def test_steps_appear_in_order_whichever_is_written_first(tmp_path, writes):
    with Run(tmp_path, every=1, max_pending=3, signals=()) as run:
        first, second = run.after(1, tree(1)), run.after(2, tree(2))
        writes[2].set()
        with contextlib.suppress(TimeoutError):
            second.result(0.2)
        assert not second.done()
        writes[1].set()
        first.result(WITHIN)
        second.result(WITHIN)
    assert_same(checkpoint.load(tmp_path / "step-2"), tree(2))


def test_a_save_that_is_cancelled_does_not_let_a_later_one_overtake_an_earlier_one(tmp_path, writes):
    with Run(tmp_path, every=1, max_pending=3, signals=()) as run:
        run.after(1, tree(1))
        cancelled = run.after(2, tree(2))
        assert cancelled.cancel()
        writes[2].set()
        cancelled.exception(WITHIN)
        writes[3].set()
        with contextlib.suppress(TimeoutError):
            run.after(3, tree(3)).result(0.2)
        assert numbers(tmp_path) == []
        writes[1].set()
    assert numbers(tmp_path) == [1, 3]


def test_a_step_whose_files_a_save_may_link_is_not_removed(tmp_path, writes):
    with Run(tmp_path, every=1, keep=1, max_pending=2, signals=()) as run:
        for gate in (writes[1], writes[2], writes[4]):
            gate.set()
        run.after(1, tree(1)).result(WITHIN)
        run.after(2, tree(2)).result(WITHIN)
        run._upkeep.wait()
        run.after(3, tree(3))
        assert numbers(tmp_path) == [2]
        writes[3].set()
    assert numbers(tmp_path) == [3]
    assert checkpoint.verify(tmp_path / "step-3").ok


def test_the_errors_of_saves_are_raised_in_order_and_counted_in_a_row(tmp_path, monkeypatch):
    are_under_way = threading.Event()

    def fails(self, meter):
        assert are_under_way.wait(WITHIN)
        raise OSError(f"no room for {self.store.url.rpartition('/')[2]}")

    with Run(tmp_path, every=1, max_pending=3, signals=()) as run:
        monkeypatch.setattr(saving.Save, "write", fails)
        for number in (1, 2):
            run.after(number, tree(number))
        are_under_way.set()
        for name in ("step-1", "step-2"):
            with pytest.raises(OSError, match=f"no room for {name}"):
                run.wait()
        monkeypatch.undo()
        run.after(3, tree(3))
    assert numbers(tmp_path) == [3]


def test_max_pending_is_at_least_one(tmp_path):
    with pytest.raises(ValueError, match="max_pending=0: expected at least 1"):
        Run(tmp_path, max_pending=0)


# -------------------------------------------------------------------------------- one save after another


def test_a_continuous_run_saves_again_as_soon_as_the_last_save_is_committed(tmp_path, writes):
    with Run(tmp_path, every=Every(continuous=True), signals=()) as run:
        first = run.after(1, tree(1))
        assert [run.after(number, tree(number)) for number in (2, 3, 4)] == [None, None, None]
        for gate in writes.values():
            gate.set()
        first.result(WITHIN)
        assert run.after(5, tree(5)) is not None
    assert numbers(tmp_path) == [1, 5]


def test_a_continuous_rule_may_end(tmp_path):
    with Run(tmp_path, every=[Every(continuous=True, until=2), Every(10)], signals=()) as run:
        for number in range(1, 11):
            if pending := run.after(number, tree(number)):
                pending.result(WITHIN)
    assert numbers(tmp_path) == [1, 2, 10]


# --------------------------------------------------------------------------------------- the last step


def test_the_last_step_is_saved_at_the_end(tmp_path, caplog):
    with Run(tmp_path, every=2, last=True, signals=()) as run:
        for number in range(1, 6):
            run.after(number, tree(number), metrics={"loss": number})
    step = checkpoint.steps(tmp_path)[-1]
    assert (step.number, step.reason, step.metrics) == (5, "end", {"loss": 5.0})
    assert_same(checkpoint.load(tmp_path), tree(5))
    assert "is done and not saved" not in caplog.text


def test_a_last_step_that_is_saved_is_not_saved_again(tmp_path):
    with Run(tmp_path, every=2, last=True, signals=()) as run:
        for number in range(1, 5):
            run.after(number, tree(number))
        before = run.steps[-1] if run.wait() is None else None
        saved_at = before.saved_at
    assert checkpoint.steps(tmp_path)[-1].saved_at == saved_at
    assert numbers(tmp_path) == [2, 4]


class Rows:
    """Numbers without end, with a position."""

    position = 0

    def __next__(self):
        self.position += 1
        return self.position

    def get_state(self):
        return {"position": self.position}

    def set_state(self, state):
        self.position = state["position"]


def test_the_last_step_has_the_position_and_the_metrics_that_it_had(tmp_path):
    rows, metrics = Rows(), {}
    with Run(tmp_path, every=100, last=True, signals=()) as run:
        for number in (1, 2, 3):
            metrics["loss"] = next(rows)
            run.after(number, tree(number), data=rows, metrics=metrics)
        metrics["loss"] = next(rows)  # a step that is begun and not done
    assert checkpoint.steps(tmp_path)[-1].metrics == {"loss": 3.0}
    resumed = Rows()
    with Run(tmp_path, signals=()) as run:
        run.resume(data=resumed)
    assert resumed.position == 3


def test_a_step_that_the_run_went_back_from_is_not_missed_at_the_end(tmp_path, caplog):
    with Run(tmp_path, every=2, last=True, signals=()) as run:
        for number in (1, 2, 3):
            run.after(number, tree(number))
        run.resume(step=2)
    assert numbers(tmp_path) == [2]
    assert "is done and not saved" not in caplog.text


def test_a_last_step_whose_save_is_cancelled_is_named(tmp_path, writes, caplog):
    with Run(tmp_path, every=2, last=True, signals=()) as run:
        run.after(1, tree(1))
        assert run.after(2, tree(2)).cancel()
        writes[2].set()
    assert "step 2 is done and not saved; the save of step 2 has failed or was cancelled" in caplog.text


def fail_after(path, steps):
    with Run(path, every=2, last=True, signals=()) as run:
        for number in range(1, steps + 1):
            run.after(number, tree(number))
        raise ZeroDivisionError


def test_an_error_in_the_block_saves_no_last_step(tmp_path):
    with pytest.raises(ZeroDivisionError):
        fail_after(tmp_path, 3)
    assert numbers(tmp_path) == [2]


# ------------------------------------------------------------------------------------------- the claim


def test_a_step_that_appears_before_the_first_save_claims_the_run_is_not_joined(tmp_path, monkeypatch):
    with Run(tmp_path, every=1, signals=()) as run:
        monkeypatch.setattr(run._writer, "look", lambda: ())
        checkpoint.save(tree(7), tmp_path / "step-7")
        for number in (1, 2):
            with pytest.raises(
                FileExistsError, match="has 1 step, the newest is 7, and this job has not resumed"
            ):
                run.after(number, tree(number)).result(WITHIN)
            run._main.under_way.log_failures()
        assert not (tmp_path / "run.json").exists()  # a job that writes the run goes on
        assert run.resume().step == 7
        run.after(8, tree(8))
    assert numbers(tmp_path) == [7, 8]
