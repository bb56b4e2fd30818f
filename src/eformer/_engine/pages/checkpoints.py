"""Keep the last few checkpoints open that pages have asked for, alone or beside another. Leaves are read on demand."""

from __future__ import annotations

import threading
from collections import OrderedDict
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from eformer._engine.pages.changes import overview
from eformer._engine.pages.contents import page_contents
from eformer._engine.pages.facts import columns, leaf_facts
from eformer._engine.pages.reading import measure_one
from eformer._engine.pages.report import changes_of, made
from eformer._engine.pages.requests import RefusedError, as_json

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator

    from eformer._engine.pages.contents import Leaf
    from eformer._engine.pages.reading import Measured
    from eformer._engine.pages.requests import Answer

Json = dict[str, Any]
Place = tuple[str, "Hashable"]  # a path, and what tells a checkpoint from another one at the same path

MOST_OPEN = 3  # checkpoints; a tree keeps up to 256 files open, and programs may have 1024
MOST_LEAVES = 300_000  # of all that are open, but for the last
MOST_READERS = 2  # leaves that are read at once; each takes up to three boxes of 16 MiB
_MOST_MEASURED = 5000  # leaves whose statistics are kept
_PATIENCE = 0.25  # seconds between two looks whether the client is still there


class OpenCheckpoint:
    """A checkpoint that is open, perhaps to be compared with another, and the leaves of it that were read."""

    def __init__(self, path: str, readers: threading.Semaphore, against: str | None = None) -> None:
        with ExitStack() as stack:
            self._contents = stack.enter_context(page_contents(path))
            self._other = stack.enter_context(page_contents(against)) if against is not None else None
            self._changes = changes_of(self._contents, self._other, {})
            self._stack = stack.pop_all()
        self._measured: dict[str, Measured] = {}
        self._columns: Answer | None = None
        about = {"against": self._other.brief()} if self._other else {}
        self._summary = (
            self._contents.summary()
            | about
            | {
                "kind": "checkpoint",
                "has_values": "on demand",
                "health": {"nan": 0, "inf": 0, "zero": 0},
                "verification": {
                    "state": "unchecked",
                    "text": "Leaves are read, and checked against their digests, when they are selected.",
                },
            }
        )
        self._readers, self._lock = readers, threading.Lock()

    @property
    def opened(self) -> int:
        """Count the checkpoints whose files are open."""
        return 2 if self._other else 1

    @property
    def leaves(self) -> int:
        return len(self._contents.leaves) + (len(self._other.leaves) if self._other else 0)

    def close(self) -> None:
        self._stack.close()

    def summary(self) -> Json:
        return self._summary | made()

    def columns(self) -> Answer:
        """Return the tree and the leaves, with everything that is known of them by now."""
        with self._lock:
            if self._columns is None:
                self._columns = as_json(columns(self._contents, self._measured, self._changes))
            return self._columns

    def changes(self) -> Json | None:
        """Return what changed since the other checkpoint, as far as the records and the leaves that were read tell.

        None if there is no other checkpoint.
        """
        if self._other is None:
            return None
        with self._lock:
            return overview(self._contents, self._other, self._changes)

    def leaf(self, path: str, has_gone: Callable[[], bool]) -> Json | None:
        """Describe a leaf; read it first, unless it was read before. None if there is no such leaf.

        Raise RefusedError as soon as nobody waits for it any more.
        """
        if (leaf := self._contents.by_path.get(path)) is None:
            return None
        measured = self._measured.get(path)
        if measured is None and leaf.entry:
            measured = self._measure(leaf, has_gone)
            self._note(path, measured)
        return leaf_facts(leaf, measured, self._changes.get(path))

    def _note(self, path: str, measured: Measured) -> None:
        """Remember what reading a leaf has shown."""
        with self._lock:
            self._measured[path] = measured
            if len(self._measured) > _MOST_MEASURED:
                del self._measured[next(iter(self._measured))]
            if measured.change:
                self._changes[path] = measured.change
            self._columns = None

    def _measure(self, leaf: Leaf, has_gone: Callable[[], bool]) -> Measured:
        def go_on() -> None:
            if has_gone():
                raise RefusedError(408, "nobody waits for this leaf")

        while not self._readers.acquire(timeout=_PATIENCE):
            go_on()
        try:
            return measure_one(self._contents, leaf, self._other, before_box=go_on)
        finally:
            self._readers.release()


class _Lent:
    """A checkpoint that is being opened, or is open, and how many requests use it."""

    def __init__(self) -> None:
        self.users, self.lock = 0, threading.Lock()
        self.checkpoint: OpenCheckpoint | None = None


class Checkpoints:
    """The checkpoints that are open. The one that was used longest ago is closed first."""

    def __init__(self) -> None:
        self._places: OrderedDict[tuple[Place, Place | None], _Lent] = OrderedDict()
        self._lock = threading.Lock()
        self._readers = threading.BoundedSemaphore(MOST_READERS)

    @contextmanager
    def opened(self, place: Place, against: Place | None = None) -> Iterator[OpenCheckpoint]:
        """Lend a checkpoint, beside another if there is one, which stay open for as long."""
        key = place, against
        with self._lock:
            lent = self._places.setdefault(key, _Lent())
            self._places.move_to_end(key)
            lent.users += 1
        try:
            with lent.lock:  # others wait for the first to open it
                if lent.checkpoint is None:
                    lent.checkpoint = OpenCheckpoint(place[0], self._readers, against and against[0])
            yield lent.checkpoint
        finally:
            for unused in self._given_back(lent):
                unused.close()

    def _given_back(self, lent: _Lent) -> list[OpenCheckpoint]:
        """Return the checkpoints to close, now that a request is done with one."""
        with self._lock:
            lent.users -= 1
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
        return sum(one.opened for one in there) > MOST_OPEN or (
            len(there) > 1 and sum(one.leaves for one in there) > MOST_LEAVES
        )
