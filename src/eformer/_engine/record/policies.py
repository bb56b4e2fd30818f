"""Rules for when a run saves, and which of its steps it keeps. Pure."""

from __future__ import annotations

import math
import operator
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex, TypeGuard

from eformer._engine.record.names import is_inside, is_text
from eformer._engine.record.step_names import step_number
from eformer._engine.record.text import few

if TYPE_CHECKING:
    import os
    from collections.abc import Collection, Mapping, Sequence

_MOST_SKEW = 60.0  # seconds by which clocks of different machines may differ


@dataclass(frozen=True, slots=True)
class Every:
    """A rule for when a run saves: at multiples of a number of steps, after some time, or at given steps.

    steps       save at every multiple of this number
    minutes     save when this many minutes have passed since the last save
    at          save at these steps
    until       the rule ends after this step
    continuous  save again as soon as the last save is committed
    only        save only this part of the tree, such as "params", in a directory of that name in the run. Such steps
                are apart from the steps of the run: `resume` does not use them, and `keep` of the run does not count
                them
    keep        which of the steps of this part stay, like `keep` of a `Run`; only with `only`

    Example:

        >>> run = checkpoint.Run("runs/new", every=[Every(100, until=1000), Every(1000), Every(minutes=15)])
        >>> best = Keep(best=3, by="loss")
        >>> run = checkpoint.Run("runs/new", every=[Every(1000), Every(200, only="params", keep=best)])
    """

    steps: int | None = None
    minutes: float | None = None
    at: tuple[int, ...] = ()
    until: int | None = None
    continuous: bool = False
    only: str | None = None
    keep: tuple[Keep, ...] | None = None

    if TYPE_CHECKING:  # `keep` takes what `Run(keep=)` takes

        def __init__(
            self,
            steps: int | None = None,
            minutes: float | None = None,
            at: Sequence[int] = (),
            until: int | None = None,
            *,
            continuous: bool = False,
            only: str | None = None,
            keep: int | Keep | Sequence[Keep] | None = None,
        ) -> None: ...

    def __post_init__(self) -> None:
        if self.steps is None and self.minutes is None and not self.at and not self.continuous:
            raise ValueError("Every needs steps=, minutes=, at= or continuous=True")
        if self.steps is not None and self.steps < 1:
            raise ValueError(f"Every(steps={self.steps}): steps must be positive")
        if self.minutes is not None and not self.minutes > 0:
            raise ValueError(f"Every(minutes={self.minutes}): minutes must be positive")
        if self.only is None and self.keep is not None:
            raise ValueError("Every(keep=) is for a part of the tree: pass only=, or keep= to the Run")
        if self.only is not None:
            self._check_part(self.only)
        object.__setattr__(self, "at", tuple(self.at))
        object.__setattr__(self, "keep", keep_from(self.keep))

    def _check_part(self, only: str) -> None:
        if self.minutes is not None or self.continuous:
            raise ValueError(f"Every(only={only!r}): pass steps= or at=, not minutes= or continuous=")
        if not (is_text(only) and is_inside(only)) or "/" in only or only.startswith("."):
            raise ValueError(
                f"Every(only={only!r}): expected the name of a part of the tree, such as 'params', that can be the "
                "name of a directory"
            )
        if step_number(only) is not None:
            raise ValueError(f"Every(only={only!r}): a directory of that name would be a step of the run")


@dataclass(frozen=True, slots=True)
class Keep:
    """A rule for which steps of a run stay: the last, the best or the recent multiples of `every`, or all of them.

    every     apply the rule only to multiples of this number
    last      keep this many of the last steps
    best      keep this many of the best steps by the metric `by`; steps without the metric do not count
    by        the name of the metric, such as "eval.loss"
    mode      rank by smallest ("min", the default) or largest ("max") value
    hours     keep the steps that were saved at most this many hours before the newest step
    at        keep these steps
    foreign   also count and remove steps of other programs, such as Orbax; without such a rule they stay

    Example:

        >>> run = checkpoint.Run("runs/new", keep=[Keep(last=2), Keep(every=10_000), Keep(best=3, by="loss")])
    """

    every: int | None = None
    last: int | None = None
    best: int | None = None
    by: str | None = None
    mode: Literal["min", "max"] = "min"
    hours: float | None = None
    at: tuple[int, ...] = ()
    foreign: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "at", tuple(self.at))
        rules = (self.every, self.last, self.best, self.hours)
        if all(rule is None for rule in rules) and not self.at:
            raise ValueError("Keep needs every=, last=, best=, hours= or at=")
        for name in ("every", "last", "best"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"Keep({name}={value}): {name} must be positive")
        if (self.best is None) != (self.by is None):
            raise ValueError("Keep(best=) needs by=, the name of a metric, and by= needs best=")
        if self.mode not in ("min", "max"):
            raise ValueError(f"Keep(mode={self.mode!r}): expected 'min' or 'max'")


@dataclass(frozen=True, slots=True)
class Near:
    """Say where and when a run saves near steps: in memory or on a local disk of each host, and more often.

    path    a directory in memory or on a local disk of each host, such as "/dev/shm/llama"
    every   when `Run.after` saves there: a number of steps, a timedelta, an `Every`, or several
    copies  on how many other hosts each process's part is copied, over the network. With copies, each process opens a
            port for the other processes of the job

    Example:

        >>> near = checkpoint.Near("/dev/shm/llama", every=50, copies=1)
        >>> run = checkpoint.Run("runs/new", every=1000, near=near)
    """

    path: str | os.PathLike[str]
    every: int | timedelta | Every | Sequence[Every] = field(kw_only=True)
    copies: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        if isinstance(self.copies, bool) or operator.index(self.copies) < 0:
            raise ValueError(f"Near(copies={self.copies!r}): expected a number of other hosts, 0 or more")
        if not (rules := every_from(self.every)):
            raise ValueError(f"Near(every={self.every!r}): no rule says when near steps are saved")
        if any(rule.continuous or rule.only for rule in rules):
            raise ValueError(f"Near(every={self.every!r}): continuous= and only= are for Run(every=)")


@dataclass(frozen=True, slots=True)
class StepFacts:
    """The facts about a step that rules use. `saved_at` is in seconds; None if it is not recorded."""

    number: int
    saved_at: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    is_foreign: bool = False


def kept(
    steps: Iterable[StepFacts],
    rules: Sequence[Keep],
    *,
    stay: Collection[int | None] = (),
    now: float = math.inf,
) -> set[int]:
    """Return the numbers of the steps that stay: the newest step, the steps in `stay`, every step that a rule keeps,
    and the steps of other programs unless a rule counts them."""
    there = sorted(steps, key=lambda step: step.number)
    counted = counted_steps(there, rules)
    found = {step.number for step in there} & {*stay}
    found |= {step.number for step in there} - {step.number for step in counted}
    found |= {step.number for step in counted[-1:]}
    for rule in rules:
        found |= kept_by(rule, counted, now)
    return found


def counted_steps(steps: Iterable[StepFacts], rules: Sequence[Keep]) -> list[StepFacts]:
    """Return the steps that the rules apply to. Steps of other programs count only if a rule has `foreign`."""
    has_foreign = any(rule.foreign for rule in rules)
    return [step for step in steps if has_foreign or not step.is_foreign]


def kept_by(rule: Keep, ordered: Sequence[StepFacts], now: float = math.inf) -> set[int]:
    """Return the numbers of the steps that one rule keeps. `ordered` are all steps that count, by number."""
    found = {step.number for step in ordered if step.number in rule.at}
    multiples = [step for step in ordered if rule.every is None or step.number % rule.every == 0]
    if rule.last is not None:
        found |= {step.number for step in multiples[-rule.last :]}
    if rule.best is not None:
        found |= {*ranked(multiples, rule)[: rule.best]}
    if rule.hours is not None and ordered:
        times = plausible_times(ordered, now)
        newest = times[ordered[-1].number]
        found |= {step.number for step in multiples if newest - times[step.number] <= 3600 * rule.hours}
    if rule.every is not None and rule.last is rule.best is rule.hours is None:
        found |= {step.number for step in multiples}
    return found


def plausible_times(ordered: Sequence[StepFacts], now: float = math.inf) -> dict[int, float]:
    """Return when each step was saved, by number. `ordered` are all steps by number.

    A clock may have been wrong, and a step that seems to come from next year must not make the steps after it old. So
    no time lies after `now`. The times that fit the order are trusted: a longest sequence of times that never falls,
    and ends with the last step. Any other step counts as saved with the next trusted step, or at its own time if that
    is later but not after the last step. No step counts as older than a step before it. A step without a time counts as
    saved with the next step. In doubt a step counts as newer, and stays.
    """
    dated, times = _dated(ordered, now)
    trusted = _in_order(times)
    found: dict[int, float] = {}
    following = times[-1] if times else 0.0
    for index in reversed(range(len(times))):
        if index in trusted:
            following = times[index]
        own = times[index] if times[index] <= times[-1] else following
        found[dated[index].number] = max(own, following)
    following = times[-1] if times else 0.0
    for step in reversed(ordered):
        following = found.setdefault(step.number, following)
    numbers = [step.number for step in ordered]
    return dict(zip(numbers, accumulate((found[number] for number in numbers), max), strict=True))


def _dated(ordered: Sequence[StepFacts], now: float) -> tuple[list[StepFacts], list[float]]:
    """Return the steps whose times are recorded, and their times. Times after `now` become `now`."""
    dated = [(step, min(step.saved_at, now)) for step in ordered if step.saved_at is not None]
    return [step for step, _ in dated], [time for _, time in dated]


def _in_order(times: Sequence[float]) -> set[int]:
    """Return the indexes of a longest sequence of times that never falls and ends with the last time. Of several such
    sequences, prefer late times."""
    # Backwards: ends[n] is the index of the latest time at which a sequence of n + 1 times can begin.
    ends: list[int] = []
    after: dict[int, int | None] = {}
    for index in reversed(range(len(times))):
        if times[index] <= times[-1]:
            place = bisect_right(ends, -times[index], key=lambda end: -times[end])
            after[index] = ends[place - 1] if place else None
            ends[place : place + 1] = [index]
    found: set[int] = set()
    next_one = ends[-1] if ends else None
    while next_one is not None:
        found.add(next_one)
        next_one = after[next_one]
    return found


def warnings_of(steps: Iterable[StepFacts], rules: Sequence[Keep], now: float = math.inf) -> dict[str, str]:
    """Return warnings, by kind, of steps that stay or count differently than the rules suggest."""
    there = sorted(steps, key=lambda step: step.number)
    counted, found = counted_steps(there, rules), {}
    if len(counted) < len(there):
        numbers = few([str(step.number) for step in there if step.is_foreign])
        found["foreign"] = (
            f"steps of another program stay: {numbers}; Keep(..., foreign=True) applies the rules to them"
        )
    if any(rule.hours is not None for rule in rules) and (numbers := few(_misdated(counted, now))):
        found["clock"] = (
            f"the times of these steps do not fit their order, so the clock was wrong: {numbers}; Keep(hours=) uses "
            "the times of later steps for them"
        )
    return found


def can_remove(steps: Iterable[StepFacts], rules: Sequence[Keep]) -> bool:
    """Tell whether a rule can be applied.

    If all rules use metrics that no step has, every step but the newest would go. More likely the metrics are misspelt,
    or not scored yet.
    """
    there = metrics_of(counted_steps(steps, rules))
    return any(rule.by is None or rule.by in there for rule in rules)


def unknown_metrics(steps: Iterable[StepFacts], rules: Sequence[Keep]) -> str | None:
    """Return a message with the metrics of the rules that no step has; None if every metric is known."""
    there = metrics_of(counted_steps(steps, rules))
    missing = sorted({rule.by for rule in rules if rule.by is not None} - there)
    if not missing:
        return None
    return f"no step has a number for the metric {few(missing)}; the steps have {few(sorted(there)) or 'no metrics'}"


def metrics_of(steps: Iterable[StepFacts]) -> set[str]:
    """Return the names of the metrics that a step has a number for. NaN is not a number to rank by."""
    return {name for step in steps for name, value in step.metrics.items() if _has_number(value)}


def _misdated(ordered: Sequence[StepFacts], now: float) -> list[str]:
    """Return the numbers of the steps whose times do not fit the steps around them, or lie in the future, by more than
    the clocks of different machines differ."""
    dated, times = _dated(ordered, now)
    trusted = sorted(_in_order(times))
    found = []
    for index, step in enumerate(dated):
        place = bisect_left(trusted, index)
        low = times[trusted[place - 1]] if place else 0.0
        fitting = min(max(times[index], low), times[trusted[place]])
        if abs((step.saved_at or 0.0) - fitting) > _MOST_SKEW:
            found.append(str(step.number))
    return found


def ranked(steps: Iterable[StepFacts], rule: Keep) -> list[int]:
    """Return the numbers of the steps that have the metric of a rule, the best first. Of equal steps the later comes
    first. NaN does not count."""
    sign = 1 if rule.mode == "min" else -1
    found = [
        (sign * value, -step.number)
        for step in steps
        if _has_number(value := step.metrics.get(rule.by or ""))
    ]
    return [-negative for _, negative in sorted(found)]


def _has_number(value: float | None) -> TypeGuard[float]:
    return value is not None and not math.isnan(value)


def rule_of_metric(rules: Sequence[Keep]) -> Keep | None:
    """Return the first rule that names a metric; None if no rule does."""
    return next((rule for rule in rules if rule.by), None)


def needs_manifests(rules: Sequence[Keep]) -> bool:
    """Tell whether the rules look at more than the numbers of steps."""
    return any(rule.by is not None or rule.hours is not None for rule in rules)


# -------------------------------------------------------------------------------- arguments


def every_from(given: int | timedelta | Every | Sequence[Every] | None) -> tuple[Every, ...]:
    """Return rules for saving from a number of steps, a time, a rule or several rules."""
    if given is None:
        return ()
    if isinstance(given, Every):
        return (given,)
    if isinstance(given, timedelta):
        return (Every(minutes=given.total_seconds() / 60),)
    if isinstance(given, SupportsIndex):
        return (Every(operator.index(given)),)
    if not _is_several(given):
        raise TypeError(
            f"every={given!r}: expected a number of steps, a timedelta, an Every, or several of these"
        )
    return tuple(rule for one in given for rule in every_from(one))


def keep_from(given: int | Keep | Sequence[Keep] | None) -> tuple[Keep, ...] | None:
    """Return rules for keeping from a number of steps, a rule or several rules; None keeps everything."""
    if given is None:
        return None
    if isinstance(given, Keep):
        return (given,)
    if isinstance(given, SupportsIndex):
        return (Keep(last=operator.index(given)),)
    if not _is_several(given):
        raise TypeError(f"keep={given!r}: expected a number of last steps, a Keep, or several of these")
    return tuple(rule for one in given for rule in keep_from(one) or ())


def _is_several(given: object) -> bool:
    return isinstance(given, Iterable) and not isinstance(given, (str, bytes))


def metric_from(name: str, value: Any) -> float:
    """Return a metric as a number; raise ValueError if it is not one."""
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"metrics[{name!r}] is {str(value)[:80]!r}; expected a single number") from error


def is_due(rules: Sequence[Every], step: int) -> bool:
    """Tell whether a rule asks for a save at this step, regardless of the time."""
    return any(
        step in rule.at or (rule.steps is not None and step % rule.steps == 0)
        for rule in rules
        if _is_in_force(rule, step)
    )


def is_continuous(rules: Sequence[Every], step: int) -> bool:
    """Tell whether a rule asks for the next save as soon as the last one is committed."""
    return any(rule.continuous and _is_in_force(rule, step) for rule in rules)


def minutes_due(rules: Sequence[Every], step: int) -> float | None:
    """Return after how many minutes since the last save a rule asks for the next save; None if no rule does."""
    found = [rule.minutes for rule in rules if rule.minutes is not None and _is_in_force(rule, step)]
    return min(found, default=None)


def _is_in_force(rule: Every, step: int) -> bool:
    return rule.until is None or step <= rule.until
