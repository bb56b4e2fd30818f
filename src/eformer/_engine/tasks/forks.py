"""A lock that is free in a forked child.

A child has one thread: the thread that forked. A lock that another thread of the parent held at that moment would stay
locked in the child until it ends, as no thread there releases it.
"""

from __future__ import annotations

import os
import weakref
from _thread import RLock

_locks: weakref.WeakSet[Lock] = weakref.WeakSet()


class Lock(RLock):  # type: ignore[misc]  # only the stubs call it final
    """A lock that is free in a forked child, even if a thread of the parent holds it. For data that outlives one call.

    The guarded data must be valid after every instruction: the thread of the parent may be in the middle of a change.
    `with` acquires and releases it in C, and Python handles no signal between that and the block. A lock written in
    Python could be interrupted by Ctrl-C after it was acquired and before the block, and would then stay locked.
    """

    def __init__(self) -> None:
        _locks.add(self)


def _free_all() -> None:
    for lock in list(_locks):  # a list, since a lock may be collected during the loop
        # As `threading` does for its own locks. Releasing it is not possible: its owner is a thread of the parent.
        lock._at_fork_reinit()  # type: ignore[attr-defined]


os.register_at_fork(after_in_child=_free_all)
