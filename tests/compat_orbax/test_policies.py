"""Policies and names of steps: pure, and as Orbax has them."""

import datetime as dt

import pytest

from eformer import checkpoint
from eformer.compat import orbax as ocp

known = ocp.checkpoint_managers
NOW = dt.datetime(2030, 1, 1, tzinfo=dt.UTC)


def infos(*steps, **metrics):
    return [
        known.CheckpointInfo(step, NOW + dt.timedelta(seconds=step), metrics.get(f"m{step}"))
        for step in steps
    ]


def kept(policy, there):
    flags = policy.should_preserve(there, context=known.PreservationContext())
    return [info.step for info, is_kept in zip(there, flags, strict=True) if is_kept]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (known.LatestN(2), [7, 9]),
        (known.LatestN(), [1, 4, 5, 7, 9]),
        (known.LatestN(0), []),
        (known.EveryNSteps(5), [5]),
        (known.EveryNSteps(3, exact_interval=False), [1, 4, 7]),
        (known.EveryNStepsClosest(4), [1, 4, 9]),
        (known.EveryNSeconds(4), [1, 5, 9]),
        (known.CustomSteps([4, 9]), [4, 9]),
        (known.AnyPreservationPolicy([known.LatestN(1), known.CustomSteps([4])]), [4, 9]),
        (known.PreserveAll(), [1, 4, 5, 7, 9]),
    ],
)
def test_which_steps_stay(policy, expected):
    assert kept(policy, infos(1, 4, 5, 7, 9)) == expected


def test_the_best_steps_stay():
    there = infos(1, 2, 3, 4, m1=3, m2=1, m4=1)
    assert kept(known.BestN(get_metric_fn=lambda m: m, n=1), there) == [1, 3]
    assert kept(
        known.BestN(get_metric_fn=lambda m: m, n=1, reverse=True, keep_checkpoints_without_metrics=False),
        there,
    ) == [4]


@pytest.mark.parametrize(
    ("policy", "step", "before", "expected"),
    [
        (known.FixedIntervalPolicy(3), 6, [3], True),
        (known.FixedIntervalPolicy(3), 7, [3], False),
        (known.SpecificStepsPolicy([7]), 7, [3], True),
        (known.InitialSavePolicy(), 7, [], True),
        (known.InitialSavePolicy(), 7, [3], False),
        (known.PreemptionCheckpointingPolicy(), 7, [3], False),
        (known.ContinuousCheckpointingPolicy(), 7, [3], True),
        (known.ContinuousCheckpointingPolicy(minimum_interval_secs=60), 7, [3], False),
        (known.AnySavePolicy([known.FixedIntervalPolicy(3), known.SpecificStepsPolicy([7])]), 7, [3], True),
    ],
)
def test_which_steps_are_saved(policy, step, before, expected):
    context = known.DecisionContext()
    assert policy.should_save(infos(step)[0], previous_steps=infos(*before), context=context) is expected


@pytest.mark.parametrize(
    ("options", "names"),
    [({}, ["7"]), ({"step_prefix": "a_b"}, ["a_b_7"]), ({"step_format_fixed_length": 3}, ["007", "1234"])],
)
def test_names_of_steps(tmp_path, options, names):
    found = ocp.step.standard_name_format(**options)
    for name in ("7", "a_b_7", "007", "1234", "x", "7.orbax-checkpoint-tmp"):
        checkpoint.save({"a": 1}, tmp_path / name)
    expected = [*names, "1234"] if not options else names
    assert [each.path.name for each in found.find_all(tmp_path)] == expected
    assert found.find_step(tmp_path, 7).path.name == names[0]
    with pytest.raises(ValueError, match="No step path found"):
        found.find_step(tmp_path, 8)


def test_steps_of_any_name(tmp_path):
    for name in ("ckpt_3", "12"):
        checkpoint.save({"a": 1}, tmp_path / name)
    (tmp_path / "99").mkdir()
    assert sorted(ocp.utils.checkpoint_steps(tmp_path)) == [3, 12]
    assert ocp.step.get_save_directory(3, tmp_path, "params", step_prefix="ckpt").name == "params"
    both = ocp.step.composite_name_format(
        ocp.step.standard_name_format(),
        [ocp.step.standard_name_format(), ocp.step.standard_name_format(step_prefix="ckpt")],
    )
    assert sorted(each.step for each in both.find_all(tmp_path)) == [3, 12]
    assert ocp.step.latest_step_metadata(tmp_path, both).step == 12
