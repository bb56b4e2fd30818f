"""How far a long call has come, for whoever waits for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

Progress = bool | Callable[[int, int], None] | None
"""True for a bar; or what is called with the bytes that are done and with all there are, some times a second."""

_BETWEEN = 0.05  # seconds


class Meter:
    """Adds up the bytes that several threads are done with."""

    def __init__(self, total: int, report: Callable[[int, int], None] | None) -> None:
        self._total, self._report = total, report
        self._done, self._last = 0, 0.0
        self._lock = threading.Lock()

    def add(self, nbytes: int) -> None:
        if self._report is None:
            return
        with self._lock:
            self._done += nbytes
            now = time.monotonic()
            if now - self._last >= _BETWEEN:
                self._last = now
                self._report(self._done, self._total)

    def end(self) -> None:
        if self._report:
            self._report(self._total, self._total)


@contextmanager
def metered(progress: Progress, total: int, what: str) -> Iterator[Meter]:
    """A meter that reports to `progress`, to the end if all goes well."""
    if progress is not True:
        meter = Meter(total, progress or None)
        yield meter
        meter.end()
        return
    with _bar(total, what) as report:
        meter = Meter(total, report)
        yield meter
        meter.end()


@contextmanager
def _bar(total: int, what: str) -> Iterator[Callable[[int, int], None]]:
    """On standard error, so that what is piped stays clean; live in a notebook."""
    from rich.console import Console  # late: only who wants to see something waits for it
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(),
        TimeRemainingColumn(compact=True, elapsed_when_finished=True),
    )  # fmt: skip
    console = Console(stderr=True)
    with Bars(*columns, console=None if console.is_jupyter else console) as bars:
        task = bars.add_task(what, total=total)
        yield lambda done, _: bars.update(task, completed=done)
