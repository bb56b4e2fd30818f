"""Reports of runs."""

import json

import numpy as np
import pytest

from eformer import checkpoint
from eformer._engine.pages.live import LiveRun
from eformer._engine.record.policies import keep_from
from eformer.checkpoint import Keep, Run
from eformer.errors import NotFoundError


@pytest.fixture
def run(tmp_path):
    frozen = np.ones(2**18, np.float32)
    with Run(tmp_path / "run", every=10) as run:
        for step in range(10, 60, 10):
            tree = {
                "frozen": {"w": frozen},
                "head": {"w": np.full(4, step, np.float32)},
                "opt_state": {"mu": np.full(4, step**3)},
            }
            run.after(step, tree, metrics={"loss": 1 / step})
    return tmp_path / "run"


def of(path, **options):
    return {step["number"]: step for step in checkpoint.report(path, **options).data["run"]["steps"]}


def test_a_run_has_its_steps_with_sizes_metrics_and_reasons(run):
    steps = of(run)
    assert list(steps) == [10, 20, 30, 40, 50]
    assert steps[10]["nbytes"] > 2**20 > steps[20]["nbytes"]
    assert steps[20]["metrics"] == {"loss": 1 / 20}
    assert {step["why"] for step in steps.values()} == {"every"}


def test_the_norm_of_the_change_of_each_step_leaves_out_the_optimizer(run):
    steps = of(run)
    assert steps[10]["change"] is None
    assert steps[30]["change"]["norm"] == 20.0  # 4 elements, each 10 more
    assert steps[30]["change"]["relative"] == pytest.approx(20 / np.sqrt(2**18 + 4 * 20**2), rel=1e-3)
    assert of(run, values=False)[30]["change"] is None


def test_damaged_steps_are_told_and_the_change_is_since_the_sound_one_before(run):
    (run / "step-30" / "manifest.json").write_bytes(b"{")
    steps = of(run)
    assert "manifest" in steps[30]["problem"]
    assert steps[40]["change"]["norm"] == 40.0


def test_a_step_in_which_the_model_became_nan_is_told_and_its_successors_are_not_calm(tmp_path):
    frozen = np.ones(5)
    with Run(tmp_path / "run", every=1) as run:
        for step, value in enumerate([1.0, 2.0, np.nan, np.nan], 1):
            run.after(step, {"frozen": frozen, "w": np.full(4, value), "bad": np.array([np.inf])})
    facts = checkpoint.report(tmp_path / "run").data["run"]
    changes = {step["number"]: step["change"] for step in facts["steps"]}
    assert [(changes[n]["became"], changes[n]["special"]) for n in (2, 3, 4)] == [(0, 1), (1, 2), (0, 2)]
    assert changes[3]["relative"] == 0.0  # of the elements that are finite in both
    assert facts["notes"] == ["step-3: 1 leaf became NaN or Inf: w"]


def test_optimizers_and_plain_numbers_that_became_nan_are_told(tmp_path):
    with Run(tmp_path / "run", every=1) as run:
        for step, (moment, scale) in enumerate([(1.0, 1.0), (np.nan, 1.0), (np.nan, np.inf)], 1):
            run.after(step, {"w": np.ones(4), "opt_state": {"nu": np.full(4, moment)}, "scale": scale})
    facts = checkpoint.report(tmp_path / "run").data["run"]
    assert facts["notes"] == [
        "step-2: 1 leaf became NaN or Inf: opt_state.nu",
        "step-3: 1 leaf became NaN or Inf: scale",
    ]
    assert facts["steps"][1]["change"]["norm"] == 0.0


def test_a_note_names_a_parameter_before_an_optimizer(tmp_path):
    with Run(tmp_path / "run", every=1) as run:
        for step, value in enumerate([1.0, np.nan], 1):
            run.after(step, {"a_mu": {"mu": np.full(4, value)}, "w": np.full(4, value)})
    facts = checkpoint.report(tmp_path / "run").data["run"]
    assert facts["notes"] == ["step-2: 2 leaves became NaN or Inf: w and 1 more"]


def test_a_run_that_is_nan_throughout_says_so(tmp_path):
    with Run(tmp_path / "run", every=1) as run:
        for step in (1, 2):
            run.after(step, {"w": np.full(4, np.nan)})
    facts = checkpoint.report(tmp_path / "run").data["run"]
    assert facts["steps"][1]["change"] == {"norm": 0.0, "relative": None, "became": 0, "special": 1}
    assert facts["notes"] == ["step-2: NaN or Inf in 1 array"]


def test_a_step_that_changed_the_model_from_zero_says_so(tmp_path):
    with Run(tmp_path / "run", every=1) as run:
        for step in (0, 1):
            run.after(step + 1, {"w": np.full(4, float(step))})
    change = of(tmp_path / "run")[2]["change"]
    assert (change["norm"], change["relative"], change["from_zero"]) == (2.0, None, True)


def test_rules_say_which_steps_stay_and_why(run):
    steps = of(run, keep=[Keep(last=1), Keep(every=20), Keep(best=1, by="loss", mode="max")])
    assert {number: step["kept_by"] for number, step in steps.items()} == {
        10: ["the best 1 by loss (max)"],
        20: ["every 20"],
        30: [],
        40: ["every 20"],
        50: ["the newest", "the last 1"],
    }
    assert [number for number, step in steps.items() if step["is_removed"]] == [30]


def test_a_step_of_a_run_has_the_report_of_a_checkpoint(run):
    found = checkpoint.report(run, step=30)
    assert found.data["summary"]["title"] == "step-30"
    assert checkpoint.report(run / "step-30").data["kind"] == "checkpoint"
    with pytest.raises(NotFoundError, match="has no step 31"):
        checkpoint.report(run, step=31)


def test_the_page_of_a_run_is_valid_json_inside(run):
    text = checkpoint.report(run).html
    embedded = text.partition('id="data">')[2].partition("</script>")[0]
    assert json.loads(embedded)["run"]["metrics"] == ["loss"]


def test_series_are_counted_apart_on_every_page_as_prune_counts_them(tmp_path):
    for name in ("step-1", "step-2", "run-3", "run-4"):
        checkpoint.save({"w": np.ones(2)}, tmp_path / name)
    removed = checkpoint.prune(tmp_path, keep=1, dry_run=True).removed
    assert {*removed} == {"step-1", "run-3"}
    steps = of(tmp_path, keep=1)
    assert {step["name"] for step in steps.values() if step["is_removed"]} == {*removed}
    assert {number: step["kept_by"] for number, step in steps.items() if step["kept_by"]} == {
        2: ["the newest", "the last 1"],
        4: ["the newest", "the last 1"],
    }
    live = LiveRun(str(tmp_path), keep_from(1))
    live._look()
    assert live.news().removed == {*removed}
    live.close()


def test_a_run_with_rules_whose_steps_are_all_damaged_still_has_a_page(tmp_path):
    with Run(tmp_path, every=1, keep=2) as run:
        for step in (1, 2):
            run.after(step, {"w": np.ones(2)})
    for step in checkpoint.steps(tmp_path):
        (tmp_path / step.name / "manifest.json").write_bytes(b"{")
    steps = of(tmp_path)
    assert all(step["problem"] and not step["is_removed"] for step in steps.values())
    assert steps == of(tmp_path, keep=1)


def test_a_page_that_follows_a_run_forgets_what_older_rules_would_remove(tmp_path):
    for step in (1, 2, 3):
        checkpoint.save({"w": np.ones(2)}, tmp_path / f"step-{step}")
    with Run(tmp_path, keep=2) as run:
        run.resume()
    live = LiveRun(str(tmp_path))
    live._look()
    assert live.news().removed == {"step-1"}
    with Run(tmp_path) as run:
        run.resume()
        run.save(4, {"w": np.ones(2)})
    live._look()
    assert (*live.news().removed,) == ()
    assert live.news().reasons == {}
    live.close()
