"""Renew in a forked child what threads of its parent hold: they are not in the child, and would never give it back."""

from __future__ import annotations

import os
import weakref
from _thread import RLock
from typing import Protocol


class Renewable(Protocol):
    """Something that threads share."""

    def renew_in_child(self) -> None:
        """Be as if no other thread had ever used it. Called in a forked child, before anything else runs there."""
        ...


_shared: weakref.WeakSet[Renewable] = weakref.WeakSet()


def renew_in_children(shared: Renewable) -> None:
    """Renew it in every process that is forked from this one, as long as it exists."""
    _shared.add(shared)


def _renew_all() -> None:
    for shared in list(_shared):
        shared.renew_in_child()


os.register_at_fork(after_in_child=_renew_all)


class Lock(RLock):  # type: ignore[misc]  # only the stubs call it final
    """A lock that is free in a forked child, whoever held it in the parent. For all that outlives one call.

    What it guards must be right at any moment: the thread that held the lock may have been in the middle of a change.
    `with` takes and releases it by functions of C, between which and the block no signal is handled: by functions of
    Python, a Ctrl-C after the lock is taken and before the block would leave it taken for ever.
    """

    def __init__(self) -> None:
        renew_in_children(self)

    def renew_in_child(self) -> None:
        self._at_fork_reinit()  # type: ignore[attr-defined]  # as `threading` itself does
