"""Commands in several processes: one prints, all end with the same exit code, and an error in one is an error in all."""

import json

import numpy as np
import pytest

from eformer import checkpoint
from support.launched import Launched, launched

pytestmark = pytest.mark.xdist_group("processes")


@pytest.fixture
def saved(tmp_path):
    rng = np.random.default_rng(0)
    tree = {f"layer{i}": {"w": rng.random((300, 1000), np.float32), "b": rng.random(10)} for i in range(8)}
    checkpoint.save(tree | {"large": rng.random((3000, 500), np.float32)}, tmp_path / "saved")
    return tmp_path / "saved"


def flip(path, at):
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))


@pytest.mark.parametrize("count", [2, 4])
def test_one_process_prints_the_check_of_all(saved, count):
    outcome = launched(count, "verify", saved)
    assert outcome.codes == [0] * count, outcome
    assert outcome.outputs == [f"{checkpoint.verify(saved)}\n", *[""] * (count - 1)]
    assert outcome.errors == [""] * count


def test_damage_in_the_part_of_any_process_is_in_the_one_result(saved):
    (file,) = saved.glob("*.safetensors")
    size = file.stat().st_size
    for at in (9, size // 3, size - 5):
        flip(file, at)
    expected = checkpoint.verify(saved)
    outcome = launched(3, "verify", saved, "--json")
    assert outcome.codes == [1, 1, 1], outcome
    found = json.loads(outcome.outputs[0])
    assert len(found["damages"]) == 3
    assert [d["start"] for d in found["damages"]] == sorted(d.start for d in expected.damages)
    assert outcome.outputs[1:] == ["", ""]


def test_an_error_in_one_process_is_an_error_in_all(saved):
    words = "import eformer._engine.tools.verify as v\ndef fail(*a): raise OSError('disk 7 is gone')\n"
    outcome = launched(3, "verify", saved, programs={2: f"{words}v._damages = fail"})
    assert outcome.codes == [1, 1, 1], outcome
    assert "process 2: OSError('disk 7 is gone')" in outcome.errors[0]
    assert outcome.errors[1:] == ["", ""]


def test_an_error_before_the_work_of_one_process_is_an_error_in_all(saved):
    hidden = "import eformer._engine.tools.verify as v\ndef fail(*a, **b): raise FileNotFoundError('no such mount')"
    outcome = launched(2, "verify", saved, programs={1: f"{hidden}\nv.path_of_step = fail"})
    assert outcome.codes == [1, 1], outcome
    assert "process 1: FileNotFoundError('no such mount')" in outcome.errors[0]


@pytest.mark.parametrize("number", [0, 2])
def test_all_processes_end_with_an_error_if_one_is_killed(saved, number):
    quick = "import eformer._engine.processes.crew as c\nc.SILENCE = 3.0; c.BEAT = 0.2\n"
    die = "import os, eformer._engine.tools.verify as v\ndef die(*a): os.kill(os.getpid(), 9)\nv._damages = die\n"
    programs = dict.fromkeys(range(3), quick) | {number: quick + die}
    outcome = Launched(3, "verify", saved, programs=programs).wait()
    assert outcome.codes[number] == -9
    assert all(code != 0 for code in outcome.codes), outcome
    for other in {0, 1, 2} - {number}:
        if number:  # the first process prints for all
            assert "verifying: process 2 of 3 gave no sign of life for 3 s" in outcome.errors[0]
        else:  # the first process had the service of JAX, which ends all others
            assert "another task died" in outcome.errors[other]


def slurm(number, count):
    return {
        "SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_NUM_TASKS": str(count),
        "SLURM_NTASKS": str(count), "SLURM_PROCID": str(number), "SLURM_LOCALID": str(number),
    }  # fmt: skip


def open_mpi(number, count):
    return {
        "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://127.0.0.1:34911",
        "OMPI_COMM_WORLD_SIZE": str(count),
        "OMPI_COMM_WORLD_RANK": str(number),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(number),
    }


@pytest.mark.parametrize("variables", [slurm, open_mpi])
def test_launchers_need_no_options(saved, variables):
    outcome = launched(2, "verify", saved, variables=variables)
    assert outcome.codes == [0, 0], outcome
    assert outcome.outputs[1] == ""


def test_a_process_whose_others_never_come_says_so(saved):
    port = {"EFORMER_START_TIMEOUT": "2"}
    outcome = launched(1, "verify", saved, variables=lambda n, c: slurm(0, 2), **port)
    assert outcome.codes == [1]
    assert "process 0/2 of Slurm could not reach the others" in outcome.errors[0]
    assert "--process 0/1" in outcome.errors[0]


def test_several_processes_compare_and_report(saved, tmp_path):
    tree = checkpoint.load(saved)
    tree["layer3"]["w"] = np.asarray(tree["layer3"]["w"]) + 1
    checkpoint.save(tree, tmp_path / "other")
    outcome = launched(3, "diff", saved, tmp_path / "other")
    assert outcome.codes == [1, 1, 1], outcome
    assert outcome.outputs == [f"{checkpoint.diff(saved, tmp_path / 'other')}\n", "", ""]
    outcome = launched(2, "report", saved, "--against", tmp_path / "other", "--json")
    assert outcome.codes == [0, 0], outcome
    alone = checkpoint.report(saved, tmp_path / "other").data
    assert json.loads(outcome.outputs[0])["leaves"] == json.loads(json.dumps(alone["leaves"]))
