"""Report the progress of a long call to a bar or a callback."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

from eformer._engine.tasks.bars import progress_bar
from eformer._engine.tasks.interrupts import called

if TYPE_CHECKING:
    from collections.abc import Iterator

ProgressCallback = Callable[[int, int], None]

Progress = bool | ProgressCallback | None
"""True for a progress bar; or a function that is called several times a second with the bytes done and the total."""

_INTERVAL = 0.05  # seconds


class Meter:
    """Add up the bytes that several threads have finished, and report them.

    Reported numbers never decrease and never exceed the total, and the total is reported exactly once.
    """

    def __init__(self, total: int, callback: ProgressCallback | None) -> None:
        self._total, self._callback = total, callback
        self._done, self._is_ended = 0, False
        self._last = -math.inf  # not 0: the monotonic clock starts at zero on a machine that has just booted
        self._lock = threading.Lock()

    def add(self, nbytes: int) -> None:
        if self._callback is None:
            return
        with self._lock:
            self._done = min(self._done + nbytes, self._total)
            now = time.monotonic()
            if self._done == self._total or now - self._last >= _INTERVAL:
                self._last = now
                self._report(self._callback)

    def end(self) -> None:
        """Report the total, if it has not been reported."""
        if self._callback is None:
            return
        with self._lock:
            self._done = self._total
            self._report(self._callback)

    def _report(self, callback: ProgressCallback) -> None:
        if self._is_ended:
            return
        self._is_ended = self._done == self._total
        try:
            called(callback, self._done, self._total)
        except Exception as error:
            raise _CallbackError(error) from error


SILENT = Meter(0, None)
"""A meter that reports nothing."""


class _CallbackError(Exception):
    """Carries an exception of the callback to the caller, so that nothing between takes it for an I/O error."""

    def __init__(self, error: Exception) -> None:
        super().__init__(f"the progress callback raised {error!r}")
        self.error = error


def is_wanted(progress: Progress) -> bool:
    """Tell whether progress is to be reported. A callable counts even if it is falsy."""
    if progress is None or callable(progress):
        return progress is not None
    if type(progress).__name__ in ("bool", "bool_"):  # numpy's, too
        return bool(progress)
    raise TypeError(
        f"progress={progress!r}: expected True for a bar, or a function of the bytes done and the total"
    )


@contextmanager
def metered(progress: Progress, total: int, what: str) -> Iterator[Meter]:
    """Yield a meter that reports to `progress`, and report the total on success. Errors of the callback are raised."""
    if not is_wanted(progress):
        yield SILENT
        return
    bar: AbstractContextManager[ProgressCallback] = (
        nullcontext(progress) if callable(progress) else progress_bar(total, what)
    )
    with bar as callback:
        meter = Meter(total, callback)
        try:
            yield meter
            meter.end()
        except _CallbackError as raised:
            raise raised.error from raised.error.__cause__
