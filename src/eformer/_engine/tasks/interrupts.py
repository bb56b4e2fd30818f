"""Hold a Ctrl-C back while a call owns locks, turns, descriptors or scratch files, and hand it on where none gets lost.

Python raises KeyboardInterrupt between any two instructions of the main thread, such as between the opening of a file
and the block that would close it. Therefore a public call runs inside `held_back`, which notes SIGINT and gives it to
the handler of the program at the next `check`, or at the end of the call. `check` is called at places where an error of
the caller could be raised as well: before each task, while waiting, before a commit.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
import time
from concurrent import futures
from contextlib import suppress
from contextvars import ContextVar
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

P = ParamSpec("P")
T = TypeVar("T")

_POLL = 0.05  # seconds until a wait notices a Ctrl-C: short for a person, long for a processor

# The functions below `signal`, which converts all numbers to enums. That takes several times as long, and `Run.after`
# is called at every step of a training.
_system: Any = importlib.import_module("_signal")
_SIGINT = int(signal.SIGINT)
# SIGTERM and SIGHUP end a program without any Python code running, unless it has a handler for them.
_HELD_BACK = (_SIGINT, int(signal.SIGTERM), int(signal.SIGHUP))


class StoppedError(Exception):
    """Raised by `check` in work that its caller has cancelled."""

    __repr__ = Exception.__str__  # for the messages of other processes


class Stop:
    """Asks the work of a context to stop, until the work passes the point from which it goes on to its end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_too_late = False
        self._asked: tuple[BaseException, float] | None = None

    def ask(self, error: BaseException) -> bool:
        """Let `check` raise an error like this one in the work. Return False if it is too late."""
        with self._lock:
            if not self._is_too_late and self._asked is None:
                self._asked = (error, time.monotonic())
            return self._asked is not None

    def close(self) -> BaseException | None:
        """Let the work go on to its end, unless it was asked to stop. Return the error that was asked for."""
        with self._lock:
            self._is_too_late = self._asked is None
            return self._asked[0] if self._asked else None

    def check(self, grace: float = 0.0) -> None:
        """Raise the error if the work was asked to stop at least `grace` seconds ago."""
        if (asked := self._asked) and time.monotonic() - asked[1] >= grace:
            raise type(asked[0])(*asked[0].args)  # a new one, because several threads raise it


given_up: ContextVar[Stop | None] = ContextVar("eformer_given_up", default=None)
"""Asks the work of this context to stop: `Pending.cancel` was called, or a `save_async` that was interrupted returned
no handle."""


class held_back:  # noqa: N801
    """Hold SIGINT back during the block, in the main thread. In other threads, which never see it, do nothing.

    Hold SIGTERM and SIGHUP back if they raise KeyboardInterrupt, as in the command line. If the interrupt is raised
    after the block has ended well, the caller gets no result: `otherwise`, if the block has set it, then undoes the
    call. Clearing up after a Ctrl-C is not interrupted by a second one.

    A block inside another one leaves signals to the outer block, except while that lets them through to a function of
    the caller: then the inner block holds them back.
    """

    def __init__(self) -> None:
        self.otherwise: Callable[[], object] | None = None
        self.lets_through = False
        self._before: dict[int, Callable[[int, Any], object]] = {}
        self._around: held_back | None = None
        self._noted: int | None = None
        self._is_raised = self._is_over = False

    def __enter__(self) -> Self:
        global _outermost, _main
        if (around := _here()) and around.lets_through:
            self._around, around.lets_through = around, False
        elif _outermost is None and threading.current_thread() is threading.main_thread():
            try:
                # `signal.signal` first raises a signal that is pending, and then sets nothing: the block has not begun,
                # and the handlers that are set already are put back. Once it has returned, none is raised.
                for number, before in _handlers():
                    self._before[number] = before
                    _system.signal(number, self.note)
            except BaseException:
                self._put_back()
                raise
            if self._before:  # last, since an error before this line has put the handlers back
                _main, _outermost = threading.get_ident(), self
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        global _outermost
        if not self._before and not self._around:  # inside another block, which hands the signal on
            return
        is_interrupted = kind is not None and issubclass(kind, KeyboardInterrupt)
        try:
            if self._around:
                self._around.lets_through = True
                if not is_interrupted:  # else the signal that was noted is being raised
                    self._around.hand_on()
                return
            _outermost = None  # first, so that the block is over even if the next line is interrupted
            self._put_back()
            if self._noted and not is_interrupted:
                self._before[self._noted](self._noted, sys._getframe())
        except BaseException:
            with held_back():  # a second Ctrl-C must not stop the undoing
                if self.otherwise and kind is None:
                    self.otherwise()
            raise

    def note(self, number: int, frame: Any) -> None:
        """Note a signal. After the block, pass it on: the program may have kept this handler and set it again."""
        if self._is_over:
            self._before[number](number, frame)
        self._noted = number
        if self.lets_through:
            self.hand_on()

    def hand_on(self) -> None:
        """Call the handler of the program if a signal came, unless that has raised an error already."""
        if self._noted is None or self._is_raised:
            return
        number, self._noted, self._is_raised = self._noted, None, True
        self._before[number](number, sys._getframe())
        self._is_raised = False  # the handler only made a note, as that of asyncio does

    def leave_to_parent(self) -> None:
        """Put the handlers back in a forked child, which may never reach the end of the block."""
        self._put_back()

    def _put_back(self) -> None:
        try:
            for number, before in reversed(self._before.items()):
                if _system.getsignal(number) == self.note:  # else the block has set a handler that shall stay
                    _system.signal(number, before)
        finally:
            # A Ctrl-C here leaves this handler in place. From now on it calls the handler before it.
            self._is_over = True


def _handlers() -> Iterator[tuple[int, Callable[[int, Any], object]]]:
    """Yield the signals to hold back, with their handlers. Handlers of the system, or not in Python, stay."""
    for number in _HELD_BACK:
        before = _system.getsignal(number)
        if before is signal.default_int_handler or (number == _SIGINT and callable(before)):
            yield number, before


_outermost: held_back | None = None  # of the main thread
_main = threading.get_ident()  # of the thread of `_outermost`


def uninterrupted(function: Callable[P, T]) -> Callable[P, T]:
    """Hold SIGINT back during every call of a function, see `held_back`."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        with held_back():
            return function(*args, **kwargs)

    return call


def check(grace: float = 0.0) -> None:
    """Raise KeyboardInterrupt if a Ctrl-C was noted. Raise the error of a `Stop` that was asked for at least `grace`
    seconds ago."""
    if (block := _here()) and block._noted is not None:
        block.hand_on()
    if stop := given_up.get():
        stop.check(grace)


def go_on_to_the_end() -> None:
    """Raise like `check`. If nothing is raised, this work can no longer be given up."""
    check()
    if stop := given_up.get():
        stop.close()
        stop.check()  # it may have been asked for in between


def wait_until(until: Callable[[float | None], T], timeout: float | None = None, *, grace: float = 0.0) -> T:
    """Call `until(seconds)` until it returns something true, for at most `timeout` seconds. Notice a Ctrl-C meanwhile,
    and work that is given up for at least `grace` seconds.

    Elsewhere one call waits for the whole time: in other threads no signal is held back.
    """
    if not _can_be_stopped():
        return until(timeout)
    end = None if timeout is None else time.monotonic() + timeout
    while True:
        left = _POLL if end is None else min(_POLL, max(0.0, end - time.monotonic()))
        if (found := until(left)) or (end is not None and time.monotonic() >= end):
            return found
        check(grace)


def let_through(call: Callable[[], T]) -> T:
    """Call a function that waits in the system or in another library, and let KeyboardInterrupt be raised inside it.

    `call` must lose nothing if it is interrupted at any point, also right after it has done its work.
    """
    if (block := _here()) is None:
        return call()
    before, was_raised = block.lets_through, block._is_raised
    # A Ctrl-C between this line and `try` leaves it True. That is harmless: the interrupt is being raised, and
    # `hand_on` calls the handler for one signal only.
    block.lets_through = True
    try:
        check()  # for a signal that was noted before it could be let through
        result = call()
        block._is_raised = was_raised  # the call may have caught an interrupt; the next one counts again
        return result
    finally:
        block.lets_through = before


_MARK = "_eformer_is_of_caller"


def called(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of the caller: let Ctrl-C interrupt it, and mark the error that it raises.

    Without the mark, a FileNotFoundError of a callback would look like a missing file of the checkpoint, and would be
    reported as damage.
    """
    try:
        return let_through(partial(function, *arguments))
    except Exception as error:
        with suppress(Exception):  # the class of an error may refuse attributes
            setattr(error, _MARK, True)
        raise


def is_of_caller(error: BaseException) -> bool:
    """Tell whether a function of the caller has raised an error."""
    return getattr(error, _MARK, False) is True


def result_of(future: futures.Future[T], timeout: float | None = None, *, grace: float = 0.0) -> T:
    """Wait for a future and return its result, like `wait_until`."""
    if not _can_be_stopped():
        return future.result(timeout)
    wait_for_all([future], timeout, grace=grace)
    return future.result(0)


def wait_for_all(
    waited_for: Iterable[futures.Future[Any]], timeout: float | None = None, *, grace: float = 0.0
) -> None:
    """Wait for futures, like `wait_until`."""
    several = list(waited_for)
    wait_until(lambda seconds: not futures.wait(several, seconds).not_done, timeout, grace=grace)


def _can_be_stopped() -> bool:
    """Tell whether this thread receives signals, or its work can be given up."""
    return _here() is not None or given_up.get() is not None


def _here() -> held_back | None:
    """Return the block that holds signals back, if this is the thread that receives them."""
    return _outermost if threading.get_ident() == _main else None


def _leave_to_parent() -> None:
    # A fork by a thread that is not the main thread makes that thread the main thread of the child.
    global _outermost
    block, _outermost = _outermost, None
    if block:
        block.leave_to_parent()


os.register_at_fork(after_in_child=_leave_to_parent)
