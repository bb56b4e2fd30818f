"""The epochs of a near tier: which near steps belong to the run, in `near.json` in its directory.

An epoch is the time from one resume to the next, and has a unique id. The run never resumes from an epoch that the file
does not name, nor from a step after the last step of an epoch: it belongs to another run, or the run went on from an
earlier step.

Tests: tests/engine/runs/test_near.py, tests/engine/runs/test_whole_near.py.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import msgspec

from eformer._engine.formats.run_steps import claim_of
from eformer._engine.record.values import parse_json
from eformer._engine.stores.base import read_whole, update_file
from eformer.errors import FormatError

if TYPE_CHECKING:
    from eformer._engine.runs.near_parts import NearStep
    from eformer._engine.runs.writer import Writer

logger = logging.getLogger("eformer")

NEAR_FILE = "near.json"

_MOST_EPOCHS = 64  # in the file; the near tier no longer has steps of older ones


class _Recorded(msgspec.Struct):
    """The epochs from which the run may go on, each up to a step; None for all steps.

    The epochs count only at the path where the file was written, not in a copy of the run, and only while one of
    `writers` is the writer of the run: a later job without a near tier has gone on from other steps.
    """

    path: str = ""
    writers: list[str] = []
    epochs: list[tuple[str, int | None]] = []


class Epochs:
    """The epochs of a run, read and written by the first process alone."""

    def __init__(self, writer: Writer) -> None:
        self._writer, self._run = writer, writer.store
        self._known = _Recorded()

    @property
    def ids(self) -> list[str]:
        return [epoch for epoch, _ in self._known.epochs]

    def has(self, step: NearStep) -> bool:
        """Tell whether the run may go on from a near step."""
        return any(
            step.epoch == epoch and (last is None or step.number <= last)
            for epoch, last in self._known.epochs
        )

    def look(self) -> None:
        """Read the epochs, and add this writer to them before it claims the run: a job that dies between both leaves
        epochs that still count."""
        known, claim = self._read(), claim_of(self._run)
        holder = claim.id if claim else ""
        is_ours = known.path == self._run.url and holder in known.writers
        epochs = known.epochs if is_ours else []
        self._write(_Recorded(self._run.url, [self._writer.id, holder], epochs))

    def forget(self) -> None:
        """Forget the epochs of earlier jobs."""
        self._write(_Recorded(self._known.path, self._known.writers))

    def begin(self, number: int, epoch: str) -> None:
        """Begin an epoch after step `number`: later steps of earlier epochs no longer count."""
        before = [(name, number if last is None else min(number, last)) for name, last in self._known.epochs]
        epochs = [*before, (epoch, None)][-_MOST_EPOCHS:]
        self._write(_Recorded(self._known.path, self._known.writers, epochs))

    def _read(self) -> _Recorded:
        try:
            data, _ = read_whole(self._run, NEAR_FILE)
            return parse_json(data, _Recorded, f"{self._run.path_to(NEAR_FILE)} cannot be read")
        except (FileNotFoundError, NotADirectoryError):
            return _Recorded()
        except FormatError as error:
            logger.warning("the near tier is not used: %s", error)
            return _Recorded()

    def _write(self, known: _Recorded) -> None:
        self._known = known
        update_file(self._run, NEAR_FILE, lambda _: msgspec.json.encode(known))
