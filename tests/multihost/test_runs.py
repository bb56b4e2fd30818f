"""Several processes of one training run."""

import os
import signal
import time

import pytest

from eformer import checkpoint
from support.processes import Failed

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


def test_a_job_that_has_not_resumed_is_refused_in_every_process(two, tmp_path):
    assert succeed(two.run("run_without_resume", tmp_path, 1)) == ["", ""]
    outcomes = succeed(two.run("run_without_resume", tmp_path, 2))
    assert len(set(outcomes)) == 1
    assert "has 1 step, the newest is 1, and this job has not resumed from it" in outcomes[0]
    assert numbers(tmp_path) == [1]


@pytest.mark.sample(2)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_job_that_starts_anew_in_one_process_only_is_an_error_in_all(two, tmp_path, rank):
    succeed(two.run("run_loop", tmp_path, 20))
    outcomes = two.run("run_fresh_in", tmp_path, rank, limit=20)
    message = f"Run(fresh=) differs between processes: it is True in process {rank}, and False elsewhere"
    assert [isinstance(outcome, Failed) and message in str(outcome) for outcome in outcomes] == [True, True]
    assert numbers(tmp_path) == [10, 20]


def test_steps_that_no_rule_keeps_are_removed_by_the_first_process(two, tmp_path):
    succeed(two.run("run_loop", tmp_path, 50, 10, 2))
    assert numbers(tmp_path) == [40, 50]


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("rank", "fault"), [(0, "damage"), (1, "damage"), (1, "EIO"), (0, "gone"), (1, "gone")]
)
def test_damage_that_one_process_alone_sees_is_skipped_by_all(two, tmp_path, rank, fault):
    succeed(two.run("run_loop", tmp_path, 20))
    outcomes = succeed(two.run("run_with_fault_seen_by", tmp_path, rank, 20, fault))
    assert [(began, skipped) for began, _, _, _, skipped in outcomes] == [(10, [20])] * 2
    assert (tmp_path / "step-20.damaged").is_dir()


@pytest.mark.sample(2)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_step_that_one_process_sees_at_the_second_look_only_is_resumed_from(two, tmp_path, rank):
    succeed(two.run("run_loop", tmp_path, 20))
    outcomes = succeed(two.run("run_with_fault_seen_by", tmp_path, rank, 20, "gone", 1))
    assert [(began, skipped) for began, _, _, _, skipped in outcomes] == [(20, [])] * 2
    assert numbers(tmp_path) == [10, 20]


@pytest.mark.sample(2)
@pytest.mark.parametrize("rank", [0, 1])
def test_what_is_no_damage_is_an_error_in_all(two, tmp_path, rank):
    succeed(two.run("run_loop", tmp_path, 20))
    outcomes = two.run("run_with_fault_seen_by", tmp_path, rank, 20, "refused")
    assert all("only this process sees it" in str(outcome) for outcome in outcomes)
    assert numbers(tmp_path) == [10, 20]


def test_a_run_that_cannot_be_claimed_is_an_error_in_all_at_once(two, tmp_path):
    (tmp_path / "run.json").mkdir()
    outcomes = two.run("run_loop", tmp_path, 20, limit=20)
    assert ["not a regular file" in str(outcome) for outcome in outcomes] == [True, True]


def test_a_process_that_stands_still_is_named(two, tmp_path):
    os.kill(two.ranks[1].pid, signal.SIGSTOP)
    try:
        two.start("run_slowly_answered", tmp_path, 1.0)
        waiting = two.answer(0, time.monotonic() + 30)
    finally:
        os.kill(two.ranks[1].pid, signal.SIGCONT)
    assert waiting.kind == "ProcessTimeoutError"
    assert "after 1 s process 0 still waits for process 1" in waiting.text
    assert isinstance(two.answer(1, time.monotonic() + 30), Failed)


@pytest.mark.sample(2)
@pytest.mark.parametrize("rank", [0, 1])
def test_processes_with_other_listings_resume_from_one_step(two, tmp_path, rank):
    succeed(two.run("run_loop", tmp_path, 20))
    assert succeed(two.run("run_with_another_listing", tmp_path, rank)) == [20 if rank else 10] * 2


def test_a_step_without_a_save_costs_no_message(two, tmp_path):
    assert succeed(two.run("count_messages", tmp_path, 500)) == [0, 0]


@pytest.mark.sample(5)
@pytest.mark.parametrize("clock", ["right", "an hour behind", "an hour ahead", "set back an hour", "stopped"])
def test_the_clocks_of_other_processes_do_nothing(two, tmp_path, clock):
    (saved, met), (other, _) = succeed(two.run("run_by_the_clock", tmp_path, 1.0, 1.5, ["right", clock]))
    assert other == saved
    assert saved == numbers(tmp_path) == [40, 80, 120, 160, 200]
    assert met < 90  # with the meetings of the saves


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("clock", "expected"),
    [
        ("an hour behind", [40, 80, 120, 160, 200]),
        ("set back", [40, 100, 140, 180]),
        ("stopped for a minute", [40, 120, 160, 200]),
        ("stopped", []),
    ],
)
def test_a_clock_that_is_set_back_or_stops_makes_a_save_late(two, tmp_path, clock, expected):
    (saved, met), (other, _) = succeed(two.run("run_by_the_clock", tmp_path, 1.0, 1.5, [clock, "right"]))
    assert other == saved
    assert saved == numbers(tmp_path)
    assert len(saved) == len(expected)
    assert all(0 <= step - due < 20 for step, due in zip(saved, expected, strict=True))
    assert clock == "stopped" or met < 90


def test_a_run_that_begins_late_meets_as_often(two, tmp_path):
    (saved, met), _ = succeed(two.run("run_by_the_clock", tmp_path, 1.0, 1.5, ["right"] * 2, 5001))
    assert saved == numbers(tmp_path) == [5040, 5080, 5120, 5160, 5200]
    assert met < 90


@pytest.mark.sample(2)
@pytest.mark.parametrize(("tolerate", "expected"), [(0, [3, 5, "wait"]), (1, [])])
def test_a_full_disk_is_told_to_all_by_the_next_call(two, small_disk, tolerate, expected):
    outcomes = succeed(two.run("run_out_of_room", small_disk.place, tolerate))
    assert outcomes == [[(step, True) for step in expected]] * 2
    assert numbers(small_disk.place / "run") == ([1] if tolerate == 0 else [5])


@pytest.mark.sample(2)
@pytest.mark.parametrize("rank", [0, 1])
def test_the_checkpointer_of_trainers_decides_in_the_first_process(two, tmp_path, rank):
    (saved, step), (others_saved, others_step) = succeed(two.run("use_checkpointer", tmp_path, rank))
    assert saved == others_saved == [(7, True), (14, True), (20, False), (27, True)]
    assert step == others_step == (31 if rank else 20)
    assert numbers(tmp_path) == [20, 31]


def test_another_number_of_processes_is_an_error_for_the_data(jobs, tmp_path):
    succeed(jobs(2, 2).run("run_loop", tmp_path, 20))
    outcomes = jobs(4, 2).run("run_loop", tmp_path, 40)
    assert all(
        isinstance(outcome, Failed) and "positions of 2 processes" in str(outcome) for outcome in outcomes
    )


def test_a_save_that_is_cancelled_in_any_process_ends_the_run_of_none(two, tmp_path):
    answers = succeed(two.run("run_cancelling", tmp_path / "run"))
    assert any(answers[0])
    there = [step.number for step in checkpoint.steps(tmp_path / "run")]
    kept = [
        step for step, first, second in zip(range(1, 13, 2), *answers, strict=True) if not (first or second)
    ]
    assert there == sorted([*kept, *range(2, 13, 2)])
