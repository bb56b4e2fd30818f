"""The near tier of a run in a bucket: whole steps, saved more often than the steps of the run, and soon removed.

    <near>/<epoch>/step-510      a step as the run itself would save it; `near.json` of the run names the epoch

All processes save such a step together, and any job can load it: on other hosts, on another mesh.

Tests: tests/engine/runs/test_whole_near.py, tests/multihost/test_near.py.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING, Any

import jax

from eformer._engine.formats.found import kinds_if_there
from eformer._engine.formats.run_steps import steps_if_there
from eformer._engine.loading.load import load_tree
from eformer._engine.record.policies import Keep, every_from
from eformer._engine.record.step_names import step_name
from eformer._engine.runs.clock import Due
from eformer._engine.runs.near_epochs import Epochs
from eformer._engine.runs.near_parts import Held, NearPart, NearStep, Where
from eformer._engine.runs.retention import remove_step
from eformer._engine.runs.series import Series
from eformer._engine.runs.under_way import UnderWay
from eformer._engine.runs.upkeep import Upkeep
from eformer._engine.stores.locate import absolute, store_at
from eformer._engine.stores.store_options import options_during

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from eformer._engine.loading.load import LoadedTree
    from eformer._engine.loading.request import Request
    from eformer._engine.record.options import SaveOptions
    from eformer._engine.record.policies import Near
    from eformer._engine.runs.done import Done
    from eformer._engine.runs.writer import Writer
    from eformer._engine.saving.save import Format

logger = logging.getLogger("eformer")

_KEPT = (Keep(last=2),)
_ALL = 10**9  # failed saves in a row: the run saves a later step


class WholeTier(Due):
    """The near tier of a run in a bucket. Its calls are those of `NearTier`."""

    def __init__(
        self,
        near: Near,
        writer: Writer,
        options: SaveOptions,
        seconds: Callable[[], float],
        format: Format,  # noqa: A002
    ) -> None:
        if near.copies:
            raise ValueError(f"{near}: a bucket needs no copies; leave copies= out")
        super().__init__(every_from(near.every), seconds, options.timeout)
        self._path, self._format = absolute(near.path), format
        self._end_store_options = options_during(self, self._path, options.store_options)
        self._options = dataclasses.replace(options, reuse=False)
        self._writer, self._epochs = writer, Epochs(writer)
        self._series = Series(self._path, _KEPT, UnderWay(_ALL))
        self._upkeep = Upkeep(self._path, lambda: None)

    @property
    def took(self) -> float | None:
        """Seconds from the hand-over of the last save to its commit."""
        return self._series.took

    @property
    def saved(self) -> int | None:
        """The last step that was saved."""
        return self._series.last

    # -------------------------------------------------------------------------------------- resume

    def look(self) -> Held:
        """Return the near steps, in the first process."""
        self.wait()
        if jax.process_index() != 0:
            return Held("", None, [])
        self._epochs.look()
        return Held("", None, [NearPart(step, 0, 1) for step in self._steps()])

    def _steps(self) -> list[NearStep]:
        """List the whole steps of this run."""
        there, found = kinds_if_there(store_at(self._path)), []
        for epoch in self._epochs.ids:
            for step in steps_if_there(self._epoch(epoch)) if epoch in there else ():
                if problem := step.problem():
                    logger.warning("%s is not used: %s", step.path, problem)
                elif self._epochs.has(one := NearStep(step.number, epoch)):
                    found.append(one)
        return found

    def forget(self) -> None:
        """Forget the steps of earlier jobs, before a run that starts anew puts its own steps aside."""
        if jax.process_index() == 0:
            self._epochs.forget()

    def in_common(self, held: Sequence[Held]) -> tuple[list[NearStep], list[str], Where]:
        """Return the steps of this run, and its epochs. Only the first process calls this."""
        return sorted(part.step for part in held[0].parts), self._epochs.ids, Where()

    def note_where(self, where: Where) -> None:
        """All processes find a whole step at one place."""

    def load(self, step: NearStep, request: Request, *, is_again: bool = False) -> LoadedTree:
        return load_tree([f"{self._epoch(step.epoch)}/{step_name(step.number)}"], request)

    def begin(self, number: int, epoch: str, before: Iterable[str] = ()) -> None:
        """Begin an epoch after step `number`. The first step of the epoch replaces the steps of the epochs `before`."""
        if jax.process_index() == 0:
            self._epochs.begin(number, epoch)
        self._series = Series(self._epoch(epoch), _KEPT, UnderWay(_ALL))
        self._upkeep = Upkeep(self._path, _Removal(self._writer, self._series, self._path, [*before]))
        self.note_save(number)

    # ---------------------------------------------------------------------------------------- save

    def save(self, done: Done, late: Callable[[Sequence[bytes]], Mapping[str, Any]]) -> None:
        """Save a step in the background. Wait for the near step before it, and only log its error."""
        self._series.under_way.wait_for_room(self._path)
        self._series.save(
            done,
            late,
            format=self._format,
            options=self._options,
            begin=lambda: None,
            fence=self._writer.check,
            after=self._ask,
        )
        self.note_save(done.step)

    def _ask(self, step: int, path: str) -> None:
        if jax.process_index() == 0:
            self._upkeep.ask()

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the near save that runs. Log its error, and do not raise it."""
        self._series.under_way.wait(timeout)

    def close(self) -> None:
        """Wait for the near save that runs, and for the removal of old steps."""
        self.wait()
        self._upkeep.end()
        self._end_store_options()

    def _epoch(self, epoch: str) -> str:
        return f"{self._path.rstrip('/')}/{epoch}"


@dataclasses.dataclass(frozen=True, slots=True)
class _Removal:
    """Removes the steps of an epoch that no rule keeps, and the steps of the epochs before it."""

    writer: Writer
    series: Series
    path: str
    before: list[str]

    def __call__(self) -> None:
        self.writer.check()
        self.series.remove_others(0.0, self.writer.check)
        while self.before:
            store = store_at(f"{self.path.rstrip('/')}/{self.before[-1]}")
            for step in steps_if_there(store.url):
                remove_step(store, step.name, None)
            self.before.pop()
