"""The near tier of a run: frequent steps in memory or on a local disk, in which each process has its own part.

    <near>/process-0/<epoch>/step-510                   the part of step 510 that process 0 has saved
    <near>/process-1/of-process-0/<epoch>/step-510      a copy of it, which process 1 has made on its host
    <run>/near.json                                     the epochs that belong to the run, and the last step of each

An epoch is the time from one resume to the next, and has a unique id. Steps belong together if they have one number and
one epoch, so processes never mix steps of different jobs. The run never resumes from an epoch that `near.json` does not
name, nor from a step after the last step of an epoch: it belongs to another run, or the run went on from an earlier
step.

A process resumes from its own part, wherever that is: in its near directory, or as a copy in another one. If the job
has another number of processes or another mesh, each process reads the boxes that it needs from all parts.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import re
import time
import weakref
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from eformer._engine.formats.found import kinds_if_there
from eformer._engine.formats.run_steps import Step, steps_if_there
from eformer._engine.processes import hosts as _hosts
from eformer._engine.record.policies import Near, every_from
from eformer._engine.record.step_names import step_name
from eformer._engine.runs.clock import Due
from eformer._engine.runs.copies import Exchange
from eformer._engine.runs.near_epochs import Epochs
from eformer._engine.runs.near_parts import (
    SCHEME,
    Held,
    Here,
    NearPart,
    NearStep,
    PartStore,
    There,
    Where,
    found_by_url,
    where_parts_are,
)
from eformer._engine.runs.near_whole import WholeTier
from eformer._engine.runs.own_part import load_joined, load_own, own_part_of
from eformer._engine.saving.pending import Pending
from eformer._engine.saving.save import complete
from eformer._engine.saving.start import start
from eformer._engine.stores.directory import Directory, remove_entry
from eformer._engine.stores.durable import scratch_name
from eformer._engine.stores.local import on_disk
from eformer._engine.stores.locate import absolute, store_at
from eformer._engine.trees.copies import compile_copies
from eformer.errors import CorruptionError, ProcessError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from eformer._engine.loading.load import LoadedTree
    from eformer._engine.loading.request import Request
    from eformer._engine.record.options import SaveOptions
    from eformer._engine.runs.done import Done
    from eformer._engine.runs.near_parts import StepParts
    from eformer._engine.runs.writer import Writer
    from eformer._engine.saving.save import Format, Save

logger = logging.getLogger("eformer")

NEAR_FILE = "near.json"

# Whole steps beside the step that is being written. When the arrays of step n are computed, every process has begun
# step n - 1, and so has finished step n - 2: that step stays until the next save, so all processes have one in common.
_KEPT = 2
_MOST_EPOCHS = 64  # in the file; the near tier no longer has steps of older ones

_EPOCH = re.compile(r"[0-9a-f]{16}")
_PROCESS = re.compile(r"process-(?P<number>[0-9]{1,9})")
_COPIES = re.compile(r"of-process-(?P<number>[0-9]{1,9})")
_COUNT = "eformer.processes"

# Whole copies beside the copy that is being made: a process that is killed while it makes one has the one before.
_COPIES_KEPT = 1


class NearTier(Due):
    """The near tier of a run, seen from one process.

    The order of calls: `look` before this job becomes the writer, `in_common` in the first process, `note_where`, and
    `begin`; then `is_due`, `save` and `note_save`; then `close`. Errors of near saves and of copies are logged and not
    raised, because the run saves a later step.
    """

    def __init__(
        self,
        near: Near,
        writer: Writer,
        options: SaveOptions,
        seconds: Callable[[], float],
    ) -> None:
        local = on_disk(store_at(absolute(near.path)))
        assert local is not None, "a bucket has a WholeTier"
        super().__init__(every_from(near.every), seconds, options.timeout)
        self._copies = near.copies
        self._near, self._own = Path(local), f"process-{jax.process_index()}"
        if (self._near / self._own).is_symlink():  # `begin` would remove files of its target
            raise ValueError(
                f"{near}: {self._near / self._own} is a link; remove it, or choose another directory"
            )
        self._timeout = options.timeout
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
        self._epochs, self._epoch = Epochs(writer), ""
        self._found: dict[NearPart, str] = {}
        self._where = Where()
        self._exchange: Exchange | None = None
        self._end_exchange: Callable[[], object] = lambda: None
        self._pending: Pending | None = None
        self.took: float | None = None  # seconds from the hand-over of the last save to its commit
        self.saved: int | None = None  # the last step that was saved

    # -------------------------------------------------------------------------------------- resume

    def look(self) -> Held:
        """Return the whole parts of near steps in the near directory, and with copies the door of this process.

        The first process also reads the epochs.
        """
        self.wait()
        self._end_exchange()
        self._found = self._find_parts()
        self._exchange = self._open_exchange()
        if jax.process_index() == 0:
            self._epochs.look()
        door = self._exchange.address if self._exchange else None
        return Held(_hosts.host_id(), door, sorted(self._found))

    def _open_exchange(self) -> Exchange | None:
        if not self._copies or _hosts.is_alone():
            return None
        try:
            exchange = Exchange(self._near, self._found)
        except OSError as error:
            logger.warning("%s: this process copies no near steps: %s", self._near, error)
            return None
        self._end_exchange = weakref.finalize(self, exchange.close)
        return exchange

    def forget(self) -> None:
        """Forget the steps of earlier jobs, before a run that starts anew puts its own steps aside."""
        if jax.process_index() == 0:
            self._epochs.forget()

    def in_common(self, held: Sequence[Held]) -> tuple[list[NearStep], list[str], Where]:
        """Return the steps of this run that all processes can load, the epochs of this run, and where the parts are.
        `held` is from each process. Only the first process calls this."""
        where = where_parts_are(held, self._epochs.has)
        found = [one.step for one in where.steps]
        newest = found[-1].number if found else -1
        others = {part.step.number for one in held for part in one.parts if part.step.number > newest}
        if others:
            logger.warning(
                "the near steps %s are not used: they are not of this run, or parts of them are on hosts that are gone",
                sorted(others),
            )
        return found, self._epochs.ids, where

    def note_where(self, where: Where) -> None:
        """Note where the parts are that all processes have agreed on."""
        self._where = where

    def load(self, step: NearStep, request: Request, *, is_again: bool = False) -> LoadedTree:
        """Load the boxes of this process from its own part of a step; if not every process has one, or if that has
        failed (`is_again`), from all parts. Raise CorruptionError for an unreadable file, so that the run tries another
        step."""
        parts, everyone = self._where.of(step), range(len(self._where.hosts))
        can_join = all(self._where.has_all(one, parts) for one in everyone)
        has_own = all(self._where.has_own(one, parts) for one in everyone)
        try:
            if can_join and (is_again or not has_own):
                return self._load_joined(parts, request)
            with found_by_url(self._part(parts, jax.process_index())) as url:
                return load_own(url, _id_of(step), request)
        except ProcessError:  # a ProcessError may be a TimeoutError, and so an OSError
            raise
        except OSError as error:
            raise CorruptionError(f"{self._near}: near step {step.number} cannot be read: {error}") from error

    def _load_joined(self, parts: StepParts, request: Request) -> LoadedTree:
        own = jax.process_index() if parts.count == jax.process_count() else 0
        stores = [self._part(parts, owner) for owner in range(parts.count)]
        url = f"{SCHEME}://{parts.step.epoch}/{step_name(parts.step.number)}"
        return load_joined(url, stores, own, _id_of(parts.step), request)

    def _part(self, parts: StepParts, owner: int) -> PartStore:
        """Return the store of a part, which reads it in the near directory or asks the processes that hold it."""
        part, me = NearPart(parts.step, owner, parts.count), jax.process_index()
        here = [Here(str(self._near / self._found[part]))] if part in self._found else []
        doors = [self._where.doors[holder] for holder in parts.holders[owner] if holder != me]
        there = [There(door, part) for door in doors if door is not None]
        name = f"process-{owner}/{parts.step.epoch}/{step_name(parts.step.number)}"
        return PartStore(f"{SCHEME}://{name}", [*here, *there])

    def begin(self, number: int, epoch: str, before: Iterable[str] = ()) -> None:
        """Begin an epoch after step `number`. Remove later steps, and steps of epochs that are not in `before`. Begin
        to copy the parts of other processes."""
        self._epoch = epoch
        # The file comes before the removals: if this job dies in between, the later steps no longer count.
        if jax.process_index() == 0:
            self._epochs.begin(number, epoch)
        stay = {
            place
            for part, place in self._found.items()
            if part.step.number <= number and part.step.epoch in before
        }
        for place, _ in self._places():
            _remove_but(stay, self._near, place)
        if self._exchange:
            self._exchange.begin(
                self._where, self._copies, self._own, functools.partial(_make_room, self._near)
            )
        self.note_save(number)

    # ---------------------------------------------------------------------------------------- save

    def save(self, done: Done, late: Callable[[Sequence[bytes]], Mapping[str, Any]]) -> None:
        """Save this process's part of the tree in the background. Wait for its previous near save, but not for other
        processes. `late` returns more metadata when the save is committed."""
        position, tree = done.position(), done.state()
        self.wait()
        step = NearStep(done.step, self._epoch)
        place = _path_in(self._own, step)
        own, table = own_part_of(tree)
        save = start(
            own,
            str(self._near / place),
            metadata={**(done.metadata or {}), **table, _COUNT: jax.process_count()},
            options=self._options,
            origin=done.origin,
            detach=True,
            hosts=_hosts.current("saves", (jax.process_index(),), self._timeout),
        )
        save.late, save.own_metadata = late, position
        part = NearPart(step, jax.process_index(), jax.process_count())
        self._pending = Pending(str(self._near / place))
        self.note_save(done.step)
        try:
            work = functools.partial(self._carry_out, save, part, place, time.monotonic())
            self._pending.start(work, afterwards=compile_copies)
        except BaseException:  # no thread could be started: later saves must not wait for this one
            save.turn.end()
            raise

    def _carry_out(self, save: Save, part: NearPart, place: str, began: float) -> None:
        """Remove all but the last whole steps, then write the new step."""
        try:
            # Computed arrays prove that every process has finished the last step but one.
            for array in (array for source in save.sources for _, array in source.parts):
                if isinstance(array, jax.Array):
                    array.block_until_ready()
            self._remove_old()
        except BaseException:
            save.turn.end()
            raise
        complete(save)
        self.took, self.saved = time.monotonic() - began, part.step.number
        if self._exchange:
            self._exchange.shelf.put(part, place, is_new=True)

    def _remove_old(self) -> None:
        """Remove the own steps but the last ones, and the parts of other processes from before them."""
        there = sorted(_steps_in(self._near, self._own))
        for step in there[:-_KEPT]:
            _remove(self._near, self._own, step)
        if len(there) < _KEPT:
            return
        for place, _ in self._places():
            for step in _steps_in(self._near, place) if place != self._own else ():
                if step.number < there[-_KEPT].number:
                    _remove(self._near, place, step)

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the near save that runs. Log its error, and do not raise it."""
        pending = self._pending
        if pending is not None and (error := pending.exception(timeout)):
            logger.error("the near step at %s was not saved", pending.path, exc_info=error)
        self._pending = None

    def close(self) -> None:
        """Wait for the near save that runs, and end the copying."""
        try:
            self.wait()
        finally:
            self._end_exchange()

    # --------------------------------------------------------------------------------------- files

    def _find_parts(self) -> dict[NearPart, str]:
        """Find the whole parts in the near directory, of any process, and their places below it."""
        found: dict[NearPart, str] = {}
        for place, owner in self._all_places():
            for step in _steps_in(self._near, place):
                path = _path_in(place, step)
                if count := _count_of(Step(step.number, str(self._near / path))):
                    found.setdefault(NearPart(step, owner, count), path)
        return found

    def _places(self) -> list[tuple[str, int]]:
        """Return the places that this process tidies: its own, those of processes that are not on this host, and the
        copies in them."""
        me, hosts = jax.process_index(), self._where.hosts
        others = {number for number, host in enumerate(hosts) if number != me and host == hosts[me]}
        return [(place, owner) for place, owner in self._all_places() if _holder_of(place) not in others]

    def _all_places(self) -> Iterator[tuple[str, int]]:
        """Yield the directories of parts below the near directory, and the process that has saved these."""
        for name, kind in sorted(kinds_if_there(store_at(self._near)).items(), key=self._is_other):
            if kind == "directory" and (process := _PROCESS.fullmatch(name)):
                yield name, int(process["number"])
                for inner, kind_of_inner in kinds_if_there(store_at(self._near / name)).items():
                    if kind_of_inner == "directory" and (copied := _COPIES.fullmatch(inner)):
                        yield f"{name}/{inner}", int(copied["number"])

    def _is_other(self, entry: tuple[str, object]) -> bool:
        return entry[0] != self._own


def _steps_in(near: Path, place: str) -> list[NearStep]:
    """List the steps in a place, whole or damaged, of any run."""
    return [
        NearStep(step.number, epoch)
        for epoch, kind in kinds_if_there(store_at(near / place)).items()
        if kind == "directory" and _EPOCH.fullmatch(epoch)
        for step in steps_if_there(near / place / epoch)
    ]


def _make_room(near: Path, place: str) -> None:
    """Remove all but the last copies of the parts of a process, before the next is made."""
    for step in sorted(_steps_in(near, place))[:-_COPIES_KEPT]:
        _remove(near, place, step)


def _remove(near: Path, place: str, step: NearStep) -> None:
    path = f"{place}/{step.epoch}"
    with _logged(near / path), Directory.open(near) as tier, tier.enter(path) as folder:
        _remove_entry(folder, step_name(step.number))


def _path_in(place: str, step: NearStep) -> str:
    return f"{place}/{step.epoch}/{step_name(step.number)}"


def _holder_of(place: str) -> int:
    return int(place.partition("/")[0].removeprefix("process-"))


def _id_of(step: NearStep) -> str:
    """Return an id that is the same in all processes if their parts belong together."""
    return f"{step.epoch}-{step.number}"


def _count_of(part: Step) -> int:
    """Return how many processes have saved the step of a part; 0 for a part that is not whole."""
    if problem := part.problem():
        logger.warning("%s is not used: %s", part.path, problem)
        return 0
    count = part.metadata.get(_COUNT)
    return count if isinstance(count, int) else 0


def _remove_but(stay: Iterable[str], near: Path, place: str) -> None:
    """Remove everything in the epochs of a place but the parts in `stay`: other parts, and remains of killed saves.

    No directory is entered through a link: other users may be able to write to the near tier, and a link would make
    this process delete its own files elsewhere. Errors are logged, because a part that stays only takes room.
    """
    with _logged(near / place), Directory.open(near) as tier, tier.enter(place) as folder:
        for epoch, kind in folder.kinds().items():
            if kind == "directory" and _EPOCH.fullmatch(epoch):
                with folder.enter(epoch) as inner:
                    for name in inner.kinds():
                        if f"{place}/{epoch}/{name}" not in stay:
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


def near_tier(
    near: Near,
    writer: Writer,
    options: SaveOptions,
    seconds: Callable[[], float],
    format: Format,  # noqa: A002
) -> NearTier | WholeTier:
    """Return the near tier at a path: parts of steps on a local disk, whole steps in a bucket."""
    if not isinstance(near, Near):
        raise TypeError(f"near={near!r}: expected near=Near(path, every=...)")
    if on_disk(store_at(absolute(near.path))) is None:
        return WholeTier(near, writer, options, seconds, format)
    return NearTier(near, writer, options, seconds)
