"""Keep saves to one place in order, and let readers of this process wait for saves in the background."""

from __future__ import annotations

import os
import threading
import weakref
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from eformer._engine.tasks import interrupts

if TYPE_CHECKING:
    from collections.abc import Collection, Container, Iterable, Iterator

_PATIENCE = 60.0  # seconds
_LOOK_AGAIN = 1.0  # seconds: a turn that ends by being collected wakes nobody

_inside: ContextVar[tuple[threading.Event, ...]] = ContextVar("eformer_readers", default=())


class _Turns:
    """Saves to one place commit in the order of their calls, however long each takes to write."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._lock = threading.Lock()
        self._under_way: dict[threading.Event, tuple[str, str]] = {}  # in the order of the calls
        self._in_background: dict[threading.Event, str] = {}
        self._readers: dict[threading.Event, Collection[str]] = {}

    def take(self, key: str, host: str, *, in_background: bool = False) -> Turn:
        turn = Turn(self, key)
        with self._lock:
            turn.before = self.under_way(key, host)
            self._under_way[turn.over] = (key, host)
            if in_background:
                self._in_background[turn.over] = key
        return turn

    def under_way(self, key: str, host: str) -> list[threading.Event]:
        """Return the saves to a place that are not over, to `wait` for."""
        return [over for over, place in self._under_way.copy().items() if place == (key, host)]

    def are_awaited(self, key: str) -> bool:
        """Tell whether a save to a place is under way."""
        return any(where == key for where, _ in self._under_way.copy().values())

    def wait(self, saves: Iterable[threading.Event]) -> None:
        """Wait until these saves are over."""
        for over in saves:
            while over in self._under_way:
                interrupts.wait(over.wait, _LOOK_AGAIN)

    def forget(self, over: threading.Event) -> None:
        """Remove a save. Take no lock: a finalizer calls this, in the middle of anything."""
        self._in_background.pop(over, None)
        self._under_way.pop(over, None)

    @property
    def has_background(self) -> bool:
        """Tell whether any save in the background is under way."""
        return bool(self._in_background)

    def wait_for_background(self, keys: Container[str]) -> None:
        """Wait for the saves in the background to these places that are under way now.

        Saves in the foreground are not waited for: this may be a function that one of them calls.
        """
        self.wait([over for over, key in self._in_background.copy().items() if key in keys])

    @contextmanager
    def held_back(self, keys: Collection[str]) -> Iterator[None]:
        """Let saves to these places commit after the block, for a reader that they have overtaken again and again."""
        event = threading.Event()
        with self._lock:
            self._readers[event] = keys
        token = _inside.set((*_inside.get(), event))
        try:
            yield
        finally:
            _inside.reset(token)
            with self._lock:
                self._readers.pop(event, None)
            event.set()

    def readers_of(self, key: str, inside: Collection[threading.Event]) -> list[threading.Event]:
        """Return the readers that hold saves to a place back, except for those `inside` which the save was called."""
        with self._lock:
            return [event for event, keys in self._readers.items() if key in keys and event not in inside]


class Turn:
    """A place in the queue of saves to one path. It ends when it is collected, if its save was stopped before it could
    `end` it, as by the handler of a timer that raises."""

    def __init__(self, queue: _Turns, key: str) -> None:
        self.over, self.before = threading.Event(), list[threading.Event]()
        self._queue, self._key, self._inside = queue, key, _inside.get()
        self._forget = weakref.finalize(self, queue.forget, self.over)
        self._forget.atexit = False

    def wait(self) -> None:
        """Wait for the saves before this one, and for readers that hold it back: for these a while only, since they may
        wait for it themselves."""
        self._queue.wait(self.before)
        for reader in self._queue.readers_of(self._key, self._inside):
            interrupts.wait(reader.wait, _PATIENCE)

    def end(self) -> None:
        self._forget()
        self.over.set()


turns = _Turns()
os.register_at_fork(after_in_child=turns.reset)  # the threads that would end these turns are in the parent
