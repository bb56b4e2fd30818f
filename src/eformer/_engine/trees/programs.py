"""Compile programs for a load in the background, each once.

Tests: tests/engine/loading/test_pinned_stream.py.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import Future
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import jax

if TYPE_CHECKING:
    from collections.abc import Callable

_enable_x64: Any = jax.enable_x64  # it has no types


def program(
    lower: Callable[..., Any], *arguments: Any, device: Any, x64: bool, again: bool = False
) -> Future[Any]:
    """Return the program that `lower(*arguments)` lowers, and begin to compile it on the first call.

    The future has the error of a program that cannot be compiled; with `again`, such a program is tried anew.
    """
    made = _compiling(lower, arguments, device, x64)
    if again and made.done() and made.exception():
        _compiling.cache_clear()  # of all programs: a cache cannot forget a single one
        made = _compiling(lower, arguments, device, x64)
    return made


@lru_cache(256)
def _compiling(lower: Callable[..., Any], arguments: tuple[Any, ...], device: Any, x64: bool) -> Future[Any]:
    """Begin to compile a program, in a thread of its own."""
    made: Future[Any] = Future()

    def run() -> None:
        try:
            # Both settings belong to a thread, and this one has the defaults.
            with jax.default_device(device), _enable_x64(x64):
                made.set_result(lower(*arguments).compile())
        except BaseException as error:  # noqa: BLE001  raised by the thread that waits, if one does
            made.set_exception(error)

    # Not a daemon, so Python waits for it at exit: XLA aborts a process that ends while it compiles.
    threading.Thread(target=run, name="eformer-compile").start()
    return made


# A child has no thread that would finish a program, and would wait for it without end.
os.register_at_fork(after_in_child=_compiling.cache_clear)


def place_of(device: Any, *, is_committed: bool) -> Any:
    """Return the sharding of arrays on a device; None for arrays that are not committed, which JAX may move."""
    return jax.sharding.SingleDeviceSharding(device) if is_committed else None
