"""Decide by the clock when a run saves, without a message at every step.

Tests: tests/engine/runs/test_run.py, tests/multihost/test_runs.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from eformer._engine.processes import hosts as _hosts
from eformer._engine.record.policies import is_due, minutes_due

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from eformer._engine.record.policies import Every


class Clock:
    """Ask the clock of the first process. The processes meet only at steps that the last meeting has agreed on.

    At a meeting the first process estimates the step at which the time will be over. The next meeting is half of the
    way there, but at most twice as far away as this one was, because steps may become slower. A clock that is set back
    or stops only makes a save late.
    """

    def __init__(self, clock: Callable[[], float], timeout: float | None) -> None:
        self._clock, self._timeout = clock, timeout
        self._is_alone = _hosts.is_alone()
        self.saved_at = self._met_at = clock()  # when the last save began
        self._met_step: int | None = None
        self._next_step = 0

    def note_save(self, step: int) -> None:
        self.saved_at = self._met_at = self._clock()
        self._met_step, self._next_step = step, step + 1

    def is_due(self, step: int, minutes: float | None, left: Callable[[], float] | None = None) -> bool:
        """Tell whether it is time to save. All processes get the same answer.

        It is time when `minutes` have passed since the last save, or when `left` returns no more seconds, whichever
        comes first. `left` is called in the first process.
        """
        if self._is_alone:
            return (minutes is not None or left is not None) and self._left(minutes, left) <= 0
        if (minutes is None and left is None) or step < self._next_step:
            return False

        def answer(_: Sequence[bytes]) -> bytes:
            seconds = self._left(minutes, left)
            return b"save" if seconds <= 0 else str(step + self._distance(step, seconds)).encode()

        with _hosts.meeting("runs", self._timeout) as hosts:
            said = hosts.meet(b"", answer)
        self._met_at, self._met_step = self._clock(), step
        if said == b"save":
            return True
        self._next_step = int(said)
        return False

    def _left(self, minutes: float | None, left: Callable[[], float] | None) -> float:
        both = [] if minutes is None else [self.saved_at + 60 * minutes - self._clock()]
        return min([*both, left()] if left else both)

    def _distance(self, step: int, left: float) -> int:
        """Return how many steps away the next meeting is: half of the way, as fast as the last steps have been."""
        if self._met_step is None:  # the duration of a step is not known yet
            return 1
        passed, steps = self._clock() - self._met_at, max(step - self._met_step, 1)
        if passed <= 0:  # the clock was set back, or stands
            return steps
        return max(1, min(int(left * steps / passed / 2), 2 * steps))


class Due:
    """Tells when near steps are due, by rules for steps and times."""

    def __init__(self, every: Sequence[Every], seconds: Callable[[], float], timeout: float | None) -> None:
        self._every, self._clock = every, Clock(seconds, timeout)

    def is_due(self, step: int) -> bool:
        """Tell whether it is time for a near step. All processes get the same answer."""
        by_clock = self._clock.is_due(step, minutes_due(self._every, step))
        return is_due(self._every, step) or by_clock

    def note_save(self, step: int) -> None:
        """Note that a step is saved, here or by the run."""
        self._clock.note_save(step)
