"""A job that has not resumed from the steps in its directory: it saves nothing among them, or puts them aside."""

import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from flax.serialization import to_bytes
from safetensors.numpy import save_file

from eformer import checkpoint
from eformer.checkpoint import Near, Run
from eformer.errors import MismatchError
from support.trees import assert_same


def tree(number):
    return {"w": np.full(3, number), "frozen": np.arange(5)}


def fill(path, *numbers, **arguments):
    with Run(path, signals=(), **arguments) as run:
        for number in numbers:
            run.save(number, tree(number))


def contents(path):
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def numbers(path):
    return [step.number for step in checkpoint.steps(path)]


@pytest.mark.parametrize("first", [10, 90, 100, 110])
def test_the_first_save_is_an_error_and_nothing_changes(tmp_path, first):
    fill(tmp_path, 80, 90, 100)
    before = contents(tmp_path)
    with Run(tmp_path, every=10, keep=3, signals=()) as run:
        for _ in range(2):
            with pytest.raises(
                FileExistsError,
                match=r"has 3 steps, the newest is 100, and this job has not resumed from it\. "
                r"Call run\.resume\(\.\.\.\).* or here with Run\(\.\.\., fresh=True\)",
            ):
                run.after(first, tree(0))
    assert contents(tmp_path) == before


def test_a_load_by_hand_is_no_resume(tmp_path):
    fill(tmp_path, 1)
    state = checkpoint.load(tmp_path)
    with (
        Run(tmp_path, signals=()) as run,
        pytest.raises(FileExistsError, match="has 1 step, the newest is 1"),
    ):
        run.save(2, state)


def test_a_resume_that_failed_is_none(tmp_path):
    fill(tmp_path, 1)
    with Run(tmp_path, signals=()) as run:
        with pytest.raises(MismatchError):
            run.resume(like={"other": jnp.zeros(1)})
        with pytest.raises(FileExistsError, match="has not resumed"):
            run.save(2, tree(2))
    assert numbers(tmp_path) == [1]


def test_a_step_of_another_writer_counts(tmp_path):
    (tmp_path / "100").mkdir()
    (tmp_path / "100" / "_CHECKPOINT_METADATA").write_text("{}")
    with Run(tmp_path, signals=()) as run, pytest.raises(FileExistsError, match="the newest is 100"):
        run.save(1, tree(1))


def test_a_damaged_step_counts(tmp_path):
    fill(tmp_path, 1)
    (tmp_path / "step-1" / "manifest.json").unlink()
    with Run(tmp_path, signals=()) as run, pytest.raises(FileExistsError, match="the newest is 1"):
        run.save(1, tree(1))


def test_a_job_that_is_refused_takes_nothing_from_the_one_that_writes(tmp_path):
    with Run(tmp_path, signals=()) as writer:
        writer.save(1, tree(1)).result()
        with Run(tmp_path, signals=()) as other, pytest.raises(FileExistsError):
            other.save(1, tree(0))
        writer.save(2, tree(2)).result()
    assert numbers(tmp_path) == [1, 2]


def test_a_run_without_steps_needs_no_resume_and_one_that_resumed_from_nothing_has_resumed(tmp_path):
    fill(tmp_path / "one", 1, 2)
    with Run(tmp_path / "other", signals=()) as run:
        assert run.resume() is None
        run.save(1, tree(1)).result()
        run.save(2, tree(2))
    assert numbers(tmp_path / "one") == numbers(tmp_path / "other") == [1, 2]


# --------------------------------------------------------------------------------------------- near steps


def test_near_steps_alone_are_steps_too(tmp_path):
    near = {"near": Near(tmp_path / "near", every=1)}
    with Run(tmp_path / "run", signals=(), **near) as run:
        run.after(3, tree(3))
    for how in ("save", "after"):
        refused = pytest.raises(FileExistsError, match="has 1 step, the newest is 3")
        with Run(tmp_path / "run", signals=(), **near) as run, refused:
            getattr(run, how)(1, tree(0))
    with Run(tmp_path / "run", signals=(), **near) as run:
        assert_same(run.resume().tree, tree(3))


def test_near_steps_of_another_run_do_not_count(tmp_path):
    near = {"near": Near(tmp_path / "near", every=1)}
    with Run(tmp_path / "run", signals=(), **near) as run:
        run.after(3, tree(3))
    shutil.rmtree(tmp_path / "run")
    with Run(tmp_path / "run", signals=(), **near) as run:
        run.after(1, tree(1))
        run.wait()
        assert run.resume().step == 1


def test_a_fresh_run_removes_near_steps(tmp_path):
    near = {"near": Near(tmp_path / "near", every=1)}
    with Run(tmp_path / "run", signals=(), **near) as run:
        run.after(0, tree(0))
        run.after(3, tree(3))
    with Run(tmp_path / "run", signals=(), fresh=True, **near) as run:
        run.after(1, tree(1))
        run.wait()
        found = run.resume()
        assert found.step == 1
    assert_same(found.tree, tree(1))


# -------------------------------------------------------------------------------------------------- fresh


@pytest.mark.parametrize("fmt", ["safetensors", "tensorstore"])
def test_a_fresh_run_puts_the_old_steps_aside_whole(tmp_path, caplog, fmt):
    fill(tmp_path, 80, 90, 100, format=fmt)
    fill(tmp_path, 90, format=fmt, fresh=True)
    assert "fresh=True has put its steps aside: step-80; step-90; step-100" in caplog.text
    fill(tmp_path, 90, 91, format=fmt, fresh=True, keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "run.json", "step-100.old", "step-80.old", "step-90.old", "step-90.old-2", "step-91",
    ]  # fmt: skip
    for name, number in (("step-80.old", 80), ("step-100.old", 100), ("step-90.old-2", 90)):
        assert checkpoint.verify(tmp_path / name).ok
        assert_same(checkpoint.load(tmp_path / name), tree(number))


def test_a_fresh_run_keeps_no_step_for_a_resume_before_it(tmp_path):
    fill(tmp_path, 10, 20, 30)
    with Run(tmp_path, signals=()) as run:
        assert run.resume().step == 30
    fill(tmp_path, 20, 30, 40, fresh=True, keep=1)
    assert numbers(tmp_path) == [40]
    assert json.loads((tmp_path / "run.json").read_text())["resumed_from"] is None


def test_scores_are_put_aside_with_their_step(tmp_path):
    for metric in ("first", "second"):
        fill(tmp_path, 1, fresh=metric == "second")
        checkpoint.score(tmp_path, 1, {metric: 1.0})
    fill(tmp_path, 1, 2, fresh=True, keep=1)
    scores = {
        name: checkpoint.Step(1, str(tmp_path / name)).scores for name in ("step-1.old", "step-1.old-2")
    }
    assert scores == {"step-1.old": {"first": 1.0}, "step-1.old-2": {"second": 1.0}}


def test_steps_of_one_number_and_two_names_are_all_put_aside(tmp_path):
    fill(tmp_path, 100)
    shutil.copytree(tmp_path / "step-100", tmp_path / "100")
    fill(tmp_path, 1, fresh=True)
    assert {path.name for path in tmp_path.iterdir()} == {"100.old", "run.json", "step-1", "step-100.old"}


def test_a_fresh_run_changes_nothing_before_its_first_save_and_logs_nothing_in_a_new_directory(
    tmp_path, caplog
):
    fill(tmp_path / "old", 1)
    before = contents(tmp_path / "old")
    with Run(tmp_path / "old", fresh=True, signals=()):
        pass
    fill(tmp_path / "new", 1, fresh=True)
    assert (contents(tmp_path / "old"), caplog.text) == (before, "")


def test_a_fresh_run_does_not_resume_from_old_steps_but_may_go_back_to_its_own(tmp_path):
    fill(tmp_path, 100)
    with Run(tmp_path, fresh=True, signals=()) as run:
        with pytest.raises(ValueError, match=r"Run\(fresh=True\) starts anew in .*: do one of the two"):
            run.resume()
        assert numbers(tmp_path) == [100]
        for number in (1, 2):
            run.save(number, tree(number))
        assert run.resume(step=1, rewind=True).step == 1
    assert numbers(tmp_path) == [1]


# ------------------------------------------------------------------------- checkpoints of other programs


def in_flax(path):
    for number in (90, 100):
        (path / f"checkpoint_{number}").write_bytes(to_bytes(tree(number)))


def in_flax_with_fractions(path):
    (path / "checkpoint_0.5").write_bytes(to_bytes(tree(0)))


def in_t5x(path):
    (path / "checkpoint_100" / "target.w").mkdir(parents=True)
    (path / "checkpoint_100" / "checkpoint").write_bytes(to_bytes(tree(100)))


def in_transformers(path):
    for number in (90, 100):
        (path / f"checkpoint-{number}").mkdir()
        save_file(tree(number), path / f"checkpoint-{number}" / "model.safetensors")


WRITERS = {
    in_flax: "checkpoint_100",
    in_flax_with_fractions: "checkpoint_0.5",
    in_t5x: "checkpoint_100",
    in_transformers: "checkpoint-100",
}


@pytest.mark.parametrize("start", ["resume", "save", "fresh"])
@pytest.mark.parametrize("write", WRITERS)
def test_checkpoints_of_other_programs_are_refused(tmp_path, write, start):
    write(tmp_path)
    before = contents(tmp_path)
    message = (
        rf"holds checkpoints of another program \({WRITERS[write]}\), which a run cannot resume from; "
        rf"load {tmp_path}/{WRITERS[write]}, and give the run a directory of its own"
    )
    with (
        Run(tmp_path, signals=(), fresh=start == "fresh") as run,
        pytest.raises(FileExistsError, match=message),
    ):
        run.resume() if start == "resume" else run.save(1, tree(1))
    assert contents(tmp_path) == before


def test_files_and_directories_that_hold_no_checkpoint_are_not_refused(tmp_path):
    others = [
        "run.json", "notes.txt", "1", "run-1/events.out.tfevents.1.host", "run-2/files/config.yaml",
        "2026/slurm-123.out", "3/rank.0/stdout", "step-4/config.json", ".hidden/checkpoint",
    ]  # fmt: skip
    for name in others:
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text("x")
    (tmp_path / "checkpoint_5").touch()
    (tmp_path / "checkpoint-6").mkdir()
    checkpoint.save(tree(1), tmp_path / "run-7" / "step-1")
    with Run(tmp_path, signals=()) as run:
        assert run.resume() is None
        run.save(1, tree(1))
    assert numbers(tmp_path) == [1]
