"""Cancel saves in the background between any two of their calls or requests."""

from __future__ import annotations

import fcntl
import os
import threading
from concurrent.futures import CancelledError
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

from eformer.checkpoint import Pending, save_async

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PATIENCE = 60.0  # seconds; a save takes a hundredth of one


@contextmanager
def held(directory: str | os.PathLike[str]) -> Iterator[None]:
    """Keep saves to a directory from committing: another one has its lock."""
    os.makedirs(directory, exist_ok=True)
    descriptor = os.open(directory, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(descriptor)


class Cancelling:
    """A hook that cancels a save before its call number `at`, of 1 and more; counts the calls if it is not reached."""

    def __init__(self, at: int = 0) -> None:
        self.at, self.count = at, 0
        self.pending: Pending | None = None
        self.was_stopped: bool | None = None  # the answer of `cancel`
        self.where = ""
        self._lock = threading.Lock()

    def __call__(self, *call: object) -> None:
        if self.pending is None:  # the call that begins the save has not returned
            return
        with self._lock:
            self.count += 1
            is_here = self.count == self.at
        if is_here:
            self.where = f"{self.at}: {call}"
            self.was_stopped = self.pending.cancel()

    def save(self, *args: Any, **kwargs: Any) -> None:
        """Save in the background, to the end. Raise the error of the save, and check that it fits the answer."""
        start: Callable[..., None] = Pending.start

        def noted(pending: Pending, *work: Any, **more: Any) -> None:
            self.pending = pending
            start(pending, *work, **more)

        with mock.patch.object(Pending, "start", noted):
            error = save_async(*args, **kwargs).exception(PATIENCE)
        assert isinstance(error, CancelledError) == bool(self.was_stopped), (self.where, error)
        if error is not None:
            raise error
