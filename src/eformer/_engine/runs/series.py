"""The steps that a run saves in one directory: the whole state, or a part of it with rules of its own.

Tests: tests/engine/runs/test_background.py, tests/engine/runs/test_parts.py.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import jax

from eformer._engine.formats.run_steps import steps_if_there
from eformer._engine.formats.steps import name_to_save
from eformer._engine.record.policies import is_due
from eformer._engine.record.step_names import step_name
from eformer._engine.runs.retention import remove_others
from eformer._engine.saving.pending import Pending, run_in_background
from eformer._engine.saving.start import start
from eformer._engine.stores.locate import store_at
from eformer._engine.trees.nodes import subtree

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from eformer._engine.record.options import SaveOptions
    from eformer._engine.record.policies import Every, Keep
    from eformer._engine.runs.done import Done
    from eformer._engine.runs.under_way import UnderWay
    from eformer._engine.saving.save import Format, Save

logger = logging.getLogger("eformer")


class Series:
    """Steps in one directory, written by one job: the only writer, so it knows its last step without a listing.

    path      the directory
    keep      the rules for which steps stay; None keeps all
    only      the name of the part of the tree that is saved, or None for the whole tree
    every     when a part is saved
    """

    def __init__(
        self,
        path: str,
        keep: Sequence[Keep] | None,
        under_way: UnderWay,
        *,
        only: str | None = None,
        every: Sequence[Every] = (),
    ) -> None:
        self.path, self.store, self.only = path, store_at(path), only
        self.under_way = under_way
        self._keep, self._every = keep, every
        self._base: tuple[int, str] | None = (
            None  # the last committed step, whose files the next save may link
        )
        self._bases: dict[Pending, int] = {}  # the steps whose files the saves under way may link
        self._resumed_from: int | None = None
        self._told: set[str] = set()  # the warnings of retention that were logged
        self._removing: object = None  # the removals under way
        self._is_held = False
        self.took: float | None = None  # seconds from the hand-over of the last save to its commit

    @property
    def last(self) -> int | None:
        """The last committed step."""
        return self._base[0] if self._base else None

    def is_due(self, step: int) -> bool:
        return is_due(self._every, step)

    def go_on(self, step: int | None) -> None:
        """Go on from a step, which stays. Note the last step, whose files the next save may link."""
        there = [one for one in steps_if_there(self.path) if step is not None and one.number <= step]
        self._base = (there[-1].number, there[-1].path) if there else None
        self._resumed_from = step

    def path_of(self, step: int) -> str:
        """Return the path to save a step to. Only the step that the run was resumed from may have another name."""
        name = name_to_save(self.store, step) if step == self._resumed_from else step_name(step)
        return self.store.path_to(name)

    def save(
        self,
        done: Done,
        facts: Callable[[Sequence[bytes]], Mapping[str, Any]],
        *,
        format: Format,  # noqa: A002
        options: SaveOptions,
        begin: Callable[[], None],
        fence: Callable[[], None],
        after: Callable[[int, str], None],
    ) -> Pending:
        """Take a snapshot of a step, and save it in the background.

        facts    returns the metadata of the run
        begin    called first, in the thread of the save and in the first process
        fence    called during the commit, see `Save`
        after    called with the number and the path of the step when it is committed
        """
        path, began = self.path_of(done.step), time.monotonic()
        position, tree = done.position(), done.state()
        tree = tree if self.only is None else subtree(tree, self.only)
        save = start(
            tree,
            path,
            format=format,
            metadata=done.metadata,
            options=_reusing(options),
            origin=done.origin,
            detach=True,
        )
        pending = Pending(path)
        before = self.under_way.unfinished()
        save.begin = functools.partial(self._begin, pending, begin)
        save.late = functools.partial(_in_order, before, facts)
        save.own_metadata, save.fence, save.whole_files = position, fence, True
        committed = functools.partial(self._committed, pending, done.step, began, after)
        run_in_background(save, pending, after=committed)
        self.under_way.add(pending)
        pending.add_done_callback(lambda over: self._bases.pop(over, None))
        return pending

    def _begin(self, pending: Pending, begin: Callable[[], None], save: Save) -> None:
        if jax.process_index() == 0:
            begin()
            self._refuse_link(pending.path)
        if save.options.reuse is True and (base := self._base):
            self._bases[pending], path = base
            save.options = dataclasses.replace(save.options, reuse=path)

    def _refuse_link(self, path: str) -> None:
        store, name = store_at(path).parent()
        if store.kind(name) not in (None, "directory"):
            raise FileExistsError(f"{path} is a file or a link, expected a directory; move it away")

    def _committed(
        self, pending: Pending, step: int, began: float, after: Callable[[int, str], None]
    ) -> None:
        self.took = time.monotonic() - began
        self._base = (step, pending.path)
        self._bases.pop(pending, None)  # before `after`, which lets retention go on
        after(step, pending.path)

    def remove_others(self, now: float, check: Callable[[], None]) -> None:
        """Remove the steps that no rule keeps, in the first process. Steps whose files a save may link stay.

        `check` is called before each removal, and raises an error if this job is no longer the writer.
        """
        if self._keep is None or self._base is None:
            return
        removing = self._removing = object()
        stay = {self._base[0], self._resumed_from, *self._bases.values()}

        def goes_on() -> bool:
            check()
            return self._removing is removing and not self._is_held

        remove_others(self.path, self._keep, stay, now=now, told=self._told, goes_on=goes_on)

    @contextmanager
    def held(self) -> Iterator[None]:
        """End the removals under way, and begin none during the block: the run may go on from any of the steps."""
        self._is_held, self._removing = True, None
        try:
            yield
        finally:
            self._is_held = False


def _reusing(options: SaveOptions) -> SaveOptions:
    """Reuse unchanged leaves of the last step where possible. The first step already writes leaves that are likely to
    change together into files of their own."""
    can_reuse = not (options.ocdbt or options.compression) and jax.process_count() == 1
    return dataclasses.replace(options, reuse=True) if options.reuse is None and can_reuse else options


def _in_order(
    before: Sequence[Pending],
    facts: Callable[[Sequence[bytes]], Mapping[str, Any]],
    positions: Sequence[bytes],
) -> Mapping[str, Any]:
    """Return the metadata of a step when the saves before it are over: no later step exists first."""
    for pending in before:
        pending.exception()
    return facts(positions)
