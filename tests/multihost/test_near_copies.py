"""Near steps with copies on other hosts: processes of several hosts, which are killed and lose their directories.

A host is a directory here, and a name; all processes are on this machine.
"""

import shutil
import time

import pytest

from multihost.test_near import damage, succeed
from support.processes import Job

pytestmark = pytest.mark.xdist_group("processes")

APART = [0, 1]  # the host of each process
PAIRS = [0, 0, 1, 1]


@pytest.fixture
def far(tmp_path):
    return tmp_path / "far"


@pytest.fixture
def near(tmp_path):
    return tmp_path / "near"


def own(near, rank, number, host=None):
    """The part of a step that a process has saved."""
    host = rank if host is None else host
    (found,) = near.glob(f"host-{host}/process-{rank}/*/step-{number}")
    return found


def copies(near, owner):
    """The copies of the parts of a process, by number."""
    found = near.glob(f"host-*/process-*/of-process-{owner}/*/step-*/manifest.json")
    return {int(path.parent.name[5:]): path.parent for path in found}


def resumed(job, *arguments):
    return [outcome[:2] for outcome in succeed(job.run("near_apart_resumed", *arguments))]


def killed(far, near, until, log):
    """A run that is killed when each process's part of a step is on the other host, too."""
    with Job(2, 2, log) as job:
        job.start("near_apart", far, near, APART, 10_000, 0.02, 1, 10_000)
        deadline = time.monotonic() + 60
        while not all(max(copies(near, rank), default=0) >= until for rank in (0, 1)):
            assert time.monotonic() < deadline, job.told(0) + job.told(1)
            time.sleep(0.01)
        for rank in (0, 1):
            job.kill(rank)


@pytest.mark.thorough
@pytest.mark.parametrize("lost", [0, 1])
def test_killed_processes_of_which_one_has_lost_its_host_resume_bit_for_bit(two, far, near, tmp_path, lost):
    killed(far, near, 24, tmp_path / "log")
    shutil.rmtree(near / f"host-{lost}")
    outcomes = succeed(two.run("near_apart", far, near, APART, 90))
    assert outcomes[0][0] == outcomes[1][0] >= 24
    whole = succeed(two.run("near_apart", tmp_path / "whole", tmp_path / "other", APART, 90))
    assert [outcome[1:] for outcome in outcomes] == [outcome[1:] for outcome in whole]


@pytest.mark.thorough
def test_all_resume_from_the_far_step_if_a_part_is_lost_with_its_copy(jobs, far, near):
    succeed(jobs(4, 1).run("near_apart", far, near, [0, 1, 2, 3], 29))
    for lost in (1, 2):  # host 2 has the copy of the part that host 1 has
        shutil.rmtree(near / f"host-{lost}")
    assert resumed(jobs(4, 1), far, near, [0, 1, 2, 3]) == [(20, [])] * 4


@pytest.mark.thorough
def test_an_older_near_step_is_taken_if_the_newest_lacks_a_part(two, far, near):
    succeed(two.run("near_apart", far, near, APART, 29))
    shutil.rmtree(own(near, 0, 27))
    shutil.rmtree(near / "host-1")
    assert resumed(two, far, near, APART) == [(24, [])] * 2


def test_without_copies_a_lost_host_makes_all_resume_from_the_far_step(two, far, near):
    succeed(two.run("near_apart", far, near, APART, 29, 0.0, 0))
    shutil.rmtree(near / "host-1")
    assert resumed(two, far, near, APART, 0) == [(20, [])] * 2


@pytest.mark.thorough
def test_processes_that_have_changed_their_hosts_get_their_parts_from_each_other(two, far, near):
    (_, bits, _), _ = succeed(two.run("near_apart", far, near, APART, 27))
    for rank in (0, 1):
        for path in copies(near, rank).values():
            shutil.rmtree(path)
    assert succeed(two.run("near_apart_resumed", far, near, [1, 0])) == [(27, [], bits)] * 2


@pytest.mark.thorough
def test_the_processes_of_a_remaining_host_resume_on_their_own_mesh(jobs, far, near):
    (_, bits, _), *_ = succeed(jobs(4, 1).run("near_apart", far, near, PAIRS, 27))
    shutil.rmtree(near / "host-1")
    assert succeed(jobs(2, 2).run("near_apart_resumed", far, near, [0, 0])) == [(27, [], bits)] * 2


@pytest.mark.thorough
def test_fewer_processes_on_several_hosts_read_what_they_need_from_each_other(jobs, far, near):
    (_, bits, _), *_ = succeed(jobs(4, 1).run("near_apart", far, near, [0, 1, 2, 3], 27))
    for lost in (1, 3):
        shutil.rmtree(near / f"host-{lost}")
    assert succeed(jobs(2, 2).run("near_apart_resumed", far, near, [2, 0])) == [(27, [], bits)] * 2


def test_a_damaged_part_is_read_from_its_copy(two, far, near):
    (_, bits, _), _ = succeed(two.run("near_apart", far, near, APART, 27))
    damage(own(near, 1, 27))
    assert succeed(two.run("near_apart_resumed", far, near, APART)) == [(27, [], bits)] * 2


def test_a_damaged_copy_is_refused_and_the_far_step_is_taken(two, far, near):
    succeed(two.run("near_apart", far, near, APART, 29))
    for path in copies(near, 1).values():
        damage(path)
    shutil.rmtree(near / "host-1")
    (first, second) = resumed(two, far, near, APART)
    assert first == second
    assert first[0] == 20
    assert 27 in first[1]


def test_a_process_that_does_not_answer_costs_the_copies_alone(two, far, near):
    outcomes = succeed(two.run("near_apart", far, near, APART, 29, 0.0, 1, 10, 0))
    assert [outcome[0] for outcome in outcomes] == [0, 0]
    assert copies(near, 1)
    assert not copies(near, 0)
    assert resumed(two, far, near, APART) == [(27, [])] * 2


@pytest.mark.thorough
def test_copies_are_bounded_and_go_with_their_epoch(two, far, near):
    succeed(two.run("near_apart", far, near, APART, 59))
    assert [len(copies(near, rank)) <= 2 for rank in (0, 1)] == [True, True]
    epochs = {path.parent.name for rank in (0, 1) for path in copies(near, rank).values()}
    succeed(two.run("near_apart", far, near, APART, 89))
    now = {path.parent.name for rank in (0, 1) for path in copies(near, rank).values()}
    assert not epochs & now
