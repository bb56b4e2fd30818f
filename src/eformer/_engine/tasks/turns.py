"""Keep saves to one place in order, and let readers of this process wait for saves in the background."""

from __future__ import annotations

import os
import threading
import weakref
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from eformer._engine.tasks import interrupts
from eformer._engine.tasks.deadline import time_left, told

if TYPE_CHECKING:
    from collections.abc import Collection, Container, Iterable, Iterator, Sequence

_PATIENCE = 60.0  # seconds that a save waits for a reader
_LOOK_AGAIN = 1.0  # seconds: a turn that ends by being collected sets no event, and is only found gone

_inside: ContextVar[tuple[threading.Event, ...]] = ContextVar("eformer_readers", default=())


class _Turns:
    """Order the saves to one place: they write side by side, and commit in the order of their calls."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._lock = threading.Lock()  # a new one: a thread of the parent may have held the old one at a fork
        # For each save: its place, its process, and whether it is in the background; in the order of the calls.
        self._under_way: dict[threading.Event, tuple[str, str, bool]] = {}
        self._readers: dict[threading.Event, Collection[str]] = {}

    def take(self, key: str, process: str, *, in_background: bool = False) -> Turn:
        """Queue a save to the place `key`. Several processes of a test live in one program, and each has a queue."""
        with self._lock:  # no other save may be queued between the look at the queue and the new place in it
            turn = Turn(self, key, self.under_way(key, process))
            self._under_way[turn.over] = (key, process, in_background)
        return turn

    def under_way(self, key: str, process: str) -> list[threading.Event]:
        """Return the saves of a process to a place that are not over, to `wait` for."""
        # A copy in one step, because turns end in other threads and without the lock.
        return [over for over, place in self._under_way.copy().items() if place[:2] == (key, process)]

    def are_awaited(self, key: str) -> bool:
        """Tell whether a save to a place is under way."""
        return any(where == key for where, *_ in self._under_way.copy().values())

    def wait(self, saves: Iterable[threading.Event]) -> None:
        """Wait until these saves are over. Raise TimeoutError at the deadline of the call."""
        for over in saves:
            while over in self._under_way:  # not only until the event: a collected turn leaves it unset
                if limit := told():
                    raise TimeoutError(
                        f"{limit} is over, and an earlier save to the same place is still under way"
                    )
                interrupts.wait_until(over.wait, time_left(_LOOK_AGAIN))

    @property
    def has_background(self) -> bool:
        """Tell whether any save in the background is under way."""
        return any(in_background for *_, in_background in self._under_way.copy().values())

    def wait_for_background(self, keys: Container[str]) -> None:
        """Wait for the saves in the background to these places that are under way now.

        Saves in the foreground are not waited for: this may be a function that one of them calls.
        """
        saves = self._under_way.copy().items()
        self.wait([over for over, (key, _, in_background) in saves if in_background and key in keys])

    @contextmanager
    def held_back(self, keys: Collection[str]) -> Iterator[None]:
        """Let saves to these places commit only after the block, for a reader that they have overtaken repeatedly."""
        event = threading.Event()
        with self._lock:
            self._readers[event] = keys
        token = _inside.set((*_inside.get(), event))
        try:
            yield
        finally:
            _inside.reset(token)
            with self._lock:
                self._readers.pop(event, None)  # not there in a child that was forked in the block
            event.set()


class Turn:
    """A place in the queue of saves to one path.

    It also ends when it is collected, because a save may be stopped before it calls `end`: the handler of a timer may
    raise at any instruction. Otherwise all later saves to the path would wait for it.
    """

    def __init__(self, queue: _Turns, key: str, before: Sequence[threading.Event]) -> None:
        self.over, self.before = threading.Event(), before
        self._queue, self._key, self._inside = queue, key, _inside.get()
        # `pop` needs no lock. A finalizer may run at any instruction, also while this thread holds the lock.
        self._forget = weakref.finalize(self, queue._under_way.pop, self.over, None)
        self._forget.atexit = False  # at exit no save waits

    def wait(self) -> None:
        """Wait for the saves before this one, then for the readers that hold it back.

        Wait for a reader for a minute at most, since it may wait for this save itself. A reader inside which the save
        was called is not waited for: it cannot end before the save.
        """
        if self.before:
            self._queue.wait(self.before)
        with self._queue._lock:
            readers = [event for event, keys in self._queue._readers.items() if self._key in keys]
        for reader in readers:
            if reader not in self._inside:
                interrupts.wait_until(reader.wait, time_left(_PATIENCE))

    def end(self) -> None:
        self._forget()  # first: a save that the event wakes must find the turn gone
        self.over.set()


turns = _Turns()
# A child forgets all turns: the threads that would end them are in the parent.
os.register_at_fork(after_in_child=turns.reset)
