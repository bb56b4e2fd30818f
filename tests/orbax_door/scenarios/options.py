"""Options and policies: which steps are saved, which are kept."""

import datetime as dt
from dataclasses import dataclass

import jax.numpy as jnp

from orbax_door.scenario import fields, json_of, listing, manager, outcome, scenario, there


def _run(ocp, root, steps, *, metrics=None, force=False, **options):
    """Save steps, and return the truth of each save, the steps that are kept, and the names in the root."""
    with manager(ocp, root, **options) as it:
        saved = [_save(ocp, it, step, metrics, force) for step in steps]
        it.wait_until_finished()
        return saved, it.all_steps(), it.all_steps(read=True), it.latest_step(), it.best_step(), listing(root)


def _save(ocp, it, step, metrics, force):
    given = {} if metrics is None or metrics[step] is None else {"metrics": {"loss": metrics[step]}}
    return it.save(step, args=ocp.args.StandardSave({"a": jnp.int32(step)}), force=force, **given)


_LOSSES = [5.0, 1.0, 4.0, 2.0, 3.0, 9.0]


@scenario(
    tail={
        f"{keep} {period} {mode}": {"keep": keep, "period": period, "mode": mode}
        for keep in (None, 0, 1, 2)
        for period in (None, 2)
        for mode in (None, "min", "max")
    }
)
def steps_are_kept(ocp, root, keep, period, mode):
    best = {"best_fn": lambda metrics: metrics["loss"], "best_mode": mode} if mode else {}
    losses = _LOSSES if mode else None
    yield "kept", _run(ocp, root, range(6), metrics=losses, max_to_keep=keep, keep_period=period, **best)


@scenario(tail={f"{keep}": {"without": keep} for keep in (True, False)})
def steps_without_metrics(ocp, root, without):
    losses = [5.0, None, 4.0, None, 3.0, None]
    options = {
        "best_fn": lambda metrics: metrics["loss"],
        "best_mode": "min",
        "keep_checkpoints_without_metrics": without,
    }
    yield "kept", _run(ocp, root, range(6), metrics=losses, max_to_keep=2, **options)


@scenario
def best_step_ties(ocp, root):
    options = {"best_fn": lambda metrics: metrics["loss"]}
    yield "max", _run(ocp, root / "max", range(4), metrics=[1.0, 2.0, 2.0, 0.0], best_mode="max", **options)
    yield "min", _run(ocp, root / "min", range(4), metrics=[1.0, 0.5, 0.5, 3.0], best_mode="min", **options)
    yield "none have metrics", _run(ocp, root / "none", range(2), **options)


@scenario
def best_newest_is_deleted(ocp, root):
    """The policy may delete the step that was saved last."""
    options = {"best_fn": lambda metrics: metrics["loss"], "best_mode": "min", "max_to_keep": 2}
    yield "kept", _run(ocp, root, range(4), metrics=[1.0, 2.0, 3.0, 4.0], **options)


@scenario
def best_function_that_fails(ocp, root):
    with manager(ocp, root, best_fn=lambda metrics: metrics["absent"], max_to_keep=1) as it:
        for step in range(2):
            yield f"save {step}", outcome(_save, ocp, it, step, [1.0, 2.0], False)
        yield "wait", outcome(it.wait_until_finished)


@scenario(tail={f"{interval}": {"interval": interval} for interval in (1, 2, 5)})
def save_interval(ocp, root, interval):
    yield "from 0", _run(ocp, root / "a", range(7), save_interval_steps=interval)
    yield "from 3", _run(ocp, root / "b", range(3, 12), save_interval_steps=interval)
    yield "forced", _run(ocp, root / "c", range(3), save_interval_steps=interval, force=True)


@scenario
def save_on_steps(ocp, root):
    yield "alone", _run(ocp, root / "a", range(9), save_on_steps=[3, 7], save_interval_steps=100)
    yield "with an interval", _run(ocp, root / "b", range(9), save_on_steps={3, 7}, save_interval_steps=4)


@scenario
def should_save_function(ocp, root):
    asked = []

    def decide(step, latest):
        asked.append((step, latest))
        return step % 3 == 1

    yield "saved", _run(ocp, root, range(8), should_save_fn=decide, save_interval_steps=2)
    yield "asked", asked


@scenario
def should_save(ocp, root):
    with manager(ocp, root, save_interval_steps=5) as it:
        yield "empty", [it.should_save(step) for step in (0, 1, 5)]
        it.save(5, args=ocp.args.StandardSave({"a": jnp.zeros(2)}))
        it.wait_until_finished()
        yield "then", [it.should_save(step) for step in (0, 5, 6, 10, 11)]


@scenario
def declined_save_validates_nothing(ocp, root):
    with manager(ocp, root, save_interval_steps=5) as it:
        it.save(5, args=ocp.args.StandardSave({"a": jnp.zeros(2)}))
        yield "a string", it.save(6, args=ocp.args.StandardSave({"a": "text"}))
        yield "nothing", outcome(it.save, 7)
        yield "another kind", outcome(it.save, 8, args=ocp.args.JsonSave({}))


@scenario
def keep_time_interval(ocp, root):
    long = dt.timedelta(hours=1)
    yield "kept", _run(ocp, root, range(4), max_to_keep=1, keep_time_interval=long)


@scenario
def steps_before_the_manager(ocp, root):
    """Steps of an earlier run are counted."""
    yield "first", _run(ocp, root, range(4))
    yield "second", _run(ocp, root, range(4, 6), max_to_keep=3)


@scenario
def renamed_instead_of_deleted(ocp, root):
    yield "kept", _run(ocp, root, range(4), max_to_keep=1, todelete_subdir="trash")
    yield "trash", listing(root / "trash")
    with manager(ocp, root) as it:
        yield "listed", it.all_steps()
    yield "whole", there(root, "trash/0/default", "trash/0/_CHECKPOINT_METADATA")


@scenario
def deleted_in_the_background(ocp, root):
    options = ocp.CheckpointManagerOptions(max_to_keep=1, enable_background_delete=True)
    with ocp.CheckpointManager(root, options=options) as it:
        for step in range(3):
            _save(ocp, it, step, None, False)
        it.wait_until_finished()
        yield "steps", it.all_steps()
    yield "root", listing(root)


@scenario(
    tail={
        name: {"given": given}
        for name, given in {
            "negative": {"max_to_keep": -1},
            "best mode": {"best_mode": "median"},
            "both trashes": {"todelete_subdir": "a", "todelete_full_path": "b"},
            "per process": {"enable_per_process_directory_creation": True},
        }.items()
    }
)
def invalid_options(ocp, root, given):
    yield "options", outcome(ocp.CheckpointManagerOptions, **given)


_NAMES = (
    "save_interval_steps max_to_keep keep_time_interval keep_period best_fn best_mode keep_checkpoints_without_metrics "
    "step_prefix step_format_fixed_length step_name_format create cleanup_tmp_directories save_on_steps "
    "single_host_load_and_broadcast todelete_subdir todelete_full_path enable_background_delete num_deletion_threads "
    "read_only enable_async_checkpointing async_options should_save_fn atomicity_options save_root_metadata "
    "temporary_path_class save_decision_policy preservation_policy prevent_write_metrics "
    "enable_should_save_is_saving_in_progress_check enable_per_process_directory_creation lightweight_initialize"
).split()


@scenario
def option_defaults(ocp, root):
    yield "defaults", fields(ocp.CheckpointManagerOptions(), *_NAMES)
    given = ocp.CheckpointManagerOptions(
        read_only=True, max_to_keep=3, keep_period=2, create=True, cleanup_tmp_directories=True, save_on_steps=[1],
        todelete_subdir="x", keep_time_interval=dt.timedelta(1), should_save_fn=lambda *_: True,
    )  # fmt: skip
    yield "read only", fields(given, *_NAMES)
    both = ocp.CheckpointManagerOptions(
        multiprocessing_options=ocp.options.MultiprocessingOptions(primary_host=0)
    )
    yield (
        "processes",
        fields(both.multiprocessing_options, "primary_host", "active_processes", "barrier_sync_key_prefix"),
    )
    yield "files", fields(both.file_options, "path_permission_mode")
    yield "async", fields(ocp.AsyncOptions(), "timeout_secs", "barrier_sync_fn", "post_finalization_callback")
    yield "async also", fields(ocp.options.AsyncOptions(timeout_secs=7), "timeout_secs")


@scenario
def positional_options(ocp, root):
    """Some programs give the first options by position."""
    yield "options", fields(ocp.CheckpointManagerOptions(5, 3), "save_interval_steps", "max_to_keep")


@scenario(
    tail={
        name: {"given": given}
        for name, given in {
            "lightweight": {"lightweight_initialize": True},
            "broadcast": {"single_host_load_and_broadcast": True},
            "threads": {"num_deletion_threads": 2},
            "progress check": {"enable_should_save_is_saving_in_progress_check": False},
            "no root metadata": {"save_root_metadata": False},
            "no write of metrics": {"prevent_write_metrics": True},
        }.items()
    }
)
def options_without_much_effect(ocp, root, given):
    losses = [1.0, 2.0, 3.0]
    best = {"best_fn": lambda metrics: metrics["loss"], "max_to_keep": 2}
    yield "kept", _run(ocp, root / "a", range(3), metrics=losses, **best, **given)
    with ocp.CheckpointManager(root / "a", options=ocp.CheckpointManagerOptions(**best, **given)) as it:
        yield "again", it.all_steps()
        yield "best", it.best_step()
        yield "metrics", outcome(it.metrics, 2)


@scenario
def time_limit_of_a_save(ocp, root):
    options = {"async_options": ocp.AsyncOptions(timeout_secs=300)}
    yield "kept", _run(ocp, root, range(2), **options)


@scenario
def callback_before_the_commit(ocp, root):
    calls = []
    options = {
        "async_options": ocp.options.AsyncOptions(
            post_finalization_callback=lambda: calls.append(listing(root))
        )
    }
    yield "kept", _run(ocp, root, range(1), **options)
    yield "calls", len(calls)


@scenario
def permissions(ocp, root):
    options = {"file_options": ocp.options.FileOptions(path_permission_mode=0o770)}
    yield "kept", _run(ocp, root / "a", range(1), **options)
    yield "step", oct((root / "a" / "0").stat().st_mode & 0o777)
    yield "item", oct((root / "a" / "0" / "default").stat().st_mode & 0o777)


@scenario
def active_processes(ocp, root):
    options = ocp.options.MultiprocessingOptions(
        primary_host=None, active_processes={0}, barrier_sync_key_prefix="x"
    )
    yield "kept", _run(ocp, root, range(2), create=False, multiprocessing_options=options)
    yield "create", outcome(_run, ocp, root / "b", range(2), create=True, multiprocessing_options=options)


# Policies as values


@dataclass
class Info:
    """A step as policies see it."""

    step: int
    time: dt.datetime
    metrics: dict


def _policies(ocp):
    known = ocp.checkpoint_managers
    return {
        "LatestN": known.LatestN(2),
        "LatestN all": known.LatestN(),
        "EveryNSteps": known.EveryNSteps(2),
        "EveryNStepsClosest": known.EveryNStepsClosest(3),
        "EveryNSteps at most": known.EveryNSteps(2, max_to_keep=1),
        "EveryNSteps not exact": known.EveryNSteps(2, exact_interval=False),
        "EveryNSeconds": known.EveryNSeconds(3600),
        "BestN": known.BestN(get_metric_fn=lambda metrics: metrics["loss"], n=2),
        "BestN reverse": known.BestN(get_metric_fn=lambda metrics: metrics["loss"], reverse=True, n=2),
        "BestN only with metrics": known.BestN(
            get_metric_fn=lambda metrics: metrics["loss"], n=1, keep_checkpoints_without_metrics=False
        ),
        "CustomSteps": known.CustomSteps([1, 4]),
        "LatestDuration": known.LatestDuration(dt.timedelta(hours=1)),
        "Any": known.AnyPreservationPolicy([known.LatestN(1), known.EveryNSteps(3)]),
    }


_POLICIES = [
    "LatestN",
    "LatestN all",
    "EveryNSteps",
    "EveryNStepsClosest",
    "EveryNSeconds",
    "BestN",
    "BestN reverse",
]
_POLICIES += ["EveryNSteps at most", "EveryNSteps not exact"]
_POLICIES += ["BestN only with metrics", "CustomSteps", "LatestDuration", "Any"]


@scenario(tail={name: {"name": name} for name in _POLICIES})
def preservation_policy(ocp, root, name):
    made = outcome(lambda: _policies(ocp)[name])
    yield "made", made.error is None
    losses = [5.0, 1.0, None, 2.0, 3.0, 9.0]
    yield "kept", outcome(_run, ocp, root, range(6), metrics=losses, preservation_policy=made.value)


@scenario(tail={name: {"name": name} for name in _POLICIES})
def preservation_decisions(ocp, root, name):
    """Policies are asked without a manager, with times of the steps."""
    times = [dt.datetime(2030, 1, 1, hour, tzinfo=dt.UTC) for hour in range(6)]
    infos = [Info(step, time, {"loss": float(step % 4)}) for step, time in enumerate(times)]
    context = ocp.checkpoint_managers.PreservationContext()
    policy = outcome(lambda: _policies(ocp)[name])
    yield "decisions", outcome(lambda: list(policy.value.should_preserve(infos, context=context)))
    yield "of none", outcome(lambda: list(policy.value.should_preserve([], context=context)))


@scenario
def own_preservation_policy(ocp, root):
    seen = []

    class Mine(ocp.checkpoint_managers.PreservationPolicy):
        def should_preserve(self, checkpoints, *, context):
            seen.append([each.step for each in checkpoints])
            return [each.step in (0, 3) for each in checkpoints]

    yield "kept", _run(ocp, root, range(5), preservation_policy=Mine())
    yield "asked about the last", seen[-1]


@scenario
def preservation_policy_by_protocol(ocp, root):
    class Mine:
        def should_preserve(self, checkpoints, *, context):
            return [each.step % 2 == 0 for each in checkpoints]

    yield "kept", _run(ocp, root, range(5), preservation_policy=Mine())


def _decisions(ocp):
    known = ocp.checkpoint_managers
    return {
        "FixedInterval": known.FixedIntervalPolicy(2),
        "SpecificSteps": known.SpecificStepsPolicy([1, 4]),
        "Continuous": known.ContinuousCheckpointingPolicy(),
        "Continuous slow": known.ContinuousCheckpointingPolicy(minimum_interval_secs=3600),
        "Preemption": known.PreemptionCheckpointingPolicy(),
        "Initial": known.InitialSavePolicy(),
        "Any": known.AnySavePolicy([known.FixedIntervalPolicy(3), known.SpecificStepsPolicy([4])]),
    }


_DECISIONS = ["FixedInterval", "SpecificSteps", "Continuous slow", "Preemption", "Initial", "Any"]


@scenario(tail={name: {"name": name} for name in _DECISIONS})
def save_decision_policy(ocp, root, name):
    yield "from 0", _run(ocp, root / "a", range(6), save_decision_policy=_decisions(ocp)[name])
    yield "from 1", _run(ocp, root / "b", range(1, 6), save_decision_policy=_decisions(ocp)[name])


@scenario
def continuous_saves(ocp, root):
    """A save is started whenever none runs."""
    with manager(ocp, root, save_decision_policy=_decisions(ocp)["Continuous"]) as it:
        for step in range(3):
            yield f"save {step}", _save(ocp, it, step, None, False)
            it.wait_until_finished()


@scenario
def own_save_decision_policy(ocp, root):
    contexts = []

    class Mine(ocp.checkpoint_managers.SaveDecisionPolicy):
        def should_save(self, step, previous_steps, *, context):
            contexts.append(
                (step.step, [each.step for each in previous_steps], context.is_saving_in_progress)
            )
            return step.step in (1, 3)

    with manager(ocp, root, save_decision_policy=Mine()) as it:
        for step in range(4):
            yield f"save {step}", _save(ocp, it, step, None, False)
            it.wait_until_finished()
    yield "contexts", contexts


@scenario
def policies_in_modules(ocp, root):
    known = ocp.checkpoint_managers
    yield "preservation", known.preservation_policy.LatestN is known.LatestN
    yield "decision", known.save_decision_policy.FixedIntervalPolicy is known.FixedIntervalPolicy
    yield "LatestN", fields(known.LatestN(3), "n")
    yield "EveryNSteps", fields(known.EveryNSteps(interval_steps=3), "interval_steps")
    yield "Fixed", fields(known.FixedIntervalPolicy(interval=3), "interval")
    yield "Any", [type(each).__name__ for each in known.AnyPreservationPolicy([known.LatestN(3)]).policies]
    yield "equal", known.LatestN(3) == known.LatestN(3)


# Metrics


@scenario
def metrics(ocp, root):
    with manager(ocp, root, best_fn=lambda metrics: metrics["loss"], best_mode="min") as it:
        for step, loss in enumerate([3.0, 1.0, 2.0]):
            it.save(
                step,
                args=ocp.args.StandardSave({"a": jnp.zeros(2)}),
                metrics={"loss": loss, "more": [1, {"x": 2}]},
            )
        it.wait_until_finished()
        yield "metrics", it.metrics(1)
        yield "best", it.best_step()
        yield "latest", it.latest_step()
        yield "absent step", outcome(it.metrics, 9)
        yield "restored", it.restore(1)
        yield "file", there(root, "1/metrics/metrics")
        yield "json", json_of(root, "1/metrics/metrics")
        yield "in metadata", it.metadata(1).metrics
    with manager(ocp, root, best_fn=lambda metrics: metrics["loss"], best_mode="min") as it:
        yield "read again", it.metrics(2)
        yield "best again", it.best_step()


@scenario
def metrics_without_best_function(ocp, root):
    with ocp.CheckpointManager(root) as it:
        it.save(0, args=ocp.args.StandardSave({"a": jnp.zeros(2)}), metrics={"loss": 1.0})
        it.wait_until_finished()
        yield "metrics", outcome(it.metrics, 0)
        yield "file", there(root, "0/metrics/metrics")
        yield "best", it.best_step()
        yield "in metadata", it.metadata(0).metrics


@scenario
def metrics_of_items(ocp, root):
    args = ocp.args
    with manager(ocp, root, best_fn=lambda metrics: metrics["loss"]) as it:
        it.save(0, args=args.Composite(a=args.StandardSave({"x": jnp.zeros(2)})), metrics={"loss": 1.0})
        it.wait_until_finished()
        yield "restored", it.restore(0)
        yield "asked", it.restore(0, args=args.Composite(metrics=args.JsonRestore()))


@scenario
def metrics_of_numpy(ocp, root):
    import numpy as np

    with manager(ocp, root, best_fn=lambda metrics: metrics["loss"]) as it:
        given = {"loss": np.float32(1.5)}
        yield "save", outcome(it.save, 0, args=ocp.args.StandardSave({"a": jnp.zeros(2)}), metrics=given)
        yield "wait", outcome(it.wait_until_finished)
        yield "steps", it.all_steps(read=True)


@scenario
def item_named_metrics(ocp, root):
    args = ocp.args
    with manager(ocp, root, best_fn=lambda metrics: metrics["loss"]) as it:
        given = args.Composite(metrics=args.JsonSave({"loss": 1.0}))
        yield "save", outcome(it.save, 0, args=given, metrics={"loss": 1.0})
