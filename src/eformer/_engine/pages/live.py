"""Follow a run while it trains, and list its present steps for pages that poll.

A thread looks at the run as long as a page polls. It reads new and replaced steps, the newest first, and at every look
reads a few known steps again, because a file may be damaged at any time.

Tests: tests/engine/pages/test_addresses.py, tests/engine/pages/test_timeline.py.
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from eformer._engine.formats.run_steps import resumed_from, steps
from eformer._engine.formats.steps import name_of_step
from eformer._engine.pages.timeline import News, SeenStep, read_step, reasons, recorded
from eformer._engine.record.text import printable
from eformer._engine.runs.retention import by_series, removable
from eformer._engine.stores import checkpoints
from eformer._engine.stores.local import on_disk, usage
from eformer._engine.stores.locate import store_at
from eformer.errors import EformerError, NotFoundError

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Mapping, Sequence

    from eformer._engine.formats.run_steps import Step
    from eformer._engine.record.policies import Keep
    from eformer._engine.stores.base import Store

logger = logging.getLogger("eformer.serve")

Json = dict[str, Any]

_SECONDS_BETWEEN = 1.0  # between two looks at a directory
_SECONDS_BETWEEN_FAR = 10.0  # between two looks at a bucket: requests cost money
_SECONDS_UNASKED = 30.0  # the thread ends if no page polls for so long
_SECONDS_BETWEEN_NEWS = 0.3  # while many steps are read
_READ_AGAIN = 20  # known steps that each look reads again
_PATIENCE = 0.5  # seconds that a poll waits for the first look to be complete
_REST = 10  # times as long as a look takes: a run of thousands of steps must not slow down the training


class LiveRun:
    """The steps of a run, followed by a thread while a page polls."""

    def __init__(self, path: str, rules: Sequence[Keep] = ()) -> None:
        self.path, self.store, self.rules = path, store_at(path), rules
        self._between = _SECONDS_BETWEEN if on_disk(self.store) else _SECONDS_BETWEEN_FAR
        self._news = News()
        self._changed = threading.Condition()
        self._follower: threading.Thread | None = None
        self._asked = 0.0
        self._again = 0
        self._closed = threading.Event()

    def close(self) -> None:
        """Let the thread end."""
        self._closed.set()

    def news(self) -> News:
        """Return the steps that are known now. Only calls before the end of the first look wait for it."""
        with self._changed:
            self._asked = time.monotonic()
            if self._follower is None:
                self._follower = threading.Thread(target=self._follow, name="eformer-serve", daemon=True)
                self._follower.start()
            self._changed.wait_for(lambda: self._news.is_complete, _PATIENCE)
            return self._news

    def locate(self, number: int) -> tuple[str, Hashable]:
        """Return the path and the identity of a step. Raise NotFoundError if the run no longer has it."""
        known = next((step.name for step in self._news.steps if step.number == number), None)
        name = known or name_of_step(self.store, number)
        try:
            return self.store.path_to(name), require_identity(self.store, name)
        except FileNotFoundError:
            raise NotFoundError(
                f"step {number} is not there: it was removed by the rules of the run or by hand, or never saved"
            ) from None

    # ------------------------------------------------------------------------------------------ follow

    def _follow(self) -> None:
        while True:
            start = time.monotonic()
            try:
                self._look()
            except Exception:
                logger.exception("the run cannot be followed")
                self._tell(problem="the run cannot be followed; the terminal of `eformer serve` says why")
            rest = max(self._between, _REST * (time.monotonic() - start))
            with self._changed:
                if time.monotonic() - self._asked > _SECONDS_UNASKED:
                    self._follower = None
                    return
            if self._closed.wait(rest):
                return

    def _look(self) -> None:
        try:
            there = {step.name: step for step in steps(self.path)}
        except (EformerError, OSError) as error:
            self._tell(steps=(), problem=printable(str(error)), is_complete=True)
            return
        seen = self._merged(there)
        # The files beside the steps change with them: the first step, or a removed one.
        are_new = not self._news.is_complete or tuple(seen.values()) != self._news.steps
        self._tell(steps=tuple(seen.values()), problem=None, **(recorded(self.store) if are_new else {}))
        self._read(there, seen)
        self._measure_sizes([*seen])
        self._tell(is_complete=True)

    def _merged(self, there: Mapping[str, Step]) -> dict[str, SeenStep]:
        """Return the listed steps with the facts that were read before; without facts for new and replaced steps."""
        before = {(step.name, step.identity): step for step in self._news.steps}
        found = {}
        for name, step in there.items():
            with suppress(FileNotFoundError):  # removed meanwhile
                identity = require_identity(self.store, name)
                found[name] = before.get((name, identity)) or SeenStep(step.number, name, identity)
        return found

    def _read(self, there: Mapping[str, Step], seen: dict[str, SeenStep]) -> None:
        told = time.monotonic()
        for name in self._to_read(seen):
            seen[name] = read_step(there[name], seen[name])
            if time.monotonic() - told > _SECONDS_BETWEEN_NEWS:
                self._tell(steps=tuple(seen.values()))
                told = time.monotonic()
        self._tell(steps=tuple(seen.values()), **self._retention(seen.values()))

    def _to_read(self, seen: Mapping[str, SeenStep]) -> list[str]:
        """List the unread steps, the newest first, and a few known steps, in turn."""
        names = [*seen]
        start = self._again % max(1, len(names))
        again = [name for name in (names[start:] + names[:start])[:_READ_AGAIN] if seen[name].is_read]
        self._again = start + _READ_AGAIN
        return [name for name in reversed(names) if not seen[name].is_read] + again

    def _retention(self, seen: Collection[SeenStep]) -> Json:
        """Return the steps that `prune` would remove by the rules, and the reasons why other steps stay."""
        facts = {step.name: step.facts for step in seen if step.is_read and step.problem is None}
        rules = self._news.rules_or_own(self.rules)
        if not rules or not facts:  # the rules of the run may have changed
            return {"removed": (), "reasons": {}}
        removed = (removable(self.store, series, rules, now=time.time()) for series in by_series(facts))
        return {
            "removed": frozenset(chain.from_iterable(removed)),
            "reasons": reasons(facts, rules, resumed_from(self.store)),
        }

    def _measure_sizes(self, names: Sequence[str]) -> None:
        if set(names) != self._news.sizes.keys():
            with suppress(OSError):
                self._tell(sizes=usage(self.store, names))

    def _tell(self, **changes: Any) -> None:
        with self._changed:
            news = replace(self._news, **changes)
            if news != self._news or not news.version:
                self._news = replace(news, version=self._news.version + 1)
                self._changed.notify_all()


def require_identity(store: Store, name: str) -> Hashable:
    """Return the identity of a checkpoint. Raise FileNotFoundError if it is gone."""
    found = checkpoints.identity_of(store, name)
    if not found:
        raise FileNotFoundError(name)
    return found
