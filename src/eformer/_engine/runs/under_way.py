"""The saves of a run that are under way: a later call raises their errors, or tolerates them.

Tests: tests/engine/runs/test_run.py, tests/engine/runs/test_background.py, tests/faults/test_run_disk.py.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import TYPE_CHECKING

from eformer._engine.saving.pending import is_cancelled
from eformer.errors import SupersededError

if TYPE_CHECKING:
    from eformer._engine.saving.pending import Pending

logger = logging.getLogger("eformer")

_LONG_WAIT = 1.0  # seconds


class UnderWay:
    """The saves whose errors have not been raised yet, the oldest first: at most `most` of them are unfinished.

    Only log the errors of `tolerate` failed saves in a row.
    """

    def __init__(self, tolerate: int = 0, most: int = 1) -> None:
        self._tolerate, self._most, self._failures = tolerate, most, 0
        self._saves: deque[Pending] = deque()

    def add(self, pending: Pending) -> None:
        self._saves.append(pending)

    def unfinished(self) -> list[Pending]:
        """Return the saves that have not finished. A later one may have failed, or been cancelled, already."""
        return [pending for pending in self._saves if not pending.done()]

    def are_over(self) -> bool:
        """Tell whether every save has finished."""
        return all(pending.done() for pending in self._saves)

    def wait(self, timeout: float | None = None) -> None:
        """Wait for all saves, and raise the first error; raise TimeoutError after `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        for pending in self._saves:
            pending.exception(None if deadline is None else max(0.0, deadline - time.monotonic()))
        self.raise_failure()

    def wait_for_room(self, path: str) -> None:
        """Wait until one more save may begin. Log a wait of more than a second."""
        began = time.monotonic()
        for pending in [*self._saves][: max(0, len(self._saves) + 1 - self._most)]:
            pending.exception()
        if (waited := time.monotonic() - began) > _LONG_WAIT:
            logger.warning("%s: waited %.1f s for the previous save", path, waited)
        self.raise_failure()

    def raise_failure(self) -> None:
        """Raise the error of a finished save if more saves in a row have failed than are tolerated."""
        while self._saves and self._saves[0].done():
            pending = self._saves.popleft()
            if (error := pending.exception()) is None:
                self._failures = 0
                continue
            if is_cancelled(error):  # by a caller who has the handle of the save
                continue
            self._failures += 1
            if self._failures > self._tolerate or isinstance(error, SupersededError):
                raise error
            logger.error("%s failed, %d in a row are tolerated", pending, self._tolerate, exc_info=error)

    def log_failures(self) -> None:
        """Wait for all saves, and log their errors: the caller raises another error, or has a last save to do."""
        while self._saves:
            pending = self._saves.popleft()
            error = pending.exception()
            if error is not None and not is_cancelled(error):
                logger.error("%s failed", pending, exc_info=error)
