"""Delete old checkpoints of a run."""

import fcntl
import os
import shutil
import signal
from contextlib import contextmanager
from pathlib import Path
from stat import S_ISREG

import msgspec
import numpy as np
import pytest
import safetensors.numpy

from eformer._engine.formats.run_steps import Step
from eformer._engine.runs import retention
from eformer._engine.stores.base import read_whole
from eformer._engine.stores.locate import store_at
from eformer._engine.tools.prune import plan_removal, remove_planned
from eformer.checkpoint import Keep, Run, load, prune, save, score, steps
from eformer.errors import EformerError, NotFoundError
from support import programs
from support.buckets import objects

ORBAX = Path(__file__).parents[2] / "compat" / "orbax"
ORIGINAL = Path(__file__).parents[2] / "compat" / "data" / "checkpointer"


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


def test_series_are_counted_separately(run):
    for name in ("step-5", "step-6", "7", "8"):
        save({"w": 1}, run / name, format="tensorstore")
    done = prune(run, keep=1)
    assert set(done.kept) == {"run-1000", "step-6", "8"}
    assert sorted(os.listdir(run)) == ["8", "run-1000", "step-6"]


# ------------------------------------------------------------------------------ what is no step of ours


@pytest.fixture
def mixed(tmp_path):
    """A directory in which steps lie beside much else that has a number in its name."""
    for step in (1, 2, 3):
        save({"w": np.full(10, step)}, tmp_path / f"step-{step}")
    for name in ("eval_2023.npz", "fold1.npz", "fold2.npz"):
        np.savez(tmp_path / name, w=np.ones(2))
    for number in (1, 2):
        save({"w": 1}, tmp_path / f"llama-{number}")
        save({"w": 1}, tmp_path / f"embeddings-v{number}.safetensors")
    for number in (6, 7):
        (tmp_path / f"hf-{number}").mkdir()
        safetensors.numpy.save_file({"w": np.ones(3)}, tmp_path / f"hf-{number}" / "model.safetensors")
        (tmp_path / f"hf-{number}" / "notes.txt").write_text("years of work")
    return tmp_path


def test_only_steps_of_eformer_under_names_of_steps_are_removed(mixed):
    before = set(os.listdir(mixed))
    done = prune(mixed, keep=1)
    assert (done.removed, done.kept, done.left) == (("step-1", "step-2"), ("step-3",), {})
    assert before - set(os.listdir(mixed)) == {"step-1", "step-2"}


@pytest.mark.parametrize(
    ("pattern", "removed"),
    [
        ("llama-*", "llama-1"),
        ("embeddings-v*.safetensors", "embeddings-v1.safetensors"),
        ("step-*", "step-1"),
    ],
)
def test_a_pattern_names_other_checkpoints(mixed, pattern, removed):
    before = set(os.listdir(mixed))
    done = prune(mixed, keep=1 if "step" not in pattern else 2, pattern=pattern)
    assert done.removed == (removed,)
    assert before - set(os.listdir(mixed)) == {removed}


def test_checkpoints_of_other_programs_are_removed_if_that_is_asked_for(mixed):
    for pattern, removed in (("fold*.npz", "fold1.npz"), ("hf-*", "hf-6")):
        with pytest.raises(NotFoundError, match=r"another program wrote it .*; foreign=True also counts"):
            prune(mixed, keep=1, pattern=pattern)
        assert (mixed / removed).exists()
        assert prune(mixed, keep=1, pattern=pattern, foreign=True).removed == (removed,)
        assert not (mixed / removed).exists()


@pytest.mark.parametrize("pattern", ["", "ema", "*", "a*b*", "runs/step-*"])
def test_a_pattern_has_one_place_for_the_number(mixed, pattern):
    with pytest.raises(ValueError, match=r"expected a name with one \* in place of the number"):
        prune(mixed, keep=1, pattern=pattern)


def test_a_directory_with_other_names_alone_says_how_to_name_them(tmp_path):
    save({"w": 1}, tmp_path / "ema-1")
    with pytest.raises(NotFoundError, match=r"no checkpoints named by their steps.*; pattern= counts other"):
        prune(tmp_path, keep=1)
    with pytest.raises(NotFoundError, match=r"no checkpoints called best-\*"):
        prune(tmp_path, keep=1, pattern="best-*")


def test_steps_of_orbax_are_left_and_named(tmp_path):
    shutil.copytree(ORBAX / "manager", tmp_path, dirs_exist_ok=True)
    for step in (10, 11):
        save({"w": 1}, tmp_path / f"step-{step}")
    done = prune(tmp_path, keep=1)
    assert done.removed == ("step-10",)
    assert list(done.left) == ["2", "3"]
    assert "another program wrote it (orbax); foreign=True" in done.left["2"]
    done = prune(tmp_path, keep=Keep(last=1, foreign=True))
    assert (done.removed, done.kept) == (("2",), ("3", "step-11"))


def run_of_flax(path):
    for step in (9, 10):
        path.mkdir(parents=True, exist_ok=True)
        (path / f"checkpoint_{step}").write_bytes(msgspec.msgpack.encode({"w": step}))


RUNS = {
    "eformer": lambda path: [save({"w": np.ones(3)}, path / f"step-{step}") for step in (1, 2)],
    "arrays": lambda path: [save({"w": np.ones(3)}, path / str(step), format="tensorstore") for step in (1, 2)],
    "orbax": lambda path: shutil.copytree(ORBAX / "manager", path),
    "flax": run_of_flax,
}  # fmt: skip


@pytest.mark.parametrize("make", RUNS.values(), ids=RUNS)
def test_runs_with_steps_of_their_own_stay(tmp_path, make):
    for number in (1, 2, 3):
        make(tmp_path / f"run-{number}")
    for foreign in (False, True):
        with pytest.raises(NotFoundError, match=r"run-1: .*it is a run, not a step; its newest step is"):
            prune(tmp_path, keep=1, foreign=foreign)
    for step in (4, 5):
        save({"w": np.ones(3)}, tmp_path / f"run-{step}")
    done = prune(tmp_path, keep=1, foreign=True)
    assert (done.removed, list(done.left)) == (("run-4",), ["run-1", "run-2", "run-3"])
    assert load(tmp_path / "run-1")


def test_runs_in_a_bucket_stay():
    where = f"memory://prune-{os.getpid()}/runs"
    for number in (1, 2):
        for step in (1, 2):
            save({"w": np.ones(3)}, f"{where}/run-{number}/step-{step}")
    with pytest.raises(NotFoundError, match=r"run-1: .*it is a run, not a step"):
        prune(where, keep=1)
    for step in (3, 4):
        save({"w": np.ones(3)}, f"{where}/run-{step}")
    assert prune(where, keep=1).removed == ("run-3",)
    assert load(f"{where}/run-1/step-1")["w"][0] == 1


LAYOUTS = (
    {}, {"options": {"max_shard_bytes": 100}}, {"format": "tensorstore"}, {"format": "tensorstore", "prefix": "m"},
    {"format": "tensorstore", "options": {"ocdbt": True}},
)  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_other_files_in_a_step_are_listed_before_they_are_removed(tmp_path, caplog, layout):
    for step in (1, 2, 3):
        save({"w": np.ones(100), "v": {"x": np.ones(100)}}, tmp_path / f"step-{step}", **layout)
    (tmp_path / "step-1" / "notes.txt").write_text("why it diverged")
    (tmp_path / "step-1" / "plots").mkdir()
    (tmp_path / "step-1" / "plots" / "loss.png").write_bytes(b"png")
    plan = prune(tmp_path, keep=1, dry_run=True)
    assert plan.other_files == {"step-1": ("notes.txt", "plots/loss.png")}
    assert not caplog.text
    prune(tmp_path, keep=1)
    assert "step-1 is removed with files that are not part of it: notes.txt; plots/loss.png" in caplog.text


def test_nothing_of_orbax_or_of_the_checkpointer_is_another_file(tmp_path):
    shutil.copytree(ORBAX / "manager", tmp_path / "orbax")
    assert prune(tmp_path / "orbax", keep=1, foreign=True, dry_run=True).other_files == {}
    (tmp_path / "orbax" / "2" / "notes.txt").write_text("x")
    plan = prune(tmp_path / "orbax", keep=1, foreign=True, dry_run=True)
    assert plan.other_files == {"2": ("notes.txt",)}
    for step in (1, 2):
        save({"w": np.ones(3)}, tmp_path / "run" / f"run-{step}", format="tensorstore")
        (tmp_path / "run" / f"run-{step}" / "metadata.json").write_text('{"step":1,"is_temporary":false}')
    assert prune(tmp_path / "run", keep=1, dry_run=True).other_files == {}


NOTES = (
    "_METADATA", "_notes.md", "a/b/c.0123456789abcdef.safetensors", "d/notes", "export/.eformer-notes",
    "hf/model.safetensors.index.json", "metadata.json", "other.safetensors.index.json",
    "results.0123456789abcdef/scores.csv", "w/d/notes",
)  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_notes_with_names_like_those_of_eformer_are_listed(tmp_path, layout):
    for step in (1, 2):
        save({"w": np.ones(100), "v": {"x": np.ones(100)}}, tmp_path / f"step-{step}", **layout)
    for name in NOTES:
        (tmp_path / "step-1" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "step-1" / name).write_text("x")
    assert prune(tmp_path, keep=1, dry_run=True).other_files == {"step-1": NOTES}


def test_notes_with_names_like_those_of_orbax_are_listed(tmp_path):
    shutil.copytree(ORBAX / "manager", tmp_path, dirs_exist_ok=True)
    notes = (
        "_eval/deep/results.csv",
        "_notes.md",
        "default/d/deep/notes",
        "eval/.zarray",
        "metadata.json",
        "x/d/mine",
    )
    for name in notes:
        (tmp_path / "2" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "2" / name).write_text("x")
    assert prune(tmp_path, keep=1, foreign=True, dry_run=True).other_files == {"2": notes}


def test_no_file_that_a_save_left_in_a_bucket_is_another_file():
    where = f"memory://prune-{os.getpid()}/files"
    for step in (1, 2):
        for form in ("safetensors", "tensorstore"):
            save({"w": np.ones(100)}, f"{where}/{form}/step-{step}", format=form)
            save({"w": np.zeros(100)}, f"{where}/{form}/step-{step}", format=form)
    for form in ("safetensors", "tensorstore"):
        plan = prune(f"{where}/{form}", keep=1, dry_run=True)
        assert (plan.removed, plan.other_files) == (("step-1",), {})


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
    monkeypatch.setattr(os, "unlink", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        prune(run, keep=3)
    (hidden,) = [name for name in os.listdir(run) if name not in ("run-100", "run-200", "run-1000")]
    assert hidden.startswith(".eformer-")


def test_no_save_commits_between_the_last_look_at_a_step_and_its_removal(run, monkeypatch):
    """A save commits under the lock of its directory, which the removal holds."""
    rename, tried = os.rename, []

    def commit_before(source, target, **directories):
        if source == "run-90":
            with closing_descriptor(run / "run-90") as descriptor, pytest.raises(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            tried.append(source)
        return rename(source, target, **directories)

    monkeypatch.setattr(os, "rename", commit_before)
    assert [os.path.basename(path) for path in prune(run, keep=3).removed] == ["run-90"]
    assert tried == ["run-90"]


@contextmanager
def closing_descriptor(path):
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


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


def test_only_planned_checkpoints_are_removed(run):
    plan = plan_removal(run, keep=1)
    save({"w": 1}, run / "run-2000")
    remove_planned(plan)
    assert sorted(os.listdir(run)) == ["run-1000", "run-2000"]


def test_targets_of_links_stay(run):
    (run / "best").symlink_to("run-100")
    assert prune(run, keep=1).removed == ("run-90", "run-200")
    assert load(run / "best")["w"][0] == 100


# ---------------------------------------------------------------------------- files of other programs


def scores_of_others(path):
    """Write files of other programs that have the names of scores, and the scores of a step that has gone."""
    (path / "100.scores.json").write_text('{"accuracy": 0.93}')
    (path / "run-9.scores.json").write_text('{"digest": "", "metrics": {"x": 1.0}, "by": "me"}')
    (path / "run-7.scores.json").write_text('{"digest": "0f", "metrics": {"loss": 1.0}}')
    (path / "run-8.scores.json").mkdir()


def test_only_scores_that_eformer_wrote_are_removed_and_they_are_listed(run):
    scores_of_others(run)
    assert prune(run, keep=4, dry_run=True).scores == ("run-7.scores.json",)
    assert (run / "run-7.scores.json").exists()
    assert prune(run, keep=4).scores == ("run-7.scores.json",)
    left = sorted(name for name in os.listdir(run) if "scores" in name)
    assert left == ["100.scores.json", "run-8.scores.json", "run-9.scores.json"]


def test_a_run_in_a_bucket_removes_no_scores_of_others():
    where = f"memory://prune-{os.getpid()}/scores"
    content = b'{"accuracy": 0.93}'
    store_at(where).objects.put(f"prune-{os.getpid()}/scores/100.scores.json", content)
    with Run(where, keep=1) as run:
        for step in (1, 2):
            run.save(step, {"w": np.ones(3)}).result()
    prune(where, keep=1)
    assert read_whole(store_at(where), "100.scores.json")[0] == content


def test_a_file_beside_a_directory_with_the_name_of_a_signature_stays(run):
    (run / "run-90.eformer.sig").write_text("mine")
    assert prune(run, keep=3).removed == ("run-90",)
    assert (run / "run-90.eformer.sig").read_text() == "mine"


def test_a_step_that_gets_files_after_its_removal_was_planned_stays(run):
    (run / "run-90" / "plots").mkdir()
    plan = plan_removal(run, 3)
    (run / "run-90" / "plots" / "loss.png").write_bytes(b"png")
    with pytest.raises(ValueError, match=r"run-90 has changed since .* it has new files: plots/loss.png"):
        remove_planned(plan)
    assert (run / "run-90" / "plots" / "loss.png").exists()


def test_files_of_the_original_are_part_of_its_checkpoint(tmp_path):
    for step in (4, 5):
        shutil.copytree(ORIGINAL / "run-5", tmp_path / f"run-{step}")
    plan = prune(tmp_path, keep=1, foreign=True, dry_run=True)
    assert (plan.removed, plan.other_files) == (("run-4",), {})


def test_files_in_a_directory_called_like_that_of_leases_are_listed_on_a_disk(run):
    (run / "run-90" / ".eformer-leases").mkdir()
    (run / "run-90" / ".eformer-leases" / "mine").write_text("x")
    assert prune(run, keep=3, dry_run=True).other_files == {"run-90": (".eformer-leases/mine",)}


def test_only_digits_of_ascii_are_numbers_of_steps(run):
    save({"w": 1}, run / "run-\u0663\u0663")
    assert prune(run, keep=3).removed == ("run-90",)
    assert steps(run)[-1].name == "run-1000"
    assert (run / "run-\u0663\u0663").exists()


# ----------------------------------------------------------------------------------------------- rules


def test_a_metric_that_no_checkpoint_has_is_refused(run):
    for step in (90, 100):
        score(run, step, {"eval.loss": 0.1, "loss": 0.2})
    for dry_run in (True, False):
        with pytest.raises(
            ValueError,
            match=r"no step has a number for the metric eval.los; the steps have eval.loss; loss; nothing was",
        ):
            prune(run, keep=[Keep(best=2, by="eval.los"), Keep(last=1)], dry_run=dry_run)
    assert plan_removal(run, Keep(best=2, by="eval.los")).removed == ()
    assert prune(run, keep=Keep(best=2, by="eval.loss")).removed == ("run-200",)


def test_a_series_without_the_metric_stays(run, caplog):
    for step in (1, 2):
        save({"w": 1}, run / f"step-{step}")
    score(run, 200, {"loss": 0.1})
    assert prune(run, keep=Keep(best=1, by="loss")).removed == ("run-90", "run-100")
    assert (
        "all of step-1; step-2 stay: no step has a number for the metric loss; the steps have no metrics"
        in caplog.text
    )


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
        save({"w": np.ones(3)}, run / f"step-{number}")
    (run / "run-1000" / "model.safetensors").unlink()
    done = prune(run, keep=[Keep(last=1), Keep(every=300)])
    assert set(done.kept) == {"run-200", "step-300", "step-900"}
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
        with pytest.raises(ValueError, match="no rule selects checkpoints to keep"):
            prune(run, keep=nothing)
    assert len(os.listdir(run)) == 4


# ------------------------------------------------------------------------------- what dead saves left

KILLED = """
import os, signal, sys
import numpy as np
from eformer._engine.saving import save as saving
from eformer.checkpoint import save

write = saving.write
def killed(*arguments, **more):
    write(*arguments, **more)
    os.kill(os.getpid(), signal.SIGKILL)

saving.write = killed
save({"w": np.ones(1000)}, sys.argv[1], format=sys.argv[2])
"""


@pytest.mark.parametrize("form", ["safetensors", "tensorstore"])
@pytest.mark.parametrize("step", [100, 2000], ids=["over-a-step", "a-new-step"])
@pytest.mark.sample(2)
def test_what_a_dead_save_left_is_swept(run, form, step):
    shutil.rmtree(run / "run-100")
    save({"w": np.full(1000, 100)}, run / "run-100", format=form)
    before = {name: sorted(os.listdir(run / name)) for name in os.listdir(run)}
    killed = programs.run(KILLED, run / f"run-{step}", form)
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
    identity = retention.identity_of

    def late(store, name):
        if name == "run-90":
            shutil.rmtree(run / name)
        return identity(store, name)

    monkeypatch.setattr(retention, "identity_of", late)
    plan = plan_removal(run, 1)
    assert plan.removed == ("run-100", "run-200")
    shutil.rmtree(run / "run-100")
    remove_planned(plan)
    assert os.listdir(run) == ["run-1000"]


def test_a_run_that_removes_all_steps_meanwhile_is_listed_again(tmp_path, monkeypatch):
    save({"w": np.ones(3)}, tmp_path / "step-1")
    problem = Step.problem

    def late(step):
        if step.number == 1:
            save({"w": np.ones(3)}, tmp_path / "step-2")
            shutil.rmtree(tmp_path / "step-1")
        return problem(step)

    monkeypatch.setattr(Step, "problem", late)
    plan = prune(tmp_path, keep=1, dry_run=True)
    assert (plan.kept, plan.left) == (("step-2",), {})


# ---------------------------------------------------------------------------------------------- bytes


@pytest.fixture
def linked(tmp_path):
    """Three steps that share a frozen leaf, which is one file on the disk."""
    frozen, reuse = np.arange(50_000.0), {"reuse": False}
    for step in (1, 2, 3):
        save({"frozen": frozen, "w": np.full(1000, step)}, tmp_path / f"step-{step}", options=reuse)
        reuse = {"reuse": tmp_path / f"step-{step}"}
    return tmp_path


def used(place):
    return sum({s.st_ino: s.st_size for s in map(os.stat, place.rglob("*")) if S_ISREG(s.st_mode)}.values())


def test_files_that_a_step_that_stays_shares_are_not_freed(linked):
    before, plan = used(linked), prune(linked, keep=1, dry_run=True)
    done = prune(linked, keep=1)
    assert done.nbytes > 400_000 > 50_000 > done.freed
    assert plan.freed == done.freed == before - used(linked)


def test_files_that_only_removed_steps_share_are_freed_once(linked):
    save({"w": 1}, linked / "step-4")
    before, plan = used(linked), prune(linked, keep=1, dry_run=True)
    done = prune(linked, keep=1)
    assert plan.freed == done.freed == done.nbytes == before - used(linked) > 400_000


def test_a_step_that_a_file_elsewhere_is_linked_to_is_not_freed(run, tmp_path_factory):
    kept = tmp_path_factory.mktemp("kept")
    for name in ("run-90", "run-100"):
        os.link(next((run / name).glob("*.safetensors")), kept / name)
    done = prune(run, keep=2)
    assert 0 < done.freed < done.nbytes - 2 * 8000


def test_a_removed_step_of_a_bucket_frees_its_objects():
    for step in (1, 2):
        save({"w": np.full(1000, step)}, f"memory://freed/step-{step}")
    before = sum(map(len, objects("memory://freed/step-1").values()))
    done = prune("memory://freed", keep=1)
    after = sum(map(len, objects("memory://freed/step-1").values()))
    assert done.freed == done.nbytes == before - after
