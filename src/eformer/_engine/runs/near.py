"""The near tier of a run: frequent steps in memory or on a local disk, in which each process has its own part.

    <near>/process-0/<epoch>/step-510      the part of step 510 that process 0 holds
    <run>/near.json                        the epochs that belong to the run, and the last step of each

An epoch is the time from one resume to the next, and has a unique id. Steps belong together if they have one number and
one epoch, so processes never mix steps of different jobs. The run never resumes from an epoch that `near.json` does not
name, nor from a step after the last step of an epoch: it belongs to another run, or the run went on from an earlier
step.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import re
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import msgspec

from eformer._engine.formats.found import kinds_if_there
from eformer._engine.processes import hosts as _hosts
from eformer._engine.record.policies import Near, every_from, is_due, minutes_due
from eformer._engine.record.step_names import step_name
from eformer._engine.record.values import parse_json
from eformer._engine.runs.clock import Clock
from eformer._engine.runs.own_part import load_own, own_part_of
from eformer._engine.runs.steps import Step, claim_of, steps_if_there
from eformer._engine.saving.pending import Pending
from eformer._engine.saving.save import complete
from eformer._engine.saving.start import start
from eformer._engine.stores.base import read_whole, update_file
from eformer._engine.stores.directory import Directory, remove_entry
from eformer._engine.stores.durable import scratch_name
from eformer._engine.stores.local import on_disk
from eformer._engine.stores.locate import absolute, store_at
from eformer._engine.trees.copies import compile_copies
from eformer.errors import CorruptionError, FormatError, ProcessError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from eformer._engine.loading.load import LoadedTree
    from eformer._engine.loading.request import Request
    from eformer._engine.record.options import SaveOptions
    from eformer._engine.runs.done import Done
    from eformer._engine.runs.writer import Writer
    from eformer._engine.saving.save import Save

logger = logging.getLogger("eformer")

NEAR_FILE = "near.json"

# Whole steps beside the step that is being written. When the arrays of step n are computed, every process has begun
# step n - 1, and so has finished step n - 2: that step stays until the next save, so all processes have one in common.
_KEPT = 2
_MOST_EPOCHS = 64  # in the file; the near tier no longer has steps of older ones

_EPOCH = re.compile(r"[0-9a-f]{16}")
_PROCESS = re.compile(r"process-(?P<number>[0-9]{1,9})")
_COUNT = "eformer.processes"


class NearStep(msgspec.Struct, frozen=True, order=True, array_like=True):
    """A step: its number, and the epoch in which it was saved to the near tier; "" for a step of the run itself."""

    number: int
    epoch: str = ""


class _Epochs(msgspec.Struct):
    """The epochs from which the run may go on, each up to a step; None for all steps.

    The epochs count only at the path where the file was written, not in a copy of the run, and only while one of
    `writers` is the writer of the run: a later job without a near tier has gone on from other steps.
    """

    path: str = ""
    writers: list[str] = []
    epochs: list[tuple[str, int | None]] = []

    def has(self, step: NearStep) -> bool:
        return any(
            step.epoch == epoch and (last is None or step.number <= last) for epoch, last in self.epochs
        )

    def up_to(self, number: int, epoch: str) -> _Epochs:
        """Return the epochs of a run that goes on from a step in a new epoch."""
        before = [(name, number if last is None else min(number, last)) for name, last in self.epochs]
        return _Epochs(self.path, self.writers, [*before, (epoch, None)][-_MOST_EPOCHS:])


class NearTier:
    """The near tier of a run, seen from one process.

    The order of calls: `look` before this job becomes the writer, `in_common`, and `begin`; then `is_due`, `save` and
    `note_save`. Errors of near saves are logged and not raised, because the run saves a later step.
    """

    def __init__(
        self,
        near: Near,
        writer: Writer,
        options: SaveOptions,
        seconds: Callable[[], float],
    ) -> None:
        if not isinstance(near, Near):
            raise TypeError(f"near={near!r}: expected near=Near(path, every=...)")
        local = on_disk(store_at(absolute(near.path)))
        if local is None:
            raise ValueError(
                f"{near}: near steps are saved in memory or on a local disk; pass a path such as '/dev/shm/run'"
            )
        self._every = every_from(near.every)
        self._process = Path(local) / f"process-{jax.process_index()}"
        if self._process.is_symlink():  # `begin` would remove files of its target
            raise ValueError(f"{near}: {self._process} is a link; remove it, or choose another directory")
        self._writer, self._run = writer, writer.store
        self._clock, self._timeout = Clock(seconds, options.timeout), options.timeout
        self._options = dataclasses.replace(
            options,
            dtype=None,
            reuse=False,
            processes=None,
            max_chunk_bytes=None,
            compression=None,
            ocdbt=False,
            store_options=None,
        )
        self._epochs, self._epoch = _Epochs(), ""
        self._pending: Pending | None = None
        self.took: float | None = None  # seconds from the hand-over of the last save to its commit

    # -------------------------------------------------------------------------------------- resume

    def look(self) -> list[NearStep]:
        """Return the whole steps of this process that the present number of processes saved.

        The first process also reads the epochs, and adds this writer to them before it claims the run: a job that dies
        between both leaves epochs that still count.
        """
        self.wait()
        if jax.process_index() == 0:
            known, claim = self._read_epochs(), claim_of(self._run)
            holder = claim.id if claim else ""
            is_ours = known.path == self._run.url and holder in known.writers
            epochs = known.epochs if is_ours else []
            self._write_epochs(_Epochs(self._run.url, [self._writer.id, holder], epochs))
        return self._whole_steps()

    def forget(self) -> None:
        """Forget the steps of earlier jobs, before a run that starts anew puts its own steps aside."""
        if jax.process_index() == 0:
            self._write_epochs(_Epochs(self._epochs.path, self._epochs.writers))

    def _whole_steps(self) -> list[NearStep]:
        return sorted(step for step in self._all_steps() if self._is_whole(step))

    def _is_whole(self, step: NearStep) -> bool:
        found = Step(step.number, self._path_of(step))
        if problem := found.problem():
            logger.warning("%s is not used: %s", found.path, problem)
            return False
        count = found.metadata.get(_COUNT)
        if count != jax.process_count():
            logger.warning("%s is not used: it was saved by %s processes", found.path, count)
        return bool(count == jax.process_count())

    def in_common(self, held: Sequence[Iterable[NearStep]]) -> tuple[list[NearStep], list[str]]:
        """Return the steps of this run that all processes hold, and the epochs of this run. `held` has the steps of
        each process. Only the first process calls this."""
        everywhere = set.intersection(*(set(steps) for steps in held))
        found = sorted(step for step in everywhere if self._epochs.has(step))
        newest = found[-1].number if found else -1
        others = {step.number for steps in held for step in steps if step.number > newest}
        if others:
            logger.warning(
                "the near steps %s are not used: they are not of this run, or not every process holds them",
                sorted(others),
            )
        return found, [epoch for epoch, _ in self._epochs.epochs]

    def load(self, step: NearStep, request: Request) -> LoadedTree:
        """Load this process's part of a step. Raise CorruptionError for an unreadable file, so that the run tries
        another step."""
        try:
            return load_own(self._path_of(step), f"{step.epoch}-{step.number}", request)
        except ProcessError:  # a ProcessError may be a TimeoutError, and so an OSError
            raise
        except OSError as error:
            raise CorruptionError(f"{self._path_of(step)} cannot be read: {error}") from error

    def begin(self, number: int, epoch: str, before: Iterable[str] = ()) -> None:
        """Begin an epoch after step `number`. Remove later steps, and steps of epochs that are not in `before`."""
        self._epoch = epoch
        # The file comes before the removals: if this job dies in between, the later steps no longer count.
        if jax.process_index() == 0:
            self._write_epochs(self._epochs.up_to(number, epoch))
        stay = [step for step in self._whole_steps() if step.number <= number and step.epoch in before]
        near = self._process.parent
        _remove_but(stay, near, self._process.name)
        for name in kinds_if_there(store_at(near)):  # left by a job that had more processes
            if (found := _PROCESS.fullmatch(name)) and int(found["number"]) >= jax.process_count():
                _remove_but((), near, name)
        self.note_save(number)

    def _read_epochs(self) -> _Epochs:
        try:
            data, _ = read_whole(self._run, NEAR_FILE)
            return parse_json(data, _Epochs, f"{self._run.path_to(NEAR_FILE)} cannot be read")
        except (FileNotFoundError, NotADirectoryError):
            return _Epochs()
        except FormatError as error:
            logger.warning("the near tier is not used: %s", error)
            return _Epochs()

    def _write_epochs(self, known: _Epochs) -> None:
        self._epochs = known
        update_file(self._run, NEAR_FILE, lambda _: msgspec.json.encode(known))

    # ---------------------------------------------------------------------------------------- save

    def is_due(self, step: int) -> bool:
        """Tell whether it is time for a near step. All processes get the same answer."""
        by_clock = self._clock.is_due(step, minutes_due(self._every, step))
        return is_due(self._every, step) or by_clock

    def note_save(self, step: int) -> None:
        """Note that a step is saved, here or by the run."""
        self._clock.note_save(step)

    def save(self, done: Done, late: Callable[[Sequence[bytes]], Mapping[str, Any]]) -> None:
        """Save this process's part of the tree in the background. Wait for its previous near save, but not for other
        processes. `late` returns more metadata when the save is committed."""
        position, tree = done.position(), done.state()
        self.wait()
        path = self._path_of(NearStep(done.step, self._epoch))
        own, table = own_part_of(tree)
        save = start(
            own,
            path,
            metadata={**(done.metadata or {}), **table, _COUNT: jax.process_count()},
            options=self._options,
            detach=True,
            hosts=_hosts.current("saves", (jax.process_index(),), self._timeout),
        )
        save.late, save.own_metadata = late, position
        self._pending = Pending(path)
        self.note_save(done.step)
        try:
            self._pending.start(
                functools.partial(self._carry_out, save, time.monotonic()), afterwards=compile_copies
            )
        except BaseException:  # no thread could be started: later saves must not wait for this one
            save.turn.end()
            raise

    def _carry_out(self, save: Save, began: float) -> None:
        """Remove all but the last whole steps, then write the new step."""
        try:
            # Computed arrays prove that every process has finished the last step but one.
            for array in (array for source in save.sources for _, array in source.parts):
                if isinstance(array, jax.Array):
                    array.block_until_ready()
            for step in sorted(self._all_steps())[:-_KEPT]:
                self._remove(step)
        except BaseException:
            save.turn.end()
            raise
        complete(save)
        self.took = time.monotonic() - began

    def _remove(self, step: NearStep) -> None:
        near, epoch = self._process.parent, f"{self._process.name}/{step.epoch}"
        with _logged(near / epoch), Directory.open(near) as tier, tier.enter(epoch) as folder:
            _remove_entry(folder, step_name(step.number))

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the near save that runs. Log its error, and do not raise it."""
        pending = self._pending
        if pending is not None and (error := pending.exception(timeout)):
            logger.error("the near step at %s was not saved", pending.path, exc_info=error)
        self._pending = None

    # --------------------------------------------------------------------------------------- files

    def _path_of(self, step: NearStep) -> str:
        return str(self._process / step.epoch / step_name(step.number))

    def _all_steps(self) -> list[NearStep]:
        """List the steps of this process, whole or damaged, of any run."""
        return [
            NearStep(step.number, epoch)
            for epoch in kinds_if_there(store_at(self._process))
            if _EPOCH.fullmatch(epoch)
            for step in steps_if_there(self._process / epoch)
        ]


def _remove_but(stay: Iterable[NearStep], near: Path, process: str) -> None:
    """Remove everything in the epochs of a process but the steps in `stay`: other steps, and remains of killed saves.

    No directory is entered through a link: other users may be able to write to the near tier, and a link would make
    this process delete its own files elsewhere. Errors are logged, because a step that stays only takes room.
    """
    kept = {(step.epoch, step_name(step.number)) for step in stay}
    with _logged(near / process), Directory.open(near) as tier, tier.enter(process) as folder:
        for epoch, kind in folder.kinds().items():
            if kind == "directory" and _EPOCH.fullmatch(epoch):
                with folder.enter(epoch) as inner:
                    for name in inner.kinds():
                        if (epoch, name) not in kept:
                            _remove_entry(inner, name)
                folder.remove_if_empty(epoch)


@contextmanager
def _logged(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        pass
    except OSError as error:
        logger.warning("%s was not removed: %s", path, error)


def _remove_entry(folder: Directory, name: str) -> None:
    """Remove a step or any other entry. Rename it to a hidden name first, so that a half removed step is never read."""
    with _logged(folder.path / name):
        hidden = name if name.startswith(".") else scratch_name()
        if hidden != name:
            folder.rename(name, folder, hidden)
        remove_entry(folder, hidden)
