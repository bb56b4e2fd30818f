"""When a run saves, and which steps it keeps."""

import math
from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eformer._engine.record.policies import (
    Every,
    Keep,
    StepFacts,
    every_from,
    is_due,
    keep_from,
    kept,
    minutes_due,
    warnings_of,
)

# ----------------------------------------------------------------------------------------------- every


@pytest.mark.parametrize(
    ("rules", "due"),
    [(Every(10), [10, 20, 30, 40]), (Every(at=(7, 33)), [7, 33]), (Every(10, until=20), [10, 20]),
     ([Every(5, until=10), Every(20)], [5, 10, 20, 40]), (None, []), (Every(minutes=1), [])],
)  # fmt: skip
def test_steps_at_which_a_save_is_due(rules, due):
    assert [step for step in range(1, 41) if is_due(every_from(rules), step)] == due


def test_minutes_after_which_a_save_is_due():
    rules = every_from([Every(100), Every(minutes=15), timedelta(minutes=5)])
    assert minutes_due(rules, 3) == 5
    assert minutes_due(every_from(100), 3) is None
    assert minutes_due((Every(minutes=2, until=10),), 11) is None


@pytest.mark.parametrize(
    ("make", "problem"),
    [(lambda: Every(), "needs steps="), (lambda: Every(0), "must be positive"), (lambda: Every(minutes=0), "must be positive"),
     (lambda: Keep(), "needs every="), (lambda: Keep(last=0), "must be positive"), (lambda: Keep(best=1), "needs by="),
     (lambda: Keep(last=1, by="loss"), "needs best="), (lambda: Keep(best=1, by="x", mode="least"), "'min' or 'max'")],
)  # fmt: skip
def test_rules_that_make_no_sense_are_refused(make, problem):
    with pytest.raises(ValueError, match=problem):
        make()


# ------------------------------------------------------------------------------------------------ keep


def facts(*numbers, **metrics):
    return [StepFacts(n, 60.0 * n, {"loss": metrics[f"s{n}"]} if f"s{n}" in metrics else {}) for n in numbers]


@pytest.mark.parametrize(
    ("keep", "stay"),
    [(2, {40, 50}), (Keep(last=1), {50}), (Keep(every=20), {20, 40, 50}), (Keep(every=20, last=1), {40, 50}),
     (Keep(at=(10, 11)), {10, 50}), (Keep(hours=0.3), {40, 50}), ([Keep(last=1), Keep(every=30)], {30, 50}), ([], {50})],
)  # fmt: skip
def test_steps_that_stay(keep, stay):
    assert kept(facts(10, 20, 30, 40, 50), keep_from(keep)) == stay


def test_the_best_stay_whatever_the_last_are_and_steps_without_a_metric_do_not_count():
    steps = facts(1, 2, 3, 4, 5, s1=0.5, s2=0.1, s3=math.nan, s4=0.1)
    assert kept(steps, [Keep(best=1, by="loss")]) == {4, 5}  # the later of two equal ones
    assert kept(steps, [Keep(best=2, by="loss"), Keep(last=1)]) == {2, 4, 5}
    assert kept(steps, [Keep(best=1, by="loss", mode="max")]) == {1, 5}
    assert kept(steps, [Keep(best=3, by="accuracy")]) == {5}


STEPS = st.lists(
    st.builds(
        StepFacts,
        st.integers(0, 60),
        st.floats(0, 1e5),
        st.dictionaries(st.sampled_from(["a", "b"]), st.floats(allow_nan=True), max_size=2),
    ),
    unique_by=lambda step: step.number,
    max_size=25,
)
RULES = st.lists(
    st.one_of(
        st.builds(Keep, last=st.integers(1, 5)),
        st.builds(Keep, every=st.integers(1, 9)),
        st.builds(Keep, every=st.integers(1, 9), last=st.integers(1, 3)),
        st.builds(Keep, every=st.integers(1, 9), at=st.just((7, 11))),
        st.builds(
            Keep, best=st.integers(1, 3), by=st.sampled_from(["a", "b"]), mode=st.sampled_from(["min", "max"])
        ),
        st.builds(Keep, hours=st.floats(0, 30)),
        st.builds(Keep, at=st.lists(st.integers(0, 60), min_size=1, max_size=4).map(tuple)),
    ),
    max_size=4,
)


def slow_kept(steps, rules):
    """Decide for each step alone, by counting the steps that come before it."""

    def stays(step, rule):
        if step.number in rule.at:
            return True
        if rule.every is not None and step.number % rule.every:
            return False
        those = [s for s in steps if rule.every is None or s.number % rule.every == 0]
        found = rule.every is not None and rule.last is rule.best is rule.hours is None
        if rule.last is not None:
            found |= sum(s.number > step.number for s in those) < rule.last
        if rule.hours is not None:
            found |= max(s.saved_at for s in steps) - step.saved_at <= 3600 * rule.hours
        if rule.best is not None and not math.isnan(mine := step.metrics.get(rule.by, math.nan)):
            better = 0
            for s in those:
                other = s.metrics.get(rule.by, math.nan)
                is_better = other < mine if rule.mode == "min" else other > mine
                better += is_better or (other == mine and s.number > step.number)
            found |= better < rule.best
        return found

    newest = max((s.number for s in steps), default=None)
    return {s.number for s in steps if s.number == newest or any(stays(s, rule) for rule in rules)}


def in_order(steps):
    """Give the steps their times in the order of their numbers, as a clock that is right does."""
    times = sorted(step.saved_at for step in steps)
    ordered = sorted(steps, key=lambda step: step.number)
    return [replace(step, saved_at=time) for step, time in zip(ordered, times, strict=True)]


@given(STEPS.map(in_order), RULES)
def test_retention_is_what_counting_says(steps, rules):
    assert kept(steps, rules) == slow_kept(steps, rules)


def is_settled(steps, rules):
    once = kept(steps, rules)
    return kept([step for step in steps if step.number in once], rules) == once


@given(STEPS, RULES.map(lambda rules: [rule for rule in rules if rule.hours is None]))
def test_retention_applied_twice_removes_nothing_more(steps, rules):
    assert is_settled(steps, rules)


@given(STEPS.map(in_order), RULES)
def test_retention_by_time_applied_twice_removes_nothing_more_if_the_clock_was_right(steps, rules):
    """Otherwise the steps that go may be those by which a time was told to be wrong."""
    assert is_settled(steps, rules)


# ----------------------------------------------------------------------------------------- wrong clocks

HOUR, YEAR = 3600.0, 365 * 24 * 3600.0


def saved(*hours):
    return [StepFacts(10 * n, 1e9 + HOUR * hour) for n, hour in enumerate(hours, 1)]


DAY = [Keep(hours=24)]


def test_a_step_from_next_year_does_not_make_the_steps_after_it_old():
    wrong = YEAR / HOUR
    assert kept(saved(0, 1, wrong, 3, 4), DAY) == {10, 20, 30, 40, 50}
    assert kept(saved(0, 1, wrong, wrong + 1, 4), DAY) == {10, 20, 30, 40, 50}
    assert kept(saved(wrong, wrong + 1, wrong + 2, 3, 4), DAY) == {10, 20, 30, 40, 50}
    assert kept(saved(0, 1, wrong, 3, 4, 30), DAY) == {60}  # it goes with the one after it
    assert kept(saved(0, 1, wrong, 6, 7, 30), DAY) == {30, 40, 50, 60}


def test_a_step_from_last_year_makes_no_other_step_old():
    wrong = -YEAR / HOUR
    assert kept(saved(0, wrong, 2), DAY) == {10, 20, 30}
    assert kept(saved(0, 1, wrong, 3, 4), DAY) == {10, 20, 30, 40, 50}
    assert kept(saved(0, 1, 2, wrong), DAY) == {10, 20, 30, 40}


def test_steps_before_which_the_clock_was_set_back_are_not_older_than_the_steps_before_them():
    behind = -YEAR / HOUR
    assert kept(saved(-3, behind, behind + 1, behind + 2, 0), DAY) == {10, 20, 30, 40, 50}
    assert kept(saved(-30, behind, behind + 1, behind + 2, 0), DAY) == {50}


def test_a_step_whose_time_is_not_recorded_counts_as_saved_with_the_next():
    unknown = [StepFacts(number) for number in (11, 12, 31)]
    assert kept([*saved(0, 1, 2), *unknown], DAY) == {10, 11, 12, 20, 30, 31}
    assert kept([*saved(0, 1, 30), *unknown], DAY) == {30, 31}
    assert kept([*saved(0, 30), StepFacts(30)], DAY) == {20, 30}
    assert kept([StepFacts(1), StepFacts(2)], DAY) == {1, 2}
    assert warnings_of([*saved(0, 1, 2), *unknown], DAY) == {}


def test_a_newest_step_from_the_future_counts_as_saved_now():
    steps = saved(0, 30, 31, YEAR / HOUR)
    assert kept(steps, DAY) == {40}
    assert kept(steps, DAY, now=1e9 + 32 * HOUR) == {20, 30, 40}


def test_wrong_clocks_are_told_if_a_rule_is_about_time():
    steps = saved(0, 1, YEAR / HOUR, 3, 3.99)
    assert (
        "the times of these steps do not fit their order, so the clock was wrong: 30;"
        in warnings_of(steps, DAY)["clock"]
    )
    assert warnings_of(steps, [Keep(last=1)]) == {}
    assert warnings_of(saved(0, 2, 1.99, 3), DAY) == {}  # clocks of two machines
    assert "50;" in warnings_of(saved(0, 1, 2, 3, YEAR / HOUR), DAY, now=1e9 + 5 * HOUR)["clock"]


@given(STEPS.map(in_order), st.sets(st.integers(0, 60)), st.floats(0, 30), st.floats(1, 1e9))
def test_steps_from_the_future_cost_no_step_that_would_stay_without_them(steps, wrong, hours, ahead):
    times = [step.saved_at for step in steps]
    seen = [
        replace(step, saved_at=times[-1] + ahead) if step.number in wrong and step is not steps[-1] else step
        for step in steps
    ]
    assert kept(steps, [Keep(hours=hours)]) <= kept(seen, [Keep(hours=hours)])


@given(STEPS, st.floats(0, 30))
def test_whatever_the_clocks_said_a_step_of_the_hours_before_the_last_stays(steps, hours):
    last = max(steps, key=lambda step: step.number, default=None)
    recent = {step.number for step in steps if 0 <= last.saved_at - step.saved_at <= 3600 * hours}
    assert recent <= kept(steps, [Keep(hours=hours)])


# -------------------------------------------------------------------------- steps of other programs


def test_steps_of_other_programs_neither_count_nor_go_unless_a_rule_says_so():
    steps = [replace(step, is_foreign=step.number < 4) for step in facts(1, 2, 3, 4, 5, 6)]
    assert kept(steps, [Keep(last=2)]) == {1, 2, 3, 5, 6}
    assert kept(steps, [Keep(last=4)]) == {1, 2, 3, 4, 5, 6}
    assert kept(steps, [Keep(last=4, foreign=True)]) == {3, 4, 5, 6}
    assert kept(steps, [Keep(last=1, foreign=True), Keep(every=2)]) == {2, 4, 6}
    assert "1; 2; 3; Keep(..., foreign=True)" in warnings_of(steps, [Keep(last=2)])["foreign"]
    assert warnings_of(steps, [Keep(last=2, foreign=True)]) == {}


def test_given_steps_stay_if_they_are_there():
    assert kept(facts(1, 2, 3, 4), [Keep(last=1)], stay={2, 7, None}) == {2, 4}
