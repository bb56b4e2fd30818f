"""What a run remembers beside its steps: its rules, and the metrics of removed steps."""

import json
import shutil
from datetime import timedelta

import numpy as np
import pytest

from contracts.bucket import forget
from eformer import checkpoint
from eformer._engine.runs import removed
from eformer.checkpoint import Every, Keep, Run
from support.bucket_faults import hooked


def train(path, numbers, *, loss=lambda step: 1 / step, **options):
    with Run(path, **({"every": 1, "keep": 2} | options)) as run:
        if not options.get("fresh"):
            run.resume()
        for step in numbers:
            run.after(step, {"w": np.full(2, step)}, metrics={"loss": loss(step)})


@pytest.fixture
def bucket(tmp_path):
    found = f"memory://removed-steps/{tmp_path.name}"
    yield found
    forget(found)


def facts(path):
    return checkpoint.report(path, values=False).data["run"]


def past(path):
    return {one["number"]: one["metrics"] for one in facts(path)["past"]}


def test_the_metrics_of_removed_steps_stay_also_those_that_are_not_finite(tmp_path):
    train(tmp_path, range(1, 6), loss=lambda step: np.nan if step == 2 else step)
    assert [step.number for step in checkpoint.steps(tmp_path)] == [4, 5]
    assert past(tmp_path) == {1: {"loss": 1.0}, 2: {"loss": None}, 3: {"loss": 3.0}}
    assert facts(tmp_path)["metrics"] == ["loss"]


def test_the_scores_of_a_removed_step_stay_whoever_removes_it(tmp_path):
    train(tmp_path, range(1, 4), keep=None)
    checkpoint.score(tmp_path, 1, {"eval.loss": 0.5})
    checkpoint.prune(tmp_path, keep=1)
    assert past(tmp_path) == {1: {"loss": 1.0, "eval.loss": 0.5}, 2: {"loss": 0.5}}


def test_removed_steps_that_the_run_has_left_behind_are_forgotten(tmp_path):
    train(tmp_path, range(1, 6), keep=[Keep(last=1), Keep(at=(2,))])
    assert [*past(tmp_path)] == [1, 3, 4]
    with Run(tmp_path, every=1) as run:
        run.resume(step=2, rewind=True)
    assert [*past(tmp_path)] == [1]
    train(tmp_path, [7], fresh=True)
    assert past(tmp_path) == {}


def test_a_run_goes_on_if_the_metrics_of_removed_steps_cannot_be_written(tmp_path, caplog):
    (tmp_path / removed.REMOVED_FILE).mkdir()
    train(tmp_path, range(1, 5))
    assert [step.number for step in checkpoint.steps(tmp_path)] == [3, 4]
    assert "the metrics of removed steps could not be written" in caplog.text
    assert past(tmp_path) == {}


def test_the_file_of_removed_steps_stays_small_and_survives_lines_of_others(tmp_path, monkeypatch):
    monkeypatch.setattr(removed, "_MOST_BYTES", 200)
    (tmp_path / removed.REMOVED_FILE).write_bytes(b'not json\n{"step": 1}\n')
    train(tmp_path, range(1, 41), loss=float)
    assert (tmp_path / removed.REMOVED_FILE).stat().st_size <= 200
    assert 3 <= len(past(tmp_path)) < 38
    assert max(past(tmp_path)) == 38


def test_the_oldest_removed_steps_are_thinned_no_more_than_the_newest(monkeypatch):
    monkeypatch.setattr(removed, "_MOST_BYTES", 4000)
    known = {}
    for number in range(1, 2001):
        known = removed._parsed(removed._bounded(known | {number: {"loss": 1 / number}}))
    assert (min(known), max(known)) == (1, 2000)
    assert sum(number <= 1000 for number in known) > len(known) / 8


@pytest.mark.parametrize("count", range(1, 12))
def test_half_of_few_removed_steps_is_fewer_and_has_the_last(count):
    numbers = [n * n for n in range(count)]
    found = [*removed._thinned(numbers)]
    assert found[-1] == numbers[-1]
    assert len(found) <= max(1, count // 2)
    assert set(found) <= set(numbers)


def test_a_metric_whose_name_is_no_text_stops_no_removal(tmp_path, caplog):
    with Run(tmp_path, every=1, keep=1) as run:
        for step in range(1, 4):
            run.after(step, {"w": np.ones(2)}, metrics={"lo\ud800ss": 1.0, "loss": step})
    assert [step.number for step in checkpoint.steps(tmp_path)] == [3]
    assert past(tmp_path) == {1: {"loss": 1.0}, 2: {"loss": 2.0}}
    assert not caplog.records


def test_a_run_whose_steps_were_removed_by_hand_starts_without_their_metrics(tmp_path):
    train(tmp_path, range(1, 5), loss=lambda step: 9)
    for step in checkpoint.steps(tmp_path):
        shutil.rmtree(step.path)
    train(tmp_path, [1])
    assert past(tmp_path) == {}


@pytest.mark.parametrize(("metrics", "expected"), [({"loss": 1.0}, ["read", "write"]), (None, [])])
def test_a_save_in_a_bucket_asks_for_the_file_of_removed_steps_once(bucket, metrics, expected):
    asked = []

    def note(operation, key):
        if key.endswith(removed.REMOVED_FILE):
            asked.append(operation)

    with Run(bucket, every=1, keep=1) as run:
        for step in range(1, 4):
            run.after(step, {"w": np.ones(2)}, metrics=metrics)
        run.wait()
        with hooked(note):
            run.after(4, {"w": np.ones(2)}, metrics=metrics)
            run.wait()
    assert asked == expected


# ---------------------------------------------------------------------------------------------- rules


@pytest.mark.parametrize(
    ("given", "every", "rules"),
    [
        ({"every": np.int64(5), "keep": 3}, ["every 5 steps"], ["the last 3"]),
        ({"every": timedelta(minutes=2), "keep": Keep(best=1, by="loss")}, ["every 2 minutes"], ["the best 1 by loss (min)"]),
        ({"every": Every(at=(1, 7), until=7), "keep": None}, ["at 1, 7, until step 7"], []),
    ],
)  # fmt: skip
def test_a_page_shows_the_rules_of_the_run(tmp_path, given, every, rules):
    with Run(tmp_path, **given) as run:
        run.save(1, {"w": np.ones(2)})
    found = facts(tmp_path)
    assert (found["own"], found["rules"]) == ({"every": every, "keeps_all": given["keep"] is None}, rules)


def test_rules_that_a_caller_gives_come_before_those_of_the_run(tmp_path):
    train(tmp_path, range(1, 4), keep=3)
    found = checkpoint.report(tmp_path, values=False, keep=Keep(every=2)).data["run"]
    assert found["rules"] == ["every 2"]
    assert [step["is_removed"] for step in found["steps"]] == [True, False, False]


def test_rules_of_a_newer_version_do_not_void_the_claim_of_its_job(tmp_path):
    with Run(tmp_path, every=1) as run:
        run.resume()
        claim = json.loads((tmp_path / "run.json").read_bytes())
        claim["rules"] = {"keep": [{"by_moon": "full"}]}
        (tmp_path / "run.json").write_text(json.dumps(claim))
        run.after(1, {"w": np.ones(2)})
    assert facts(tmp_path)["own"] is None
    assert [step.number for step in checkpoint.steps(tmp_path)] == [1]


def test_rules_with_a_field_of_a_newer_version_are_not_read_as_other_rules(tmp_path):
    train(tmp_path, range(1, 4), keep=3)
    claim = json.loads((tmp_path / "run.json").read_bytes())
    for more, rules in (({"unless": None}, ["the last 1"]), ({"unless": "pinned"}, [])):
        claim["rules"]["keep"] = [{"last": 1} | more]
        (tmp_path / "run.json").write_text(json.dumps(claim))
        found = facts(tmp_path)
        assert (found["rules"], found["own"] is None) == (rules, not rules)
    assert not any(step["is_removed"] for step in found["steps"])


@pytest.mark.parametrize(
    "keep",
    [Keep(at=range(100_000)), [Keep(last=1, hours=float("inf"))], Keep(last=2**70)],
    ids=["long", "infinite", "big"],
)
def test_rules_that_have_no_place_in_a_small_file_are_not_recorded_and_do_not_void_the_claim(tmp_path, keep):
    train(tmp_path, range(1, 4), keep=keep)
    assert (tmp_path / "run.json").stat().st_size < 20_000
    found = facts(tmp_path)
    assert found["rules"] in ([], [f"the last {2**70}"])
    assert len(found["steps"]) == 3


def test_a_rule_with_many_numbers_says_how_many_it_does_not_show(tmp_path):
    rule = {"every": Every(at=range(1, 13)), "keep": Keep(at=range(1, 13))}
    train(tmp_path, [1], **rule)
    found = facts(tmp_path)
    assert found["own"]["every"] == ["at 1, 2, 3, 4, 5, 6, 7, 8, 9, 10 and 2 more"]
    assert found["rules"] == ["1, 2, 3, 4, 5, 6, 7, 8, 9, 10 and 2 more"]
