"""The steps of a run, and `run.json`, which names the job that writes the run, its rules, and the step it was resumed
from. No jax.

Tests: tests/engine/runs/test_steps.py, tests/engine/runs/test_best.py.
"""

from __future__ import annotations

import datetime as dt
import logging
import os
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from eformer._engine.formats.find import FOREIGN, find_step, newest_step, problem_of
from eformer._engine.formats.steps import RUN_FILE, checked_number, is_checkpoint, name_of_step, steps_in
from eformer._engine.record.lazy import lazy_property
from eformer._engine.record.policies import (
    Every,
    Keep,
    StepFacts,
    metrics_of,
    ranked,
    rule_of_metric,
    unknown_metrics,
)
from eformer._engine.record.step_names import step_number
from eformer._engine.record.text import few
from eformer._engine.record.values import MALFORMED_JSON, json_decoder, parse_json
from eformer._engine.stores.base import read_whole
from eformer._engine.stores.checkpoints import held
from eformer._engine.stores.locate import store_at
from eformer._engine.tasks.interrupts import uninterrupted
from eformer._engine.tasks.pool import run_all
from eformer._engine.tasks.turns import turns
from eformer.errors import CorruptionError, EformerError, FormatError, NotFoundError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AbstractContextManager

    from eformer._engine.formats.found import Found
    from eformer._engine.stores.base import Store

logger = logging.getLogger("eformer")

StepChoice = int | Literal["best"] | None

# The entry of the metadata in a manifest that the run writes, beside the metadata of the caller.
RUN_METADATA = "eformer.run"


class Scores(msgspec.Struct):
    """The file beside a step: metrics, and the digest of the scored manifest.

    The digest tells whether the step is still the scored one: a step may be replaced.
    """

    digest: str
    metrics: dict[str, float]


@dataclass(frozen=True)
class Step:
    """A step of a run. Its other facts are read from its manifest on first use.

    number   how many steps were done when it was saved
    path     the path of its checkpoint

    Example:

        >>> step = checkpoint.steps("run")[-1]
        >>> step.number, step.name, step.scores
        (300, 'step-300', {'eval.loss': 0.5})
    """

    number: int
    path: str

    @property
    def name(self) -> str:
        """The name of its directory, such as "step-100"."""
        return self.path.rpartition("/")[2]

    @lazy_property
    def _found(self) -> Found:
        return find_step(self.path)

    @lazy_property
    def _metadata(self) -> dict[str, Any]:
        """The metadata of the step, merged over its trees."""
        # The tree without a prefix comes last, and wins.
        trees = sorted(self._found.manifest.trees.items(), reverse=True)
        return {name: value for _, tree in trees for name, value in tree.metadata.items()}

    @property
    def saved_at(self) -> dt.datetime | None:
        """When it was saved; None if no time is recorded, or reading it would copy the step from a bucket."""
        if self._found.foreign.is_costly:
            return None
        times = [tree.saved_at for tree in self._found.trees.values() if tree.saved_at]
        return _time(max(times)) if times else None

    @property
    def _of_run(self) -> dict[str, Any]:
        """The facts that the run wrote about the step; empty if no run saved it."""
        return facts_of_run(self._metadata)

    @property
    def reason(self) -> str:
        """Why it was saved: "every", "asked", "signal", "end" or "call"; "" if no run saved it."""
        return str(self._of_run.get("why", ""))

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of the save, and the metrics that `score` added."""
        return {**_numbers(self._of_run.get("metrics")), **self.scores}

    @property
    def scores(self) -> dict[str, float]:
        """The metrics that `score` added."""
        store, name = store_at(self.path).parent()
        try:
            return self.scores_in(read_whole(store, score_name(name))[0])
        except (FileNotFoundError, FormatError):
            return {}

    def scores_in(self, data: bytes) -> dict[str, float]:
        """Return the scores in a file; none if they are of a step that this one has replaced."""
        try:
            scores = parse_json(data, Scores, f"{self.path}: its scores cannot be read")
        except FormatError:
            return {}
        return scores.metrics if scores.digest == self._found.manifest.digest else {}

    @property
    def metadata(self) -> dict[str, Any]:
        """The `metadata` that the caller gave to `Run.after` or `Run.save`."""
        return {name: value for name, value in self._metadata.items() if name != RUN_METADATA}

    @property
    def nbytes(self) -> int:
        """The bytes of its arrays. Steps that share unchanged leaves count them each."""
        return sum(tree.nbytes for tree in self._found.trees.values())

    def hold(self) -> AbstractContextManager[str]:
        """Return a context manager for a path at which the step stays readable, even if the run removes the step.

        Example:

            >>> with step.hold() as path:
            ...     evaluate(checkpoint.load(path))
        """
        store, name = store_at(self.path).parent()
        return held(store, name)

    def problem(self) -> str | None:
        """Return why this is not a whole checkpoint, or None. Lengths are compared, digests are not."""
        try:
            return problem_of(self._found)
        except (EformerError, OSError) as error:
            return str(error)


def facts_of_run(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts that a run wrote into the metadata of a step; empty if no run saved it."""
    found = metadata.get(RUN_METADATA)
    return found if isinstance(found, dict) else {}


def _time(text: str) -> dt.datetime | None:
    """Parse a time; return None for any other text."""
    try:
        found = dt.datetime.fromisoformat(text)
        found.timestamp()  # fails for a time of the year 1
    except (ValueError, OverflowError):
        return None
    return found


def _numbers(metrics: Any) -> dict[str, float]:
    """Return the metrics in a manifest that are numbers. Another program may have written the
    manifest."""
    if not isinstance(metrics, dict):
        return {}
    return {str(name): value for name, value in metrics.items() if isinstance(value, float)}


def found_of(step: Step) -> Found:
    """Return the checkpoint of a step, as it was first found."""
    return step._found


def is_foreign(step: Step) -> bool:
    """Tell whether another program wrote a step."""
    return step._found.manifest.format in FOREIGN


_SCORES = ".scores.json"


def score_name(step: str) -> str:
    """Return the name of the score file, which lies beside the step."""
    return f"{step}{_SCORES}"


def scored_step(name: str) -> str | None:
    """Return the name of the step of a score file; None for any other file."""
    step = name.removesuffix(_SCORES)
    return step if step != name and step_number(step) is not None else None


@uninterrupted
def steps(path: str | os.PathLike[str]) -> tuple[Step, ...]:
    """Return the steps of the run at `path`, in the order of their numbers. Reads names, and no manifest.

    Example:

        >>> [step.number for step in checkpoint.steps("run")]
        [100, 200, 300]
    """
    store = store_at(path)
    try:
        return tuple(Step(number, store.path_to(name)) for number, name in steps_in(store))
    except (FileNotFoundError, NotADirectoryError):
        raise NotFoundError(f"{store.url} is not a directory of steps") from None


def steps_if_there(path: str | os.PathLike[str]) -> tuple[Step, ...]:
    """Return the steps of a run; none if the run does not exist."""
    try:
        return steps(path)
    except NotFoundError:
        return ()


def path_to_step(path: str, number: int) -> str:
    """Return the path that a step of a run has, or will have. List no other directory."""
    store = store_at(path)
    return store.path_to(name_of_step(store, number))


def path_of_step(path: str | os.PathLike[str], step: int | str | None) -> str | os.PathLike[str]:
    """Return the path of a step of the run at `path`: of its number, or of "best" by the rule that the run records;
    `path` itself for None. Wait for a save of this process to the step of that number in the background."""
    if step is None:
        return path
    if step == "best":
        if (found := best(path)) is None:
            raise NotFoundError(f"{store_at(path).url} has no steps, so no step is its best")
        return found
    if isinstance(step, str):
        raise ValueError(
            f"step={step!r}: expected the number of a step, or 'best'; the default is the newest"
        )
    number = checked_number(step)
    if turns.has_background:
        turns.wait_for_background({store_at(path_to_step(os.fspath(path), number)).key})
    return step_at(path, number).path


def step_at(path: str | os.PathLike[str], number: int) -> Step:
    """Return a step of the run at `path`; raise NotFoundError if it does not exist."""
    found = next((step for step in steps(path) if step.number == number), None)
    if found is None:
        store = store_at(path)
        if is_checkpoint(store):
            raise NotFoundError(f"{store.url} is a checkpoint, not a run with steps: leave step={number} out")
        raise NotFoundError(f"{store.url} has no step {number}")
    return found


@uninterrupted
def latest(path: str | os.PathLike[str]) -> str | None:
    """Return the path of the newest step of the run at `path`; None if the run has no steps, or does not exist yet.

    Raise CorruptionError if the newest step is damaged, and VersionError if a newer eformer wrote it; the message names
    the step before. Lengths are compared, digests are not.

    Example:

        >>> checkpoint.latest("run")
        'run/step-300'
    """
    store = store_at(path)
    found = newest_step(store)
    return store.path_to(found[0]) if found else None


# ---------------------------------------------------------------------------------------------- best


@uninterrupted
def best(
    path: str | os.PathLike[str], *, by: str | None = None, mode: Literal["min", "max"] = "min"
) -> str | None:
    """Return the path of the best step of the run at `path`; None if the run has no steps, or does not exist yet.

    by     the name of a metric, such as "eval.loss"; None for the rule of `Run(keep=)` that names a metric, as the run
           records it. Metrics that `score` added count, too
    mode   whether the smallest ("min") or the largest ("max") value is the best; with `by` only

    Steps without a number for the metric do not count, and damaged steps are logged and left out; lengths are compared,
    digests are not. Of equal steps the later is better. Raise NotFoundError if no step has the metric, CorruptionError
    if all steps that have it are damaged, and ValueError if `by` is None and no rule is recorded.

    Example:

        >>> checkpoint.best("run", by="eval.loss")
        'run/step-300'
    """
    if by is None and mode != "min":
        raise ValueError(f"mode={mode!r} needs by=, the name of a metric")
    rule = None if by is None else Keep(best=1, by=by, mode=mode)
    if not (there := steps_if_there(path)):
        return None
    facts = facts_by_metrics(there)
    if (rule := rule or _recorded_rule(path)) is None:
        raise ValueError(_no_rule(path, facts))
    if problem := unknown_metrics(facts, [rule]):
        raise NotFoundError(f"{store_at(path).url}: {problem}")
    by_number = {step.number: step for step in there}
    return _first_whole([by_number[number] for number in ranked(facts, rule)])


def _recorded_rule(path: str | os.PathLike[str]) -> Keep | None:
    """Return the rule of a run that names a metric; None if the run records none."""
    rules = rules_of(store_at(path))
    return rule_of_metric(rules.keep or ()) if rules else None


def _no_rule(path: str | os.PathLike[str], facts: Sequence[StepFacts]) -> str:
    metrics = sorted(metrics_of(facts))
    by = repr(metrics[0] if metrics else "eval.loss")
    return (
        f"{store_at(path).url}: the run records no rule that names a metric, so no step is the best. Name a metric: "
        f"checkpoint.best({os.fspath(path)!r}, by={by}) returns the path of a step. The steps have "
        f"{few(metrics) or 'no metrics'}"
    )


def _first_whole(some: Sequence[Step]) -> str:
    """Return the path of the first whole step. Log the damaged steps before it."""
    problems = []
    for step in some:
        if (problem := step.problem()) is None:
            return step.path
        problems.append(f"{step.name}: {problem}")
        logger.warning("%s is left out: %s", step.path, problem)
    raise CorruptionError(f"{some[0].path} and all other steps with the metric are damaged: {few(problems)}")


def facts_by_metrics(there: Sequence[Step]) -> list[StepFacts]:
    """Return the numbers and the metrics of steps. Log and leave out steps whose manifests cannot be read."""
    found: dict[int, StepFacts] = {}

    def read(step: Step) -> None:
        try:
            found[step.number] = StepFacts(step.number, None, step.metrics)
        except (EformerError, OSError) as error:
            logger.warning("%s is left out: %s", step.path, error)

    threads = store_at(there[0].path).read_threads if there else 1
    run_all([partial(read, step) for step in there], threads)
    return [found[number] for number in sorted(found)]


# ------------------------------------------------------------------------------------------ run.json


class Rules(msgspec.Struct, frozen=True):
    """The rules of a run: when its job saves, and which steps stay. None keeps all."""

    every: tuple[Every, ...] = ()
    keep: tuple[Keep, ...] | None = None


class Claim(msgspec.Struct, frozen=True):
    """The writer of a run: the unique id of its job, the host and process for messages, the step that the run was
    resumed from, and its rules."""

    id: str
    host: str = ""
    pid: int = 0
    since: str = ""
    resumed_from: int | None = None
    rules: msgspec.Raw = msgspec.Raw(b"null")  # parsed by `rules_of` alone: no rule may void the claim

    @classmethod
    def from_json(cls, data: bytes | None) -> Claim | None:
        """Return the claim; None for no data, or data that cannot be parsed."""
        try:
            return None if data is None else json_decoder(cls).decode(data)
        except MALFORMED_JSON:
            return None

    def to_json(self) -> bytes:
        return msgspec.json.encode(self)


def claim_of(store: Store) -> Claim | None:
    """Return the claim of the job that writes a run; None if `run.json` is missing or cannot be read."""
    try:
        return Claim.from_json(read_whole(store, RUN_FILE)[0])
    except (FileNotFoundError, NotADirectoryError, FormatError):
        return None


def resumed_from(store: Store) -> int | None:
    """Return the number of the step that a run was last resumed from, which always stays."""
    claim = claim_of(store)
    return claim.resumed_from if claim else None


def rules_of(store: Store) -> Rules | None:
    """Return the rules of the job that last wrote a run; None if they are not recorded, or a newer version wrote rules
    that this one does not know."""
    if (claim := claim_of(store)) is None:
        return None
    try:
        found = json_decoder(Rules).decode(claim.rules)
        return found if _is_known(msgspec.json.decode(claim.rules), msgspec.to_builtins(found)) else None
    except MALFORMED_JSON:
        return None


def _is_known(given: Any, known: Any) -> bool:
    """Tell whether all fields of some JSON are known. A decoder ignores the others."""
    if isinstance(given, dict):
        return all(
            name in known and _is_known(one, known[name]) for name, one in given.items() if one is not None
        )
    if isinstance(given, list):
        return all(map(_is_known, given, known))
    return True
