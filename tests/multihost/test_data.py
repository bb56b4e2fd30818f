"""The data of a training run that goes on in another number of processes."""

import time

import pytest

from eformer import checkpoint
from multihost.test_runs import succeed
from support.processes import Failed, Job

pytestmark = pytest.mark.xdist_group("processes")


def rows_by_step(outcomes):
    """Return the rows that all processes of a job have seen together, by step."""
    seen = [seen for _, seen, _ in outcomes]
    return {step: sorted(row for one in seen for row in one[step]) for step in seen[0]}


@pytest.mark.sample(4)
@pytest.mark.parametrize("kind", ["double", "grain"])
@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2)])
def test_elastic_iterators_go_on_in_another_number_of_processes(jobs, tmp_path, kind, before, after):
    whole = succeed(jobs(before, 2).run("run_on_data", tmp_path / "whole", kind, 20))
    succeed(jobs(before, 2).run("run_on_data", tmp_path / "parts", kind, 13))
    parts = succeed(jobs(after, 2).run("run_on_data", tmp_path / "parts", kind, 20))
    assert {began for began, _, _ in parts} == {10}
    assert rows_by_step(parts) == {step: rows_by_step(whole)[step] for step in range(11, 21)}
    assert {tuple(state) for _, _, state in parts} == {tuple(state) for _, _, state in whole}


@pytest.mark.thorough
def test_a_job_that_was_killed_goes_on_in_another_number_of_processes(jobs, tmp_path):
    with Job(4, 1, tmp_path / "log") as job:
        job.start("run_on_data", tmp_path / "run", "grain", 100, 0.02)
        deadline = time.monotonic() + 60
        while not (tmp_path / "run/step-10").is_dir():
            assert time.monotonic() < deadline, job.told(0)
            time.sleep(0.01)
        for rank in range(4):
            job.kill(rank)
    whole = succeed(jobs(2, 2).run("run_on_data", tmp_path / "whole", "grain", 100))
    parts = succeed(jobs(2, 2).run("run_on_data", tmp_path / "run", "grain", 100))
    assert parts[0][0] >= 10
    assert rows_by_step(parts) == {step: rows_by_step(whole)[step] for step in range(parts[0][0] + 1, 101)}
    assert parts[0][2] == whole[0][2]


def test_other_iterators_are_refused_in_all_processes(jobs, tmp_path):
    succeed(jobs(2, 2).run("run_on_data", tmp_path, "sliced", 10))
    outcomes = jobs(4, 2).run("run_on_data", tmp_path, "sliced", 20)
    message = "has the positions of 2 processes in the data, this job has 4. The processes have had 10 each"
    assert all(isinstance(outcome, Failed) and message in str(outcome) for outcome in outcomes)
    assert [step.number for step in checkpoint.steps(tmp_path)] == [5, 10]
