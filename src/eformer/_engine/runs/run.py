"""A training run: save steps by rule, remove steps that no rule keeps, resume from the newest sound step."""

from __future__ import annotations

import dataclasses
import functools
import logging
import operator
import os
import secrets
import time
import weakref
from contextlib import ExitStack
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack

import jax

from eformer._engine.formats.run_steps import Rules, Step, steps_if_there
from eformer._engine.formats.steps import checked_number
from eformer._engine.loading.load import LoadArguments, log_differences, request_from
from eformer._engine.processes.hosts import meeting
from eformer._engine.record.options import LoadOptions, SaveOptions, options_from
from eformer._engine.record.origin import checked_origin
from eformer._engine.record.policies import every_from, is_continuous, is_due, keep_from, minutes_due
from eformer._engine.record.text import count, few
from eformer._engine.runs.clock import Clock
from eformer._engine.runs.done import Done
from eformer._engine.runs.near import near_tier
from eformer._engine.runs.replicas import check_replicas
from eformer._engine.runs.requests import Requests
from eformer._engine.runs.resume import Job, Resumed, reasons_to_put_aside, rule_of_best
from eformer._engine.runs.retention import steady_clock
from eformer._engine.runs.series import Series
from eformer._engine.runs.signals import Signals
from eformer._engine.runs.under_way import UnderWay
from eformer._engine.runs.upkeep import Upkeep
from eformer._engine.runs.writer import Writer
from eformer._engine.saving.pending import wait_for_saves_below
from eformer._engine.stores.local import on_disk
from eformer._engine.stores.locate import absolute, store_at
from eformer._engine.stores.store_options import options_during
from eformer._engine.tasks.forks import Lock
from eformer._engine.tasks.interrupts import uninterrupted
from eformer._engine.tasks.pool import Later

if TYPE_CHECKING:
    import signal
    from collections.abc import Callable, Collection, Mapping, Sequence

    from eformer._engine.record.policies import Every, Keep, Near
    from eformer._engine.runs.near import NearTier
    from eformer._engine.runs.near_whole import WholeTier
    from eformer._engine.runs.resume import AgreedSteps
    from eformer._engine.saving.pending import Pending
    from eformer._engine.saving.save import Format
    from eformer._engine.stores.base import Store

logger = logging.getLogger("eformer")

_DEFAULT = SaveOptions()


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
    keep       which steps stay: how many of the last steps, a `Keep`, or several; None deletes nothing. Steps are
               deleted in the background after each save
    last       save the last step at the end of `with`, if it is not saved and no error leaves the block. The run keeps
               the state of the last step for this
    signals    signals at which the run saves and stops; None for SIGTERM where that works, () for no signal
    notice     how long the job has after a signal before it is killed: a timedelta. If the last saves took longer than
               the time that is left, the last step is saved to the near tier
    tolerate   how many saves in a row may fail before a call raises the error
    max_pending
               how many saves may be under way. If a save is due and so many are unfinished, `after` waits
    on_saved   function that is called with each committed `Step`, in the thread of the save
    format     the format of the steps, see `save`
    options    the options of the saves: a `SaveOptions`, or a dict of its fields
    near       a `Near`: also save steps more often, in memory or on a local disk of each host. Each process saves its
               own shards there, and the run resumes from a near step if all of its parts are found. A step that is
               due for both is saved to `path` alone
    fresh      start anew in a directory that has steps: the first save puts them aside under other names
               (`step-100.old`), and removes near steps. Not with `resume`
    check_replicas
               compare the copies of arrays on different devices and processes after every so many steps, before the
               step is saved. ReplicaError names the leaves and the processes that differ
    origin     where the state comes from, recorded in each step: `LoadReport.origin` of the model that the run begins
               with. Without it, a resumed run keeps the origin of the step that it goes on from

    Attributes:

    path       the directory or the URL of the run
    step       how many steps are done: after `resume`, the number of the step that was loaded
    stopping   True once a signal has arrived and the step is saved; then end the loop

    All processes of a job make the same calls. A step exists if it is whole in the directory; the run keeps no other
    list. If the directory has steps, call `resume` before the first save, or pass `fresh=True`; otherwise that save
    raises FileExistsError. So does a start in a directory of another program's checkpoints that a run cannot resume
    from.
    """

    path: str
    step: int
    stopping: bool

    _seconds = staticmethod(time.monotonic)  # for rules by time; tests set another clock

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        every: int | timedelta | Every | Sequence[Every] | None = None,
        keep: int | Keep | Sequence[Keep] | None = None,
        last: bool = False,
        signals: Sequence[signal.Signals] | None = None,
        notice: timedelta | None = None,
        tolerate: int = 0,
        max_pending: int = 1,
        on_saved: Callable[[Step], object] | None = None,
        format: Format = "safetensors",  # noqa: A002
        options: SaveOptions | Mapping[str, Any] = _DEFAULT,
        near: Near | None = None,
        fresh: bool = False,
        check_replicas: int | None = None,
        origin: Mapping[str, Any] | None = None,
    ) -> None:
        self.path = absolute(path)
        if check_replicas is not None and check_replicas < 1:
            raise ValueError(
                f"check_replicas={check_replicas}: expected a number of steps, at least 1, or None"
            )
        self._check_replicas = check_replicas
        self._origin = checked_origin(origin)
        self.step = 0
        self.stopping = False
        rules, self._keep = every_from(every), keep_from(keep)
        self._every = tuple(rule for rule in rules if rule.only is None)
        self._notice, self._on_saved = notice, on_saved
        self._format: Format = format
        self._options = options_from(options, SaveOptions)
        if self._keep == ():
            raise ValueError(f"keep={keep!r}: no rule says which steps stay; None keeps all")
        if operator.index(max_pending) < 1:
            raise ValueError(f"max_pending={max_pending}: expected at least 1")
        if notice is not None and not isinstance(notice, timedelta):  # now, and not when the signal comes
            raise TypeError(f"notice={notice!r}: expected a timedelta, such as timedelta(seconds=90)")
        self._end_store_options = options_during(self, self.path, self._options.store_options)
        self._writer = Writer(store_at(self.path), secrets.token_hex(8), Rules(rules, self._keep))
        self._main = Series(self.path, self._keep, UnderWay(tolerate, max_pending))
        self._parts = _parts(self._writer.store, rules, tolerate, max_pending)
        self._near = (
            None if near is None else near_tier(near, self._writer, self._options, self._seconds, format)
        )
        self._job = Job(self.path, self._writer, self._near, self._options.timeout)
        self._signals = Signals(signals)
        self._clock = Clock(self._seconds, self._options.timeout)
        self._requests = Requests(self._writer.store, self._writer.id)
        self._is_told = False
        self._is_fresh, self._has_begun = fresh, False
        self._claiming, self._is_refused = Lock(), False
        self._listing: Later[Sequence[Step]] | None = None
        self._resumed_from: int | None = None
        self._progress = _Progress(self.path, has_rules=bool(self._every), keeps=last)
        # Without `close`, a collected run still warns of an unsaved end, and leaves signals to the program.
        self._at_end = weakref.finalize(self, _end, self._progress, self._signals, self._requests)
        # The task has no reference to this object, which is collected when the caller drops it.
        remove = functools.partial(_remove_others, self._writer, self._all_series(), steady_clock())
        self._upkeep = Upkeep(self.path, remove)
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
        """The steps of the run, listed from the directory each time."""
        return steps_if_there(self.path)

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

        Wait for the save under way first. Damaged steps are skipped and renamed; `skipped` has the reasons. Raise
        MismatchError for a tree that does not fit, and CorruptionError if all steps are damaged: a run never starts
        afresh by itself. `fallback=False` raises for a damaged step instead of skipping it.

        A near step counts like a step of the run if all of its parts are found, but not for "best". Near steps after
        the step that the run goes on from are removed.

        like      a tree of arrays, `ShapeDtypeStruct`s or shardings, see `load`
        step      a number, or "best" for the best step by the rule of `keep` that names a metric
        into      like `like`, but modules in it are updated in place, see `load`
        data      an iterator, which is set to its recorded position. Without `data`, log a warning if the step has a
                  position
        fallback  skip damaged steps
        rewind    with an older `step`: rename the newer steps; without `rewind`, newer steps are an error
        return_report
                  do not log the leaves that `partial` or `rename` kept or left out; `report` has them in any case
        arguments
                  all other arguments of `load`, except `dequant` and `duplicates`, which a step of a run does not need.
                  `timeout` and `store_options` are those of `Run(options=)`, not of a `LoadOptions` here. If the code
                  has changed: `partial`, `rename`, `root`, `resize`, `dtype`, `keys`. Where leaves go: `mesh`, `rules`,
                  `shardings`. With `signed_by`, a step that the owner of that key has not signed is refused; not with
                  `near`
        """
        self._check_arguments(step, arguments)
        arguments["options"] = self._load_options(arguments.get("options", LoadOptions()))
        request = request_from(like=like, into=into, timeout_of="SaveOptions", **arguments)
        rule = rule_of_best(self._keep or ()) if step == "best" else None
        self._main.under_way.wait()  # the save may write the newest step
        wait_for_saves_below(self.path)  # of another Run of this program, which loses the run to this one
        with ExitStack() as stack:
            for series in self._all_series():
                stack.enter_context(series.held())
            self._upkeep.wait()  # it may be removing any step
            agreed = self._job.agree(claims=True, fresh=self._is_fresh, rule=rule)
            if not agreed.steps:
                self._go_on(None, agreed)
                return None
            candidates = agreed.to_try(step, rule, self.path)
            if not rewind:
                agreed.refuse_after(candidates[0].number, step, self.path, {})
            chosen, loaded, skipped = self._job.load_first(candidates, request, fallback=fallback)
            if not rewind:
                agreed.refuse_after(chosen.number, step, self.path, skipped)
            # Before anything is put aside: the iterator may refuse the position.
            self._job.set_position(data, chosen, loaded.entry.metadata)
            self._go_on(chosen.number, agreed, skipped)
            if self._origin is None:  # rules give the leaves other names than the recorded ones
                self._origin = loaded.report.origin if request.by_rules else loaded.entry.origin
        if not return_report and (request.partial or request.by_rules):
            log_differences(f"{self.path}: step {chosen.number}", loaded.report)
        return Resumed(loaded.tree, chosen.number, skipped, loaded.report)

    def _check_arguments(self, step: int | str, arguments: LoadArguments) -> None:
        if unknown := sorted(arguments.keys() - LoadArguments.__optional_keys__):
            raise TypeError(f"Run.resume() got an unexpected keyword argument {unknown[0]!r}")
        if arguments.get("signed_by") is not None and self._near:
            raise ValueError("resume(signed_by=) and Run(near=): near steps are not signed")
        if isinstance(step, str) and step not in ("newest", "best"):
            raise ValueError(f"resume(step={step!r}): expected a number, 'newest' or 'best'")
        if self._is_fresh and not self._has_begun:
            raise ValueError(
                f"Run(fresh=True) starts anew in {self.path}, and resume goes on from its steps: do one of the two. "
                "Leave fresh=True out of a program that is started again after an interruption: each start would put "
                "the steps of the previous start aside"
            )

    def _load_options(self, given: LoadOptions | Mapping[str, Any]) -> LoadOptions:
        options = options_from(given, LoadOptions)
        if options.timeout is not None or options.store_options is not None:
            raise ValueError("resume(options=) has timeout or store_options: pass them in Run(options=)")
        return dataclasses.replace(options, timeout=self._options.timeout)

    def _begin(self) -> None:
        """Begin to save without `resume`: put existing steps aside if `fresh`, otherwise refuse to mix with them.

        Only a fresh run and a near tier need answers of the store first. Otherwise the first save claims the run in its
        own thread, see `_claim`.
        """
        if self._has_begun:
            return
        if not self._is_fresh:  # before the claim, which would end the job that writes the run
            agreed = self._job.agree(claims=False, fresh=False, listed=self._listed)
            self._refuse_steps([step.number for step in agreed.steps])
        if self._is_fresh or self._near:
            agreed = self._job.agree(claims=True, fresh=self._is_fresh)
            if not self._is_fresh:  # another job may have saved one before the claim
                self._refuse_steps([step.number for step in agreed.steps])
            else:
                self._put_all_aside()
            if self._near:
                self._near.begin(0, agreed.epoch)
        self._has_begun = True

    def _put_all_aside(self) -> None:
        if self._near:
            self._near.forget()
        done = self._job.put_aside(lambda _: "old", [part.path for part in self._parts])
        if done and jax.process_index() == 0:
            logger.warning("%s: fresh=True has put its steps aside: %s", self.path, few(done))
        self._writer.note_resumed(None)

    def _listed(self) -> Sequence[Step]:
        """List the steps of a run that has not begun, in the first process; in a bucket while the first steps are
        done."""
        listing, self._listing = self._listing, None
        return listing.result() if listing else self._writer.look()

    def _claim(self) -> None:
        """Become the writer of the run before the first save writes, in the thread of the save and in the first
        process."""
        with self._claiming:
            if self._writer.has_claimed and not self._is_refused:
                return
            # Another job may have saved steps since the run was listed. It is not ended by the claim then; after the
            # claim it saves no more.
            self._is_refused = True
            self._refuse_steps([step.number for step in steps_if_there(self.path)])
            self._writer.claim()
            self._refuse_steps([step.number for step in steps_if_there(self.path)])
            self._is_refused = False

    def _refuse_steps(self, there: Sequence[int]) -> None:
        if there:
            raise FileExistsError(
                f"{self.path} has {count(len(there), 'step')}, the newest is {there[-1]}, and this job has not "
                "resumed from it. Call run.resume(...) before the first save to go on from there; or start anew in "
                "another directory, or here with Run(..., fresh=True), which puts the old steps aside"
            )

    def _go_on(self, step: int | None, agreed: AgreedSteps, skipped: Collection[int] = ()) -> None:
        """Go on from a step, or from zero for None. Remove near steps, and put aside steps, that the run has left
        behind."""
        if self._near:
            self._near.begin(step or 0, agreed.epoch, agreed.before)
        rewound = [] if step is None else agreed.after(step, skipped)
        if rewound or skipped:
            self._job.put_aside(reasons_to_put_aside(self.path, rewound, skipped))
        if step is not None and rewound and self._parts:
            self._job.put_aside(
                lambda one: "rewound" if one.number > step else None, [part.path for part in self._parts]
            )
        if step is not None or self._resumed_from is not None:  # its steps may have been removed since
            self._writer.note_resumed(step)
        for series in self._all_series():
            series.go_on(step)
        self.step, self._resumed_from = step or 0, step
        self._progress.done = None
        self._progress.note_save(step)
        self._has_begun, self._is_refused = True, False

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
        """Save in the background if a save is due: `step` steps are done. Return the save, or None if only a near step
        or nothing was saved.

        If the job was told to end, save, wait for the save, and set `stopping`.

        step       how many steps are done
        tree       the state; or a function that returns it, which is called only if a save is due
        data       an iterator, whose position is saved with the state
        metrics    numbers by name, as `Step.metrics` returns them; numbers on a device are copied in the background
        metadata   a dict of plain values, as `Step.metadata` returns it
        """
        done = Done(checked_number(step), tree, data, metrics, metadata, self._origin)
        # Before the rules: a loop that counts from zero gets the error at its first step, saved or not.
        self._refuse_earlier(done.step)
        if self._check_replicas and done.step % self._check_replicas == 0:
            check_replicas(self.path, done.step, done.state(), self._options.timeout)
        self._progress.note(done)
        if self._has_begun:
            self._requests.watch()
        else:
            self._look_ahead()
        why = self._why(done.step)
        if why == "signal":  # the last chance to save
            return self._save_last(done)
        for series in self._all_series():
            series.under_way.raise_failure()
        for part in self._parts:
            if part.is_due(done.step):
                self._save_part(part, done)
        if why is not None:
            return self._save(done, why)
        if self._near and self._near.is_due(done.step):
            self._save_near(done, self._near)
        return None

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
        """Save this step in the background, due or not. Replace a step that exists.

        The arguments are those of `after`: `step`, `tree`, `data`, `metrics` and `metadata`.
        """
        done = Done(checked_number(step), tree, data, metrics, metadata, self._origin)
        self._requests.reached(done.step)  # a request may be for this step
        return self._save(done, "call")

    def request_save(self) -> None:
        """Ask for a save at the next step; with several processes, at the next step that all of them can agree on. Call
        it in the first process, from any thread."""
        self._requests.ask()

    def should_stop(self) -> bool:
        """Tell whether the job was told to end, in a loop without steps, such as an evaluation. The next `after` then
        saves."""
        self._is_told = self._signals.reached() or self._is_told
        return self._is_told

    @uninterrupted
    def wait(self, timeout: float | None = None) -> None:
        """Wait for the saves under way, and raise their error; raise TimeoutError after `timeout` seconds.

        Then wait for the deletion of old steps, for at most half a minute.
        """
        self._wait_for_saves(timeout)
        self._upkeep.wait(timeout)

    def _wait_for_saves(self, timeout: float | None = None) -> None:
        if self._near:
            self._near.wait(timeout)
        for series in self._all_series():
            series.under_way.wait(timeout)

    def _look_ahead(self) -> None:
        """List the steps of a bucket while the first steps are done: the first save has to know them."""
        if not self._has_begun and self._listing is None and on_disk(self._writer.store) is None:
            self._listing = Later(self._writer.look)

    def _why(self, step: int) -> str | None:
        is_asked = self._requests.reached(step)
        if self.should_stop() and not self.stopping:
            return "signal"
        left = self._left if is_continuous(self._every, step) else None
        by_clock = self._clock.is_due(step, minutes_due(self._every, step), left)
        if is_due(self._every, step):
            return "every"
        return "asked" if is_asked else "every" if by_clock else None

    def _left(self) -> float:
        """Estimate the seconds until the saves under way are over."""
        if self._main.under_way.are_over():
            return 0.0
        return max(0.01, self._clock.saved_at + (self._main.took or 0.0) - self._seconds())

    def _save(self, done: Done, why: str) -> Pending:
        self._main.under_way.wait_for_room(self.path)
        self._refuse_earlier(done.step)
        facts = done.facts(why)
        self._begin()
        pending = self._start(self._main, done, facts)
        self.step = done.step
        self._progress.note_save(done.step, pending)
        self._clock.note_save(done.step)
        self._requests.watch()
        if (asked := self._requests.note_save(done.step)) is not None:
            answer = functools.partial(self._requests.answer, asked, done.step)
            pending.add_done_callback(lambda over: answer(over.exception()))
        if self._near:
            self._near.note_save(done.step)
        return pending

    def _save_part(self, part: Series, done: Done) -> None:
        part.under_way.wait_for_room(part.path)
        facts = done.facts("every")
        self._begin()
        self._start(part, done, facts)

    def _start(
        self, series: Series, done: Done, facts: Callable[[Sequence[bytes]], Mapping[str, Any]]
    ) -> Pending:
        return series.save(
            done,
            facts,
            format=self._format,
            options=self._options,
            begin=self._claim,
            fence=self._writer.check,
            after=functools.partial(self._after_commit, series),
        )

    def _save_last(self, done: Done) -> Pending | None:
        """Save because of a signal, in the tier that will be done in time, and wait for it."""
        if self._near and self._near_is_better(self._near):
            self._save_near(done, self._near)
            self._near.wait()
            if self._all_agree(is_so=self._near.saved == done.step):
                self.stopping = True
                self._progress.last = None  # a save at the end would not be done in time
                return None
        for series in self._all_series():
            series.under_way.log_failures()
        pending = self._save(done, "signal")
        self._wait_for_saves()
        self.stopping = True
        return pending

    @uninterrupted
    def _save_unsaved(self) -> None:
        """Save the last step if it is not saved, and was kept for this."""
        if (last := self._progress.unsaved()) is not None:
            self._save(last, "end")

    def _near_is_better(self, near: NearTier | WholeTier) -> bool:
        """Tell whether only a near step will be saved before the notice is over. All processes get the same answer."""
        if self._notice is None:
            return False
        with meeting("runs", self._options.timeout) as hosts:
            said = hosts.meet(b"", lambda _: str(self._notice_answer(near)).encode())
        return said == b"True"

    def _all_agree(self, *, is_so: bool) -> bool:
        """Tell whether something is so in every process."""
        with meeting("runs", self._options.timeout) as hosts:
            return bool(hosts.meet(b"yes" if is_so else b"", lambda said: b"yes" if all(said) else b""))

    def _notice_answer(self, near: NearTier | WholeTier) -> bool:
        left = self._notice.total_seconds() - self._signals.since() if self._notice else 0.0
        needs = self._left() + (self._main.took or 0.0)
        is_better = needs > left and near.took is not None and near.took < needs
        logger.warning(
            "%s: %.1f s of the notice are left, a save takes about %s: the last step is saved %s",
            self.path,
            left,
            f"{needs:.1f} s" if self._main.took else "an unknown time",
            "to the near tier" if is_better else "to the run",
        )
        return is_better

    def _save_near(self, done: Done, near: NearTier | WholeTier) -> None:
        late = done.facts("near")
        self._begin()
        near.save(done, late)
        self.step = done.step

    def _refuse_earlier(self, step: int) -> None:
        """Refuse a step before the resumed step: the loop counts from zero, and would replace old steps one by one."""
        if self._resumed_from is not None and step < self._resumed_from:
            raise ValueError(
                f"{self.path}: step {step} is before step {self._resumed_from}, which this run goes on from. Count on "
                "from there: range(run.step, ...); or go back to an earlier step: resume(step=..., rewind=True)"
            )

    def _after_commit(self, series: Series, step: int, path: str) -> None:
        """Tell the caller, and let retention go on. Errors are logged: the step is saved."""
        if jax.process_index() != 0:
            return
        if self._on_saved and series is self._main:
            try:
                self._on_saved(Step(step, path))
            except Exception:
                logger.exception("%s: step %d is saved, but on_saved failed", self.path, step)
        self._upkeep.ask()

    def _all_series(self) -> list[Series]:
        return [self._main, *self._parts]

    # ------------------------------------------------------------------------------------- context

    def close(self) -> None:
        """Wait for the save under way, and stop to handle signals, as at the end of `with`."""
        self.__exit__(None, None)

    def __enter__(self) -> Self:
        return self

    @uninterrupted
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        try:
            if error is None:
                self._save_unsaved()
                self._wait_for_saves()
                self._progress.warn_of_unsaved()
            else:
                for series in self._all_series():
                    series.under_way.log_failures()
        finally:
            self._at_end.detach()  # warn of an unsaved end once
            with ExitStack() as stack:  # in reverse order; a Ctrl-C may end the waits
                stack.callback(self._end_store_options)
                stack.callback(self._signals.close)
                if self._near:
                    stack.callback(self._near.close)
                stack.callback(self._upkeep.end, _SHORT if self.stopping else None)
                stack.callback(self._requests.close)


# Seconds that a job which was told to end waits for the deletion of old steps.
_SHORT = 2.0


def _parts(store: Store, rules: Sequence[Every], tolerate: int, most: int) -> list[Series]:
    """Return the parts of the tree that are saved with rules of their own, each with a directory in the run."""
    found = []
    for only in dict.fromkeys(rule.only for rule in rules if rule.only is not None):
        every = [rule for rule in rules if rule.only == only]
        keep = [one for rule in every for one in rule.keep or ()]
        under_way = UnderWay(tolerate, most)
        found.append(Series(store.path_to(only), keep or None, under_way, only=only, every=every))
    return found


@dataclasses.dataclass(slots=True)
class _Progress:
    """The last step that is done, and the last step that is saved in the run itself, not in its near tier.

    `keeps` holds on to the state of the last step, for a save at the end.
    """

    path: str
    has_rules: bool
    keeps: bool = False
    done: int | None = None
    saved: int | None = None
    save: Pending | None = None
    failed: int | None = None
    last: Done | None = None
    process: int = dataclasses.field(default_factory=os.getpid)

    def note(self, done: Done) -> None:
        self.done = done.step
        self.last = done.as_it_is() if self.keeps else None

    def note_save(self, step: int | None, save: Pending | None = None) -> None:
        self.saved, self.save = step, save
        self.last = None

    def unsaved(self) -> Done | None:
        """Return the last step if it is not saved, and was kept for that."""
        last, self.last = self.last, None
        return last if last is not None and last.step != self.saved else None

    def warn_of_unsaved(self) -> None:
        """Warn, in the first process, if the last step that was done is not in the run."""
        done, self.done = self.done, None
        if self.save and self.save.has_failed():
            self.saved, self.failed = None, self.saved
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
        if self.failed is not None:
            return f"the save of step {self.failed} has failed or was cancelled"
        if self.saved is not None:
            return f"the last saved step is {self.saved}"
        if self.has_rules:
            return "no step is saved, because no rule of every= came due"
        return "no step is saved, because without every= `after` saves at a signal or a request only"


def _remove_others(writer: Writer, several: Sequence[Series], now: Callable[[], float]) -> None:
    """Remove the steps that no rule keeps, if this job is still the writer of the run."""
    writer.check()
    failed = []
    for series in several:
        try:
            series.remove_others(now(), writer.check)
        except OSError as error:  # the steps of the others may still be removed
            failed.append(error)
    if failed:
        raise failed[0]


def _end(progress: _Progress, signals: Signals, requests: Requests) -> None:
    signals.abandon()
    requests.abandon()
    progress.warn_of_unsaved()
