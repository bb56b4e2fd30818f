"""Many small tasks on a few threads; and many small objects at once."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Sized
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence


def default_threads() -> int:
    """One a core, and never one alone: more only wait for the interpreter."""
    return min(16, max(2, os.cpu_count() or 1))


def run_all(
    tasks: Iterable[Callable[[], None]], threads: int, on_error: Callable[[], None] | None = None
) -> None:
    """Runs every task; the first error stops the rest and is raised here.

    A task is taken from the iterable when a thread is free for it, never before: what tasks hold in memory is
    bounded by the number of threads. The caller's thread is one of them. `on_error` wakes tasks that wait for others.
    """
    if isinstance(tasks, Sized):
        threads = min(threads, len(tasks))
    work = _Work(tasks, on_error)
    helpers = [threading.Thread(target=work.help, name="eformer-io") for _ in range(threads - 1)]
    try:
        with suppress(RuntimeError):  # no threads to be had, as when the interpreter exits: then without
            for helper in helpers:
                helper.start()
        work.run()
    except BaseException as error:  # noqa: BLE001  Ctrl-C, say: the helpers finish what they are at, and no more
        work.fail(error)
    while True:
        try:
            work.wait()
            for helper in helpers:
                with suppress(RuntimeError):  # it was never started
                    helper.join()
            break
        except BaseException as error:  # noqa: BLE001  Ctrl-C while waiting: they end soon, and nobody is left behind
            work.fail(error)
    if work.error:
        raise work.error


def in_turn(tasks: Sequence[Callable[[], None]], end: Callable[[], None]) -> list[Callable[[], None]]:
    """The same tasks; whichever ends last, calls `end`. Without tasks, that is all there is to do."""
    if not tasks:
        return [end]
    left, lock = len(tasks), threading.Lock()

    def carry_out(task: Callable[[], None]) -> None:
        nonlocal left
        task()
        with lock:
            left -= 1
            is_last = left == 0
        if is_last:
            end()

    return [partial(carry_out, task) for task in tasks]


_VERY_MANY = 10_000
_FEW = 1_000


@contextmanager
def gc_paused() -> Iterator[None]:
    """Lets the garbage collector rest while very many objects are made, none of which is garbage.

    With JAX loaded a full collection takes a tenth of a second, and making 10,000 arrays starts several. Afterwards
    very many young objects count as old: to look at each of them twice before they do, takes as long as to make them.
    """
    was_enabled = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if was_enabled:
            try:
                # What a caller has frozen, stays so; some hundreds Python 3.12 freezes by itself.
                if gc.get_count()[0] > _VERY_MANY and gc.get_freeze_count() < _FEW:
                    gc.freeze()
                    gc.unfreeze()  # into the oldest generation
            finally:
                gc.enable()


class _Work:
    def __init__(self, tasks: Iterable[Callable[[], None]], on_error: Callable[[], None] | None) -> None:
        self.tasks = iter(tasks)
        self.on_error = on_error
        self.lock = threading.Lock()
        self.error: BaseException | None = None
        self.helping, self.helpers = threading.Condition(), 0

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
        """Until all helpers have ended. One that begins only now finds nothing to do."""
        with self.helping:
            while self.helpers:
                self.helping.wait()

    def take(self) -> Callable[[], None] | None:
        with self.lock:
            return None if self.error else next(self.tasks, None)

    def run(self) -> None:
        try:
            while task := self.take():
                task()
        except BaseException as error:  # noqa: BLE001  raised by run_all, in the caller's thread
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        self.error = self.error or error
        if self.on_error:
            self.on_error()
