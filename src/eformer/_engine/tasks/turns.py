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
    from collections.abc import Collection, Container, Iterable, Iterator, Sequence

_PATIENCE = 60.0  # seconds
_LOOK_AGAIN = 1.0  # seconds: a turn that ends by being collected wakes nobody

_inside: ContextVar[tuple[threading.Event, ...]] = ContextVar("eformer_readers", default=())


class _Turns:
    """Saves to one place commit in the order of their calls, however long each takes to write."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._lock = threading.Lock()
        # The place and the process of each, and whether it is in the background, in the order of the calls.
        self._under_way: dict[threading.Event, tuple[str, str, bool]] = {}
        self._readers: dict[threading.Event, Collection[str]] = {}

    def take(self, key: str, process: str, *, in_background: bool = False) -> Turn:
        with self._lock:
            turn = Turn(self, key, self.under_way(key, process))
            self._under_way[turn.over] = (key, process, in_background)
        return turn

    def under_way(self, key: str, process: str) -> list[threading.Event]:
        """Return the saves to a place that are not over, to `wait` for."""
        return [over for over, place in self._under_way.copy().items() if place[:2] == (key, process)]

    def are_awaited(self, key: str) -> bool:
        """Tell whether a save to a place is under way."""
        return any(where == key for where, *_ in self._under_way.copy().values())

    def wait(self, saves: Iterable[threading.Event]) -> None:
        """Wait until these saves are over."""
        for over in saves:
            while over in self._under_way:
                interrupts.wait_until(over.wait, _LOOK_AGAIN)

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


class Turn:
    """A place in the queue of saves to one path. It ends when it is collected, if its save was stopped before it could
    `end` it, as by the handler of a timer that raises."""

    def __init__(self, queue: _Turns, key: str, before: Sequence[threading.Event]) -> None:
        self.over, self.before = threading.Event(), before
        self._queue, self._key, self._inside = queue, key, _inside.get()
        # It takes no lock: a finalizer may run in the middle of anything.
        self._forget = weakref.finalize(self, queue._under_way.pop, self.over, None)
        self._forget.atexit = False

    def wait(self) -> None:
        """Wait for the saves before this one, and for readers that hold it back: for these a while only, since they may
        wait for it themselves. Readers inside which the save was called are not waited for."""
        if self.before:
            self._queue.wait(self.before)
        with self._queue._lock:
            readers = [event for event, keys in self._queue._readers.items() if self._key in keys]
        for reader in readers:
            if reader not in self._inside:
                interrupts.wait_until(reader.wait, _PATIENCE)

    def end(self) -> None:
        self._forget()
        self.over.set()


turns = _Turns()
os.register_at_fork(after_in_child=turns.reset)  # the threads that would end these turns are in the parent
