"""Remove the steps of a run that no rule keeps. No jax."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from eformer._engine.formats.indexes import INDEXES
from eformer._engine.formats.steps import remains_in
from eformer._engine.record.policies import StepFacts, kept, needs_manifests
from eformer._engine.runs.steps import score_name, scored_step, steps
from eformer._engine.stores.base import read_whole, remove_files, update_file
from eformer._engine.stores.locate import store_at

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from eformer._engine.record.policies import Keep
    from eformer._engine.runs.steps import Step
    from eformer._engine.stores.base import Identity, Store

logger = logging.getLogger("eformer")


def _others(
    store: Store, there: Sequence[Step], rules: Sequence[Keep], stay: Collection[int | None]
) -> list[Step]:
    """Return the steps that no rule keeps, except those in `stay`, and those that a link in the run points to. Damaged
    ones, and links to steps that are elsewhere, neither count nor go."""
    sound = [step for step in there if step.problem() is None and not Path(step.path).is_symlink()]
    facts = [facts_of(step, rules) for step in sound]
    keep = kept(facts, rules).union(stay)
    place = store.local_path()
    linked = linked_in(Path(place)) if place is not None else set()
    return [step for step in sound if step.number not in keep and step.name not in linked]


def linked_in(where: Path) -> set[str]:
    """Name the entries that links beside them point to (best -> step-100) or into (best.bin -> step-100/model.bin)."""
    prefix = f"{os.path.realpath(where)}/"
    with os.scandir(where) as entries:
        targets = [os.path.realpath(entry.path) for entry in entries if entry.is_symlink()]
    return {target.removeprefix(prefix).partition("/")[0] for target in targets if target.startswith(prefix)}


def _identities(store: Store, there: Sequence[Step]) -> dict[str, Identity]:
    """Return what the steps are that are about to be looked at, so that nothing else is removed in their place. In a
    bucket nothing can be given another name."""
    found: dict[str, Identity] = {}
    for step in there if store.can_rename else ():
        with suppress(FileNotFoundError):
            found[step.name] = store.identity(step.name, INDEXES)
    return found


def remove_others(path: str, rules: Sequence[Keep], stay: Collection[int | None] = ()) -> list[Step]:
    """Remove the steps that no rule keeps; return them."""
    store, there, removed = store_at(path), steps(path), []
    identities = _identities(store, there)
    for step in _others(store, there, rules, stay):
        try:
            if store.remove_checkpoint(step.name, INDEXES, identities.get(step.name)):
                removed.append(step)
        except FileNotFoundError:  # somebody else has removed it
            continue
        except ValueError as error:  # another directory has taken its name
            logger.warning("%s", error)
    sweep(store, [step.name for step in there])
    remove_orphaned_scores(store, [step.name for step in removed])
    return removed


def remove_orphaned_scores(store: Store, removed: Collection[str]) -> None:
    """Remove the scores of steps that were removed, now or by somebody who died before he came to the scores."""
    names = store.kinds()
    # Not what is listed alone: SeaweedFS lists directories for a while that are empty.
    left = names.keys() - set(removed)
    remove_files(store, [name for name in names if (step_of := scored_step(name)) and step_of not in left])


def set_aside(store: Store, step: str, why: str, marks: Sequence[str]) -> None:
    """Let a directory be no step any more, and give its scores the new name."""
    aside = store.set_aside(step, why, marks)
    with suppress(FileNotFoundError):
        data = read_whole(store, score_name(step))[0]
        update_file(store, score_name(aside), lambda _: data)
        remove_files(store, [score_name(step)])


def sweep(store: Store, known: Collection[str] = ()) -> None:
    """Remove what dead saves have left in directories that are not steps. On a disk they leave none: directories appear
    whole there."""
    if not store.can_rename:
        for name in remains_in(store, known):
            store.sweep(name, INDEXES)


def facts_of(step: Step, rules: Sequence[Keep]) -> StepFacts:
    """Return what the rules look at. The manifest is read only if they need it."""
    if not needs_manifests(rules):
        return StepFacts(step.number)
    saved_at = step.saved_at
    return StepFacts(step.number, saved_at.timestamp() if saved_at else 0.0, step.metrics)
