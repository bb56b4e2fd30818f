"""Remove old steps in a thread of their own: a slow, failing or hanging deletion never makes a save wait.

Tests: tests/engine/runs/test_background.py.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from typing import TYPE_CHECKING

from eformer._engine.tasks import interrupts
from eformer.errors import SupersededError

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger("eformer")

_PAUSES = (1.0, 5.0, 25.0)  # seconds before each repetition of a failed removal
_PATIENCE = 30.0  # seconds that the end of a run, or of the program, waits for removals


class Upkeep:
    """Carries out one task of a run again and again, each time that it is asked for: one at a time, in the background.

    Requests that come while the task runs are answered by one more execution. A task that fails is repeated after a
    pause, and its error is logged; it is given up after a few repetitions, until the next request. The thread ends when
    nothing is left to do. It does not keep the program from ending: whatever it was doing, a kill would do as well.
    """

    def __init__(self, name: str, task: Callable[[], None]) -> None:
        self._name, self._task = name, task
        self._changed = threading.Condition()
        self._asked = self._is_running = self._is_ending = False
        _all.add(self)

    def ask(self) -> None:
        """Carry out the task soon. Return immediately."""
        with self._changed:
            self._asked = True
            self._changed.notify_all()
            if self._is_running:
                return
            self._is_running = True
        try:
            threading.Thread(target=self._run, name="eformer-upkeep", daemon=True).start()
        except BaseException:
            self._is_running = False
            raise

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until nothing is left to do, for at most half a minute or `timeout` seconds. Tell whether it is done."""
        deadline = time.monotonic() + min(_PATIENCE, _PATIENCE if timeout is None else timeout)
        while self._is_running and (left := deadline - time.monotonic()) > 0:
            interrupts.check()
            with self._changed:
                if self._is_running:
                    self._changed.wait(min(left, 0.05))
        return not self._is_running

    def end(self, timeout: float | None = None) -> None:
        """Wait as `wait` does, without further repetitions of a failing task. Log a task that is left unfinished."""
        with self._changed:
            self._is_ending = True
            self._changed.notify_all()
        if not self.wait(timeout):
            logger.warning(
                "%s: old steps are still being removed; the next job that saves there goes on with it",
                self._name,
            )

    def _run(self) -> None:
        failures = 0
        while self._is_wanted(failures):
            try:
                self._task()
                failures = 0
            except SupersededError as error:  # another job removes them
                logger.warning("%s: old steps stay: %s", self._name, error)
                failures = 0
            except Exception as error:
                failures += 1
                logger.warning("%s: old steps could not be removed: %s", self._name, error, exc_info=True)

    def _is_wanted(self, failures: int) -> bool:
        """Wait for the pause after a failure. Tell whether to carry the task out once more; if not, end the thread."""
        with self._changed:
            if 0 < failures <= len(_PAUSES) and not self._asked:
                self._changed.wait_for(lambda: self._asked or self._is_ending, _PAUSES[failures - 1])
                is_repeated = not self._is_ending
            else:
                is_repeated = False
            wanted, self._asked = self._asked or is_repeated, False
            if not wanted:
                self._is_running = False
                self._changed.notify_all()
            return wanted

    def _forget(self) -> None:
        """In a forked child: the thread is in the parent."""
        self._changed = threading.Condition()
        self._asked = self._is_running = False


_all: weakref.WeakSet[Upkeep] = weakref.WeakSet()


def _forget_all() -> None:
    for upkeep in list(_all):
        upkeep._forget()


os.register_at_fork(after_in_child=_forget_all)


@atexit.register
def _end_all() -> None:
    # Python has joined the threads of all saves before it calls this.
    for upkeep in list(_all):
        upkeep.end()
