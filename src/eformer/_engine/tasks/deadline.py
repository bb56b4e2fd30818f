"""The deadline of a call: a save, a load, or the clearing up after one.

It holds for the thread that sets it, and for the threads that `run_all` starts. It is a context variable, because as
an argument it would have to pass through every function between a save and a request to a bucket.

Tests: tests/faults/test_bucket_time.py, tests/engine/tasks/test_turns.py.
"""

from __future__ import annotations

import sys
import time
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from eformer._engine.tasks.interrupts import given_up

if TYPE_CHECKING:
    from collections.abc import Iterator

# Seconds for clearing up: after Ctrl-C or a timeout the caller is waiting, after other errors a bucket may need a few
# requests to remove the uploaded objects.
_URGENT, _AFTERWARDS = 1.0, 60.0

_at: ContextVar[tuple[float, str] | None] = ContextVar("eformer_deadline", default=None)


@contextmanager
def within(seconds: float | None, name: str) -> Iterator[None]:
    """Limit the block to so many seconds; None sets no limit. An earlier deadline stays.

    `name` names the limit in the error, such as "SaveOptions(timeout=5)".
    """
    before, now = _at.get(), time.monotonic()
    if seconds is None or (before and before[0] < now + seconds):
        yield  # a call inside another one gets no more time
        return
    token = _at.set((now + seconds, name))
    try:
        yield
    finally:
        _at.reset(token)


@contextmanager
def clearing_up(*, is_urgent: bool = False) -> Iterator[None]:
    """Give the block after an error a time of its own, whatever the deadline was: a second after Ctrl-C or a timeout, a
    minute after any other error, unless that `is_urgent`. The block is not stopped if the work was given up.

    The deadline may be over already, and then every request of the clearing up would fail: it replaces the deadline.
    """
    error, stop = sys.exc_info()[0], given_up.set(None)
    # KeyboardInterrupt and SystemExit are no `Exception`.
    is_urgent |= error is not None and (issubclass(error, TimeoutError) or not issubclass(error, Exception))
    token = _at.set((time.monotonic() + (_URGENT if is_urgent else _AFTERWARDS), "the time for clearing up"))
    try:
        yield
    finally:
        _at.reset(token)
        given_up.reset(stop)


def time_left(most: float | None = None) -> float | None:
    """Return the seconds until the deadline, from 0 to `most`; None without a limit."""
    found = _at.get()
    if found is None:
        return most  # a request has a limit of its own, even if the call has none
    left = max(0.0, found[0] - time.monotonic())
    return left if most is None else min(left, most)


def told() -> str:
    """Return the name of the deadline if it is over, else ""."""
    found = _at.get()
    return found[1] if found and found[0] <= time.monotonic() else ""
