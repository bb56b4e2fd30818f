"""Policies: which steps are saved, and which stay.

Tests: tests/compat_orbax/test_policies.py.
"""

from __future__ import annotations

import datetime as dt
import sys
from collections.abc import Callable, Container, Sequence
from dataclasses import InitVar, dataclass, field
from typing import Any, Protocol, runtime_checkable

from eformer.compat.orbax.options import MultiprocessingOptions


@dataclass
class CheckpointInfo:
    """A step as policies see it: its number, the time of its save, and its metrics."""

    step: int
    time: dt.datetime
    metrics: Any = None


@runtime_checkable
class PolicyCheckpointInfo(Protocol):
    """A step as policies see it: its number, the time of its save, and its metrics."""

    step: int
    time: dt.datetime
    metrics: Any


# ------------------------------------------------------------------------------------ which steps are saved


@dataclass(kw_only=True)
class DecisionContext:
    """Facts for a decision: whether a save is under way, and whether the job is about to be ended."""

    is_saving_in_progress: bool = False
    reached_preemption: bool = False
    multiprocessing_options: Any = field(default_factory=MultiprocessingOptions)


@runtime_checkable
class SaveDecisionPolicy(Protocol):
    """Decides whether a step is saved."""

    def should_save(self, step: Any, previous_steps: Sequence[Any], *, context: Any) -> bool:
        """Tell whether to save."""
        ...


@dataclass
class FixedIntervalPolicy(SaveDecisionPolicy):
    """Save every so many steps."""

    interval: int

    def should_save(self, step: Any, previous_steps: Sequence[Any], *, context: Any) -> bool:
        """Tell whether the step is a multiple of the interval."""
        return bool(step.step % self.interval == 0)


@dataclass
class SpecificStepsPolicy(SaveDecisionPolicy):
    """Save these steps."""

    steps: Container[int]

    def should_save(self, step: Any, previous_steps: Sequence[Any], *, context: Any) -> bool:
        """Tell whether the step is one of these."""
        return step.step in self.steps


@dataclass(kw_only=True)
class ContinuousCheckpointingPolicy(SaveDecisionPolicy):
    """Save whenever no save is under way, and so many seconds after the save before."""

    minimum_interval_secs: int | None = None

    def should_save(self, step: Any, previous_steps: Sequence[Any], *, context: Any) -> bool:
        """Tell whether to save; the first process decides for all."""
        return _decided_by_first(self._may_save(step, previous_steps, context))

    def _may_save(self, step: Any, previous_steps: Sequence[Any], context: Any) -> bool:
        if context.is_saving_in_progress:
            return False
        if not previous_steps or self.minimum_interval_secs is None:
            return True
        waited = step.time - previous_steps[-1].time
        return bool(waited >= dt.timedelta(seconds=self.minimum_interval_secs))


def _decided_by_first(decision: bool) -> bool:
    """Return the decision of the first process."""
    from eformer._engine.processes import hosts

    if hosts.is_alone():
        return decision
    with hosts.meeting("decisions to save", None) as group:
        return group.meet(b"1" if decision else b"0", lambda all_messages: all_messages[0]) == b"1"


class PreemptionCheckpointingPolicy(SaveDecisionPolicy):
    """Save when the job is about to be ended."""

    def should_save(self, step: Any, previous_steps: Sequence[Any], *, context: Any) -> bool:
        """Tell whether the job is about to be ended."""
        return bool(context.reached_preemption)


class InitialSavePolicy(SaveDecisionPolicy):
    """Save if there is no step yet."""

    def should_save(self, step: Any, previous_steps: Sequence[Any], *, context: Any) -> bool:
        """Tell whether there is no step yet."""
        return not previous_steps


@dataclass
class AnySavePolicy(SaveDecisionPolicy):
    """Save if any of these says so."""

    policies: Sequence[Any]

    def should_save(self, step: Any, previous_steps: Sequence[Any], *, context: Any) -> bool:
        """Ask the policies in turn."""
        return any(
            each.should_save(step, previous_steps=previous_steps, context=context) for each in self.policies
        )


# --------------------------------------------------------------------------------------- which steps stay


class PreservationContext:
    """Nothing yet."""


@runtime_checkable
class PreservationPolicy(Protocol):
    """Decides which steps stay."""

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> Sequence[bool]:
        """Tell of each step whether it stays."""
        ...


@dataclass
class PreserveAll(PreservationPolicy):
    """Keep all steps."""

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> Sequence[bool]:
        """Keep each."""
        return [True] * len(checkpoints)


@dataclass
class LatestN(PreservationPolicy):
    """Keep the last steps; None keeps all."""

    n: int | None = None

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> Sequence[bool]:
        """Keep the last."""
        first = 0 if self.n is None else max(0, len(checkpoints) - self.n)
        return [number >= first for number in range(len(checkpoints))]


@dataclass
class EveryNSeconds(PreservationPolicy):
    """Keep steps that are so many seconds apart."""

    interval_secs: int

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> Sequence[bool]:
        """Keep the first, and each that is late enough after the one kept before."""
        kept, last = [], None
        for each in checkpoints:
            is_due = last is None or each.time - last >= dt.timedelta(seconds=self.interval_secs)
            last = each.time if is_due else last
            kept.append(is_due)
        return kept


@dataclass
class EveryNSteps(PreservationPolicy):
    """Keep steps whose numbers are multiples, or, without `exact_interval`, so far apart."""

    interval_steps: int
    exact_interval: bool = True
    max_to_keep: int | None = None

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> Sequence[bool]:
        """Keep the multiples."""
        _require_interval(self.interval_steps)
        if self.exact_interval:
            return _last_true(
                [each.step % self.interval_steps == 0 for each in checkpoints], self.max_to_keep
            )
        kept, last = [], None
        for each in checkpoints:
            is_due = last is None or each.step - last >= self.interval_steps
            last = each.step if is_due else last
            kept.append(is_due)
        return _last_true(kept, self.max_to_keep)


@dataclass
class EveryNStepsClosest(PreservationPolicy):
    """Keep the step that is closest to each multiple, and the last step."""

    interval_steps: int
    max_to_keep: int | None = None

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> Sequence[bool]:
        """Keep the closest; of two that are equally close, the later."""
        _require_interval(self.interval_steps)
        best: dict[int, tuple[int, int]] = {}
        for number, each in enumerate(checkpoints):
            multiple = round(each.step / self.interval_steps)
            distance = abs(each.step - multiple * self.interval_steps)
            if multiple not in best or distance <= best[multiple][0]:
                best[multiple] = (distance, number)
        kept = {number for _, number in best.values()} | ({len(checkpoints) - 1} if checkpoints else set())
        return _last_true([number in kept for number in range(len(checkpoints))], self.max_to_keep)


def _require_interval(interval: int) -> None:
    if interval == 0:
        raise ValueError("interval_steps must not be 0.")


def _last_true(kept: list[bool], most: int | None) -> list[bool]:
    """Keep only the last of the kept."""
    chosen = [number for number, is_kept in enumerate(kept) if is_kept]
    dropped = set() if most is None or len(chosen) <= most else set(chosen[: len(chosen) - most])
    if most == 0:
        dropped = set()  # as Orbax has it: [:-0] is empty
    return [is_kept and number not in dropped for number, is_kept in enumerate(kept)]


@dataclass
class CustomSteps(PreservationPolicy):
    """Keep these steps."""

    steps: InitVar[Sequence[int]]
    _steps_set: set[int] = field(init=False)

    def __post_init__(self, steps: Sequence[int]) -> None:
        self._steps_set = set(steps)

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> Sequence[bool]:
        """Keep these."""
        return [each.step in self._steps_set for each in checkpoints]


@dataclass
class AnyPreservationPolicy(PreservationPolicy):
    """Keep the steps that any of these keeps."""

    policies: Sequence[Any]

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> Sequence[bool]:
        """Ask all policies."""
        answers = [each.should_preserve(checkpoints, context=context) for each in self.policies]
        return [any(several) for several in zip(*answers, strict=True)]


@dataclass(kw_only=True)
class BestN(PreservationPolicy):
    """Keep the best steps by a function of their metrics: the highest values, with `reverse` the lowest."""

    get_metric_fn: Callable[[Any], float]
    reverse: bool = False
    n: int | None = None
    keep_checkpoints_without_metrics: bool = True

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> Sequence[bool]:
        """Keep the best; of equal steps the later."""
        if self.n is None or len(checkpoints) <= self.n:
            return [True] * len(checkpoints)
        if self.n == 0:
            return [False] * len(checkpoints)
        scored = [number for number, each in enumerate(checkpoints) if each.metrics is not None]
        scored.sort(key=lambda number: self.get_metric_fn(checkpoints[number].metrics), reverse=self.reverse)
        kept = set(scored[-self.n :])
        if self.keep_checkpoints_without_metrics:
            kept |= {number for number, each in enumerate(checkpoints) if each.metrics is None}
        return [number in kept for number in range(len(checkpoints))]


@dataclass
class LatestDuration(PreservationPolicy):
    """Keep the steps of the last hours, or days."""

    duration: dt.timedelta

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> Sequence[bool]:
        """Keep the first that is young enough, and all after it."""
        now = dt.datetime.now(dt.UTC)
        young = (number for number, each in enumerate(checkpoints) if now - each.time <= self.duration)
        first = next(young, len(checkpoints))
        return [number >= first for number in range(len(checkpoints))]


# Orbax has the policies in two modules as well, which are attributes of this one.
preservation_policy = save_decision_policy = sys.modules[__name__]
