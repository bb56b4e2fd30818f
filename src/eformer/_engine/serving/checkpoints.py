"""Keep the last few checkpoints open that pages have asked for, and read their leaves on demand."""

from __future__ import annotations

import threading
from collections import OrderedDict
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from eformer._engine.reports.contents import contents_of
from eformer._engine.reports.facts import leaf_facts
from eformer._engine.reports.reading import measure_one
from eformer._engine.reports.report import made
from eformer._engine.serving.requests import RefusedError
from eformer._engine.serving.rows import Rows

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator

    from eformer._engine.reports.contents import Leaf
    from eformer._engine.reports.reading import Measured
    from eformer._engine.serving.requests import Request

Json = dict[str, Any]

MOST_OPEN = 3  # checkpoints; a tree keeps up to 256 files open, and programs may have 1024
MOST_LEAVES = 300_000  # of all that are open, but for the last
MOST_READERS = 2  # leaves that are read at once; each takes up to three boxes of 16 MiB
_PATIENCE = 0.25  # seconds between two looks whether the client is still there


class GoneError(Exception):
    """The client has gone: nobody waits for the answer."""


class OpenCheckpoint:
    """A checkpoint that is open: its rows, and the leaves that were read."""

    def __init__(self, path: str, readers: threading.Semaphore) -> None:
        self._contents = contents_of(path)
        self._rows = Rows(self._contents)
        self._summary = self._contents.summary() | {
            "kind": "checkpoint",
            "has_values": "on demand",
            "health": {"nan": 0, "inf": 0, "zero": 0},
            "verification": {
                "state": "unchecked",
                "text": "Leaves are read, and checked against their digests, when they are selected.",
            },
        }
        self._readers, self._lock = readers, threading.Lock()

    @property
    def leaves(self) -> int:
        return len(self._contents.leaves)

    def close(self) -> None:
        self._contents.stack.close()

    def summary(self) -> Json:
        return self._summary | made()

    @contextmanager
    def rows(self) -> Iterator[Rows]:
        """Lend the rows to one thread at a time."""
        with self._lock:
            yield self._rows

    def leaf(self, path: str, has_gone: Callable[[], bool]) -> Json | None:
        """Describe a leaf; read it first, unless it was read before. None if there is no such leaf.

        Raise GoneError as soon as nobody waits for it any more.
        """
        if (leaf := self._contents.by_path.get(path)) is None:
            return None
        with self.rows() as rows:
            measured = rows.measured(path)
        if measured is None and leaf.entry:
            measured = self._measure(leaf, has_gone)
            with self.rows() as rows:
                rows.note(path, measured)
        return leaf_facts(leaf, measured)

    def _measure(self, leaf: Leaf, has_gone: Callable[[], bool]) -> Measured:
        def go_on() -> None:
            if has_gone():
                raise GoneError

        while not self._readers.acquire(timeout=_PATIENCE):
            go_on()
        try:
            return measure_one(self._contents, leaf, before_box=go_on)
        finally:
            self._readers.release()


class _Place:
    """A checkpoint that is being opened, or is open, and how many requests use it."""

    def __init__(self) -> None:
        self.users, self.lock = 0, threading.Lock()
        self.checkpoint: OpenCheckpoint | None = None


class Checkpoints:
    """The checkpoints that are open. The one that was used longest ago is closed first."""

    def __init__(self) -> None:
        self._places: OrderedDict[Hashable, _Place] = OrderedDict()
        self._lock = threading.Lock()
        self._readers = threading.BoundedSemaphore(MOST_READERS)

    @contextmanager
    def opened(self, path: str, identity: Hashable) -> Iterator[OpenCheckpoint]:
        """Lend a checkpoint, which stays open for as long. Another `identity` is another one at the same path."""
        key = path, identity
        with self._lock:
            place = self._places.setdefault(key, _Place())
            self._places.move_to_end(key)
            place.users += 1
        try:
            with place.lock:  # others wait for the first to open it
                if place.checkpoint is None:
                    place.checkpoint = OpenCheckpoint(path, self._readers)
            yield place.checkpoint
        finally:
            for unused in self._given_back(place):
                unused.close()

    def _given_back(self, place: _Place) -> list[OpenCheckpoint]:
        """Return the checkpoints to close, now that a request is done with one."""
        with self._lock:
            place.users -= 1
            closed = []
            for key, one in list(self._places.items()):
                if one.users or (one.checkpoint and not self._are_too_many()):
                    continue
                del self._places[key]
                if one.checkpoint:
                    closed.append(one.checkpoint)
            return closed

    def _are_too_many(self) -> bool:
        there = [place.checkpoint for place in self._places.values() if place.checkpoint]
        return len(there) > MOST_OPEN or (len(there) > 1 and sum(one.leaves for one in there) > MOST_LEAVES)


def leaf_of(checkpoint: OpenCheckpoint, request: Request) -> Json | None:
    try:
        return checkpoint.leaf(request.parameters.get("path", ""), request.has_gone)
    except GoneError:
        raise RefusedError(408, "nobody waits for this leaf") from None
