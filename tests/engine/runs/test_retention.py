"""Which steps a run removes, and which stay: those of other programs, of wrong clocks, and the one it was resumed from."""

import datetime as dt
import json
import math
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from eformer import checkpoint
from eformer._engine.record.manifest import Manifest
from eformer._engine.saving import commit as record
from eformer.checkpoint import Keep, Run, prune
from support.commands import run as command
from support.trees import assert_same

ORBAX = Path(__file__).parents[2] / "compat" / "orbax" / "manager"  # the steps 2 and 3


def tree(number):
    return {"w": np.full(3, number, np.float32)}


def names(path):
    return sorted(each.name for each in path.iterdir() if each.is_dir() and not each.name.startswith("."))


def save_steps(path, numbers, **options):
    with Run(path, **options) as run:
        run.resume()
        for number in numbers:
            run.save(number, tree(number)).result()


# ----------------------------------------------------------------------------- steps of other programs


@pytest.fixture
def of_orbax(tmp_path):
    shutil.copytree(ORBAX, tmp_path / "run")
    return tmp_path / "run"


def test_steps_of_orbax_are_resumed_from_and_stay_which_is_told_once(of_orbax, caplog):
    with Run(of_orbax, keep=1) as run:
        assert run.resume().step == 3
        for number in range(4, 8):
            run.save(number, tree(number)).result()
    assert names(of_orbax) == ["2", "3", "step-7"]
    told = [record.message for record in caplog.records if "another program" in record.message]
    assert told == [
        f"{of_orbax}: steps of another program stay: 2; 3; Keep(..., foreign=True) applies the rules to them"
    ]


def test_steps_of_orbax_are_removed_if_the_rule_says_so(of_orbax, caplog):
    save_steps(of_orbax, [4, 5], keep=Keep(last=1, foreign=True))
    assert names(of_orbax) == ["3", "step-5"]  # it was resumed from 3
    save_steps(of_orbax, [6], keep=Keep(last=1, foreign=True))
    assert names(of_orbax) == ["step-5", "step-6"]
    assert "another program" not in caplog.text


def test_a_step_of_orbax_is_not_saved_over(of_orbax):
    before = sorted((of_orbax / "3").rglob("*"))
    save_steps(of_orbax, [3], keep=1)
    assert sorted((of_orbax / "3").rglob("*")) == before
    assert [step.path for step in checkpoint.steps(of_orbax)] == [f"{of_orbax}/2", f"{of_orbax}/step-3"]
    assert_same(checkpoint.load(of_orbax), tree(3))


def test_the_newest_step_of_a_run_is_loaded_that_orbax_began(of_orbax):
    save_steps(of_orbax, [4])
    assert checkpoint.latest(of_orbax) == f"{of_orbax}/step-4"
    assert_same(checkpoint.load(of_orbax), tree(4))
    assert [step.number for step in checkpoint.steps(of_orbax)] == [2, 3, 4]


def test_rules_of_the_command_line_leave_steps_of_orbax(of_orbax):
    save_steps(of_orbax, [4, 5])
    marked = command("steps", of_orbax, "--keep", 1).stdout.splitlines()
    assert [line.split()[0] for line in marked if line.endswith("would be removed")] == ["4"]
    shown = command("prune", of_orbax, "--keep", 1, "--dry-run").stdout
    assert (
        "leave   2: another program wrote it (orbax); --foreign also counts and removes such steps" in shown
    )
    done = json.loads(command("prune", of_orbax, "--keep", 1, "--foreign", "--yes", "--json").stdout)
    assert done["removed"] == ["2", "step-4"]


# ----------------------------------------------------------------------------------------- wrong clocks


def shift(step, **by):
    """Let a step have been saved at another time."""
    file = step / "manifest.json"
    manifest = Manifest.from_json(file.read_bytes(), "")
    saved_at = dt.datetime.now(dt.UTC) + dt.timedelta(**by)
    trees = {
        prefix: msgspec.structs.replace(tree, saved_at=saved_at.isoformat())
        for prefix, tree in manifest.trees.items()
    }
    file.write_bytes(msgspec.structs.replace(manifest, trees=trees).to_json())


def test_steps_that_follow_one_of_a_wrong_clock_stay(tmp_path, caplog):
    path = tmp_path / "run"
    save_steps(path, [1, 2, 3])
    shift(path / "step-1", hours=-30)
    shift(path / "step-2", days=365)
    with Run(path, keep=Keep(hours=24)) as run:
        run.resume()
        for number in (4, 5):
            run.save(number, tree(number)).result()
    assert names(path) == ["step-2", "step-3", "step-4", "step-5"]
    assert (
        caplog.text.count("the times of these steps do not fit their order, so the clock was wrong: 2;") == 1
    )
    assert prune(path, keep=Keep(hours=24)).removed == ()


def test_a_clock_that_is_set_ahead_while_the_run_is_open_costs_no_step(tmp_path, monkeypatch):
    class Ahead(dt.datetime):
        @classmethod
        def now(cls, zone=None):
            return dt.datetime.now(zone) + dt.timedelta(days=365)

    with Run(tmp_path, keep=Keep(hours=24)) as run:
        for number in (1, 2):
            run.save(number, tree(number)).result()
        monkeypatch.setattr(record, "dt", SimpleNamespace(datetime=Ahead, UTC=dt.UTC))
        run.save(3, tree(3)).result()
        assert checkpoint.steps(tmp_path)[-1].saved_at.year > dt.datetime.now(dt.UTC).year
    assert names(tmp_path) == ["step-1", "step-2", "step-3"]


def test_a_clock_that_was_behind_when_the_run_began_costs_no_step_and_the_steps_are_not_blamed(
    tmp_path, monkeypatch, caplog
):
    with monkeypatch.context() as behind:
        year_ago = time.time() - 365 * 24 * 3600
        behind.setattr(time, "time", lambda: year_ago)
        run = Run(tmp_path, keep=Keep(hours=24), signals=())
    with run:
        for number in (1, 2):
            run.save(number, tree(number)).result()
    assert names(tmp_path) == ["step-1", "step-2"]
    assert caplog.text.count("the clock was set ahead by 8,760.0 hours while the run was open.") == 1
    assert "start the job again" in caplog.text
    assert "the clock was wrong" not in caplog.text


def test_a_newest_step_of_a_wrong_clock_costs_none_before_it(tmp_path, caplog):
    save_steps(tmp_path, [1, 2, 3])
    shift(tmp_path / "step-1", hours=-30)
    shift(tmp_path / "step-3", days=365)
    assert prune(tmp_path, keep=Keep(hours=24)).removed == ("step-1",)
    assert "the clock was wrong" in caplog.text


# ---------------------------------------------------------------------------------- metrics and scores


def test_nothing_is_removed_while_no_step_has_the_metric_which_is_told_once(tmp_path, caplog):
    with Run(tmp_path, keep=Keep(best=1, by="eval.loss")) as run:
        for number in (1, 2, 3):
            run.save(number, tree(number), metrics={"loss": 0.5, "eval.loss": math.nan}).result()
        run.wait()
        assert names(tmp_path) == ["step-1", "step-2", "step-3"]
        told = f"{tmp_path}: no step has a number for the metric eval.loss; the steps have loss. Nothing is removed until"
        assert caplog.text.count(told) == 1
        checkpoint.score(tmp_path, 1, {"eval.loss": 0.1})
        run.save(4, tree(4)).result()
    assert names(tmp_path) == ["step-1", "step-4"]


def test_other_rules_are_applied_while_no_step_has_the_metric_of_one(tmp_path, caplog):
    with Run(tmp_path, keep=[Keep(last=2), Keep(best=1, by="eval.loss")]) as run:
        for number in (1, 2, 3):
            run.save(number, tree(number))
        run.wait()
        assert names(tmp_path) == ["step-2", "step-3"]
        assert (
            caplog.text.count("the steps have no metrics. That rule keeps nothing until a step has it") == 1
        )
        checkpoint.score(tmp_path, 2, {"eval.loss": 0.1})
        for number in (4, 5):
            run.save(number, tree(number)).result()
    assert names(tmp_path) == ["step-2", "step-4", "step-5"]


def test_a_run_removes_only_scores_that_eformer_wrote(tmp_path):
    (tmp_path / "100.scores.json").write_text('{"accuracy": 0.93}')
    with Run(tmp_path, keep=1) as run:
        for number in (1, 2):
            run.save(number, tree(number)).result()
            if number == 1:
                checkpoint.score(tmp_path, 1, {"loss": 0.1})
    assert sorted(each.name for each in tmp_path.glob("*.json")) == ["100.scores.json", "run.json"]


# ------------------------------------------------------------------- the step that it was resumed from


def test_the_step_that_a_run_was_resumed_from_stays_after_its_end(tmp_path):
    path = tmp_path / "run"
    save_steps(path, [1, 2])
    save_steps(path, [3, 4, 5], keep=1)
    assert names(path) == ["step-2", "step-5"]
    lines = command("steps", path, "--keep", 1).stdout.splitlines()[1:]
    assert ["resumed from" in line for line in lines] == [True, False]
    assert not any("would be removed" in line for line in lines)
    facts = json.loads(command("steps", path, "--json").stdout)["steps"]
    assert [step["is_resumed_from"] for step in facts] == [True, False]
    assert prune(path, keep=1).removed == ()
    save_steps(path, [6], keep=1)  # goes on from 5
    assert names(path) == ["step-5", "step-6"]


def test_a_page_says_that_the_run_was_resumed_from_a_step(tmp_path):
    path = tmp_path / "run"
    save_steps(path, [1, 2])
    save_steps(path, [3], keep=1)
    shown = checkpoint.report(path, keep=1).data["run"]["steps"]
    assert [step["kept_by"][0] for step in shown] == ["the run was resumed from it", "the newest"]


def test_a_job_that_is_not_the_writer_any_more_records_nothing(tmp_path):
    save_steps(tmp_path, [1, 2])
    with Run(tmp_path) as older, Run(tmp_path) as newer:
        older.resume()
        newer.resume()
        before = (tmp_path / "run.json").read_bytes()
        older._writer.note_resumed(1)
        assert (tmp_path / "run.json").read_bytes() == before
        assert json.loads(before)["resumed_from"] == 2


def test_a_run_that_begins_again_forgets_where_the_last_one_was_resumed(tmp_path):
    save_steps(tmp_path, [1, 2])
    save_steps(tmp_path, [3])
    assert json.loads((tmp_path / "run.json").read_bytes())["resumed_from"] == 2
    for name in names(tmp_path):
        shutil.rmtree(tmp_path / name)
    save_steps(tmp_path, [1, 2, 3], keep=1)
    assert names(tmp_path) == ["step-3"]


# ----------------------------------------------------------------------------- steps of one number and two names


@pytest.fixture
def doubled(of_orbax):
    """The steps 2 and 3 of Orbax, and a step 3 of eformer."""
    with Run(of_orbax, signals=()) as run:
        run.save(3, run.resume().tree)
    assert names(of_orbax) == ["2", "3", "step-3"]
    return of_orbax


def test_a_rewind_puts_both_aside(doubled):
    with Run(doubled, signals=()) as run:
        run.resume(step=2, rewind=True)
    assert names(doubled) == ["2", "3.rewound", "step-3.rewound"]
    with Run(doubled, signals=()) as run:
        assert run.resume().step == 2


def test_the_step_that_another_has_hidden_is_not_called_damaged(doubled):
    (doubled / "step-3" / "manifest.json").write_bytes(b"{")
    with Run(doubled, signals=()) as run:
        assert run.resume().step == 2
    assert names(doubled) == ["2", "3.rewound", "step-3.damaged"]
