"""Delete old checkpoints of a run."""

import os
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
import safetensors.numpy

from eformer._engine.stores.directory import Directory
from eformer._engine.stores.local import LocalStore
from eformer._engine.tools.prune import plan_removal, remove
from eformer.checkpoint import Keep, load, prune, save, score
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
    monkeypatch.setattr(Directory, "empty", lambda place: 1 / 0)
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


# ----------------------------------------------------------------------------------------------- rules


def test_rules_are_a_union_and_the_newest_stays(run):
    done = prune(run, keep=[Keep(every=100, last=2), Keep(at=(90,))])
    assert done.removed == ("run-100",)
    assert done.kept == ("run-90", "run-200", "run-1000")
    assert prune(run, keep=Keep(at=(90,))).removed == ("run-200",)


def test_the_best_stay_by_scores_which_go_with_their_step(run):
    for step, loss in ((90, 0.1), (100, 0.3), (200, 0.2)):
        score(run, step, {"eval.loss": loss})
    assert prune(run, keep=Keep(best=2, by="eval.loss")).removed == ("run-100",)
    assert prune(run, keep=Keep(best=1, by="eval.loss", mode="max")).removed == ("run-90",)
    assert sorted(os.listdir(run)) == ["run-1000", "run-200", "run-200.scores.json"]


def test_rules_count_each_series_and_no_damaged_checkpoint(run):
    for number in (300, 900):
        save({"w": np.ones(3)}, run / f"ema-{number}")
    (run / "run-1000" / "model.safetensors").unlink()
    done = prune(run, keep=[Keep(last=1), Keep(every=300)])
    assert set(done.kept) == {"run-200", "ema-300", "ema-900"}
    assert set(done.left) == {"run-1000"}
    assert (run / "run-1000").is_dir()


def test_a_step_of_several_trees_has_metrics(run):
    for number, loss in ((2000, 0.5), (3000, 0.7)):
        save(
            {"w": np.ones(2)},
            run / f"run-{number}",
            prefix="model",
            metadata={"eformer.run": {"metrics": {"loss": loss}}},
        )
        save({"m": np.ones(2)}, run / f"run-{number}", prefix="tx")
    assert prune(run, keep=Keep(best=1, by="loss")).kept == ("run-2000", "run-3000")


def test_no_rule_is_refused(run):
    for nothing in ([], None):
        with pytest.raises(ValueError, match="no rule says which checkpoints stay"):
            prune(run, keep=nothing)
    assert len(os.listdir(run)) == 4


# ------------------------------------------------------------------------------- what dead saves left

KILLED = """
import os, signal, sys
import numpy as np
from eformer._engine.saving import run
from eformer.checkpoint import save

write = run.write
def killed(*arguments, **more):
    write(*arguments, **more)
    os.kill(os.getpid(), signal.SIGKILL)

run.write = killed
save({"w": np.ones(1000)}, sys.argv[1], format=sys.argv[2])
"""


@pytest.mark.parametrize("form", ["safetensors", "tensorstore"])
@pytest.mark.parametrize("step", [100, 2000], ids=["over-a-step", "a-new-step"])
@pytest.mark.sample(2)
def test_what_a_dead_save_left_is_swept(run, form, step):
    shutil.rmtree(run / "run-100")
    save({"w": np.full(1000, 100)}, run / "run-100", format=form)
    before = {name: sorted(os.listdir(run / name)) for name in os.listdir(run)}
    killed = subprocess.run([sys.executable, "-c", KILLED, str(run / f"run-{step}"), form], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert any(path.name.endswith(".tmp") for path in run.rglob("*"))
    prune(run, keep=4, dry_run=True)
    assert any(path.name.endswith(".tmp") for path in run.rglob("*"))
    prune(run, keep=4)
    assert {name: sorted(os.listdir(run / name)) for name in os.listdir(run)} == before
    assert load(run / "run-100")["w"][0] == 100


def test_the_scratch_of_a_save_that_lives_is_left_alone(run):
    from eformer._engine.stores.locate import store_at

    upload = store_at(run / "run-100").begin()
    prune(run, keep=4)
    assert (run / "run-100" / upload.token).is_dir()
    upload.close()


def test_steps_that_the_run_removes_meanwhile_are_passed_over(run, monkeypatch):
    identity = LocalStore.identity

    def late(store, name, indexes):
        if name == "run-90":
            shutil.rmtree(run / name)
        return identity(store, name, indexes)

    monkeypatch.setattr(LocalStore, "identity", late)
    plan = plan_removal(run, 1)
    assert plan.removed == ("run-100", "run-200")
    shutil.rmtree(run / "run-100")
    remove(plan)
    assert os.listdir(run) == ["run-1000"]
