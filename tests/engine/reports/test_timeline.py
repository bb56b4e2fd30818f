"""Reports of runs."""

import json

import numpy as np
import pytest

from eformer import checkpoint
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
