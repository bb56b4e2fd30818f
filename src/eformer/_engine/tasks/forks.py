"""A lock that is free in a forked child: the threads of the parent are not in it, and would never give it back."""

from __future__ import annotations

import os
import weakref
from _thread import RLock

_locks: weakref.WeakSet[Lock] = weakref.WeakSet()


class Lock(RLock):  # type: ignore[misc]  # only the stubs call it final
    """A lock that is free in a forked child, whoever held it in the parent. For everything that outlives one call.

    The guarded data must be right at any moment: the thread that held the lock may have been in the middle of a change.
    `with` takes and releases it by functions of C, between which and the block no signal is handled: by functions of
    Python, a Ctrl-C after the lock is taken and before the block would leave it taken for ever.
    """

    def __init__(self) -> None:
        _locks.add(self)


def _free_all() -> None:
    for lock in list(_locks):
        lock._at_fork_reinit()  # type: ignore[attr-defined]  # as `threading` itself does


os.register_at_fork(after_in_child=_free_all)
