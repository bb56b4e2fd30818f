"""Other jobs look at a run whose steps come and go: they see whole steps, and nobody waits for them.

EFORMER_STEPS says how many steps: 150, or 10,000 by `make faults`.
"""

import os
import signal
import time

import pytest

from eformer import checkpoint
from eformer.errors import CorruptionError, NotFoundError
from support import forkserver, run_faults
from support.run_faults import seen_by_glob, tree_of
from support.trees import assert_same

STEPS = int(os.environ.get("EFORMER_STEPS", "150"))


@pytest.fixture
def begin():
    """Starts functions of `support.run_faults` in processes of their own."""
    started = []

    def start(name, *arguments):
        process = forkserver.context().Process(
            target=getattr(run_faults, name), args=tuple(map(str_of, arguments)), daemon=True
        )
        process.start()
        started.append(process)
        return process

    yield start
    for process in started:
        if process.is_alive():
            os.kill(process.pid, signal.SIGKILL)
        process.join()


def str_of(value):
    return str(value) if isinstance(value, os.PathLike) else value


def wait_for(file):
    deadline = time.monotonic() + 60
    while not file.exists():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def ended(process, limit=500):
    process.join(limit)
    assert process.exitcode == 0


@pytest.mark.parametrize("fmt", ["safetensors", "tensorstore"])
def test_a_follower_of_a_run_that_is_pruned_sees_whole_steps_only(begin, place, fmt):
    last = STEPS if fmt == "safetensors" else 1 + STEPS // 10
    writer = begin("write_steps", place / "run", 1, last, 2, fmt)
    seen, gone = [], 0
    for step in checkpoint.follow(place / "run", poll=0.001, timeout=60):
        try:
            with step.hold() as path:
                assert_same(checkpoint.load(path), tree_of(step.number))
        except FileNotFoundError:
            gone += 1
        seen.append(step.number)
        if step.number == last:
            break
    ended(writer)
    assert seen == sorted(set(seen))
    assert len(seen) > gone  # the last step stays, and is read
    assert sorted(os.listdir(place / "run")) == sorted(["run.json", f"step-{last - 1}", f"step-{last}"])


def test_a_reader_that_knows_names_only_never_reads_a_wrong_step(begin, place):
    writer = begin("write_steps", place / "run", 1, last := STEPS // 4, 1)
    read = 0
    while writer.is_alive():
        for number in seen_by_glob(place / "run"):
            try:
                found = checkpoint.load(place / "run" / f"step-{number}")
            except (FileNotFoundError, CorruptionError):  # it has gone meanwhile
                continue
            assert_same(found, tree_of(number))
            read += 1
    ended(writer)
    assert read
    assert seen_by_glob(place / "run") == [last]


@pytest.mark.sample(4)
@pytest.mark.parametrize("fmt", ["safetensors", "tensorstore"])
@pytest.mark.parametrize("keep", [1, 2])
def test_a_reader_of_the_run_itself_takes_no_step_that_comes_or_goes_for_damaged(begin, place, fmt, keep):
    path = place / "run"
    writer = begin("write_steps", path, 1, last := STEPS // 4, keep, fmt)
    wait_for(path / "run.json")
    seen = []
    while writer.is_alive():
        try:
            newest = checkpoint.latest(path)
            found = checkpoint.load(path)
        except NotFoundError:  # before the first step
            assert not seen
            continue
        number = int(found["number"])
        assert_same(found, tree_of(number))
        assert newest is None or int(newest.rpartition("-")[2]) <= number
        assert checkpoint.verify(path).ok
        seen.append(number)
    ended(writer)
    assert seen
    assert seen == sorted(seen)
    assert int(checkpoint.load(path)["number"]) == last


def test_what_a_follower_holds_survives_pruning_and_its_writer_does_not_wait(begin, place):
    ended(begin("write_steps", place / "run", 1, 1, 1))
    holder = begin("hold_for_ever", place / "run", place / "held")
    wait_for(place / "held")
    os.kill(holder.pid, signal.SIGSTOP)
    ended(begin("write_steps", place / "run", 2, 30, 1), 60)
    assert_same(checkpoint.load((place / "held").read_text()), tree_of(1))
    assert seen_by_glob(place / "run") == [30]
    os.kill(holder.pid, signal.SIGKILL)
    holder.join()
    ended(begin("write_steps", place / "run", 31, 32, 1))
    assert sorted(os.listdir(place / "run")) == ["run.json", "step-32"]


# --------------------------------------------------------------------------------------- two writers


@pytest.mark.parametrize("keep", [1, 2])
def test_a_job_that_stood_still_while_another_took_over_commits_and_removes_nothing(begin, place, keep):
    path = place / "run"
    ended(begin("write_steps", path, 1, 2, 2))
    older = begin("save_slowly", path, 3, keep, place / "ready", place / "go_on")
    wait_for(place / "ready")
    os.kill(older.pid, signal.SIGSTOP)
    ended(begin("write_steps", path, 3, 4, 3))
    before = contents(path)
    (place / "go_on").touch()
    os.kill(older.pid, signal.SIGCONT)
    ended(older, 60)
    assert (place / "go_on.error").read_text() == "SupersededError"
    after = contents(path)
    assert after == before
    assert_same(checkpoint.load(path / "step-3"), tree_of(3))


def contents(path):
    return {
        name: file.read_bytes()
        for file in path.rglob("*")
        if file.is_file() and not (name := str(file.relative_to(path))).startswith(".") and "/." not in name
    }
