"""Futures of saves in the background.

Tests: tests/compat_orbax/test_handlers.py.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent import futures
from typing import Any


class Future:
    """Anything with `result(timeout)`."""

    def result(self, timeout: float | None = None) -> Any:
        """Wait, and return the result."""
        raise NotImplementedError


class NoopFuture(Future):
    """A future that is done."""

    def result(self, timeout: float | None = None) -> Any:
        """Return None."""
        return None


class ChainedFuture(Future):
    """Several futures, and a function to call when all of them are done."""

    def __init__(self, futures: Any, cb: Any) -> None:
        self._futures, self._callback = list(futures), cb

    def result(self, timeout: float | None = None) -> Any:
        """Wait for all futures, and call the function."""
        for each in self._futures:
            each.result(timeout)
        self._callback()


class CommitFuture(Future):
    """A coroutine that runs in a thread of its own."""

    def __init__(self, coro: Coroutine[Any, Any, Any], *, name: str | None = None, **_: Any) -> None:
        self._future: futures.Future[Any] = futures.Future()
        threading.Thread(target=self._run, args=(coro,), name=name).start()

    def _run(self, coro: Coroutine[Any, Any, Any]) -> None:
        try:
            self._future.set_result(asyncio.run(coro))
        except BaseException as error:  # noqa: BLE001  `result` raises it
            self._future.set_exception(error)

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the coroutine, and return its result."""
        return self._future.result(timeout)


CommitFutureAwaitingContractedSignals = CommitFuture


def run(coro: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine to its end, also below a running loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coro)
    return CommitFuture(coro).result()
