"""The steps of a run, as a directory has them."""

import os

import numpy as np
import pytest

from eformer import checkpoint
from eformer.checkpoint import latest, load, save, steps
from eformer.errors import CorruptionError, NotFoundError
from support.trees import assert_same


def tree(number):
    return {"w": np.full(3, number, np.float32), "step": number}


@pytest.fixture
def run(tmp_path):
    for number in (9, 10, 100):
        save(tree(number), tmp_path / "run" / f"step-{number}")
    return tmp_path / "run"


def test_steps_are_in_the_order_of_their_numbers(run):
    assert [(step.number, step.path) for step in steps(run)] == [(n, f"{run}/step-{n}") for n in (9, 10, 100)]
    assert latest(run) == f"{run}/step-100"


def test_a_run_is_its_last_whole_step(run):
    assert_same(load(run), tree(100))
    assert checkpoint.inspect(run).trees[""].values == {"step": 100}
    assert checkpoint.verify(run).ok
    with checkpoint.open(run) as view:
        assert view["step"] == 100


def test_a_step_that_is_not_whole_is_passed_over(run):
    (run / "step-100" / "model.safetensors").unlink()
    assert latest(run) == f"{run}/step-10"
    assert_same(load(run), tree(10))
    for number in (9, 10):
        os.truncate(run / f"step-{number}" / "model.safetensors", 100)
    assert latest(run) is None
    with pytest.raises(CorruptionError, match=r"no step of .* is whole: step-100: "):
        load(run)


def test_names_of_other_programs_are_steps_too(tmp_path):
    for name in ("step_1", "run-2", "3", "checkpoint_4", "step-5"):
        save(tree(int(name[-1])), tmp_path / name)
    (tmp_path / "step-7").mkdir()
    save(tree(8), tmp_path / "best-8")
    assert [step.number for step in steps(tmp_path)] == [1, 2, 3, 4, 5]
    assert_same(load(tmp_path), tree(5))


def test_without_steps_there_is_no_run(tmp_path):
    assert latest(tmp_path) is None
    assert latest(tmp_path / "nothing") is None
    assert steps(tmp_path) == ()
    with pytest.raises(NotFoundError):
        steps(tmp_path / "nothing")
    with pytest.raises(NotFoundError):
        load(tmp_path)


def test_listing_reads_no_manifest(tmp_path):
    for number in range(3):
        (tmp_path / f"step-{number}").mkdir()
        (tmp_path / f"step-{number}" / "manifest.json").write_bytes(b"not a manifest")
    assert [step.number for step in steps(tmp_path)] == [0, 1, 2]
    assert latest(tmp_path) is None


def test_what_a_dead_save_left_is_no_step(run):
    from eformer._engine.stores.local_upload import LocalUpload

    (run / "step-200").mkdir()
    upload = LocalUpload(run / "step-200")
    upload.put([("model.safetensors", b"half")])
    upload.abandon()
    assert [step.number for step in steps(run)] == [9, 10, 100]
    assert latest(run) == f"{run}/step-100"
    save(tree(200), run / "step-200")
    assert latest(run) == f"{run}/step-200"
    assert not [path.name for path in (run / "step-200").iterdir() if path.name.startswith(".")]
