"""Run many small tasks on a few threads, and create many small objects without garbage collection."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Sized
from contextlib import contextmanager, suppress
from contextvars import copy_context
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

from eformer._engine.tasks import interrupts
from eformer._engine.tasks.forks import Lock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence


T = TypeVar("T")


def default_threads() -> int:
    """Return one thread a core, 2 to 16: more would only contend for the interpreter lock."""
    return min(16, max(2, os.cpu_count() or 1))


def run_all(
    tasks: Iterable[Callable[[], None]], threads: int, on_error: Callable[[], None] | None = None
) -> None:
    """Run every task. The first error stops the rest and is raised here.

    A task is taken from the iterable only when a thread is free for it, so the number of threads bounds the memory that
    tasks hold. The caller's thread is one of them. `on_error` is called to wake tasks that wait for another task.
    """
    if isinstance(tasks, Sized):
        threads = min(threads, len(tasks))
    if threads <= 1:
        _run_alone(tasks, on_error)
        return
    work = _Work(tasks, on_error)
    helpers = [
        # In the context of the caller, which has the deadline and the readers that a save is called inside.
        threading.Thread(target=copy_context().run, args=(work.help,), name="eformer-io")
        for _ in range(threads - 1)
    ]
    try:
        with suppress(RuntimeError):  # no new thread can start, as at exit: go on with fewer
            for helper in helpers:
                helper.start()
        work.run()
    except BaseException as error:  # noqa: BLE001  such as Ctrl-C: helpers finish their current task only
        work.fail(error)
    # No helper may outlive the call: it would write to files and arrays that the caller believes to be free.
    while True:
        try:
            work.wait()
            for helper in helpers:
                with suppress(RuntimeError):  # it was never started
                    helper.join()
            break
        except BaseException as error:  # noqa: BLE001  Ctrl-C while waiting: join every helper in spite of it
            work.fail(error)
    if work.error:
        raise work.error


def _run_alone(tasks: Iterable[Callable[[], None]], on_error: Callable[[], None] | None) -> None:
    try:
        interrupts.check()
        for task in tasks:
            task()
            interrupts.check()
    except BaseException:
        if on_error:
            on_error()
        raise


@contextmanager
def cancelled_with_others(cancel: Callable[[], object]) -> Iterator[None]:
    """Call `cancel` if another task of the same `run_all` fails during the block, which would then wait in vain."""
    work: _Work | None = getattr(_current, "work", None)
    if work is None:
        yield
        return
    work.watch(cancel)
    try:
        yield
    finally:
        work.forget(cancel)


class Later(Generic[T]):
    """The result of a function that runs in a thread of its own, which does not keep the program from ending."""

    def __init__(self, function: Callable[[], T]) -> None:
        self._found: T
        self._error: BaseException | None = None
        run = copy_context().run
        self._thread = threading.Thread(
            target=run, args=(self._run, function), name="eformer-later", daemon=True
        )
        self._thread.start()

    def _run(self, function: Callable[[], T]) -> None:
        try:
            self._found = function()
        except BaseException as error:  # noqa: BLE001  raised by `result`
            self._error = error

    def result(self) -> T:
        """Wait for the function, and return its result or raise its error."""
        while self._thread.is_alive():
            interrupts.check()
            self._thread.join(0.05)
        if self._error is not None:
            raise self._error
        return self._found


class Countdown:
    """Calls a function when a number of tasks is done. After an error in a task the function is never called."""

    _lock = Lock()  # one for all: it is held for an addition, and very many files have a countdown each

    def __init__(self, end: Callable[[], None], count: int = 1) -> None:
        self._end, self._count = end, count

    def after(self, task: Callable[[], None]) -> Callable[[], None]:
        """Count one more task and return it wrapped. `close` the countdown after the last one."""
        with self._lock:
            self._count += 1
        return partial(self.carry_out, task)

    def carry_out(self, task: Callable[[], None]) -> None:
        task()
        self.count_down()

    def count_down(self, count: int = 1) -> None:
        with self._lock:
            self._count -= count
            is_last = self._count == 0
        if is_last:
            self._end()

    close = count_down


def in_turn(tasks: Sequence[Callable[[], None]], end: Callable[[], None]) -> list[Callable[[], None]]:
    """Wrap the tasks so that the last to finish calls `end`. Without tasks, return `end` alone."""
    countdown = Countdown(end, len(tasks))
    return [partial(countdown.carry_out, task) for task in tasks] or [end]


_VERY_MANY = 10_000
_FEW = 1_000


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause the garbage collector while very many objects are created, none of which is garbage.

    With JAX loaded, a full collection takes a tenth of a second, and creating 10,000 arrays starts several. Afterwards,
    very many young objects move to the oldest generation: to scan each of them twice before takes as long as to create
    them.
    """
    was_enabled, pause = gc.isenabled(), object()
    try:
        if was_enabled:  # else another pause is under way, and will enable the collector
            _pauses.add(pause)
        gc.disable()
        yield
    finally:
        if was_enabled:
            try:
                # Keep objects frozen that the caller froze; Python 3.12 itself freezes a few hundred.
                if gc.get_count()[0] > _VERY_MANY and gc.get_freeze_count() < _FEW:
                    gc.freeze()
                    gc.unfreeze()  # into the oldest generation
            finally:
                gc.enable()
                _pauses.discard(pause)


_pauses: set[object] = set()  # the pauses under way that will enable the collector again


def _end_pauses() -> None:
    # In a forked child: the threads that would end these pauses are in the parent, and nothing would enable the
    # collector of the child again.
    if _pauses:
        _pauses.clear()
        gc.enable()


os.register_at_fork(after_in_child=_end_pauses)


_current = threading.local()  # `work`: the `_Work` whose task this thread carries out


class _Work:
    """The shared state of the threads of one `run_all`."""

    def __init__(self, tasks: Iterable[Callable[[], None]], on_error: Callable[[], None] | None) -> None:
        self.tasks = iter(tasks)
        self.on_error = on_error
        self.lock = threading.Lock()
        self.error: BaseException | None = None
        self.helping, self.helpers = threading.Condition(), 0
        self.watching = threading.Lock()  # of `error` and `cancels`
        self.cancels: list[Callable[[], object]] = []

    def help(self) -> None:
        with self.helping:
            self.helpers += 1
        try:
            self.run()
        finally:
            with self.helping:
                self.helpers -= 1
                self.helping.notify_all()

    def wait(self) -> None:
        """Wait until all helpers have ended. A helper that starts only now finds nothing to do."""
        with self.helping:
            interrupts.wait_until(lambda seconds: self.helping.wait_for(lambda: not self.helpers, seconds))

    def take(self) -> Callable[[], None] | None:
        interrupts.check()
        with self.lock:
            return None if self.error else next(self.tasks, None)

    def run(self) -> None:
        before, _current.work = getattr(_current, "work", None), self
        try:
            while task := self.take():
                task()
        except BaseException as error:  # noqa: BLE001  raised by run_all, in the caller's thread
            self.fail(error)
        finally:
            _current.work = before

    def watch(self, cancel: Callable[[], object]) -> None:
        with self.watching:
            self.cancels.append(cancel)
            is_late = self.cancels_others(self.error)
        if is_late:
            cancel()

    def forget(self, cancel: Callable[[], object]) -> None:
        with self.watching:
            self.cancels.remove(cancel)

    @staticmethod
    def cancels_others(error: BaseException | None) -> bool:
        """Tell whether an error ends the waits of other tasks at once. Work that is given up ends them itself: a
        request that is answered in time leaves nothing behind."""
        return error is not None and not isinstance(error, interrupts.StoppedError)

    def fail(self, error: BaseException) -> None:
        with self.watching:  # not the lock of the tasks: it is held while the iterable makes the next one
            self.error, cancels = self.error or error, list(self.cancels)
        for cancel in cancels if self.cancels_others(error) else ():
            cancel()
        if self.on_error:
            self.on_error()
