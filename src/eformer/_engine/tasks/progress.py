"""How far a long call has come, for whoever waits for it."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

from eformer._engine.tasks.bars import drawn

if TYPE_CHECKING:
    from collections.abc import Iterator

Report = Callable[[int, int], None]

Progress = bool | Report | None
"""True for a bar; or what is called with the bytes that are done and with all there are, some times a second."""

_BETWEEN = 0.05  # seconds


class Meter:
    """Adds up the bytes that several threads are done with. What it says never falls, never is more than the total, and
    is the total once."""

    def __init__(self, total: int, report: Report | None) -> None:
        self._total, self._report = total, report
        self._done, self._is_ended = 0, False
        self._last = -math.inf  # the clock starts anywhere: at zero where the machine has just booted
        self._lock = threading.Lock()

    def add(self, nbytes: int) -> None:
        if self._report is None:
            return
        with self._lock:
            self._done = min(self._done + nbytes, self._total)
            now = time.monotonic()
            if self._done == self._total or now - self._last >= _BETWEEN:
                self._last = now
                self._tell(self._report)

    def end(self) -> None:
        """Says that all is done, if that has not been said."""
        if self._report is None:
            return
        with self._lock:
            self._done = self._total
            self._tell(self._report)

    def _tell(self, report: Report) -> None:
        if self._is_ended:
            return
        self._is_ended = self._done == self._total
        try:
            report(self._done, self._total)
        except Exception as error:
            raise _Objection(error) from error


SILENT = Meter(0, None)
"""For whoever works for somebody who does not want to know."""


class _Objection(Exception):  # noqa: N818
    """What a callback raised, on its way to the caller. Whatever it is, nobody is to take it for an error of a file."""

    def __init__(self, error: Exception) -> None:
        super().__init__(f"the callback for the progress raised {error!r}")
        self.error = error


def is_wanted(progress: Progress) -> bool:
    """A callback may be something that is empty: a list that keeps its calls."""
    if progress is None or callable(progress):
        return progress is not None
    if type(progress).__name__ in ("bool", "bool_"):  # numpy's, too
        return bool(progress)
    raise TypeError(
        f"progress={progress!r}: it is True for a bar, or a function of the bytes done and of all"
    )


@contextmanager
def metered(progress: Progress, total: int, what: str) -> Iterator[Meter]:
    """A meter that reports to `progress`, to the end if all goes well. What a callback raises, is raised here."""
    if not is_wanted(progress):
        how: AbstractContextManager[Report | None] = nullcontext()
    else:
        how = nullcontext(progress) if callable(progress) else drawn(total, what)
    with how as report:
        meter = Meter(total, report)
        try:
            yield meter
            meter.end()
        except _Objection as objection:
            raise objection.error from objection.error.__cause__
