"""Keep saves to one place in order, and let readers of this process wait for saves in the background."""

from __future__ import annotations

import os
import threading
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from eformer._engine.tasks import interrupts

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Container, Iterator

_PATIENCE = 60.0  # seconds

_inside: ContextVar[tuple[threading.Event, ...]] = ContextVar("eformer_readers", default=())


class _Turns:
    """Saves to one place commit in the order of their calls, however long each takes to write."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._lock = threading.Lock()
        self._last: dict[tuple[str, str], threading.Event] = {}
        self._in_background: dict[threading.Event, str] = {}
        self._readers: dict[threading.Event, Collection[str]] = {}

    def take(self, key: str, host: str, *, in_background: bool = False) -> Turn:
        place = (key, host)
        with self._lock:
            before = self._last.get(place)
            after = self._last[place] = threading.Event()
            if in_background:
                self._in_background[after] = key
        inside = _inside.get()
        return Turn(before, after, lambda: self._forget(place, after), lambda: self._readers_of(key, inside))

    def last(self, key: str, host: str) -> threading.Event | None:
        """Return the event that is set when the latest save to a place is over; None if none is under way."""
        with self._lock:
            return self._last.get((key, host))

    def are_awaited(self, key: str) -> bool:
        """Tell whether a save to a place is under way."""
        with self._lock:
            return any(where == key for where, _ in self._last)

    @property
    def has_background(self) -> bool:
        """Tell whether any save in the background is under way."""
        return bool(self._in_background)

    def wait_for_background(self, keys: Container[str]) -> None:
        """Wait for the saves in the background to these places that are under way now.

        Saves in the foreground are not waited for: this may be a function that one of them calls.
        """
        with self._lock:
            events = [event for event, key in self._in_background.items() if key in keys]
        for event in events:
            interrupts.wait(event.wait)

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

    def _readers_of(self, key: str, inside: Collection[threading.Event]) -> list[threading.Event]:
        """Return the readers that hold saves to a place back, except for those `inside` which the save was called."""
        with self._lock:
            return [event for event, keys in self._readers.items() if key in keys and event not in inside]

    def _forget(self, place: tuple[str, str], event: threading.Event) -> None:
        with self._lock:
            self._in_background.pop(event, None)
            if self._last.get(place) is event:
                del self._last[place]


class Turn:
    """A place in the queue of saves to one path."""

    def __init__(
        self,
        before: threading.Event | None,
        after: threading.Event,
        forget: Callable[[], None],
        readers: Callable[[], list[threading.Event]],
    ) -> None:
        self._before, self._after, self._forget, self._readers = before, after, forget, readers

    def wait(self) -> None:
        """Wait for the saves before this one, and for readers that hold it back: for these a while only, since they may
        wait for it themselves."""
        if self._before:
            interrupts.wait(self._before.wait)
        for reader in self._readers():
            interrupts.wait(reader.wait, _PATIENCE)

    def end(self) -> None:
        self._forget()
        self._after.set()


turns = _Turns()
os.register_at_fork(after_in_child=turns.reset)  # the threads that would end these turns are in the parent
