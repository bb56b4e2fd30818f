"""Keep the checkpoints of the last requests open, alone or compared with another. Read leaves on demand.

Tests: tests/engine/pages/test_addresses.py.
"""

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
Located = tuple[str, "Hashable"]  # a path, and the identity of the checkpoint at it

MOST_OPEN = 3  # checkpoints; a tree keeps up to 256 files open, and programs may have 1024
MOST_LEAVES = 300_000  # of all open checkpoints together; a single one may have more
MOST_READERS = 2  # leaves that are read in parallel; each takes up to three boxes of 16 MiB
_MOST_MEASURED = 5000  # leaves whose statistics are kept
_PATIENCE = 0.25  # seconds between two checks that the client still waits


class OpenCheckpoint:
    """An open checkpoint, perhaps with another to compare it with, and the results of the leaves that were read."""

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
        """Return the tree and the leaves, with the results of the leaves that were read so far."""
        with self._lock:
            if self._columns is None:
                self._columns = as_json(columns(self._contents, self._measured, self._changes))
            return self._columns

    def changes(self) -> Json | None:
        """Return the changes since the compared checkpoint, as far as records and read leaves tell.

        None if no checkpoint is compared.
        """
        if self._other is None:
            return None
        with self._lock:
            return overview(self._contents, self._other, self._changes)

    def leaf(self, path: str, has_gone: Callable[[], bool]) -> Json | None:
        """Describe a leaf; read it first, unless it was read before. None if no leaf has this path.

        Raise RefusedError as soon as `has_gone` says that the client no longer waits.
        """
        if (leaf := self._contents.by_path.get(path)) is None:
            return None
        measured = self._measured.get(path)
        if measured is None and leaf.entry:
            measured = self._measure(leaf, has_gone)
            self._note(path, measured)
        return leaf_facts(leaf, measured, self._changes.get(path))

    def _note(self, path: str, measured: Measured) -> None:
        """Remember the result of reading a leaf."""
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
                raise RefusedError(408, "the client no longer waits for this leaf")

        while not self._readers.acquire(timeout=_PATIENCE):
            go_on()
        try:
            return measure_one(self._contents, leaf, self._other, before_box=go_on)
        finally:
            self._readers.release()


class _Lent:
    """A checkpoint that is open or being opened, and the number of requests that use it."""

    def __init__(self) -> None:
        self.users, self.lock = 0, threading.Lock()
        self.checkpoint: OpenCheckpoint | None = None


class Checkpoints:
    """The open checkpoints. The least recently used checkpoint is closed first."""

    def __init__(self) -> None:
        self._open: OrderedDict[tuple[Located, Located | None], _Lent] = OrderedDict()
        self._lock = threading.Lock()
        self._readers = threading.BoundedSemaphore(MOST_READERS)

    @contextmanager
    def opened(self, located: Located, against: Located | None = None) -> Iterator[OpenCheckpoint]:
        """Lend a checkpoint, and the checkpoint to compare it with. Both stay open until they are given back."""
        key = located, against
        with self._lock:
            lent = self._open.setdefault(key, _Lent())
            self._open.move_to_end(key)
            lent.users += 1
        try:
            with lent.lock:  # the first request opens it, and later ones wait
                if lent.checkpoint is None:
                    lent.checkpoint = OpenCheckpoint(located[0], self._readers, against and against[0])
            yield lent.checkpoint
        finally:
            for unused in self._given_back(lent):
                unused.close()

    def _given_back(self, lent: _Lent) -> list[OpenCheckpoint]:
        """Give back a checkpoint after a request, and return the checkpoints to close."""
        with self._lock:
            lent.users -= 1
            closed = []
            for key, one in list(self._open.items()):
                if one.users or (one.checkpoint and not self._are_too_many()):
                    continue
                del self._open[key]
                if one.checkpoint:
                    closed.append(one.checkpoint)
            return closed

    def _are_too_many(self) -> bool:
        there = [one.checkpoint for one in self._open.values() if one.checkpoint]
        return sum(one.opened for one in there) > MOST_OPEN or (
            len(there) > 1 and sum(one.leaves for one in there) > MOST_LEAVES
        )
