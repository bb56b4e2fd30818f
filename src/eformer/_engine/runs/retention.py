"""Remove the steps of a run that no rule keeps. No jax."""

from __future__ import annotations

import errno
import logging
import os
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from eformer._engine.formats.safetensors.names import INDEX_SUFFIX, base_name
from eformer._engine.formats.steps import MARKS, remains_in
from eformer._engine.record.policies import (
    StepFacts,
    can_remove,
    kept,
    needs_manifests,
    unknown_metrics,
    warnings_of,
)
from eformer._engine.record.values import parse_json
from eformer._engine.runs.steps import (
    Scores,
    found_of,
    is_foreign,
    resumed_from,
    score_name,
    scored_step,
    steps,
    steps_if_there,
)
from eformer._engine.stores import checkpoints
from eformer._engine.stores.base import read_whole, remove_files, update_file
from eformer._engine.stores.checkpoints import identity_of, remove_checkpoint
from eformer._engine.stores.local import on_disk
from eformer._engine.stores.locate import store_at
from eformer.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from eformer._engine.record.policies import Keep
    from eformer._engine.runs.steps import Step
    from eformer._engine.stores.base import Identity, Store

logger = logging.getLogger("eformer")

_MOST_HOURS_AHEAD = 1 / 60  # of the clock that can be set, before the one that cannot


def removable(
    store: Store,
    facts: Mapping[str, StepFacts],
    rules: Sequence[Keep],
    *,
    now: float,
    stay: Collection[int | None] = (),
) -> list[str]:
    """Name the steps that no rule keeps, given the facts of the whole ones by name. These stay, too: the steps in
    `stay`, the one that the run was resumed from, and those that a link in the run points to. All stay while no rule
    can be applied."""
    if not can_remove(facts.values(), rules):
        return []
    keep = kept(facts.values(), rules, stay={*stay, resumed_from(store)}, now=now)
    place = on_disk(store)
    linked = linked_in(Path(place)) if place is not None else set()
    return [name for name, fact in facts.items() if fact.number not in keep and name not in linked]


def by_series(facts: Mapping[str, StepFacts]) -> list[dict[str, StepFacts]]:
    """Group steps by the text before their numbers: rules of `prune` count run-100 and step-100 in series of their
    own."""
    found = defaultdict[str, dict[str, StepFacts]](dict)
    for name, fact in facts.items():
        found[name.rstrip("0123456789")][name] = fact
    return [*found.values()]


def seen_last(sound: Sequence[Step]) -> set[int]:
    """Return the newest step that was looked at, which stays; all steps if there is none. A step of Orbax in a bucket
    would have to be copied first: it may be damaged, and must not be the only one that stays."""
    looked_at = [step.number for step in sound if not found_of(step).foreign.is_costly]
    return set(looked_at[-1:] or (step.number for step in sound))


def remove_step(store: Store, name: str, identity: Identity | None) -> str | None:
    """Remove a step. Return why it stays, if it does. Raise FileNotFoundError if it is gone, and ValueError if it is
    another one."""
    try:
        is_removed = remove_checkpoint(store, name, identity)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        return f"it contains a mount point, or lies in a lower layer of an overlay: {error}"
    return None if is_removed else "a reader holds it, or a save to it is under way"


def linked_in(where: Path) -> set[str]:
    """Name the entries that links beside them point to (best -> step-100) or into (best.bin -> step-100/model.bin)."""
    prefix = f"{os.path.realpath(where)}/"
    with os.scandir(where) as entries:
        targets = [os.path.realpath(entry.path) for entry in entries if entry.is_symlink()]
    return {target.removeprefix(prefix).partition("/")[0] for target in targets if target.startswith(prefix)}


def identities_of(store: Store, names: Iterable[str]) -> dict[str, Identity]:
    """Return the identities of the steps that are still there, so that nothing else is removed in their place."""
    found: dict[str, Identity] = {}
    for name in names:
        with suppress(FileNotFoundError):
            found[name] = identity_of(store, name)
    return found


def steady_clock() -> Callable[[], float]:
    """Return a clock that goes on from the present time, and that nobody can set."""
    began, since = time.time(), _since_boot()
    return lambda: began + _since_boot() - since


def _since_boot() -> float:
    """Return seconds, also of the time that the machine sleeps, where that is known."""
    boot = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if boot is None else time.clock_gettime(boot)


def remove_others(
    path: str, rules: Sequence[Keep], stay: Collection[int | None], *, now: float, told: set[str]
) -> None:
    """Remove the steps that no rule keeps. Damaged ones, and links to steps that are elsewhere, neither count nor go. A
    warning that is `told` is not logged again."""
    store, there, removed = store_at(path), steps(path), list[str]()
    # In a bucket nothing can be given another name.
    identities = identities_of(store, [step.name for step in there if on_disk(store) is not None])
    sound = [step for step in there if step.problem() is None and not Path(step.path).is_symlink()]
    facts = {step.name: facts_of(step, rules) for step in sound}
    for kind, warning in _warnings([*facts.values()], rules, now).items():
        if kind not in told:
            logger.warning("%s: %s", path, warning)
        told.add(kind)
    for name in removable(store, facts, rules, now=now, stay={*stay, *seen_last(sound)}):
        try:
            if (why := remove_step(store, name, identities.get(name))) is None:
                removed.append(name)
            elif name not in told and on_disk(store) is not None:  # held steps of a bucket are no news
                logger.warning("%s stays: %s", store.path_to(name), why)
                told.add(name)
        except FileNotFoundError:  # somebody else has removed it
            continue
        except ValueError as error:  # another directory has taken its name
            logger.warning("%s", error)
    sweep_remains(store, [step.name for step in there])
    remove_files(store, orphaned_scores(store, removed))


def _warnings(facts: Sequence[StepFacts], rules: Sequence[Keep], now: float) -> dict[str, str]:
    """Return the warnings of retention. Do not blame the steps if the clock was set ahead since the run began: it may
    have been wrong then."""
    found = warnings_of(facts, rules, now)
    if facts and (unknown := unknown_metrics(facts, rules)):
        until = "That rule keeps nothing" if can_remove(facts, rules) else "Nothing is removed"
        found["metric"] = f"{unknown}. {until} until a step has it"
    if "clock" in found and (hours := (time.time() - now) / 3600) > _MOST_HOURS_AHEAD:
        found["clock"] = (
            f"the clock was set ahead by {hours:,.1f} hours while the run was open. Keep(hours=) goes by the clock "
            "from before, and rather keeps too many steps than too few; if the clock is right now, start the job again"
        )
    return found


class _OnlyScores(Scores, forbid_unknown_fields=True):
    """The file as eformer writes it. Other programs may give theirs the same name."""


def orphaned_scores(store: Store, removed: Collection[str] = ()) -> list[str]:
    """List the scores that eformer wrote of steps that are not there, or were just removed. A process may have died
    before it came to the scores."""
    kinds = store.kinds()
    # Not what is listed alone: SeaweedFS lists directories for a while that are empty.
    left = kinds.keys() - set(removed)
    files = [name for name, kind in kinds.items() if kind == "file"]
    orphaned = [name for name in files if (step_of := scored_step(name)) and step_of not in left]
    return [name for name in orphaned if _are_scores(store, name)]


def _are_scores(store: Store, name: str) -> bool:
    try:
        parse_json(read_whole(store, name)[0], _OnlyScores, name)
    except (FileNotFoundError, FormatError):
        return False
    return True


def set_step_aside(store: Store, step: str, why: str) -> None:
    """Let a directory be no step any more, and give its scores the new name.

    In a bucket the files by which readers know a step get other names: also the index for other readers, by which it
    would still be a step, of another program.
    """
    aside = checkpoints.set_aside(store, step, why, (*MARKS, base_name("") + INDEX_SUFFIX))
    with suppress(FileNotFoundError):
        data = read_whole(store, score_name(step))[0]
        update_file(store, score_name(aside), lambda _: data)
        remove_files(store, [score_name(step)])


def put_aside(path: str, why: Callable[[Step], str | None], check: Callable[[], None]) -> list[str]:
    """Give the steps other names for which there is a reason, and return the names that they had. The newest go first:
    a job that dies here leaves the steps before them, which the next one goes on from. `check` raises an error if this
    job is not the writer any more."""
    store, done = store_at(path), list[str]()
    # Of steps with one number (step-100 and 100), the second is listed once the first is gone.
    while there := [step for step in steps_if_there(path) if step.name not in done and why(step)]:
        check()
        for step in reversed(there):
            set_step_aside(store, step.name, why(step) or "")
        done += [step.name for step in there]
    return done


def sweep_remains(store: Store, known: Collection[str] = ()) -> None:
    """Remove what dead saves have left in directories that are not steps. On a disk they leave none: directories appear
    whole there."""
    if on_disk(store) is None:
        for name in remains_in(store, known):
            checkpoints.sweep(store, name)


def facts_of(step: Step, rules: Sequence[Keep]) -> StepFacts:
    """Return the facts that the rules look at. Times and metrics are read only if they need them."""
    if not needs_manifests(rules):
        return StepFacts(step.number, is_foreign=is_foreign(step))
    saved_at = step.saved_at
    timestamp = saved_at.timestamp() if saved_at else None
    return StepFacts(step.number, timestamp, step.metrics, is_foreign(step))
