"""Learn that the job is told to end: by JAX's preemption service if it is there, otherwise by a handler of our own."""

from __future__ import annotations

import logging
import os
import signal
import threading
from typing import TYPE_CHECKING, Any

import jax

from eformer._engine.processes import hosts as _hosts

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType

logger = logging.getLogger("eformer")


class Signals:
    """Tells at which call all processes stop. `None` for SIGTERM where that works, `()` for none.

    With JAX's service, SIGTERM belongs to it: a signal in one process stops all at the same call. Other signals raise
    SIGTERM in this process. Without it, a handler notes the signal and calls the handler before it.
    """

    def __init__(self, signals: Sequence[signal.Signals] | None) -> None:
        self._wanted = (signal.SIGTERM,) if signals is None else tuple(signals)
        self._is_optional = signals is None
        self._told = threading.Event()
        self._before: dict[signal.Signals, Any] = {}
        self._service = _has_service()
        self._install()

    def _install(self) -> None:
        if self._wanted and _hosts.current("runs", None, 1.0).count > 1 and not self._service:
            if self._is_optional:
                logger.warning("no signals: several processes need JAX's preemption service, which is off")
                self._wanted = ()
            else:
                raise ValueError(
                    "signals= of several processes need JAX's preemption service: "
                    "jax.config.update('jax_enable_preemption_service', True) before jax.distributed.initialize"
                )
        for one in self._wanted:
            if self._service and one == signal.SIGTERM:
                continue
            try:
                self._before[one] = signal.signal(one, self._handle)
            except ValueError:  # not in the main thread
                if not self._is_optional:
                    raise ValueError("signals= need the main thread: make the Run there") from None
                logger.warning("no signals: a Run that is not made in the main thread cannot handle them")

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._service:
            os.kill(os.getpid(), signal.SIGTERM)
        self._told.set()
        before = self._before.get(signal.Signals(number))
        if callable(before) and before is not signal.default_int_handler:
            before(number, frame)

    def reached(self, call: int) -> bool:
        """Tell whether to stop at this call, which all processes make with the same number."""
        if self._service and self._wanted:
            from jax.experimental import multihost_utils

            return bool(multihost_utils.reached_preemption_sync_point(call))
        return self._told.is_set()

    def close(self) -> None:
        """Put the handlers back that were there before."""
        for one, before in self._before.items():
            if signal.getsignal(one) == self._handle:
                signal.signal(one, before if before is not None else signal.SIG_DFL)
        self._before = {}


def _has_service() -> bool:
    config: Any = jax.config  # its attributes have no types
    return bool(jax.distributed.is_initialized() and getattr(config, "jax_enable_preemption_service", False))
