"""Wait for saves in the background, and keep saves to one place in order."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import traceback
import weakref
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

logger = logging.getLogger("eformer")


class Pending:
    """A save under way. Resolves to the path, as text, once the checkpoint is committed and durable.

    `result` raises the error of the save; an error that is never retrieved is logged. The interpreter does not exit
    before the save has finished.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._future: Future[str] = Future()
        self._future.set_running_or_notify_cancel()  # a caller that stops waiting does not stop the save
        self.was_asked = False
        _unfinished.add(self)

    def result(self, timeout: float | None = None) -> str:
        """Wait for the save and return the path. Raise the error of the save, or TimeoutError if it takes too long."""
        self.exception(timeout)
        return self._future.result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        error = self._future.exception(timeout)
        self.was_asked = True
        return error

    def done(self) -> bool:
        return self._future.done()

    def add_done_callback(self, callback: Callable[[Pending], object]) -> None:
        """Call `callback(self)` when the save has finished, in its thread; at once if it has finished already."""
        self._future.add_done_callback(lambda _: callback(self))

    def __await__(self) -> Generator[Any, None, str]:
        import asyncio

        self.was_asked = True
        return asyncio.wrap_future(self._future).__await__()

    def __del__(self) -> None:
        self.complain()

    def complain(self) -> None:
        """Log the error of the save if it was never retrieved."""
        if self._future.done() and not self.was_asked and (error := self._future.exception()):
            self.was_asked = True
            logger.error("saving to %s failed, and its error was never retrieved", self.path, exc_info=error)

    def __repr__(self) -> str:
        state = "under way" if not self.done() else "failed" if self._future.exception() else "done"
        return f"<Pending save to {self.path}: {state}>"

    def start(self, work: Callable[[], None], afterwards: Callable[[], None] | None = None) -> None:
        """Carry out the save in a thread of its own, which the interpreter waits for at exit.

        If it succeeds, call `afterwards` once its result is set.
        """
        arguments = (work, afterwards)
        threading.Thread(target=self._run, args=arguments, name="eformer-save", daemon=False).start()

    def _run(self, work: Callable[[], None], afterwards: Callable[[], None] | None) -> None:
        error = _error_of(work)
        del work
        if error is None:
            self._future.set_result(self.path)
        else:
            # The frames would hold the arrays for as long as the error is kept.
            traceback.clear_frames(error.__traceback__)
            self._future.set_exception(error)
        # Not after an error: `afterwards` might keep the save alive, and its error would not be logged.
        if afterwards and error is None:
            afterwards()


def _error_of(work: Callable[[], None]) -> BaseException | None:
    try:
        work()
    except BaseException as error:  # noqa: BLE001  raised by `result`
        return error
    return None


_unfinished: weakref.WeakSet[Pending] = weakref.WeakSet()


@atexit.register
def _complain_at_exit() -> None:
    for pending in list(_unfinished):
        pending.complain()


# Saves to one place commit in the order of their calls, however long each takes to write.


class _Turns:
    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._lock = threading.Lock()
        self._last: dict[tuple[str, str], threading.Event] = {}

    def take(self, key: str, host: str) -> Turn:
        place = (key, host)
        with self._lock:
            before = self._last.get(place)
            after = self._last[place] = threading.Event()
        return Turn(before, after, lambda: self._forget(place, after))

    def last(self, key: str, host: str) -> threading.Event | None:
        """Return the event that is set when the latest save to a place is over; None if none is under way."""
        with self._lock:
            return self._last.get((key, host))

    def are_awaited(self, key: str) -> bool:
        """Tell whether a save to a place is under way."""
        with self._lock:
            return any(where == key for where, _ in self._last)

    def _forget(self, place: tuple[str, str], event: threading.Event) -> None:
        with self._lock:
            if self._last.get(place) is event:
                del self._last[place]


class Turn:
    """A place in the queue of saves to one path."""

    def __init__(
        self, before: threading.Event | None, after: threading.Event, forget: Callable[[], None]
    ) -> None:
        self._before, self._after, self._forget = before, after, forget

    def wait(self) -> None:
        if self._before:
            self._before.wait()

    def end(self) -> None:
        self._forget()
        self._after.set()


turns = _Turns()
os.register_at_fork(after_in_child=turns.reset)  # the threads that would end these turns are in the parent
