"""Resume a run: agree on its steps, and load the first step that is sound in every process."""

from __future__ import annotations

import dataclasses
import errno
import logging
import secrets
from typing import TYPE_CHECKING, Any

import msgspec

from eformer._engine.formats.run_steps import facts_by_metrics, facts_of_run, path_to_step, steps_if_there
from eformer._engine.loading.load import LoadedTree, load_tree
from eformer._engine.processes.hosts import meeting
from eformer._engine.record.policies import ranked, rule_of_metric
from eformer._engine.record.text import count, few, glance
from eformer._engine.record.values import json_decoder
from eformer._engine.runs.near_parts import Held, NearStep, Where
from eformer._engine.runs.own_part import PART_METADATA
from eformer._engine.runs.positions import set_position
from eformer._engine.runs.retention import put_aside
from eformer._engine.tasks.interrupts import is_of_caller
from eformer.errors import (
    CorruptionError,
    FormatError,
    NotFoundError,
    ProcessError,
    VersionError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from eformer._engine.formats.run_steps import Step
    from eformer._engine.loading.request import LoadReport, Request
    from eformer._engine.record.policies import Keep
    from eformer._engine.runs.near import NearTier
    from eformer._engine.runs.writer import Writer

logger = logging.getLogger("eformer")


@dataclasses.dataclass(frozen=True, slots=True)
class Resumed:
    """Describe the step that a run continues from.

    tree      the state
    step      how many steps are done
    skipped   the damaged steps that were skipped, with the reasons
    report    the `LoadReport` of the step: the leaves that were loaded, kept and left out

    Example:

        >>> with checkpoint.Run("run") as run:
        ...     found = run.resume(like=state)
        >>> found.step, found.skipped
        (300, {})
    """

    tree: Any
    step: int
    skipped: dict[int, str] = dataclasses.field(default_factory=dict)
    report: LoadReport | None = None

    def __repr__(self) -> str:
        skipped = [f"skipped step {number}: {why}" for number, why in self.skipped.items()]
        return glance("\n".join([f"<Resumed: {count(self.step, 'step')} done>", *skipped]))


# ---------------------------------------------------------------------------------------- messages


class _OwnSteps(msgspec.Struct):
    """The message of a process that begins: the parts of near steps that it finds, and whether it starts anew."""

    near: Held | None
    fresh: bool


class AgreedSteps(msgspec.Struct):
    """The answer to all processes.

    far      the steps of the run
    near     the near steps that all processes can load
    best     the steps of the run that have the metric of a rule, the best first
    epoch    the id of the epoch that begins
    before   the earlier epochs of the run
    where    where the parts of the near steps are
    """

    far: list[int]
    near: list[NearStep]
    best: list[int]
    epoch: str
    before: list[str]
    where: Where

    @property
    def steps(self) -> list[NearStep]:
        """All steps in the order of their numbers; a step of the run comes after a near step of its number."""
        both = [*(NearStep(number) for number in self.far), *self.near]
        return sorted(both, key=lambda step: (step.number, not step.epoch))

    def to_try(self, step: int | str, rule: Keep | None, path: str) -> list[NearStep]:
        """Return the steps to try: first the wanted step, or the best by a rule, then its replacements if it is
        damaged."""
        there = {one.number: one for one in self.steps}
        if rule is not None:
            if not self.best:
                raise NotFoundError(f"{path}: no step has a number for the metric {rule.by!r}")
            return [there[number] for number in self.best]
        if step != "newest" and step not in there:
            raise NotFoundError(f"{path} has no step {step}; it has {[*there]}")
        return [one for one in reversed(self.steps) if step == "newest" or one.number <= int(step)]

    def after(self, number: int, skipped: Collection[int] = ()) -> list[int]:
        """Return the steps after step `number`, without the skipped steps."""
        return [step.number for step in self.steps if step.number > number and step.number not in skipped]

    def refuse_after(self, number: int, step: int | str, path: str, skipped: Mapping[int, str]) -> None:
        """Raise ValueError if the run has steps after step `number`, which `step` asks for."""
        if not (newer := self.after(number, skipped)):
            return
        chosen = f"the best step is {number}" if step == "best" else f"step {number} is not the newest"
        far = [one.name for one in steps_if_there(path) if one.number in newer]
        near = sorted({str(n) for n in newer} - {str(n) for n in self.far})
        losses = [f"{count(len(far), 'newer step')} would be put aside ({few(far)})"] if far else []
        losses += [f"{count(len(near), 'newer near step')} would be removed ({few(near)})"] if near else []
        damaged = "".join(f". Step {n} is damaged: {why}" for n, why in skipped.items())
        raise ValueError(
            f"{path}: {chosen}, and {' and '.join(losses)}{damaged}. resume(step={step!r}, rewind=True) does that and "
            f"goes on from step {number}; resume() goes on from the newest step. To keep all, load step {number}, and "
            "save to a run in another directory"
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """The processes of one job at a run. All processes make the same calls, and an error in one reaches all."""

    path: str
    writer: Writer
    near: NearTier | None
    timeout: float | None

    def agree(
        self,
        *,
        claims: bool,
        fresh: bool,
        rule: Keep | None = None,
        listed: Callable[[], Sequence[Step]] | None = None,
    ) -> AgreedSteps:
        """Agree on the steps: the steps of the run that the first process lists, and the near steps that all processes
        can load. `listed` returns the steps of the run if they are listed already.

        With `claims`, this job becomes the writer first. A job that is the writer already raises SupersededError if
        another job has taken over. With a `rule`, rank the steps of the run by its metric.
        """
        near = self.near

        def answer(messages: Sequence[bytes]) -> bytes:
            held = [json_decoder(_OwnSteps).decode(message) for message in messages]
            _require_alike([one.fresh for one in held])
            if claims:
                self.writer.claim()
            there = listed() if listed else steps_if_there(self.path)
            common, epochs, where = (
                near.in_common([one.near for one in held if one.near]) if near else ([], [], Where())
            )
            best = ranked(facts_by_metrics(there), rule) if rule else []
            far = [step.number for step in there]
            return msgspec.json.encode(AgreedSteps(far, common, best, secrets.token_hex(8), epochs, where))

        with meeting("runs", self.timeout) as hosts:
            if self.writer.has_claimed and hosts.number == 0:
                self.writer.check()
            mine = _OwnSteps(near.look() if near else None, fresh)
            answered = hosts.meet(msgspec.json.encode(mine), answer)
        self.writer.has_claimed = self.writer.has_claimed or claims
        agreed = json_decoder(AgreedSteps).decode(answered)
        if near:
            near.note_where(agreed.where)
        return agreed

    def load_first(
        self, candidates: Sequence[NearStep], request: Request, *, fallback: bool
    ) -> tuple[NearStep, LoadedTree, dict[int, str]]:
        """Load the first of these steps that is sound in every process. Return it, and the reasons of skipped steps."""
        skipped: dict[int, str] = {}
        for step in candidates:
            number = step.number
            try:
                loaded, problem = self._load(step, request)
                # Once more: a network file system may show an old directory, and a near step has several parts.
                if loaded is None and (fallback or step.epoch):
                    loaded, problem = self._load(step, request, is_again=True)
            except VersionError as error:
                raise self._newer_version(number, error) from error
            if loaded is not None:
                return step, loaded, skipped
            if not fallback:
                raise CorruptionError(f"step {number} of {self.path} is damaged: {problem}")
            logger.warning("%s: step %d is skipped: %s", self.path, number, problem)
            skipped[number] = problem
        listed = "; ".join(f"step {number}: {why}" for number, why in skipped.items())
        raise CorruptionError(
            f"no step of {self.path} is sound, and a run does not start afresh by itself: {listed}"
        )

    def _load(
        self, step: NearStep, request: Request, *, is_again: bool = False
    ) -> tuple[LoadedTree | None, str]:
        """Load a step in all processes. Return it, or the damage that one process has found."""
        loaded, error = None, None
        try:
            if step.epoch and self.near:
                loaded = self.near.load(step, request, is_again=is_again)
            else:
                loaded = load_tree([path_to_step(self.path, step.number)], request)
        except Exception as raised:  # noqa: BLE001  all processes wait to hear of it
            error = raised
        with meeting("runs", self.timeout) as hosts:
            outcome = hosts.meet(_outcome_of(error), _worst).decode()
        kind, _, problem = outcome.partition(":")
        if kind == "damage":
            return None, problem
        if error is not None:
            raise error
        if outcome:
            raise ProcessError(
                f"step {step.number} of {self.path} could not be loaded in another process: {outcome}"
            )
        return loaded, ""

    def _newer_version(self, number: int, error: VersionError) -> VersionError:
        """Return the error for a step of a newer eformer, with the call that goes on from an earlier step. Such a step
        is not damaged, so it is not skipped."""
        there = steps_if_there(self.path)
        is_newest = all(step.number <= number for step in there)
        message = f"{self.path}: {'the newest step' if is_newest else 'step'} {number} is of a newer version: {error}"
        before = (step.number for step in reversed(there) if step.number < number and not step.problem())
        if (sound := next(before, None)) is not None:
            message += f"; to go on from the step before, call resume(step={sound}, rewind=True)"
        return VersionError(message)

    def set_position(self, data: Any, step: NearStep, metadata: Mapping[str, Any]) -> None:
        """Set the data to the recorded position. A part of a near step has the position of this process alone."""
        facts, is_part = facts_of_run(metadata), PART_METADATA in metadata
        with meeting("runs", self.timeout) as hosts:
            if data is not None:
                number, count = (0, 1) if is_part else (hosts.number, hosts.count)
                set_position(data, facts, f"step {step.number} of {self.path}", number=number, count=count)
            elif facts.get("data"):
                logger.warning(
                    "%s: step %d has a position in the data, but resume was called without data=, so the data begin "
                    "anew; pass resume(data=) to go on at that position",
                    self.path,
                    step.number,
                )
            hosts.meet(b"", lambda _: b"")

    def put_aside(self, why: Callable[[Step], str | None], also: Sequence[str] = ()) -> list[str]:
        """Rename steps of the run, and of the directories in `also`, in the first process, before any process goes on.
        Return the old names of the steps of the run."""

        def answer(_: Sequence[bytes]) -> bytes:
            found = [put_aside(path, why, self.writer.check) for path in (self.path, *also)]
            return msgspec.json.encode(found[0])

        with meeting("runs", self.timeout) as hosts:
            return msgspec.json.decode(hosts.meet(b"", answer), type=list[str])


def rule_of_best(rules: Sequence[Keep]) -> Keep:
    """Return the first rule that names a metric."""
    if (rule := rule_of_metric(rules)) is None:
        raise ValueError(
            "step='best' needs a rule of keep= that names a metric: Keep(best=1, by='eval.loss')"
        )
    return rule


def _require_alike(fresh: Sequence[bool]) -> None:
    if len(set(fresh)) > 1:
        named = few([f"process {number}" for number, is_fresh in enumerate(fresh) if is_fresh])
        raise ValueError(
            f"Run(fresh=) differs between processes: it is True in {named}, and False elsewhere; pass "
            "the same value in all processes"
        )


def _outcome_of(error: Exception | None) -> bytes:
    """Encode the outcome of a load for all processes."""
    if error is None:
        return b""
    is_unreadable = isinstance(error, OSError) and error.errno == errno.EIO
    is_damage = isinstance(error, (FormatError, FileNotFoundError)) and not isinstance(error, VersionError)
    if (is_unreadable or is_damage) and not is_of_caller(error):
        return f"damage:{error}".encode(errors="replace")
    return b"peer" if isinstance(error, ProcessError) else f"error:{error!r}".encode(errors="replace")


def _worst(outcomes: Sequence[bytes]) -> bytes:
    """Return the most serious outcome: error, then damage, then the failure of another process, then success."""
    kinds = (b"error:", b"damage:", b"peer")
    return next((o for kind in kinds for o in outcomes if o.startswith(kind)), b"")


def reasons_to_put_aside(
    path: str, rewound: Collection[int], skipped: Collection[int]
) -> Callable[[Step], str | None]:
    """Return a function that returns why a step is put aside. A step that another of the same number hides was not
    read, so it is called rewound and not damaged."""
    examined = {step.name for step in steps_if_there(path)}

    def why(step: Step) -> str | None:
        if step.number in skipped and step.name in examined:
            return "damaged"
        return "rewound" if step.number in skipped or step.number in rewound else None

    return why
