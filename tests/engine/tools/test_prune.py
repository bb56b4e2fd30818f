"""Delete old checkpoints of a run."""

import os
import shutil

import numpy as np
import pytest
import safetensors.numpy

from eformer._engine.stores.directory import Directory
from eformer._engine.tools.prune import plan_removal, remove
from eformer.checkpoint import load, prune, save
from eformer.errors import EformerError, NotFoundError


@pytest.fixture
def run(tmp_path):
    for step in (90, 100, 200, 1000):
        save({"w": np.full(1000, step)}, tmp_path / f"run-{step}")
    return tmp_path


def test_the_last_ones_by_number_stay(run):
    done = prune(run, keep=2)
    assert done.removed == ("run-90", "run-100")
    assert done.kept == ("run-200", "run-1000")
    assert done.nbytes > 16_000
    assert sorted(os.listdir(run)) == ["run-1000", "run-200"]
    assert load(run / "run-200")["w"][0] == 200


def test_a_dry_run_removes_nothing(run):
    assert prune(run, keep=1, dry_run=True).removed == ("run-90", "run-100", "run-200")
    assert len(os.listdir(run)) == 4


def test_series_are_counted_separately_and_other_files_are_left_alone(run):
    for name in ("ema-5", "ema-6"):
        save({"w": 1}, run / name, format="tensorstore")
    save({"w": 1}, run / "best")
    save({"w": 1}, run / "model-7.safetensors")
    (run / "events-3").write_text("a log")
    done = prune(run, keep=1)
    assert set(done.kept) == {"run-1000", "ema-6", "model-7.safetensors"}
    assert list(done.left) == ["events-3"]
    assert sorted(os.listdir(run)) == ["best", "ema-6", "events-3", "model-7.safetensors", "run-1000"]


@pytest.mark.parametrize("harm", ["cut short", "gone", "no manifest", "empty"])
def test_incomplete_checkpoints_do_not_count_and_stay(run, harm):
    last = run / "run-1000"
    data = last / "model.safetensors"
    if harm == "cut short":
        os.truncate(data, data.stat().st_size - 1)
    elif harm == "gone":
        data.unlink()
    elif harm == "no manifest":
        (last / "manifest.json").unlink()
    else:
        shutil.rmtree(last)
        last.mkdir()
    done = prune(run, keep=1)
    assert done.kept == ("run-200",)
    assert list(done.left) == ["run-1000"]
    assert sorted(os.listdir(run)) == ["run-1000", "run-200"]


def test_those_that_stay_can_be_checked_first(run):
    with (run / "run-1000" / "model.safetensors").open("r+b") as file:
        file.seek(-10, 2)
        file.write(b"\xff")
    with pytest.raises(EformerError, match="nothing was removed, because a checkpoint to keep is damaged"):
        prune(run, keep=1, check=True)
    assert len(os.listdir(run)) == 4


def test_a_half_removed_checkpoint_is_hidden(run, monkeypatch):
    monkeypatch.setattr(Directory, "remove_tree", lambda place, name: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        prune(run, keep=3)
    (hidden,) = [name for name in os.listdir(run) if name not in ("run-100", "run-200", "run-1000")]
    assert hidden.startswith(".eformer-")


def test_a_link_is_not_followed(run, tmp_path):
    (run / "run-1").symlink_to(run / "run-1000")
    assert prune(run, keep=4).removed == ()
    assert (run / "run-1").is_symlink()


def test_errors(tmp_path):
    with pytest.raises(NotFoundError, match="is not a directory"):
        prune(tmp_path / "x", keep=1)
    with pytest.raises(NotFoundError, match="no checkpoints named by their steps"):
        prune(tmp_path, keep=1)
    with pytest.raises(ValueError, match="at least one checkpoint must stay"):
        prune(tmp_path, keep=0)


@pytest.mark.parametrize("form", ["safetensors", "tensorstore"])
def test_a_checkpoint_is_not_taken_for_a_run(tmp_path, form):
    for number in range(3):
        save({"w": np.ones(3)}, tmp_path / "c", prefix=f"m{number}", format=form)
    with pytest.raises(ValueError, match=r"is itself a checkpoint: it contains .*json"):
        prune(tmp_path / "c", keep=1)
    assert load(tmp_path / "c", prefix="m0")


def test_shards_are_not_steps(tmp_path):
    for number in (1, 2):
        safetensors.numpy.save_file(
            {f"w{number}": np.ones(3)}, tmp_path / f"model-0000{number}-of-00002.safetensors"
        )
    with pytest.raises(NotFoundError, match="no checkpoints named by their steps"):
        prune(tmp_path, keep=1)


def test_single_files_are_steps_too(tmp_path):
    for step in (1, 2):
        np.savez(tmp_path / f"step-{step}.npz", w=np.ones(2))
    assert prune(tmp_path, keep=1).removed == ("step-1.npz",)


def test_only_planned_checkpoints_are_removed(run):
    plan = plan_removal(run, keep=1)
    save({"w": 1}, run / "run-2000")
    remove(plan)
    assert sorted(os.listdir(run)) == ["run-1000", "run-2000"]


def test_targets_of_links_stay(run):
    (run / "best").symlink_to("run-100")
    assert prune(run, keep=1).removed == ("run-90", "run-200")
    assert load(run / "best")["w"][0] == 100
