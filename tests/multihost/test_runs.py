"""Several processes of one training run."""

import os
import signal
import time

import pytest

from eformer import checkpoint
from support.processes import Failed, Job

pytestmark = pytest.mark.xdist_group("processes")


def succeed(outcomes):
    problems = [f"rank {rank}: {o}" for rank, o in enumerate(outcomes) if isinstance(o, Failed)]
    assert not problems, "\n".join(problems)
    return outcomes


def numbers(path):
    return [step.number for step in checkpoint.steps(path)]


def test_a_resumed_run_equals_one_that_was_never_interrupted(two, tmp_path):
    whole = succeed(two.run("run_loop", tmp_path / "whole", 40))
    succeed(two.run("run_loop", tmp_path / "parts", 23))
    parts = succeed(two.run("run_loop", tmp_path / "parts", 40))
    assert [(began, ended) for began, ended, *_ in parts] == [(20, 40)] * 2
    assert [outcome[1:4] for outcome in parts] == [outcome[1:4] for outcome in whole]
    assert [outcome[3] for outcome in parts] == [40, 140]  # every process at its own place in the data


def test_steps_that_no_rule_keeps_are_removed_by_the_first_process(two, tmp_path):
    succeed(two.run("run_loop", tmp_path, 50, 10, 2))
    assert numbers(tmp_path) == [40, 50]


@pytest.mark.parametrize("rank", [0, 1])
def test_damage_that_one_process_alone_sees_is_skipped_by_all(two, tmp_path, rank):
    succeed(two.run("run_loop", tmp_path, 20))
    outcomes = succeed(two.run("run_with_damage_seen_by", tmp_path, rank, 20))
    assert [(began, skipped) for began, _, _, _, skipped in outcomes] == [(10, [20])] * 2
    assert (tmp_path / "step-20.damaged").is_dir()


@pytest.mark.parametrize("rank", [0, 1])
def test_processes_with_other_listings_resume_from_one_step(two, tmp_path, rank):
    succeed(two.run("run_loop", tmp_path, 20))
    assert succeed(two.run("run_with_another_listing", tmp_path, rank)) == [20 if rank else 10] * 2


def test_a_step_without_a_save_costs_no_message(two, tmp_path):
    assert succeed(two.run("count_messages", tmp_path, 500)) == [0, 0]


def test_the_clock_of_the_first_process_decides_with_few_messages(two, tmp_path):
    met = succeed(two.run("run_by_the_clock", tmp_path, 1.0, 1.5, 3600.0))
    assert numbers(tmp_path) == [40, 80, 120, 160, 200]
    assert met[0] == met[1] < 80  # with the meetings of the saves


@pytest.mark.parametrize("rank", [0, 1])
def test_the_checkpointer_of_trainers_decides_in_the_first_process(two, tmp_path, rank):
    (saved, step), (others_saved, others_step) = succeed(two.run("use_checkpointer", tmp_path, rank))
    assert saved == others_saved == [(7, True), (14, True), (20, False), (27, True)]
    assert step == others_step == (31 if rank else 20)
    assert numbers(tmp_path) == [20, 31]


def test_another_number_of_processes_is_an_error_for_the_data(jobs, tmp_path):
    succeed(jobs(2, 2).run("run_loop", tmp_path, 20))
    outcomes = jobs(4, 1).run("run_loop", tmp_path, 40)
    assert all(
        isinstance(outcome, Failed) and "positions of 2 processes" in str(outcome) for outcome in outcomes
    )


@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_in_one_process_stops_all_at_one_step(tmp_path, rank):
    with Job(2, 1, tmp_path / "log") as job:
        job.start("run_loop", tmp_path / "run", 2000, 10_000, None, 0.02)
        time.sleep(3)
        os.kill(job.ranks[rank].pid, signal.SIGTERM)
        deadline = time.monotonic() + 60
        outcomes = succeed([job.answer(one, deadline) for one in (0, 1)])
    ended = {outcome[1] for outcome in outcomes}
    assert len(ended) == 1
    assert numbers(tmp_path / "run") == list(ended)
    assert checkpoint.steps(tmp_path / "run")[0].why == "signal"
