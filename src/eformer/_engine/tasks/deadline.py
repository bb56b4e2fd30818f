"""A time by which everything that a call does has to be over: a save, a load, or clearing up after one.

It holds for the thread that sets it, and for those that `run_all` starts.
"""

from __future__ import annotations

import sys
import time
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_URGENT, _AFTERWARDS = 1.0, 60.0  # seconds

_at: ContextVar[tuple[float, str] | None] = ContextVar("eformer_deadline", default=None)


@contextmanager
def within(seconds: float | None, what: str) -> Iterator[None]:
    """Let what is done meanwhile take so many seconds at most; None: as long as it takes. An earlier deadline stays.

    `what` is told in the error, such as "SaveOptions(timeout=5)".
    """
    before, now = _at.get(), time.monotonic()
    if seconds is None or (before and before[0] < now + seconds):
        yield
        return
    token = _at.set((now + seconds, what))
    try:
        yield
    finally:
        _at.reset(token)


@contextmanager
def clearing_up() -> Iterator[None]:
    """Let what is done after an error take a moment, whatever the deadline was: after Ctrl-C, or if the time is over,
    nobody wants to wait for much more."""
    error = sys.exc_info()[0]
    is_urgent = error is not None and (issubclass(error, TimeoutError) or not issubclass(error, Exception))
    token = _at.set((time.monotonic() + (_URGENT if is_urgent else _AFTERWARDS), "the time for clearing up"))
    try:
        yield
    finally:
        _at.reset(token)


def time_left(most: float | None = None) -> float | None:
    """Return how many seconds are left, `most` at most, never fewer than 0; None if there is no limit."""
    found = _at.get()
    if found is None:
        return most
    left = max(0.0, found[0] - time.monotonic())
    return left if most is None else min(left, most)


def told() -> str:
    """Return who has set the deadline, if it is over; else ""."""
    found = _at.get()
    return found[1] if found and found[0] <= time.monotonic() else ""
