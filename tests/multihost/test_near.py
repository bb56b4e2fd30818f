"""Several processes of a run with a near tier, killed at any time.

EFORMER_KILLS says how often: once, or 20 by `make faults`.
"""

import os
import random
import shutil
import time

import pytest

from eformer import checkpoint
from support.processes import Failed, Job

pytestmark = [pytest.mark.xdist_group("processes"), pytest.mark.sample(2)]

KILLS = int(os.environ.get("EFORMER_KILLS", "1"))
UNTIL = 50 * KILLS  # steps: more than can be done before the last kill


def succeed(outcomes):
    problems = [f"rank {rank}: {o}" for rank, o in enumerate(outcomes) if isinstance(o, Failed)]
    assert not problems, "\n".join(problems)
    return outcomes


@pytest.fixture
def far(tmp_path):
    return tmp_path / "far"


@pytest.fixture
def near(tmp_path):
    return tmp_path / "near"


def held(near, rank):
    """The near steps of a process that are whole, by number."""
    found = (path.parent for path in near.glob(f"process-{rank}/*/step-*/manifest.json"))
    return {int(path.name[5:]): path for path in found}


def resumed(job, *arguments):
    """The step that each process resumes from, and the steps that it skips."""
    return [outcome[:2] for outcome in succeed(job.run("near_resumed", *arguments))]


def damage(path):
    file = next(path.glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def killed(far, near, until, log):
    """A run that is killed when it has near steps after the last far one."""
    with Job(2, 2, log) as job:
        job.start("near_loop", far, near, 10_000, 10, 3, 0.02)
        wait_until(job, lambda: all(max(held(near, rank), default=0) >= until for rank in (0, 1)))
        for rank in (0, 1):
            job.kill(rank)


def test_killed_processes_resume_from_the_near_step_bit_for_bit(two, far, near, tmp_path):
    whole = succeed(two.run("near_loop", tmp_path / "whole", tmp_path / "other", 60))
    killed(far, near, 24, tmp_path / "log")
    common = max(held(near, 0).keys() & held(near, 1).keys())
    newest = max(common, *(step.number for step in checkpoint.steps(far)))
    outcomes = succeed(two.run("near_loop", far, near, 60))
    assert [outcome[0] for outcome in outcomes] == [newest] * 2
    assert newest >= 21
    assert [outcome[1:3] for outcome in outcomes] == [outcome[1:3] for outcome in whole]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_lost_near_directory_makes_all_resume_from_the_far_step(two, far, near, rank):
    succeed(two.run("near_loop", far, near, 29))
    shutil.rmtree(near / f"process-{rank}")
    assert resumed(two, far, near) == [(20, [])] * 2


@pytest.mark.parametrize("rank", [0, 1])
def test_processes_take_the_newest_step_that_all_hold(two, far, near, rank):
    succeed(two.run("near_loop", far, near, 29))
    shutil.rmtree(held(near, rank)[27])
    assert resumed(two, far, near) == [(24, [])] * 2


@pytest.mark.parametrize("rank", [0, 1])
def test_damage_in_one_process_makes_all_take_the_step_before(two, far, near, rank):
    succeed(two.run("near_loop", far, near, 29))
    damage(held(near, rank)[27])
    assert resumed(two, far, near) == [(24, [27])] * 2
    assert [sorted(held(near, one)) for one in (0, 1)] == [[21, 24]] * 2


def test_parts_that_different_jobs_wrote_are_never_mixed(two, far, near, tmp_path):
    succeed(two.run("near_loop", far, near, 29))
    shutil.copytree(near / "process-1", tmp_path / "before")
    shutil.rmtree(near)
    succeed(
        two.run("near_loop", far, near, 29)
    )  # a host that was away comes back, with the same steps of before
    shutil.rmtree(near / "process-1")
    shutil.copytree(tmp_path / "before", near / "process-1")
    assert held(near, 0).keys() == held(near, 1).keys() == {21, 24, 27}
    assert resumed(two, far, near) == [(20, [])] * 2


@pytest.mark.parametrize("how", ["as before", "elsewhere"])
def test_arrays_come_from_the_near_step_wherever_they_lie_on_the_mesh(two, far, near, how):
    (_, first, *_), (_, second, *_) = succeed(two.run("near_loop", far, near, 27))
    assert first == second
    assert succeed(two.run("near_resumed", far, near, how)) == [(27, [], first)] * 2


@pytest.mark.thorough
def test_arrays_on_another_mesh_come_from_the_parts_of_all_processes(two, far, near):
    (_, bits, *_), _ = succeed(two.run("near_loop", far, near, 27))
    assert succeed(two.run("near_resumed", far, near, "turned")) == [(27, [], bits)] * 2


@pytest.mark.thorough
@pytest.mark.parametrize("counts", [(4, 2), (2, 4)])
def test_another_number_of_processes_resumes_from_the_parts_on_this_host(jobs, far, near, counts):
    before, after = counts
    (_, bits, *_), *_ = succeed(jobs(before, 4 // before).run("near_loop", far, near, 27))
    job = jobs(after, 4 // after)
    assert succeed(job.run("near_resumed", far, near)) == [(27, [], bits)] * after
    assert held(near, 0).keys() == {21, 24, 27}
    succeed(job.run("near_continued", far, near, 42))
    assert [sorted(held(near, rank)) for rank in range(4)] == [[36, 39, 42]] * after + [[]] * (4 - after)


@pytest.mark.thorough
def test_a_position_in_the_data_is_not_divided_among_other_processes(jobs, far, near):
    succeed(jobs(4, 1).run("near_loop", far, near, 27))
    outcomes = jobs(2, 2).run("near_loop", far, near, 29)
    assert all("has the positions of 4 processes in the data, this job has 2" in str(one) for one in outcomes)


def test_every_kind_of_leaf_comes_back_in_the_process_that_had_it(two, far, near):
    assert succeed(two.run("near_all_leaves", far, near)) == [1, 1]


def test_a_near_save_costs_no_message(two, far, near):
    assert succeed(two.run("near_messages", far, near, 100)) == [0, 0]


@pytest.mark.thorough
def test_a_run_that_is_killed_again_and_again_ends_as_one_that_never_was(two, far, near, tmp_path):
    whole = succeed(two.run("near_loop", tmp_path / "whole", tmp_path / "other", UNTIL))
    moments = random.Random(KILLS)
    for number in range(KILLS):
        with Job(2, 2, tmp_path / f"log-{number}") as job:
            before = newest(near)
            job.start("near_loop", far, near, UNTIL, 20, 3, 0.005)
            wait_until(job, have_begun, far, number + 1)
            if number % 4:  # else they die before they save anything
                wait_until(job, have_saved_since, near, before)
                time.sleep(moments.uniform(0, 0.4))
            first = moments.choice([0, 1])
            job.kill(first)
            time.sleep(moments.uniform(0, 0.05))
            job.kill(1 - first)
        if None not in newest(near):
            assert held(near, 0).keys() & held(near, 1).keys(), "no step that both have was kept"
    outcomes = succeed(two.run("near_loop", far, near, UNTIL))
    assert [outcome[1:3] for outcome in outcomes] == [outcome[1:3] for outcome in whole]
    began = [noted(far, rank) for rank in (0, 1)]
    assert began[0] == began[1] == sorted(began[0])
    if KILLS >= 8:  # of a few, all may come right after a step of the run itself
        assert any(step % 20 for step in began[0])


def noted(far, rank):
    path = far.with_name(f"{far.name}-began-{rank}")
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def have_begun(far, times):
    return all(len(noted(far, rank)) >= times for rank in (0, 1))


def newest(near):
    """The newest near step of each process."""
    return [max(held(near, rank), default=None) for rank in (0, 1)]


def have_saved_since(near, before):
    return all(now != then for now, then in zip(newest(near), before, strict=True))


def wait_until(job, is_so, *arguments):
    deadline = time.monotonic() + 60
    while not is_so(*arguments):
        assert time.monotonic() < deadline, job.told(0) + job.told(1)
        time.sleep(0.01)
