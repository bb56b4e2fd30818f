"""`eformer steps`."""

import json
import re

import numpy as np
import pytest

from eformer.checkpoint import Keep, Run
from support.commands import run as command
from support.programs import on_terminal


@pytest.fixture
def run(tmp_path):
    frozen = np.zeros(2**18, np.float32)
    with Run(tmp_path / "run", every=10) as run:
        for step in range(1, 31):
            tree = {"frozen": {"w": frozen}, "head": {"w": np.full(4, step, np.float32)}}
            run.after(step, tree, metrics={"loss": 1 / step})
    return tmp_path / "run"


def test_steps_are_listed_with_what_they_are(run):
    header, *lines = command("steps", run).stdout.splitlines()
    assert header.split() == ["Step", "Saved", "Size", "Why", "loss"]
    assert [line.split()[0] for line in lines] == ["10", "20", "30"]
    assert [line.split()[-2:] for line in lines] == [
        ["every", "0.1"],
        ["every", "0.05"],
        ["every", "0.0333333"],
    ]


def test_the_table_fits_the_terminal_and_names_the_metrics_that_do_not(tmp_path):
    with Run(tmp_path / "run", every=1) as run:
        for step in (1, 2):
            run.after(step, {"w": 0}, metrics={"loss": 0.5, "eval.loss": 0.25, "gradient.norm": step})
    (tmp_path / "run" / "step-1" / "manifest.json").write_bytes(b"{")
    text, _ = on_terminal("steps", tmp_path / "run", columns=64)
    header, *lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).rstrip() for line in text.splitlines()]
    assert header.split()[4:] == ["loss", "eval.loss"]
    assert all(len(line) <= 64 for line in [header, *lines])
    assert "damaged: " in " ".join(lines)
    assert all(lines), "no empty line"
    assert lines[-1].startswith("... and ")
    assert "gradient.norm" in lines[-1]
    assert "gradient.norm" in command("steps", tmp_path / "run").stdout.splitlines()[0]


def test_shared_bytes_are_counted_once(run):
    found = json.loads(command("steps", run, "--json").stdout)["steps"]
    assert found[0]["nbytes"] > 2**20 > found[1]["nbytes"]
    assert [step["metrics"]["loss"] for step in found] == [1 / 10, 1 / 20, 1 / 30]


def test_what_would_go_and_what_is_damaged_is_marked(run):
    (run / "step-20" / "manifest.json").write_bytes(b"{")
    lines = command("steps", run, "--keep", 1).stdout.splitlines()[1:]
    assert lines[0].endswith("would be removed")
    assert "damaged: " in lines[1]
    assert not any(word in lines[2] for word in ("damaged", "removed"))


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("rules", "removed"),
    [
        (["--keep-every", 20], ["10"]),
        (["--keep-at", 10, "--keep-at", 20], []),
        (["--keep-best", 1, "--by", "loss", "--mode", "max"], ["20"]),
        (["--keep-best", 2, "--by", "loss"], ["10"]),
        (["--keep-hours", 1], []),
        (["--keep", 1, "--keep-at", 10], ["20"]),
    ],
)
def test_prune_removes_what_steps_marks_by_the_same_rules(run, rules, removed):
    lines = command("steps", run, *rules).stdout.splitlines()
    assert [line.split()[0] for line in lines if line.endswith("would be removed")] == removed
    done = json.loads(command("prune", run, *rules, "--json", "--yes").stdout)
    assert done["removed"] == [f"step-{number}" for number in removed]
    assert len(list(run.glob("step-*"))) == 3 - len(removed)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ([], "no rule selects checkpoints to keep"),
        (["--keep-best", 1], "need each other"),
        (["--by", "loss"], "need each other"),
        (["--keep", 1, "--mode", "max"], "--keep-best, which is missing"),
    ],
)
def test_rules_that_say_too_little_are_refused(run, rules, message):
    assert message in command("prune", run, *rules, "--yes", code=2).stderr
    assert len(list(run.glob("step-*"))) == 3


def test_what_is_no_run_is_an_error_in_one_line(tmp_path):
    assert "is not a directory of steps" in command("steps", tmp_path / "nothing", code=1).stderr


def test_a_directory_without_steps_says_so(tmp_path):
    assert command("steps", tmp_path).stdout == f"no steps in {tmp_path}\n"


def test_a_checkpoint_is_no_run(run):
    shown = command("steps", run / "step-10", code=1).stderr
    assert "step-10 is a checkpoint, not a run with steps; eformer inspect shows it" in shown


def test_inspect_names_the_steps_of_a_run_and_the_step_that_it_shows(run):
    assert "step-10; step-20; step-30; step-30 is shown" in command("inspect", run).stdout
    assert "is shown" not in command("inspect", run / "step-30").stdout


def test_the_plan_of_prune_says_why_the_step_of_the_resume_stays(run):
    with Run(run) as again:
        again.resume()
        again.save(40, {"w": 0})
    shown = command("prune", run, "--keep", 1, "--dry-run").stdout
    assert "keep    step-30: the run resumed from it\nkeep    step-40\n" in shown


def test_series_are_counted_as_prune_counts_them(run):
    (run / "step-10").rename(run / "run-10")
    lines = command("steps", run, "--keep", 1).stdout.splitlines()
    assert [line.split()[0] for line in lines if line.endswith("would be removed")] == ["20"]
    assert json.loads(command("prune", run, "--keep", 1, "--json", "--yes").stdout)["removed"] == ["step-20"]


def test_every_command_for_a_checkpoint_takes_a_step_by_number_or_the_best(tmp_path):
    with Run(tmp_path / "run", keep=Keep(best=9, by="loss")) as made:
        for step, loss in enumerate([0.5, 0.2, 0.4], 1):
            made.save(step, {"params": {"w": np.full(2, step), "b": [1, 2]}}, metrics={"loss": loss})
    path = tmp_path / "run"
    assert f"{path}/step-2: " in command("verify", path, "--step", "best").stdout
    for name in ("inspect", "ls"):
        assert "params" in command(name, path, "--step", 1).stdout
        assert "has no step 7" in command(name, path, "--step", 7, code=1).stderr
        assert (
            "'x' is neither the number of a step nor 'best'"
            in command(name, path, "--step", "x", code=2).stderr
        )
    command("convert", path, tmp_path / "x.npz", "--step", "best", "--root", "params", "--keys", "w")
    with np.load(tmp_path / "x.npz") as found:
        assert (found.files, found["w"].tolist()) == (["w"], [2, 2])
    assert (
        "no leaf is named 'v'" in command("convert", path, tmp_path / "y.npz", "--keys", "v", code=1).stderr
    )
    assert (
        "no leaf is named 'parms'"
        in command("convert", path, tmp_path / "y.npz", "--root", "parms", code=1).stderr
    )
