"""One directory, two jobs: the one that began last writes."""

import itertools

import numpy as np
import pytest

from eformer import checkpoint
from eformer._engine.runs.writer import Writer
from eformer.checkpoint import Run
from eformer.errors import LeaseLostError, SupersededError


def tree(number):
    return {"w": np.full(3, number, np.float32)}


def run_at(path, **more):
    return Run(path, signals=(), **more)


def contents(path):
    return {str(file): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def numbers(path):
    return [step.number for step in checkpoint.steps(path)]


@pytest.mark.parametrize("order", [("older", "newer"), ("newer", "older")])
def test_the_older_job_fails_at_its_next_commit_and_touches_nothing(tmp_path, order):
    older = run_at(tmp_path, keep=1)
    older.save(1, tree(1)).result()
    newer = run_at(tmp_path, keep=2)
    assert newer.resume().step == 1
    for who in order:
        if who == "newer":
            newer.save(2, tree(2)).result()
            continue
        before = contents(tmp_path)
        with pytest.raises(SupersededError, match="is written by another job"):
            older.save(2, tree(-2)).result()
        assert contents(tmp_path) == before
    newer.save(3, tree(3)).result()
    assert numbers(tmp_path) == [1, 2, 3]  # the one resumed from stays
    assert checkpoint.verify(tmp_path / "step-2").ok
    np.testing.assert_array_equal(checkpoint.load(tmp_path / "step-2")["w"], tree(2)["w"])


def test_being_superseded_is_never_tolerated(tmp_path):
    older = run_at(tmp_path, every=1, tolerate=5)
    older.after(1, tree(1)).result()
    run_at(tmp_path).resume()
    older.after(2, tree(2)).exception()
    with pytest.raises(SupersededError):
        older.after(3, tree(3))


def test_a_lost_lease_is_tolerated_as_other_errors_of_a_save(tmp_path, monkeypatch):
    with run_at(tmp_path, every=1, tolerate=1) as run:
        with monkeypatch.context() as patch:
            patch.setattr(Writer, "check", lambda _: raise_lost())
            run.after(1, tree(1)).exception()
        run.after(2, tree(2)).result()
    assert numbers(tmp_path) == [2]


def raise_lost():
    raise LeaseLostError("the lease ran out; save again")


def test_a_job_that_is_superseded_right_after_its_commit_removes_nothing(tmp_path, monkeypatch):
    older, newer, calls, check = run_at(tmp_path, keep=1), run_at(tmp_path), itertools.count(), Writer.check
    older.save(1, tree(1))
    older.wait()

    def taken_over(self):
        if next(calls) == 1:  # after the commit, and before anything is removed
            assert newer.resume().step == 2
        check(self)

    monkeypatch.setattr(Writer, "check", taken_over)
    older.save(2, tree(2))
    older.wait()
    assert numbers(tmp_path) == [1, 2]
    with pytest.raises(SupersededError):
        older.save(3, tree(3)).result()
