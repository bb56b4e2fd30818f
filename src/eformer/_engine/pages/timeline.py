"""Describe a run: its steps in time, with sizes, metrics, damage, the rules that keep them, and the change of the
model."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from eformer._engine.formats.run_steps import is_foreign, resumed_from, rules_of, steps
from eformer._engine.pages.changes import SAME, is_of_optimizer, recorded_change, rounded
from eformer._engine.pages.contents import page_contents
from eformer._engine.pages.reading import Room, TooLargeError, compared
from eformer._engine.record.policies import StepFacts, counted_steps, kept_by
from eformer._engine.record.text import count, printable, size
from eformer._engine.runs.removed import removed_metrics
from eformer._engine.runs.retention import by_series
from eformer._engine.stores.local import usage
from eformer._engine.stores.locate import store_at
from eformer._engine.tasks.progress import metered
from eformer._engine.tools.compare import plain_became
from eformer._engine.tools.prune import plan_removal
from eformer.errors import EformerError, NotFoundError

if TYPE_CHECKING:
    import datetime as dt
    import os
    from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence

    from eformer._engine.formats.run_steps import Rules, Step
    from eformer._engine.pages.contents import Leaf, PageContents
    from eformer._engine.record.policies import Every, Keep
    from eformer._engine.runs.removed import Metrics
    from eformer._engine.stores.base import Store
    from eformer._engine.tasks.progress import Progress
    from eformer._engine.tools.compare import Comparison

Json = dict[str, Any]

MOST_READ = 32 * 10**9  # bytes of steps that are read for the norms of their changes, the newest first

_MOST_ALARMS = 20  # notes
_MOST_NUMBERS = 10  # steps that a rule names


@dataclass(frozen=True, slots=True)
class SeenStep:
    """A step as it was last seen. Only its number, name and identity are known until it is read."""

    number: int
    name: str
    identity: Hashable = None
    is_read: bool = False
    saved_at: dt.datetime | None = None
    reason: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    is_foreign: bool = False
    problem: str | None = None

    @property
    def facts(self) -> StepFacts:
        """Return the facts that rules look at."""
        saved_at = self.saved_at.timestamp() if self.saved_at else None
        return StepFacts(self.number, saved_at, self.metrics, self.is_foreign)


@dataclass(frozen=True, slots=True)
class News:
    """The steps of a run at one moment. Every change has a new `version`.

    own    the rules that the job of the run has recorded
    past   the metrics of steps that were removed, by number
    """

    version: int = 0
    steps: tuple[SeenStep, ...] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)
    removed: Collection[str] = ()
    reasons: Mapping[int, Sequence[str]] = field(default_factory=dict)
    problem: str | None = None
    is_complete: bool = False
    own: Rules | None = None
    past: Mapping[int, Metrics] = field(default_factory=dict)

    def as_json(self, url: str, rules: Sequence[Keep]) -> Json:
        """Describe the run at `url`, under these rules or its own, as `source.run()` of a page returns it."""
        there = {step.number for step in self.steps}
        past = {number: found for number, found in self.past.items() if number not in there}
        every = (step.metrics for step in self.steps)
        return {
            "title": printable(url.rstrip("/").rpartition("/")[2] or url),
            "path": printable(url),
            "rules": list(map(rule_text, self.rules_or_own(rules))),
            "own": self.own
            and {"every": list(map(every_text, self.own.every)), "keeps_all": self.own.keep is None},
            "steps": [self._step(step) for step in self.steps],
            "past": [{"number": number, "metrics": found} for number, found in past.items()],
            "metrics": list(dict.fromkeys(chain.from_iterable((*every, *past.values())))),
            "nbytes": sum(self.sizes.get(step.name, 0) for step in self.steps) if self.is_complete else None,
            "has_values": False,
            "is_complete": self.is_complete,
            "notes": self._notes(),
        }

    def rules_or_own(self, rules: Sequence[Keep]) -> Sequence[Keep]:
        """Return the rules that a caller gave, otherwise those of the run."""
        return rules or (self.own and self.own.keep) or ()

    def _step(self, step: SeenStep) -> Json:
        return {
            "number": step.number,
            "name": printable(step.name),
            "nbytes": self.sizes.get(step.name),
            "saved_at": step.saved_at.isoformat() if step.saved_at else None,
            "why": step.reason,
            "metrics": {
                name: value if math.isfinite(value) else None for name, value in step.metrics.items()
            },
            "problem": step.problem and printable(step.problem),
            "is_removed": step.name in self.removed,
            "kept_by": [*self.reasons.get(step.number, ())],
            "change": None,
        }

    def _notes(self) -> list[str]:
        if self.problem:
            return [self.problem]
        if self.is_complete:
            return []
        read = sum(step.is_read for step in self.steps)
        return [f"reading the steps: {read:,} of {len(self.steps):,}"]


def read_step(step: Step, seen: SeenStep) -> SeenStep:
    """Read the facts that a page shows of a step."""
    try:
        if problem := step.problem():
            return replace(seen, is_read=True, problem=problem, metrics={}, reason="", saved_at=None)
        return replace(
            seen,
            is_read=True,
            saved_at=step.saved_at,
            reason=step.reason,
            metrics=dict(step.metrics),
            is_foreign=is_foreign(step),
            problem=None,
        )
    except (EformerError, OSError) as error:  # removed or replaced meanwhile: the next look sees it
        return replace(seen, is_read=True, problem=str(error))


def step_facts(run: str | os.PathLike[str], rules: Sequence[Keep] = ()) -> list[Json]:
    """Describe the steps of a run. Bytes that several steps share count for the first of them."""
    store, found = store_at(run), steps(run)
    news, resumed = _news(store, found, rules), resumed_from(store)
    return [
        {
            "number": seen.number,
            "path": step.path,
            "nbytes": news.sizes[seen.name],
            "saved_at": seen.saved_at.isoformat() if seen.saved_at else None,
            "why": seen.reason,
            "metrics": seen.metrics,
            "problem": seen.problem,
            "is_removed": seen.name in news.removed,
            "is_resumed_from": seen.number == resumed,
        }
        for step, seen in zip(found, news.steps, strict=True)
    ]


def _news(store: Store, found: Sequence[Step], rules: Sequence[Keep]) -> News:
    """Read all steps of a run."""
    return News(
        steps=tuple(read_step(step, SeenStep(step.number, step.name)) for step in found),
        sizes=usage(store, [step.name for step in found]),
        removed=_removed(store, rules) if rules and found else (),
        is_complete=True,
    )


def _removed(store: Store, rules: Sequence[Keep]) -> Collection[str]:
    """Return the names of the steps that `prune` would remove; none if it would refuse, because no step is whole."""
    try:
        return plan_removal(store.url, rules).removed
    except NotFoundError:
        return ()


def recorded(store: Store) -> Json:
    """Return the facts of `News` that files beside the steps record."""
    return {"own": rules_of(store), "past": removed_metrics(store)}


def run_facts(
    run: str | os.PathLike[str],
    rules: Sequence[Keep] = (),
    *,
    values: bool = True,
    memory: int | None = None,
    progress: Progress = None,
) -> Json:
    """Describe a run, as `source.run()` of a page returns it.

    With `values`, consecutive steps are compared, the newest first, until `MOST_READ` bytes were read.
    """
    store, found = store_at(run), steps(run)
    known = News(**recorded(store))
    rules = known.rules_or_own(rules)
    news = replace(_news(store, found, rules), own=known.own, past=known.past)
    sound = [step for step, seen in zip(found, news.steps, strict=True) if seen.problem is None]
    by_name = {seen.name: seen.facts for seen in news.steps if seen.problem is None}
    found_reasons = reasons(by_name, rules, resumed_from(store))
    facts = replace(news, reasons=found_reasons).as_json(store.url, rules)
    changes = dict(_changes(sound, memory, progress)) if values else {}
    facts["steps"] = [step | {"change": changes.get(step["number"])} for step in facts["steps"]]
    notes = alarms(facts["steps"])
    unread = len(sound) - 1 - len(changes)
    if values and unread > 0:
        notes.append(
            f"{count(unread, 'step')} not compared with the step before: that would read more than {size(MOST_READ)}"
        )
    return facts | {"has_values": values, "notes": notes}


def alarms(shown: Sequence[Json]) -> list[str]:
    """Return notes on the steps in which leaves became NaN or infinite; or on the last step, if it has such arrays."""
    compared = [step for step in shown if step["change"] and "became" in step["change"]]
    became = [
        f"{step['name']}: {_became_text(step['change'])}" for step in compared if step["change"]["became"]
    ]
    special = [
        f"{step['name']}: NaN or Inf in {count(step['change']['special'], 'array')}"
        for step in compared[-1:]
        if step["change"]["special"]
    ]
    return became[:_MOST_ALARMS] or special


def _became_text(change: Json) -> str:
    others = f" and {change['became'] - 1:,} more" if change["became"] > 1 else ""
    return f"{count(change['became'], 'leaf', 'leaves')} became NaN or Inf: {change['first']}{others}"


def every_text(rule: Every) -> str:
    """Describe when a rule saves, in a few words."""
    parts = []
    if rule.steps is not None:
        parts.append("every step" if rule.steps == 1 else f"every {rule.steps:,} steps")
    if rule.minutes is not None:
        parts.append("every minute" if rule.minutes == 1 else f"every {rule.minutes:g} minutes")
    if rule.at:
        parts.append(f"at {_numbers(rule.at)}")
    if rule.continuous:
        parts.append("one after another")
    only = "" if rule.only is None else f"{rule.only} "
    return only + ", ".join(parts) + (f", until step {rule.until}" if rule.until is not None else "")


def _numbers(at: Sequence[int]) -> str:
    more = len(at) - _MOST_NUMBERS
    shown = ", ".join(map(str, at[:_MOST_NUMBERS]))
    return f"{shown} and {more:,} more" if more > 0 else shown


def rule_text(rule: Keep) -> str:
    """Describe the steps that a rule keeps, in a few words."""
    parts = []
    if rule.every is not None:
        parts.append(f"every {rule.every}")
    if rule.last is not None:
        parts.append(f"the last {rule.last}")
    if rule.best is not None:
        parts.append(f"the best {rule.best} by {rule.by} ({rule.mode})")
    if rule.hours is not None:
        parts.append(f"the last {rule.hours:g} hours")
    if rule.at:
        parts.append(_numbers(rule.at))
    if rule.foreign:
        parts.append("of any program")
    return printable(", ".join(parts))


def reasons(
    sound: Mapping[str, StepFacts], rules: Sequence[Keep], resumed: int | None
) -> dict[int, list[str]]:
    """Return the reasons why each step stays, in words: the rules that keep it, "the newest", "the run was resumed from
    it" or "another program wrote it"."""
    found = defaultdict[int, list[str]](list)
    for series in by_series(sound) if rules else ():
        _add_reasons(found, [*series.values()], rules, resumed)
    return dict(found)


def _add_reasons(
    found: defaultdict[int, list[str]], sound: Sequence[StepFacts], rules: Sequence[Keep], resumed: int | None
) -> None:
    counted = counted_steps(sound, rules)
    for fact in counted[-1:]:
        found[fact.number].append("the newest")
    for fact in sound:
        if fact.number == resumed:
            found[fact.number].append("the run was resumed from it")
        if fact.is_foreign and not any(rule.foreign for rule in rules):
            found[fact.number].append("another program wrote it")
    for rule in rules:
        for number in kept_by(rule, counted, time.time()):
            found[number].append(rule_text(rule))


# -------------------------------------------------------------------------------------------- change


def _changes(sound: Sequence[Step], memory: int | None, progress: Progress) -> Iterator[tuple[int, Json]]:
    """Yield the norm of the change of each step since the step before, the newest first."""
    pairs = list(zip(sound[1:], sound[:-1], strict=True))[::-1]
    if not pairs:
        return
    room = Room.within(memory, sides=2)
    known: dict[str, Comparison] = {}
    read = 0
    with metered(progress, len(pairs), "comparing", of="steps") as meter:
        for step, before in pairs:
            if read > MOST_READ:
                return
            try:
                with page_contents(step.path) as new, page_contents(before.path) as old:
                    change, nbytes = _change(new, old, known, room)
            except (EformerError, OSError, TooLargeError):
                # A step was removed meanwhile, or has damage that only its digests tell.
                change, nbytes = {"problem": "could not be read"}, 0
            read += nbytes
            meter.add(1)
            yield step.number, change


def _change(
    new: PageContents, old: PageContents, known: dict[str, Comparison], room: Room
) -> tuple[Json, int]:
    """Return the norm of the difference of all arrays outside of optimizers, and how many bytes were read for it.

    became    the number of leaves with elements that were finite in the older step, and no longer are; also in
              optimizers, which NaN often reaches first
    first     the name of one of them, of a parameter if there is one
    special   the number of leaves of the newer step that have NaN or infinite elements

    `known` has the comparisons of leaves of the newer step; the leaves of the older step replace them. A leaf that is
    the same by the records is read at most once in the whole run.
    """
    norm = before = 0.0
    nbytes = special = 0
    became: list[str] = []
    for leaf, other in _common_leaves(new, old):
        if leaf.entry is None or other.entry is None:
            if any(plain_became(other.record, leaf.record)):
                became.append(leaf.path)
            continue
        is_same = recorded_change(new, leaf, old) == SAME
        if is_same and leaf.path in known:
            special += known[leaf.path].special > 0
            change = 0.0
        else:
            found = compared(new, leaf, old, other, room, is_same=is_same)
            if found.became:
                became.append(leaf.path)
            special += found.special_now > 0
            known[leaf.path] = found
            nbytes += other.nbytes + (0 if is_same else leaf.nbytes)
            change = found.change
        if not is_of_optimizer(leaf.path):
            norm, before = math.hypot(norm, change), math.hypot(before, known[leaf.path].norm)
    facts = _change_facts(norm, before) | {"became": len(became), "special": special}
    if became:
        facts["first"] = min(became, key=is_of_optimizer)
    return facts, nbytes


def _common_leaves(new: PageContents, old: PageContents) -> Iterator[tuple[Leaf, Leaf]]:
    """Yield the plain values that both steps have, and the arrays that both have in one shape."""
    for leaf in new.leaves:
        other = old.counterpart(leaf, new)
        if other is None or (leaf.entry is None) != (other.entry is None):
            continue
        is_key = bool((leaf.entry and leaf.entry.key) or (other.entry and other.entry.key))
        if not is_key and leaf.shape == other.shape:
            yield leaf, other


def _change_facts(norm: float, before: float) -> Json:
    """Return the norm of a change as JSON, and relative to the norm before; null if the norm before is zero."""
    relative = norm / before if before else math.inf
    return {
        "norm": rounded(norm, 4) if math.isfinite(norm) else None,
        "relative": rounded(relative, 4) if math.isfinite(relative) else None,
    } | ({"from_zero": True} if norm and not before else {})
