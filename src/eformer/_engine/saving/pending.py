"""Saves in the background: carry them out in threads, wait for them, cancel them, report their errors.

Tests: tests/engine/saving/test_pending.py, tests/engine/saving/test_cancel.py, tests/faults/test_cancel.py,
tests/multihost/test_cancel.py.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import threading
import traceback
import weakref
from concurrent import futures
from typing import TYPE_CHECKING, Any

from eformer._engine.processes.hosts import told_to_all
from eformer._engine.record.text import few
from eformer._engine.saving.save import complete
from eformer._engine.tasks import interrupts
from eformer._engine.tasks.interrupts import uninterrupted
from eformer._engine.trees.copies import compile_copies
from eformer.errors import ProcessError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable

    from eformer._engine.saving.save import Save

logger = logging.getLogger("eformer")


class Pending:
    """A save under way. Resolves to the path, as text, once the checkpoint is committed and durable.

    `result` raises the error of the save. An error that is never retrieved is logged. The interpreter does not exit
    before the save has finished. A Ctrl-C ends that wait: the save is lost, and the previous checkpoint stays.

    Example:

        >>> pending = checkpoint.save_async(state, "run/step-400")
        >>> pending.result()  # waits
        'run/step-400'
        >>> pending.done()
        True
    """

    was_asked = True  # for `__del__`, which Python also calls if Ctrl-C interrupts `__init__`

    def __init__(self, path: str) -> None:
        self.path = path
        self._future: futures.Future[str] = futures.Future()
        # A running future cannot be cancelled: `asyncio` tries to when the caller stops waiting, and the save goes on.
        self._future.set_running_or_notify_cancel()
        self.was_asked = False
        self._number = next(_numbers)
        self._thread: threading.Thread | None = None
        self._is_over = False
        self._error: BaseException | None = None
        self._stop = interrupts.Stop()

    @uninterrupted
    def result(self, timeout: float | None = None) -> str:
        """Wait for the save and return the path. Raise its error, or TimeoutError after `timeout` seconds."""
        self.exception(timeout)
        return self._future.result()

    @uninterrupted
    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the save, for at most `timeout` seconds, and return its error, or None if it succeeded."""
        interrupts.wait_for_all([self._future], timeout)
        error = self._future.exception(0)
        self.was_asked = True
        return error

    @uninterrupted
    def done(self) -> bool:
        """Tell whether the save has finished, with or without an error."""
        return self._future.done()

    def has_failed(self) -> bool:
        """Tell whether the save is over and has an error, without retrieving it."""
        return self._future.done() and self._future.exception() is not None

    @uninterrupted
    def cancel(self) -> bool:
        """Stop the save, unless its commit has begun. Return True if it is stopped: the path stays as it was.

        The save removes its files, and then gives its turn to the next save; `exception()` waits for that. `result`
        raises `concurrent.futures.CancelledError`, and `await` raises `asyncio.CancelledError`. With several processes
        it fails in all of them. Return False if the save is over, or goes on to its end.

        Example:
            >>> pending = checkpoint.save_async(state, "run/step-500")
            >>> if pending.cancel():
            ...     pending.exception()  # nothing of it is left
        """
        if is_stopped := self._stop.ask(interrupts.StoppedError(_CANCELLED)):
            self.was_asked = True
        return is_stopped

    @uninterrupted
    def add_done_callback(self, callback: Callable[[Pending], object]) -> None:
        """Call `callback(self)` when the save has finished, in its thread; immediately if it has finished already."""
        self._future.add_done_callback(lambda _: callback(self))

    def __await__(self) -> Generator[Any, None, str]:
        import asyncio

        self.was_asked = True
        return asyncio.wrap_future(self._future).__await__()

    def __del__(self) -> None:
        self.complain()

    def complain(self) -> None:
        """Log the error of the save if it was never retrieved."""
        if not self.was_asked and self._future.done() and (error := self._future.exception()):
            self.was_asked = True
            logger.error("saving to %s failed, and its error was never retrieved", self.path, exc_info=error)

    def give_up(self) -> None:
        """Stop a save whose caller was interrupted before it got this handle, unless the commit has begun."""
        self.was_asked = True
        self._stop.ask(KeyboardInterrupt("the call that began this work was interrupted"))

    def leave_to_parent(self) -> None:
        """Give up the save in a forked child: its thread is in the parent. `wait` passes over it, `result` raises."""
        # A new future even for a save that is over: a thread of the parent may hold the lock of the old one.
        self._future, self.was_asked, self._stop = futures.Future(), True, interrupts.Stop()
        self._stop.close()
        if self._is_over and self._error is None:
            self._future.set_result(self.path)
        else:
            under_way = f"the parent of this forked process saves to {self.path}: wait in the parent"
            self._future.set_exception(self._error or RuntimeError(under_way))

    def __repr__(self) -> str:
        error = self._future.exception() if self.done() else None
        failed = "cancelled" if isinstance(error, futures.CancelledError) else "failed"
        return f"<Pending save to {self.path}: {'under way' if not self.done() else failed if error else 'done'}>"

    def start(self, work: Callable[[], None], afterwards: Callable[[], None] | None = None) -> None:
        """Carry out the save in a new thread, which the interpreter waits for at exit.

        After a success, call `afterwards` when the result is set.
        """
        arguments = (work, afterwards)
        self._thread = threading.Thread(target=self._run, args=arguments, name="eformer-save", daemon=False)
        self._thread.start()
        _started.add(self)  # only now: `wait` must not wait for a thread that could not start

    def _run(self, work: Callable[[], None], afterwards: Callable[[], None] | None) -> None:
        interrupts.given_up.set(self._stop)  # for `interrupts.check` in this thread and its helpers
        error, asked = _error_of(work), self._stop.close()
        del work  # it holds the save, and with it arrays that the next one needs room for
        if error is None:
            self._future.set_result(self.path)
        else:
            # The frames of the traceback hold arrays, and the caller may keep the error.
            traceback.clear_frames(error.__traceback__)
            if isinstance(asked, interrupts.StoppedError):
                error = futures.CancelledError(f"saving to {self.path} was cancelled; nothing was committed")
            self._error = error
            self._future.set_exception(error)
        self._is_over = True
        # Not after an error: `afterwards` may keep this object alive, and the error is logged when it is collected.
        if afterwards and error is None:
            afterwards()


def run_in_background(save: Save, pending: Pending, after: Callable[[], None] | None = None) -> None:
    """Carry out a save in a new thread; call `after` when it is committed."""

    def work() -> None:
        complete(save)
        if after:
            after()

    try:
        pending.start(work, afterwards=compile_copies)
    except (
        BaseException
    ) as error:  # no thread could be started: later saves and other processes must not wait
        save.turn.end()
        save.hosts.fail(error)
        raise


def serialize_with(manager: Any, save: Save, callback: Callable[[], None] | None) -> None:
    """Carry out a save in a `GlobalAsyncCheckpointManager` of JAX, and return when the manager does.

    The manager gets no arrays. It waits for its previous save, and raises the error of that save here. Then it calls
    back, in its own thread and in the first process alone. The save is carried out in that call, so that
    `wait_until_finished` waits for it and raises its error. The other processes write in a thread of eformer.
    """
    # The manager orders its saves itself. If it never calls back, later saves must not wait for this turn.
    save.turn.end()

    def commit() -> None:
        try:
            complete(save)
        except BaseException as error:  # logged, because the manager forgets an error that is never asked for
            logger.error("saving to %s failed: %s", save.store.url, error)
            raise
        finally:
            save.sources.clear()  # the manager keeps this function, and through it the arrays, until its next save
        if callback is not None:
            callback()
        compile_copies()

    # In a thread without an event loop: the manager starts one, and a notebook already runs one in this thread.
    with told_to_all(save.hosts), futures.ThreadPoolExecutor(1) as pool:
        pool.submit(manager.serialize, [], [], on_commit_callback=commit).result()
    if save.hosts.number:
        run_in_background(save, Pending(save.store.url), after=callback)


def wait_for_saves_below(path: str) -> None:
    """Wait for the background saves of this process to paths in a directory, and leave their errors to their callers.

    A save that calls this itself, in a callback, is not waited for.
    """
    below = [one for one in list(_started) if one.path.startswith(f"{path.rstrip('/')}/")]
    others = [one for one in below if one._thread is not threading.current_thread()]
    interrupts.wait_for_all([one._future for one in others])


_CANCELLED = "the save was cancelled"


def is_cancelled(error: BaseException) -> bool:
    """Tell whether a save was cancelled, here or in another process."""
    is_told = isinstance(error, ProcessError) and str(error).endswith(_CANCELLED)
    return is_told or isinstance(error, futures.CancelledError)


def _error_of(work: Callable[[], None]) -> BaseException | None:
    try:
        work()
    except BaseException as error:  # noqa: BLE001  raised by `result`
        return error
    return None


_numbers = itertools.count()  # the order of the calls, which the set does not have
# Weak, so that a save without a handle is collected when it is over, and `__del__` logs its error.
_started: weakref.WeakSet[Pending] = weakref.WeakSet()


def _leave_to_parent() -> None:
    """In a forked child: give up the saves of the parent, which has their threads."""
    for pending in list(_started):
        pending.leave_to_parent()
    _started.clear()


os.register_at_fork(after_in_child=_leave_to_parent)


@atexit.register
def _complain_at_exit() -> None:
    # Python has joined the threads of all saves before it calls this.
    for pending in list(_started):
        pending.complain()


@uninterrupted
def wait(timeout: float | None = None) -> None:
    """Wait for every `save_async` of this process. Raise the first error of a save that has not been raised yet.

    Further errors are logged. After `timeout` seconds, raise a TimeoutError that names the saves still under way. A
    save whose own callback calls this is not waited for.

    Example:
        >>> checkpoint.save_async(state, "run/step-200")
        >>> checkpoint.wait()
    """
    wait_for(list(_started), timeout)


@uninterrupted
def wait_for(saves: Iterable[Pending], timeout: float | None = None) -> None:
    """Wait for saves, and raise the first error among them that was not retrieved yet."""
    in_order = sorted(saves, key=lambda save: save._number)
    others = [save for save in in_order if save._thread is not threading.current_thread()]
    unasked = [save for save in others if not save.was_asked]
    interrupts.wait_for_all([save._future for save in others], timeout)
    if late := [save.path for save in others if not save.done()]:
        raise TimeoutError(f"not finished after {timeout} seconds: saving to {few(late)}")
    failed = [save for save in unasked if not save.was_asked and save.exception() is not None]
    for other in failed[1:]:
        logger.error("saving to %s failed", other.path, exc_info=other.exception())
    if failed:
        failed[0].result()
