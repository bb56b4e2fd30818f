"""Remember the save that runs in the background: a later call raises its error, or tolerates it.

Tests: tests/engine/runs/test_run.py, tests/faults/test_run_disk.py.
"""

from __future__ import annotations

import logging
import time
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING

from eformer.errors import SupersededError

if TYPE_CHECKING:
    from eformer._engine.saving.pending import Pending

logger = logging.getLogger("eformer")

_LONG_WAIT = 1.0  # seconds


class LastSave:
    """The last save, whose error has not been raised yet. Only log the errors of `tolerate` failed saves in a row."""

    def __init__(self, tolerate: int = 0) -> None:
        self._tolerate, self._failures = tolerate, 0
        self.pending: Pending | None = None

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the save, and raise its error; raise TimeoutError after `timeout` seconds."""
        if self.pending is not None:
            self.pending.exception(timeout)
        self.raise_failure()

    def wait_before_next(self, path: str) -> None:
        """Wait for the save. Log a wait of more than a second."""
        began = time.monotonic()
        if self.pending is not None:
            self.pending.exception()
        if (waited := time.monotonic() - began) > _LONG_WAIT:
            logger.warning("%s: waited %.1f s for the previous save", path, waited)
        self.raise_failure()

    def raise_failure(self) -> None:
        """Raise the error of a finished save if more saves in a row have failed than are tolerated."""
        if self.pending is None or not self.pending.done():
            return
        pending, self.pending = self.pending, None
        if (error := pending.exception()) is None:
            self._failures = 0
            return
        if isinstance(error, CancelledError):  # by its caller, who has the handle of the save
            return
        self._failures += 1
        if self._failures > self._tolerate or isinstance(error, SupersededError):
            raise error
        logger.error("%s failed, %d in a row are tolerated", pending, self._tolerate, exc_info=error)

    def log_failure(self) -> None:
        """Wait for the save, and log its error: the caller raises another error, or has a last save to do."""
        pending, self.pending = self.pending, None
        error = pending.exception() if pending is not None else None
        if error is not None and not isinstance(error, CancelledError):
            logger.error("%s failed", pending, exc_info=error)
