"""A training run: save steps when it is time, keep those that the rules keep, resume from the newest sound one."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import secrets
import time
import types
import weakref
from collections.abc import Mapping
from datetime import timedelta  # noqa: TC003
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack

import jax
import msgspec

from eformer._engine.formats.steps import checked_number, last_step_in, name_of_step, name_to_save
from eformer._engine.loading.load import LoadArguments, load_tree, log_differences, request_from
from eformer._engine.processes import hosts as _hosts
from eformer._engine.record.options import SaveOptions, options_from
from eformer._engine.record.policies import StepFacts, every_from, is_due, keep_from, minutes_due, ranked
from eformer._engine.record.text import count, few, glance
from eformer._engine.runs.clock import Clock
from eformer._engine.runs.data import position_of, positions_in, set_position
from eformer._engine.runs.metrics import numbers, taken
from eformer._engine.runs.near import Agreed, Held, Near, NearStep, agree, own_position
from eformer._engine.runs.outcomes import outcome_of, worst
from eformer._engine.runs.retention import remove_others, set_aside, steady_clock
from eformer._engine.runs.signals import Signals
from eformer._engine.runs.steps import RUN_METADATA, Step, facts_of_run, steps
from eformer._engine.runs.writer import Writer
from eformer._engine.saving.metadata import metadata_to_json
from eformer._engine.saving.pending import Pending, wait_for_saves_below
from eformer._engine.saving.run import Format, run_in_background
from eformer._engine.saving.save import start
from eformer._engine.stores.locate import absolute, store_at
from eformer._engine.stores.store_options import remember
from eformer._engine.tasks.callers import called
from eformer._engine.tasks.interrupts import uninterrupted
from eformer.errors import (
    CorruptionError,
    EformerError,
    NotFoundError,
    ProcessError,
    SupersededError,
    VersionError,
)

if TYPE_CHECKING:
    import signal
    from collections.abc import Callable, Collection, Mapping, Sequence

    from eformer._engine.loading.report import LoadReport
    from eformer._engine.loading.request import Request
    from eformer._engine.record.policies import Every, Keep

logger = logging.getLogger("eformer")

_DEFAULT = SaveOptions()
_LONG_WAIT = 1.0  # seconds
_NONE: Mapping[int, str] = types.MappingProxyType({})
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial, type(jax.jit(lambda: None)))


@dataclasses.dataclass(frozen=True, slots=True)
class Resumed:
    """Describe the step that a run continues from.

    tree      the state
    step      how many steps are done
    skipped   the steps that were skipped because they are damaged, and why
    report    the `LoadReport` of the step: the leaves that were loaded, kept and left out
    """

    tree: Any
    step: int
    skipped: dict[int, str] = dataclasses.field(default_factory=dict)
    report: LoadReport | None = None

    def __repr__(self) -> str:
        skipped = [f"skipped step {number}: {why}" for number, why in self.skipped.items()]
        return glance("\n".join([f"<Resumed: {count(self.step, 'step')} done>", *skipped]))


class Run:
    """Save the steps of a training run by rule, and resume it.

        with checkpoint.Run("runs/llama", every=1000, keep=3) as run:
            if found := run.resume(like=state, data=data):
                state = found.tree
            for step in range(run.step, 100_000):
                state, loss = train_step(state, next(data))
                run.after(step + 1, state, data=data, metrics={"loss": loss})
                if run.stopping:
                    break

    every      when `after` saves: a number of steps, a timedelta, an `Every`, or several
    keep       which steps stay: the number of the last ones, a `Keep`, or several; None deletes nothing
    signals    signals at which the run saves and stops; None for SIGTERM where that works, () for none
    tolerate   how many saves in a row may fail before a call raises the error
    on_saved   function that is called with each `Step` that is committed, in the thread of the save
    format     the format of the steps, see `save`
    options    the options of the saves: a `SaveOptions`, or a dict of its fields
    clock      a function that returns seconds, for rules by time
    near       a directory in memory or on a local disk of each host, for steps that are saved more often: each process
               saves what it holds, and the run resumes from them if all processes still have theirs
    near_every
               when `after` saves there, as `every`; a step that is due for both is saved to `path` alone
    fresh      start anew in a directory that has steps: the first save puts them aside under other names
               (`step-100.old`), and removes near steps. Not with `resume`

    All processes of a job make the same calls. The directory is the truth: a step exists if it is there, whole. If it
    has steps, call `resume` before the first save, or pass `fresh=True`; otherwise that save raises FileExistsError.
    So does any start in a directory with checkpoints of another program that a run cannot resume from.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        every: int | timedelta | Every | Sequence[Every] | None = None,
        keep: int | Keep | Sequence[Keep] | None = None,
        signals: Sequence[signal.Signals] | None = None,
        tolerate: int = 0,
        on_saved: Callable[[Step], object] | None = None,
        format: Format = "safetensors",  # noqa: A002
        options: SaveOptions | Mapping[str, Any] = _DEFAULT,
        clock: Callable[[], float] = time.monotonic,
        near: str | os.PathLike[str] | None = None,
        near_every: int | timedelta | Every | Sequence[Every] | None = None,
        fresh: bool = False,
    ) -> None:
        self.path = absolute(path)
        self.step = 0
        self.stopping = False
        self._every, self._keep = every_from(every), keep_from(keep)
        self._tolerate, self._on_saved = tolerate, on_saved
        self._format: Format = format
        self._options = options_from(options)
        remember(self.path, self._options.store_options)
        store = store_at(self.path)
        if self._keep == ():
            raise ValueError(f"keep={keep!r}: no rule says which steps stay; None keeps all")
        self._writer, self._has_claimed = Writer(store, secrets.token_hex(8)), False
        if near is None and near_every is not None:
            raise ValueError("near_every= needs near=, the directory to save to")
        self._near = None if near is None else Near(near, near_every, self._writer, self._options, clock)
        self._signals = Signals(signals)
        self._clock = Clock(clock, self._options.timeout)
        self._failures = 0
        self._is_told = self._is_asked = False
        self._is_fresh, self._has_begun = fresh, False
        self._pending: Pending | None = None
        self._resumed_from: int | None = None
        self._progress = _Progress(self.path, has_rules=bool(self._every))
        # Without `close`, a collected run still warns of an unsaved end, and leaves signals to the program.
        self._at_end = weakref.finalize(self, _end, self._progress, self._signals)
        self._now = steady_clock()  # for retention by time
        self._told: set[str] = set()  # the warnings of retention that were logged
        try:
            self._signals.install()  # last: a run that could not be made handles no signals
        except BaseException:
            self._signals.close()
            raise

    def __repr__(self) -> str:
        return f"<Run at {self.path}: {self.step} steps done>"

    # ---------------------------------------------------------------------------------------- look

    @property
    def steps(self) -> tuple[Step, ...]:
        """The steps that are there, read from the directory each time."""
        try:
            return steps(self.path)
        except NotFoundError:
            return ()

    # -------------------------------------------------------------------------------------- resume

    @uninterrupted
    def resume(
        self,
        like: Any = None,
        *,
        step: int | Literal["newest", "best"] = "newest",
        into: Any = None,
        data: Any = None,
        fallback: bool = True,
        rewind: bool = False,
        return_report: bool = False,
        **arguments: Unpack[LoadArguments],
    ) -> Resumed | None:
        """Load the newest step that is sound in every process; return None for a new run.

        Wait for the save under way first. Steps that are damaged are skipped and put aside under other names; `skipped`
        says why. A tree that does not fit is an error, and so is a run whose steps are all damaged: it never starts
        afresh by itself. `fallback=False` raises for a damaged step instead of skipping it.

        Near steps count as others do if all processes hold theirs; "best" does not look at them. Those after the step
        that the run goes on from are removed.

        like      a tree of arrays, `ShapeDtypeStruct`s or shardings, see `load`
        step      a number, or "best" for the best step by the rule of `keep` that names a metric
        into      like `like`, but modules in it are updated in place, see `load`
        data      an iterator, which is put to the position that it had. If it is missing, and the step has a position,
                  a warning is logged
        fallback  skip damaged steps
        rewind    with an older `step`: put the newer ones aside; without it they are an error
        return_report
                  do not log the leaves that `partial` or `rename` kept or left out; `report` has them in any case
        arguments
                  all other arguments of `load`, except `timeout` and `store_options`, which `Run(options=)` has, and
                  `dequant` and `duplicates`, which a step of a run does not need. If the code has changed: `partial`,
                  `rename`, `root`, `resize`, `dtype`, `keys`. Where leaves go: `mesh`, `rules`, `shardings`. With a
                  `key`, a step that its owner has not signed is refused; not with `near`
        """
        self._check_arguments(arguments)
        request = request_from(
            like=like, into=into, timeout=self._options.timeout, timeout_of="SaveOptions", **arguments
        )
        self._wait_for_last()  # it may be the newest step
        wait_for_saves_below(self.path)  # of another Run of this program, which this one is about to end
        self._before_claim()
        self._claim()
        agreed = self._agreed_steps()
        if not agreed.steps:
            self._begin_near(0, agreed)
            if self._resumed_from is not None:  # its steps were removed since
                self._writer.note_resumed(None)
            self.step, self._resumed_from, self._progress.saved = 0, None, None
            self._has_begun = True
            return None
        places = self._places(agreed, step)
        if not rewind:
            self._refuse_newer(agreed, places[0].number)
        found = self._load_first(places, request, fallback)
        newer = _after(agreed, found.step, found.skipped)
        if not rewind:
            self._refuse_newer(agreed, found.step, found.skipped)
        self._place(data, found)  # before anything is put aside: it may fail
        self._begin_near(found.step, agreed)
        self._put_aside({**dict.fromkeys(newer, "rewound"), **dict.fromkeys(found.skipped, "damaged")})
        self.step = self._resumed_from = self._progress.saved = found.step
        self._writer.note_resumed(found.step)
        self._has_begun = True
        if not return_report:
            log_differences(f"{self.path}: step {found.step}", request, found.report)
        return Resumed(found.tree, found.step, found.skipped, found.report)

    def _check_arguments(self, arguments: LoadArguments) -> None:
        if unknown := sorted(arguments.keys() - LoadArguments.__optional_keys__):
            raise TypeError(f"Run.resume() got an unexpected keyword argument {unknown[0]!r}")
        if arguments.get("key") is not None and self._near:
            raise ValueError("resume(key=) and Run(near=): near steps are not signed")
        if self._is_fresh and not self._has_begun:
            raise ValueError(
                f"Run(fresh=True) starts anew in {self.path}, and resume goes on from its steps: do one of the two. "
                "Leave fresh=True out of a program that is started again after an interruption: each start would put "
                "the steps of the one before aside"
            )

    def _claim(self) -> None:
        """Become the writer, before the first step is loaded or saved. All processes hear of an error."""
        if self._has_claimed:
            return
        with _meeting(self._options.timeout) as hosts:
            self._writer.claim()
            hosts.meet(b"", lambda _: b"")
        self._has_claimed = True

    def _before_claim(self) -> None:
        """Prepare the near tier for the claim. If this job has claimed the run before, no other job may have done so
        since. All processes hear of an error."""
        if self._has_claimed:
            with _meeting(self._options.timeout) as hosts:
                self._check_writer()
                hosts.meet(b"", lambda _: b"")
        if self._near:
            self._near.before_claim()

    def _check_writer(self) -> None:
        """Raise if another job has become the writer. The first process looks, for all."""
        if jax.process_index() == 0:
            self._writer.check()

    def _begin(self) -> None:
        """Begin to save, if `resume` has not: put the steps aside that are there, or refuse to mix with them."""
        if self._has_begun:
            return
        self._before_claim()
        agreed = self._agreed_steps()
        if not self._is_fresh:  # before the claim, which would end the job that writes the run
            self._refuse_steps(agreed)
        self._claim()
        if self._is_fresh:
            if self._near:
                self._near.forget()
            self._put_all_aside()
            self._writer.note_resumed(None)
        agreed = self._agreed_steps()
        if not self._is_fresh:  # another job may have saved one before the claim
            self._refuse_steps(agreed)
        if self._near:
            self._near.begin(0, agreed.epoch)
        self._has_begun = True

    def _refuse_steps(self, agreed: Agreed) -> None:
        if there := agreed.steps:
            raise FileExistsError(
                f"{self.path} has {count(len(there), 'step')}, the newest is {there[-1].number}, and this job has not "
                "resumed from it. Call run.resume(...) before the first save to go on from there; or start anew in "
                "another directory, or here with Run(..., fresh=True), which puts the old steps aside"
            )

    def _agreed_steps(self) -> Agreed:
        """Return the steps that the first process sees, and the near ones that all processes hold."""
        near = self._near
        with _meeting(self._options.timeout) as hosts:
            far = [step.number for step in self.steps]
            mine = Held(far, near.held() if near else [], self._is_fresh)
            agreed = hosts.meet(mine.to_json(), lambda held: agree(held, near).to_json())
        return Agreed.from_json(agreed)

    def _begin_near(self, step: int, agreed: Agreed) -> None:
        if self._near:
            self._near.begin(step, agreed.epoch, agreed.before)

    def _places(self, agreed: Agreed, step: int | str) -> list[NearStep]:
        """Return the steps to try, in this order: the wanted one first, then those that take its place if it is
        damaged."""
        there = {place.number: place for place in agreed.steps}
        if step == "best":
            return [there[number] for number in self._best(agreed.far)]
        if isinstance(step, str) and step != "newest":
            raise ValueError(f"resume(step={step!r}): expected a number, 'newest' or 'best'")
        if step != "newest" and step not in there:
            raise NotFoundError(f"{self.path} has no step {step}; it has {[*there]}")
        return [place for place in reversed(agreed.steps) if step == "newest" or place.number <= int(step)]

    def _best(self, there: Sequence[int]) -> list[int]:
        """Return the steps that have the metric of a rule, the best first."""
        rule = next((rule for rule in self._keep or () if rule.by), None)
        if rule is None:
            raise ValueError(
                "step='best' needs a rule of keep= that names a metric: Keep(best=1, by='eval.loss')"
            )

        def best(_: Sequence[bytes]) -> bytes:
            facts = [StepFacts(number, None, metrics) for number, metrics in self._metrics_of(there).items()]
            return msgspec.json.encode(ranked(facts, rule))

        with _meeting(self._options.timeout) as hosts:  # scores may change: the first process looks, for all
            found = msgspec.json.decode(hosts.meet(b"", best), type=list[int])
        if not found:
            raise NotFoundError(f"{self.path}: no step has a number for the metric {rule.by!r}")
        return found

    def _metrics_of(self, numbers: Sequence[int]) -> dict[int, Mapping[str, float]]:
        """Return the metrics of the steps of these numbers whose manifests can be read."""
        found: dict[int, Mapping[str, float]] = {}
        for step in (step for step in self.steps if step.number in numbers):
            try:
                found[step.number] = step.metrics
            except (EformerError, OSError) as error:
                logger.warning("%s: step %d is left out: %s", self.path, step.number, error)
        return found

    def _refuse_newer(self, agreed: Agreed, number: int, skipped: Mapping[int, str] = _NONE) -> None:
        if newer := _after(agreed, number, skipped):
            damaged = "".join(f", and step {n} is damaged: {why}" for n, why in skipped.items())
            raise ValueError(
                f"{self.path} has the steps {newer} after {number}{damaged}; pass rewind=True to put them aside, or "
                "resume from the newest"
            )

    def _load_first(self, places: Sequence[NearStep], request: Request, fallback: bool) -> _Found:
        """Load the first of these steps that is sound in every process."""
        skipped: dict[int, str] = {}
        for place in places:
            number = place.number
            try:
                loaded, problem = self._try(place, request)
                if problem is not None and fallback:  # a second look: a directory may be stale for a moment
                    loaded, problem = self._try(place, request)
            except VersionError as error:
                raise self._newer_version(number, error) from error
            if problem is None:
                facts = facts_of_run(loaded.entry.metadata)
                facts = own_position(facts) if place.epoch else facts
                return _Found(loaded.tree, number, skipped, facts, loaded.report)
            if not fallback:
                raise CorruptionError(f"step {number} of {self.path} is damaged: {problem}")
            logger.warning("%s: step %d is skipped: %s", self.path, number, problem)
            skipped[number] = problem
        listed = "; ".join(f"step {number}: {why}" for number, why in skipped.items())
        raise CorruptionError(
            f"no step of {self.path} is sound, and a run does not start afresh by itself: {listed}"
        )

    def _newer_version(self, number: int, error: VersionError) -> VersionError:
        """Say that a newer eformer wrote a step, and how to go on from the one before. It is not damaged, so it is not
        skipped."""
        there = self.steps
        is_newest = all(step.number <= number for step in there)
        message = f"{self.path}: {'the newest step' if is_newest else 'step'} {number} is of a newer version: {error}"
        before = (step.number for step in reversed(there) if step.number < number and not step.problem())
        if (sound := next(before, None)) is not None:
            message += f"; the one before is {sound}, and resume(step={sound}, rewind=True) goes on from it"
        return VersionError(message)

    def _try(self, place: NearStep, request: Request) -> tuple[Any, str | None]:
        """Load a step in all processes. Return it, or why it is damaged in one of them."""
        loaded, error, number = None, None, place.number
        try:
            if place.epoch and self._near:
                loaded = self._near.load(place, request)
            else:
                loaded = load_tree(self._path_of(number), request)
        except Exception as raised:  # noqa: BLE001  the others have to hear of it
            error = raised
        with _meeting(self._options.timeout) as hosts:
            problem = hosts.meet(outcome_of(error), worst).decode()
        if problem.startswith("damage:"):
            return None, problem.removeprefix("damage:")
        if error is not None:
            raise error
        if problem:
            raise ProcessError(
                f"step {number} of {self.path} could not be loaded in another process: {problem}"
            )
        return loaded, None

    def _put_aside(self, whys: Mapping[int, str]) -> None:
        """Give steps other names, in the first process, before any process goes on."""
        if not whys:
            return
        examined = {step.name for step in self.steps}

        def why(step: Step) -> str | None:
            """Do not call a step damaged that was hidden by another of its number, and so was not looked at."""
            reason = whys.get(step.number)
            return "rewound" if reason and step.name not in examined else reason

        self._set_aside(why)

    def _put_all_aside(self) -> None:
        """Give all steps other names, in the first process, before any process goes on."""
        if done := self._set_aside(lambda _: "old"):
            logger.warning("%s: fresh=True has put its steps aside: %s", self.path, few(done))

    def _set_aside(self, why: Callable[[Step], str | None]) -> list[str]:
        """Give the steps other names for which there is a reason. Return the names that they had."""
        done: list[str] = []
        with _meeting(self._options.timeout) as hosts:
            # Of steps with one number (step-100 and 100), the second is listed once the first is gone.
            while hosts.index == 0 and (
                there := [step for step in self.steps if step.name not in done and why(step)]
            ):
                self._check_writer()
                # The newest first: a job that dies here leaves the steps before it, which the next one goes on from.
                for step in reversed(there):
                    set_aside(store_at(self.path), step.name, why(step) or "")
                done += [step.name for step in there]
            hosts.meet(b"", lambda _: b"")
        return done

    def _place(self, data: Any, found: _Found) -> None:
        """Put the data to the position that they had. All processes hear of an error."""
        with _meeting(self._options.timeout) as hosts:
            if data is not None:
                set_position(data, self._own_position(found))
            elif found.facts.get("data"):
                logger.warning(
                    "%s: step %d has a position in the data, and resume was called without data=, so the data begin "
                    "anew; pass resume(data=) to go on at that position",
                    self.path,
                    found.step,
                )
            hosts.meet(b"", lambda _: b"")

    def _own_position(self, found: _Found) -> bytes:
        """Return the position of this process in the data, which the step has."""
        positions = positions_in(found.facts)
        if not positions:
            raise ValueError(
                f"step {found.step} of {self.path} was saved without data=, so it has no position in them; resume "
                "without data= and place the iterator yourself"
            )
        if len(positions) != jax.process_count():
            raise ValueError(
                f"step {found.step} of {self.path} has the positions of {len(positions)} processes in the data, and "
                f"there are {jax.process_count()}; resume without data= and place the iterators yourself"
            )
        return positions[jax.process_index()].encode()

    # ---------------------------------------------------------------------------------------- save

    @uninterrupted
    def after(
        self,
        step: int,
        tree: Any,
        *,
        data: Any = None,
        metrics: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Pending | None:
        """Save in the background if it is time: `step` steps are done. Return the save, or None; a near one is not
        returned.

        If the job was told to end, save, wait for that, and set `stopping`.

        step       how many steps are done
        tree       the state; or a function that returns it, which is called only if it is saved
        data       an iterator, whose position is saved with the state
        metrics    numbers by name, which `Step.metrics` gives back; those on a device are fetched in the background
        metadata   a dict of plain values, which `Step.metadata` gives back
        """
        step = checked_number(step)
        # Also if it is not saved: a loop that counts from zero is told at its first step.
        self._refuse_earlier(step)
        self._progress.done = step
        why = self._why(step)
        if (
            why == "signal" and self._pending is not None
        ):  # the last chance to save: an earlier error is logged
            self._log_failure(self._pending)
            self._pending = None
        self._raise_failure(is_waiting=False)
        if why is None:
            if self._near and self._near.is_due(step):
                self._save_near(step, tree, data, metrics, metadata)
            return None
        pending = self._save(step, tree, data, metrics, metadata, why)
        if why == "signal":
            self.wait()
            self.stopping = True
        return pending

    @uninterrupted
    def save(
        self,
        step: int,
        tree: Any,
        *,
        data: Any = None,
        metrics: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Pending:
        """Save this step in the background, whatever the rules say. A step that exists is replaced.

        The arguments are those of `after`: `step`, `tree`, `data`, `metrics` and `metadata`.
        """
        return self._save(checked_number(step), tree, data, metrics, metadata, "call")

    def request(self) -> None:
        """Ask for a save at the next step, from any thread. With several processes: at the next step at which they
        meet."""
        self._is_asked = True

    def tick(self) -> bool:
        """Tell whether to stop, in loops without steps such as evaluation. The next `after` then saves."""
        self._is_told = self._signals.reached() or self._is_told
        return self._is_told

    @uninterrupted
    def wait(self, timeout: float | None = None) -> None:
        """Wait for the save under way, and raise its error; raise TimeoutError after `timeout` seconds."""
        if self._near:
            self._near.wait(timeout)
        if self._pending is not None:
            self._pending.exception(timeout)
        self._raise_failure(is_waiting=True)

    def _why(self, step: int) -> str | None:
        if self.tick() and not self.stopping:
            return "signal"
        minutes = minutes_due(self._every, step)
        by_clock = self._clock.is_due(step, minutes, is_asked=self._is_asked)
        if is_due(self._every, step):
            return "every"
        if by_clock:
            return "asked" if self._is_asked else "every"
        return None

    def _save(
        self,
        step: int,
        tree: Any,
        data: Any,
        metrics: Mapping[str, Any] | None,
        metadata: Mapping[str, Any] | None,
        why: str,
    ) -> Pending:
        self._wait_for_last()
        self._refuse_earlier(step)
        late = functools.partial(_facts, why, taken(metrics))
        self._begin()
        store = store_at(self.path)
        path, last = store.path_to(name_to_save(store, step)), last_step_in(store)
        part = position_of(data) if data is not None else b""
        save = start(
            _called(tree),
            path,
            format=self._format,
            metadata=metadata,
            options=self._save_options(last),
            detach=True,
        )
        save = dataclasses.replace(
            save,
            late=late,
            part=part,
            fence=self._writer.check,
            whole_files=True,
        )
        pending = Pending(path)
        run_in_background(save, pending, after=functools.partial(self._after_commit, step))
        self.step = self._progress.saved = step
        self._pending, self._is_asked = pending, False
        self._clock.note_save(step)
        if self._near:
            self._near.note_save(step)
        return pending

    def _refuse_earlier(self, step: int) -> None:
        """Refuse a step before the one that the run goes on from: the loop counts from zero, and would replace the old
        steps one by one."""
        if self._resumed_from is not None and step < self._resumed_from:
            raise ValueError(
                f"{self.path}: step {step} is before step {self._resumed_from}, which this run goes on from. Count on "
                "from there: range(run.step, ...); or go back to an earlier step: resume(step=..., rewind=True)"
            )

    def _save_near(
        self,
        step: int,
        tree: Any,
        data: Any,
        metrics: Mapping[str, Any] | None,
        metadata: Mapping[str, Any] | None,
    ) -> None:
        assert self._near
        self._refuse_earlier(step)
        late = functools.partial(_facts, "near", taken(metrics))
        self._begin()
        part = position_of(data) if data is not None else b""
        self._near.save(step, _called(tree), metadata, late, part)
        self.step = step

    def _save_options(self, last: tuple[int, str] | None) -> SaveOptions:
        """Use unchanged leaves of the last step again, where that is possible. The first step already puts leaves that
        are likely to change together into files of their own."""
        options = self._options
        can_reuse = not (options.ocdbt or options.compression) and jax.process_count() == 1
        if options.reuse is not True and (options.reuse is not None or not can_reuse):
            return options
        return dataclasses.replace(
            options, reuse=True if last is None else store_at(self.path).path_to(last[1])
        )

    def _path_of(self, number: int) -> str:
        store = store_at(self.path)
        return store.path_to(name_of_step(store, number))

    def _after_commit(self, step: int) -> None:
        """Apply retention and tell the caller. Errors are logged: the step is saved."""
        if jax.process_index() != 0:
            return
        for then in (self._remove_others, self._tell):
            try:
                then(step)
            except Exception:
                logger.exception("%s: step %d is saved, but what comes after it failed", self.path, step)

    def _remove_others(self, step: int) -> None:
        if self._keep is not None:
            self._writer.check()
            stay = {step, self._resumed_from}
            remove_others(self.path, self._keep, stay, now=self._now(), told=self._told)

    def _tell(self, step: int) -> None:
        if self._on_saved:
            self._on_saved(Step(step, self._path_of(step)))

    def _wait_for_last(self) -> None:
        """Wait for the save under way, and say how long, if it took long."""
        if self._pending is None:
            return
        began = time.monotonic()
        self._pending.exception()
        if (waited := time.monotonic() - began) > _LONG_WAIT:
            logger.warning("%s: waited %.1f s for the save before", self.path, waited)
        self._raise_failure(is_waiting=True)

    def _raise_failure(self, *, is_waiting: bool) -> None:
        """Raise the error of the last save, if it has failed, and more in a row than may fail."""
        if self._pending is None or not (is_waiting or self._pending.done()):
            return
        pending, self._pending = self._pending, None
        error = pending.exception()
        if error is None:
            self._failures = 0
            return
        self._failures += 1
        if self._failures > self._tolerate or isinstance(error, SupersededError):
            raise error
        logger.error("%s failed, %d in a row are tolerated", pending, self._tolerate, exc_info=error)

    # ------------------------------------------------------------------------------------- context

    def close(self) -> None:
        """Wait for the save under way, and handle signals no longer. `with` does so at its end."""
        self.__exit__(None, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        try:
            if self._near:
                self._near.wait()
            if error is None:
                self.wait()
                self._progress.warn_of_unsaved()
            elif self._pending is not None:  # what was raised is more important than an error of the save
                self._log_failure(self._pending)
        finally:
            self._at_end.detach()  # the end is told once
            self._signals.close()

    def _log_failure(self, pending: Pending) -> None:
        if (failure := pending.exception()) is not None:
            logger.error("%s failed", pending, exc_info=failure)


@dataclasses.dataclass(slots=True)
class _Progress:
    """The last step that is done, and the last one that is saved in the run itself, not in its near tier."""

    path: str
    has_rules: bool
    done: int | None = None
    saved: int | None = None
    process: int = dataclasses.field(default_factory=os.getpid)

    def warn_of_unsaved(self) -> None:
        """Warn, in the first process, if the last step that was done is not in the run."""
        done, self.done = self.done, None
        if done is None or done == self.saved or self.process != os.getpid() or jax.process_index() != 0:
            return
        logger.warning(
            "%s: step %d is done and not saved; %s. Call run.save(%d, state) after the loop to save its end",
            self.path,
            done,
            self._why(),
            done,
        )

    def _why(self) -> str:
        if self.saved is not None:
            return f"the last saved step is {self.saved}"
        if self.has_rules:
            return "no step is saved, because no rule of every= came due"
        return "no step is saved, because without every= `after` saves at a signal or a request only"


@dataclasses.dataclass(frozen=True, slots=True)
class _Found:
    """A step that was loaded, the steps before it that were skipped, and the facts that the run recorded."""

    tree: Any
    step: int
    skipped: dict[int, str]
    facts: Mapping[str, Any]
    report: LoadReport


def _end(progress: _Progress, signals: Signals) -> None:
    signals.abandon()
    progress.warn_of_unsaved()


def _after(agreed: Agreed, number: int, skipped: Collection[int]) -> list[int]:
    """Return the steps after this one, without those that were skipped."""
    return [place.number for place in agreed.steps if place.number > number and place.number not in skipped]


class _meeting:  # noqa: N801
    """Processes of a run that meet: `with _meeting(timeout) as hosts`."""

    def __init__(self, timeout: float | None) -> None:
        self._hosts = _hosts.current("runs", None, timeout)

    def __enter__(self) -> Any:
        return self._hosts

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        if error is None:
            self._hosts.end()
        else:
            self._hosts.fail(error)


def _called(tree: Any) -> Any:
    """Return the tree that is to be saved, which may be given as a function."""
    return called(tree) if isinstance(tree, _FUNCTIONS) else tree


def _facts(why: str, metrics: Mapping[str, Any], parts: Sequence[bytes]) -> Mapping[str, Any]:
    """Return what the run records with a step, as JSON."""
    facts: dict[str, Any] = {"why": why}
    if metrics:
        facts["metrics"] = numbers(metrics)
    if any(parts):
        facts["data"] = [part.decode() for part in parts]
    return metadata_to_json({RUN_METADATA: facts})
