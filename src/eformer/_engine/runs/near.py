"""The near tier of a run: frequent steps in memory or on a local disk, in which each process has its own part.

    <near>/process-0/<epoch>/step-510      what process 0 holds of step 510
    <run>/near.json                        which epochs belong to the run, and up to which step

An epoch is the time from one resume to the next, and has an id that no other has. Steps belong together if they have
one number and one epoch: processes never mix what different jobs wrote. An epoch that is not in the run's own file, or
a step after the one from which the run went on, is never resumed from: it is of another run, or was left behind.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import re
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import msgspec

from eformer._engine.formats.found import kinds_if_there
from eformer._engine.processes import hosts as _hosts
from eformer._engine.record.policies import every_from, is_due, minutes_due
from eformer._engine.record.step_names import step_name
from eformer._engine.record.values import parse_json
from eformer._engine.runs.clock import Clock
from eformer._engine.runs.own_part import cut_to_own, load_own
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
    import os
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from datetime import timedelta

    from eformer._engine.loading.load import LoadedTree
    from eformer._engine.loading.request import Request
    from eformer._engine.record.options import SaveOptions
    from eformer._engine.record.policies import Every
    from eformer._engine.runs.done import Done
    from eformer._engine.runs.writer import Writer
    from eformer._engine.saving.save import Save

logger = logging.getLogger("eformer")

NEAR_FILE = "near.json"

# Whole steps beside the one that is being written. When its arrays are computed, every other process has begun the
# step before it, and so has finished the one before that.
_KEPT = 2
_MOST_EPOCHS = 64  # in the file; older ones have no steps any more

_EPOCH = re.compile(r"[0-9a-f]{16}")
_PROCESS = re.compile(r"process-(?P<index>[0-9]{1,9})")
_COUNT = "eformer.processes"


class NearStep(msgspec.Struct, frozen=True, order=True, array_like=True):
    """A step: its number, and the epoch in which it was saved to the near tier; "" for one of the run itself."""

    number: int
    epoch: str = ""


class _Line(msgspec.Struct):
    """The epochs from which the run may go on, each up to a step, None for all.

    They count only where the file was written, not in a copy of the run, and only as long as one of these is the
    writer: a job without a near tier that came after them has left the near steps behind.
    """

    path: str = ""
    writers: list[str] = []
    epochs: list[tuple[str, int | None]] = []

    def has(self, step: NearStep) -> bool:
        return any(
            step.epoch == epoch and (last is None or step.number <= last) for epoch, last in self.epochs
        )

    def up_to(self, number: int, epoch: str) -> _Line:
        """Return the line that goes on from a step in a new epoch."""
        before = [(name, number if last is None else min(number, last)) for name, last in self.epochs]
        return _Line(self.path, self.writers, [*before, (epoch, None)][-_MOST_EPOCHS:])


class Near:
    """The near tier of a run, seen from one process.

    The order of calls: `look` before this job becomes the writer, `in_common`, and `begin`; then `is_due`, `save` and
    `note_save`. Errors of its saves are logged: the run saves a later step.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        every: int | timedelta | Every | Sequence[Every] | None,
        writer: Writer,
        options: SaveOptions,
        clock: Callable[[], float],
    ) -> None:
        place = on_disk(store_at(absolute(path)))
        self._every = every_from(every)
        if place is None:
            raise ValueError(
                f"near={path!r}: the near tier is in memory or on a local disk, /dev/shm/run say"
            )
        if not self._every:
            raise ValueError("near= needs near_every=, which says when it saves")
        self._process = Path(place) / f"process-{jax.process_index()}"
        if self._process.is_symlink():  # everything in the tier that is not kept is removed
            raise ValueError(
                f"near={path!r}: {self._process} is a link; remove it, or choose another directory"
            )
        self._writer, self._run = writer, writer.store
        self._clock, self._timeout = Clock(clock, options.timeout), options.timeout
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
        self._line, self._epoch = _Line(), ""
        self._pending: Pending | None = None

    # -------------------------------------------------------------------------------------- resume

    def look(self) -> list[NearStep]:
        """Return the steps that this process holds whole, if they were saved by as many processes as there are. Before,
        read which epochs count, and note that this writer knows of them."""
        self.wait()
        if jax.process_index() == 0:
            line, claim = self._read_line(), claim_of(self._run)
            holder = claim.id if claim else ""
            is_ours = line.path == self._run.url and holder in line.writers
            epochs = line.epochs if is_ours else []
            self._write_line(_Line(self._run.url, [self._writer.id, holder], epochs))
        return self._held()

    def forget(self) -> None:
        """Forget the steps of earlier jobs, before a run that starts anew puts its own steps aside."""
        if jax.process_index() == 0:
            self._write_line(_Line(self._line.path, self._line.writers))

    def _held(self) -> list[NearStep]:
        return sorted(step for step in self._there() if self._is_whole(step))

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
        """Return the steps that all processes hold and that are of this run, given those of each; and the
        epochs of this run. For the first process."""
        everywhere = set.intersection(*(set(steps) for steps in held))
        found = sorted(step for step in everywhere if self._line.has(step))
        newest = found[-1].number if found else -1
        others = {step.number for steps in held for step in steps if step.number > newest}
        if others:
            logger.warning(
                "the near steps %s are not used: they are not of this run, or not every process holds them",
                sorted(others),
            )
        return found, [epoch for epoch, _ in self._line.epochs]

    def load(self, step: NearStep, request: Request) -> LoadedTree:
        """Load this process's part of a step. What cannot be read is damage, for which there is another step."""
        try:
            return load_own(self._path_of(step), f"{step.epoch}-{step.number}", request)
        except ProcessError:  # one of them is a TimeoutError, and so an OSError
            raise
        except OSError as error:
            raise CorruptionError(f"{self._path_of(step)} cannot be read: {error}") from error

    def begin(self, number: int, epoch: str, before: Iterable[str] = ()) -> None:
        """Begin an epoch after so many steps. Steps after that, and those not of the epochs `before`, are removed."""
        self._epoch = epoch
        if jax.process_index() == 0:
            self._write_line(self._line.up_to(number, epoch))
        stay = [step for step in self._held() if step.number <= number and step.epoch in before]
        near = self._process.parent
        _remove_but(stay, near, self._process.name)
        for name in kinds_if_there(store_at(near)):  # of a job that had more processes
            if (found := _PROCESS.fullmatch(name)) and int(found["index"]) >= jax.process_count():
                _remove_but((), near, name)
        self.note_save(number)

    def _read_line(self) -> _Line:
        try:
            data, _ = read_whole(self._run, NEAR_FILE)
            return parse_json(data, _Line, f"{self._run.path_to(NEAR_FILE)} cannot be read")
        except (FileNotFoundError, NotADirectoryError):
            return _Line()
        except FormatError as error:
            logger.warning("the near tier is not used: %s", error)
            return _Line()

    def _write_line(self, line: _Line) -> None:
        self._line = line
        update_file(self._run, NEAR_FILE, lambda _: msgspec.json.encode(line))

    # ---------------------------------------------------------------------------------------- save

    def is_due(self, step: int) -> bool:
        """Tell whether it is time for a near step. All processes get the same answer."""
        by_clock = self._clock.is_due(step, minutes_due(self._every, step), is_asked=False)
        return is_due(self._every, step) or by_clock

    def note_save(self, step: int) -> None:
        """Note that a step is saved, here or by the run."""
        self._clock.note_save(step)

    def save(self, done: Done, late: Callable[[Sequence[bytes]], Mapping[str, Any]]) -> None:
        """Save this process's part of the tree in the background. Wait for the near save before it, for nobody else.
        `late` returns more metadata when the save is committed."""
        position, tree = done.position(), done.state()
        self.wait()
        path = self._path_of(NearStep(done.step, self._epoch))
        own, table = cut_to_own(tree)
        save = start(
            own,
            path,
            metadata={**(done.metadata or {}), **table, _COUNT: jax.process_count()},
            options=self._options,
            detach=True,
            hosts=_hosts.current("saves", (jax.process_index(),), self._timeout),
        )
        save.late, save.part = late, position
        self._pending = Pending(path)
        self.note_save(done.step)
        try:
            self._pending.start(functools.partial(self._carry_out, save), afterwards=compile_copies)
        except BaseException:  # no thread could be started: nobody shall wait for this save
            save.turn.end()
            raise

    def _carry_out(self, save: Save) -> None:
        """Make room for the step, once all processes must have finished the last but one, and write it."""
        try:
            for array in (array for source in save.sources for _, array in source.parts):
                if isinstance(array, jax.Array):
                    array.block_until_ready()
            for step in sorted(self._there())[:-_KEPT]:
                self._remove(step)
        except BaseException:
            save.turn.end()
            raise
        complete(save)

    def _remove(self, step: NearStep) -> None:
        near, epoch = self._process.parent, f"{self._process.name}/{step.epoch}"
        with _logged(near / epoch), Directory.open(near) as place, place.enter(epoch) as folder:
            _remove_entry(folder, step_name(step.number))

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the near save under way. Its error is logged, not raised."""
        pending = self._pending
        if pending is not None and (error := pending.exception(timeout)):
            logger.error("the near step at %s was not saved", pending.path, exc_info=error)
        self._pending = None

    # --------------------------------------------------------------------------------------- files

    def _path_of(self, step: NearStep) -> str:
        return str(self._process / step.epoch / step_name(step.number))

    def _there(self) -> list[NearStep]:
        """List the steps of this process, whole or not, of whatever run."""
        return [
            NearStep(step.number, epoch)
            for epoch in kinds_if_there(store_at(self._process))
            if _EPOCH.fullmatch(epoch)
            for step in steps_if_there(self._process / epoch)
        ]


def _remove_but(stay: Iterable[NearStep], near: Path, process: str) -> None:
    """Remove everything in the epochs of a process but these steps: other steps, and what killed saves have left.

    No directory is entered through a link, which whoever may write to the near tier could have put there. Errors are
    logged: what stays takes room, and nothing else.
    """
    kept = {(step.epoch, step_name(step.number)) for step in stay}
    with _logged(near / process), Directory.open(near) as place, place.enter(process) as folder:
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
    """Remove a step or anything else; under a hidden name, so that a part of a step is never taken for a whole one."""
    with _logged(folder.path / name):
        hidden = name if name.startswith(".") else scratch_name()
        if hidden != name:
            folder.rename(name, folder, hidden)
        remove_entry(folder, hidden)
