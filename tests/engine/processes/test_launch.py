"""Variables of launchers: which are a launch, and which are an error in a sentence."""

import re
import subprocess
import sys

import numpy as np
import pytest

from eformer import checkpoint
from eformer._engine.processes.launch import find_launch
from eformer._engine.record.division import Portion

SLURM = {
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_NODELIST": "n[1-2]",
}
TPU = {"TPU_WORKER_HOSTNAMES": "a,b", "TPU_WORKER_ID": "1"}


@pytest.mark.parametrize(
    ("environ", "launcher", "part"),
    [
        (SLURM, "Slurm", Portion(3, 4)),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}, "Open MPI", Portion(1, 2)),
        (TPU, "TPU", Portion(1, 2)),
        (TPU | {"MEGASCALE_NUM_SLICES": "2", "MEGASCALE_SLICE_ID": "1"}, "TPU", Portion(3, 4)),
    ],
)
def test_launchers_are_found_by_their_variables(environ, launcher, part):
    found = find_launch(environ)
    assert (found.launcher, found.part) == (launcher, part)


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"},  # the shell of a job
        SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
        {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"},
        {"JOB_COMPLETION_INDEX": "3"},
    ],
)
def test_one_process_is_no_launch(environ):
    assert find_launch(environ) is None


def test_options_come_before_variables():
    assert find_launch(SLURM, None, "0/1") is None
    assert find_launch(SLURM, "host:99").coordinator == "host:99"
    assert find_launch({}, "host:99", "1/8").part == Portion(1, 8)


@pytest.mark.parametrize(
    ("environ", "arguments", "message"),
    [
        (
            SLURM | {"SLURM_PROCID": "4"},
            (),
            "SLURM_PROCID='4': expected a number from 0 to 3 from the launcher",
        ),
        (SLURM | {"SLURM_PROCID": "x"}, (), "SLURM_PROCID='x': expected a number"),
        (
            SLURM | {"SLURM_STEP_NUM_TASKS": "-2"},
            (),
            "SLURM_STEP_NUM_TASKS='-2': expected a number of at least 1",
        ),
        (SLURM | {"SLURM_STEP_NODELIST": ""}, (), "SLURM_STEP_NODELIST='': expected a list of nodes"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, (), "OMPI_COMM_WORLD_RANK is not set: expected a number from 0 to 1"),
        (TPU | {"TPU_WORKER_ID": "2"}, (), "TPU_WORKER_ID='2'"),
        ({}, ("host", "0/2"), "--coordinator 'host': expected HOST:PORT, such as node-0:8476"),
        ({}, ("host:1", None), "--coordinator host:1 needs --process I/N"),
        ({}, (None, "1/2"), "--process 1/2 needs --coordinator HOST:PORT"),
        ({}, ("host:1", "2/2"), "--process '2/2': expected I/N with I from 0 to N-1"),
        ({}, ("host:1", "two"), "--process 'two': expected I/N"),
    ],
)
def test_bad_variables_are_an_error_in_a_sentence(environ, arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        find_launch(environ, *arguments)


def test_one_machine_needs_no_jax(tmp_path):
    checkpoint.save({"w": np.zeros(3)}, tmp_path / "saved")
    code = (
        "import sys\nfrom eformer.cli.commands import main\n"
        f"main(['verify', {str(tmp_path / 'saved')!r}], standalone_mode=False)\nassert 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
