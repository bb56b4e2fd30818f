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

from eformer._engine.formats.run_steps import (
    Scores,
    found_of,
    is_foreign,
    resumed_from,
    score_name,
    scored_step,
    steps,
    steps_if_there,
)
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
from eformer._engine.runs.removed import remember_metrics
from eformer._engine.stores import checkpoints
from eformer._engine.stores.base import read_whole, remove_files, update_file
from eformer._engine.stores.checkpoints import identity_of, remove_checkpoint
from eformer._engine.stores.local import on_disk
from eformer._engine.stores.locate import store_at
from eformer.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from eformer._engine.formats.run_steps import Step
    from eformer._engine.record.policies import Keep
    from eformer._engine.stores.base import Identity, Store

logger = logging.getLogger("eformer")

_MOST_HOURS_AHEAD = 1 / 60  # by which the settable clock may be ahead of the steady clock


def removable(
    store: Store,
    facts: Mapping[str, StepFacts],
    rules: Sequence[Keep],
    *,
    now: float,
    stay: Collection[int | None] = (),
) -> list[str]:
    """Return the names of the steps that no rule keeps, given the facts of the whole steps by name.

    The steps in `stay`, the step that the run was resumed from, and the targets of links in the run stay, too. All
    steps stay while no rule can be applied.
    """
    if not can_remove(facts.values(), rules):
        return []
    keep = kept(facts.values(), rules, stay={*stay, resumed_from(store)}, now=now)
    local = on_disk(store)
    linked = linked_in(Path(local)) if local is not None else set()
    return [name for name, fact in facts.items() if fact.number not in keep and name not in linked]


def by_series(facts: Mapping[str, StepFacts]) -> list[dict[str, StepFacts]]:
    """Group steps by the text before their numbers: `prune` counts run-100 and step-100 in separate series."""
    found = defaultdict[str, dict[str, StepFacts]](dict)
    for name, fact in facts.items():
        found[name.rstrip("0123456789")][name] = fact
    return [*found.values()]


def seen_last(sound: Sequence[Step]) -> set[int]:
    """Return the newest step that was read, which stays; all steps if none was read. Reading a step of Orbax in a
    bucket would copy it: it may be damaged, so it must not be the only step that stays."""
    looked_at = [step.number for step in sound if not found_of(step).foreign.is_costly]
    return set(looked_at[-1:] or (step.number for step in sound))


def remove_step(store: Store, name: str, identity: Identity | None) -> str | None:
    """Remove a step. Return None, or why the step stays. Raise FileNotFoundError if it is gone, and ValueError if
    another directory has its name."""
    try:
        is_removed = remove_checkpoint(store, name, identity)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        return f"it contains a mount point, or lies in a lower layer of an overlay: {error}"
    return None if is_removed else "a reader holds it, or a save to it is under way"


def linked_in(where: Path) -> set[str]:
    """Return the targets of links in a directory: best -> step-100, or best.bin -> step-100/model.bin."""
    prefix = f"{os.path.realpath(where)}/"
    with os.scandir(where) as entries:
        targets = [os.path.realpath(entry.path) for entry in entries if entry.is_symlink()]
    return {target.removeprefix(prefix).partition("/")[0] for target in targets if target.startswith(prefix)}


def identities_of(store: Store, names: Iterable[str]) -> dict[str, Identity]:
    """Return the identities of the steps that still exist, so that nothing else is removed in their place."""
    found: dict[str, Identity] = {}
    for name in names:
        with suppress(FileNotFoundError):
            found[name] = identity_of(store, name)
    return found


def steady_clock() -> Callable[[], float]:
    """Return a clock that starts at the present time and that no change of the system clock affects."""
    began, since = time.time(), _since_boot()
    return lambda: began + _since_boot() - since


def _since_boot() -> float:
    """Return seconds since boot, including sleep where the system counts it."""
    boot = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if boot is None else time.clock_gettime(boot)


def remove_others(
    path: str, rules: Sequence[Keep], stay: Collection[int | None], *, now: float, told: set[str]
) -> None:
    """Remove the steps that no rule keeps. Damaged steps, and links to steps elsewhere, neither count nor go. Do not
    repeat a warning that is in `told`. Raise the first error after all other steps are removed."""
    store, there, removed = store_at(path), steps(path), list[str]()
    failed: list[OSError] = []
    # Noted before anything is read: only the steps that the rules have judged are removed. In a bucket no other
    # directory can take the name of a step by a rename.
    identities = identities_of(store, [step.name for step in there if on_disk(store) is not None])
    sound = [step for step in there if step.problem() is None and not Path(step.path).is_symlink()]
    facts = {step.name: facts_of(step, rules) for step in sound}
    for kind, warning in _warnings([*facts.values()], rules, now).items():
        if kind not in told:
            logger.warning("%s: %s", path, warning)
        told.add(kind)
    planned = removable(store, facts, rules, now=now, stay={*stay, *seen_last(sound)})
    doomed = set(planned)
    remember_metrics(store, [step for step in sound if step.name in doomed])
    for name in planned:
        try:
            if (why := remove_step(store, name, identities.get(name))) is None:
                removed.append(name)
            elif name not in told and on_disk(store) is not None:  # a held step of a bucket needs no warning
                logger.warning("%s stays: %s", store.path_to(name), why)
                told.add(name)
        except FileNotFoundError:  # another program has removed it
            continue
        except ValueError as error:  # another directory has taken its name
            logger.warning("%s", error)
        except OSError as error:  # the next steps may still be removed
            failed.append(error)
    sweep_remains(store, [step.name for step in there])
    remove_files(store, orphaned_scores(store, removed))
    if failed:
        raise failed[0]


def _warnings(facts: Sequence[StepFacts], rules: Sequence[Keep], now: float) -> dict[str, str]:
    """Return the warnings of retention. Do not blame the times of steps if the clock was set ahead since the run
    began: it may have been behind when they were saved."""
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
    """The file as eformer writes it. Files of other programs may have the same name."""


def orphaned_scores(store: Store, removed: Collection[str] = ()) -> list[str]:
    """List the score files of eformer whose steps do not exist or were just removed. A process that died may have left
    scores behind."""
    kinds = store.kinds()
    # The listing is not enough: SeaweedFS lists empty directories for a while.
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
    """Rename a directory so that it is no longer a step, and its scores with it.

    In a bucket, rename the files by which readers recognise a step, also the index for other programs: with it alone,
    the directory would still be a step of another program.
    """
    aside = checkpoints.set_aside(store, step, why, (*MARKS, base_name("") + INDEX_SUFFIX))
    with suppress(FileNotFoundError):
        data = read_whole(store, score_name(step))[0]
        update_file(store, score_name(aside), lambda _: data)
        remove_files(store, [score_name(step)])


def put_aside(path: str, why: Callable[[Step], str | None], check: Callable[[], None]) -> list[str]:
    """Rename the steps for which `why` returns a reason, and return their old names.

    The newest go first: a job that dies in between leaves the older steps, from which the next job goes on. `check`
    raises an error if this job is no longer the writer.
    """
    store, done = store_at(path), list[str]()
    # Of steps with one number (step-100 and 100), the second is listed once the first is gone.
    while there := [step for step in steps_if_there(path) if step.name not in done and why(step)]:
        check()
        for step in reversed(there):
            set_step_aside(store, step.name, why(step) or "")
        done += [step.name for step in there]
    return done


def sweep_remains(store: Store, known: Collection[str] = ()) -> None:
    """Remove the remains of dead saves in directories that are not steps. Do nothing on a disk, where directories
    appear whole."""
    if on_disk(store) is None:
        for name in remains_in(store, known):
            checkpoints.sweep(store, name)


def facts_of(step: Step, rules: Sequence[Keep]) -> StepFacts:
    """Return the facts that the rules use. Read times and metrics only if a rule needs them."""
    if not needs_manifests(rules):
        return StepFacts(step.number, is_foreign=is_foreign(step))
    saved_at = step.saved_at
    timestamp = saved_at.timestamp() if saved_at else None
    return StepFacts(step.number, timestamp, step.metrics, is_foreign(step))
