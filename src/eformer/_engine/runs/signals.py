"""Learn that the job is told to end: by JAX's preemption service if it is there, otherwise by a handler of our own."""

from __future__ import annotations

import itertools
import logging
import os
import signal
import threading
import time
from _thread import start_new_thread
from typing import TYPE_CHECKING, Any

import jax

from eformer._engine.processes import hosts as _hosts

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType

logger = logging.getLogger("eformer")

# A signal that comes again so soon is the same one: `timeout` sends it to the program, and then to its group.
_ONE_SIGNAL = 0.5  # seconds
_LOG_WITHIN = 1.0

# The service has one sync point for each program, the number of a call. So all runs of a program count together, and
# the first call of a second run sees a notice that came between the two runs.
_calls = itertools.count(1)


class Signals:
    """Tells at which call all processes stop. `signals` is None for SIGTERM where that works, and () for no signal.

    JAX's service handles SIGTERM itself: a signal in one process stops all processes at the same call. Other signals
    raise SIGTERM in this process. Without the service, a handler logs the signal, notes it and calls the previous
    handler.

    A second signal has the same effect as without a run, which ends most programs: the first signal may wait for a call
    that never comes. So does any signal in a process that was forked from this one, which is not part of the job.
    """

    def __init__(self, signals: Sequence[signal.Signals] | None) -> None:
        self._wanted = (signal.SIGTERM,) if signals is None else tuple(signals)
        self._is_optional = signals is None
        self._pid = os.getpid()
        # Without a lock: a handler may interrupt itself, and would wait for itself.
        self._is_told = self._is_closed = False
        self._first_at: dict[signal.Signals, float] = {}
        self._noticed_at: float | None = None  # by JAX's service
        self._unseen: signal.Signals | None = None
        self._logged: threading.Event | None = None  # is set once the first signal is logged
        self._before: dict[signal.Signals, Any] = {}
        self._service = _has_service()

    def install(self) -> None:
        """Set the handlers. After an error or a Ctrl-C at any point of the call, `close` restores the previous ones."""
        if self._wanted and not _hosts.is_alone() and not self._service:
            if self._is_optional:
                logger.warning("no signals: several processes need JAX's preemption service, which is off")
                self._wanted = ()
            else:
                raise ValueError(
                    "signals= of several processes need JAX's preemption service: "
                    "jax.config.update('jax_enable_preemption_service', True) before jax.distributed.initialize"
                )
        if self._wanted and self._service:
            _warn_of_handler()
        for one in self._wanted:
            if self._service and one == signal.SIGTERM:
                continue
            try:
                # Noted before it is replaced: a Ctrl-C between the two lines leaves the previous handler in force, and
                # `close` restores only handlers that were replaced.
                self._before[one] = signal.getsignal(one)
                signal.signal(one, self._handle)
            except ValueError:  # not in the main thread
                if not self._is_optional:
                    raise ValueError("signals= need the main thread: make the Run there") from None
                logger.warning("no signals: a Run that is not made in the main thread cannot handle them")

    def _handle(self, number: int, frame: FrameType | None) -> None:
        one = signal.Signals(number)
        if os.getpid() != self._pid or self._is_closed or self._is_second(one):
            # Sent again, not called: the previous handler may be the default action, which no call can do.
            self._put_back(one)
            os.kill(os.getpid(), number)
            return
        if self._service:  # it listens for SIGTERM alone, and tells all processes
            os.kill(os.getpid(), signal.SIGTERM)
        before = self._before.get(one)
        # The handler of an outer run, which is called below, logs the signal itself.
        if not self._is_told and not isinstance(getattr(before, "__self__", None), Signals):
            self._logged = _log_soon(
                f"{one.name}: the run saves at the next step and stops; a second {one.name} does not wait for it"
            )
        self._is_told = True
        self._unseen = one
        # Python's own handler of Ctrl-C would raise here, and the run could not save at the next step.
        if callable(before) and before is not signal.default_int_handler:
            before(number, frame)

    def _is_second(self, one: signal.Signals) -> bool:
        now = time.monotonic()
        return now - self._first_at.setdefault(one, now) > _ONE_SIGNAL

    def reached(self) -> bool:
        """Tell whether to stop at this call. All processes make the same calls."""
        if self._service and self._wanted:
            from jax.experimental import multihost_utils

            is_reached = bool(multihost_utils.reached_preemption_sync_point(next(_calls)))
            if is_reached and self._noticed_at is None:
                self._noticed_at = time.monotonic()
            if is_reached and not self._is_told:
                logger.warning("the job is told to end: the next step is saved")
            self._is_told = self._is_told or is_reached
            return is_reached
        if self._is_told:
            self._unseen = None
        return self._is_told

    def since(self) -> float:
        """Return how many seconds ago the first signal came, or was noticed."""
        now = time.monotonic()
        return now - min([*self._first_at.values(), self._noticed_at or now])

    def close(self) -> None:
        """Restore the previous handlers. Send a signal again that came too late for any call."""
        self._is_closed = True  # first: a signal from here on goes to the previous handler
        if self._logged:  # the program may end after this call, and its last message would be lost
            self._logged.wait(_LOG_WITHIN)
        put_back = {one: self._put_back(one) for one in self._before if signal.getsignal(one) == self._handle}
        unseen, self._unseen = self._unseen, None
        # A previous handler in Python was called when the signal came. Only the default action has not happened yet.
        if unseen in put_back and put_back[unseen] is signal.SIG_DFL and not self._service:
            os.kill(os.getpid(), unseen)

    def abandon(self) -> None:
        """Leave the next signal to the previous handler. Any thread may call this; only the main one sets handlers."""
        self._is_closed = True

    def _put_back(self, one: signal.Signals) -> Any:
        """Restore the previous handler. Skip handlers of closed runs, which would handle nothing."""
        before = self._before[one]
        while isinstance(owner := getattr(before, "__self__", None), Signals) and owner._is_closed:
            before = owner._before[one]
        before = signal.SIG_DFL if before is None else before
        signal.signal(one, before)
        return before


def _log_soon(message: str) -> threading.Event:
    """Log from another thread, and return an event that is set afterwards.

    The calling thread is in a signal handler. The signal may have interrupted it while it held a lock of logging or
    wrote to the same stream, so logging here could wait for itself.
    """
    logged = threading.Event()

    def log() -> None:
        try:
            logger.warning(message)
        finally:
            logged.set()

    try:
        start_new_thread(log, ())
    except RuntimeError:  # no thread can be started
        logged.set()
    return logged


def _has_service() -> bool:
    config: Any = jax.config  # its attributes have no types
    return bool(jax.distributed.is_initialized() and getattr(config, "jax_enable_preemption_service", False))


def _warn_of_handler() -> None:
    """Warn of a SIGTERM handler in Python: it has replaced JAX's handler, or JAX has replaced it."""
    if callable(signal.getsignal(signal.SIGTERM)):
        logger.warning(
            "SIGTERM has a handler in Python: set before jax.distributed.initialize, it is no longer called; set after "
            "it, JAX does not hear of SIGTERM, and the run does not stop at it"
        )
