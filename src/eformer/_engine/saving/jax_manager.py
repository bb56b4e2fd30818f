"""Let JAX's own checkpoint manager say when a save is committed. eformer writes it as any other."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from eformer._engine.saving.pending import Pending
from eformer._engine.saving.run import carry_out, run_in_background, told_to_all
from eformer._engine.trees.copies import compile_copies

if TYPE_CHECKING:
    from collections.abc import Callable

    from eformer._engine.saving.run import Save

logger = logging.getLogger("eformer")


def serialize_with(manager: Any, save: Save, callback: Callable[[], None] | None) -> None:
    """Hand a save that needs nothing of its caller's to the manager, with no arrays. Return as the manager does.

    The manager waits for its save before, and raises the error of that one here. Then it calls back, in a thread of its
    own and in the first process alone: the save is carried out there, so that `wait_until_finished` waits for it and
    raises its error. The other processes write in a thread of ours.
    """
    save.turn.end()  # the manager has its own order; should it never call back, nobody shall wait for this save

    def commit() -> None:
        try:
            carry_out(save)
        except BaseException as error:  # which the manager raises when it is asked, and otherwise forgets
            logger.error("saving to %s failed: %s", save.store.url, error)
            raise
        finally:
            save.sources.clear()  # the manager keeps this function, and with it the arrays, until its next save
        if callback is not None:
            callback()
        compile_copies()

    # In a thread without an event loop, since the manager runs one: a notebook has its own.
    with told_to_all(save.hosts), ThreadPoolExecutor(1) as pool:
        pool.submit(manager.serialize, [], [], on_commit_callback=commit).result()
    if save.hosts.index:
        run_in_background(save, Pending(save.store.url), after=callback)
