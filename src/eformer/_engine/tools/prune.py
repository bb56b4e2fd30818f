"""Delete old checkpoints of a run. No jax."""

from __future__ import annotations

import glob
import logging
import os  # noqa: TC003
import time
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from posixpath import split
from typing import TYPE_CHECKING, Any

from eformer._engine.formats.find import find_step
from eformer._engine.formats.found import Trees
from eformer._engine.formats.others import orbax
from eformer._engine.formats.others.orbax_metadata import (
    ARRAY_METADATAS,
    COMMITTED,
    JSON_FILE,
    SHARDINGS,
    STRINGS,
    TREE_METADATA,
)
from eformer._engine.formats.others.orbax_reader import AGGREGATE
from eformer._engine.formats.run_steps import Step, found_of, is_foreign
from eformer._engine.formats.safetensors.names import INDEX_SUFFIX, SUFFIX, split_shard
from eformer._engine.formats.steps import CHECKPOINTER_FILE, MARKS, RUN_FILE, is_removed
from eformer._engine.formats.zarr.read import FOREIGN as ARRAYS
from eformer._engine.record.indexes import INDEX, MANIFEST, ORBAX_CHECKPOINT, ORBAX_TREE
from eformer._engine.record.manifest import CommitLog
from eformer._engine.record.policies import can_remove, keep_from, unknown_metrics, warnings_of
from eformer._engine.record.signature import SIGNATURE, signature_name
from eformer._engine.record.step_names import STEPS, StepNames, step_number
from eformer._engine.record.text import few
from eformer._engine.record.values import parse_json
from eformer._engine.record.zarray import ZARRAY
from eformer._engine.runs import retention
from eformer._engine.runs.removed import remember_metrics
from eformer._engine.stores.base import read_whole, remove_files
from eformer._engine.stores.checkpoints import sweep
from eformer._engine.stores.durable import SCRATCH
from eformer._engine.stores.leases import LEASES, ids_in
from eformer._engine.stores.local import freed_by_removal, is_there, on_disk, usage
from eformer._engine.stores.locate import store_at
from eformer._engine.stores.ocdbt import DATABASE_MANIFEST
from eformer._engine.stores.removal import DATABASE_MARK, PROCESS_RECORD
from eformer._engine.tasks.interrupts import uninterrupted
from eformer._engine.tools.verify import verify
from eformer.errors import CorruptionError, FormatError, NotFoundError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from eformer._engine.formats.found import Found
    from eformer._engine.record.policies import Keep, StepFacts
    from eformer._engine.stores.base import Identity, Kind, Store

logger = logging.getLogger("eformer")

# Files of the original eFormer beside its arrays: one for each checkpoint, and one for each tree, named after its
# prefix.
_OF_ORIGINAL, _STRUCTURE = "checkpoint_metadata.json", "_structure.json"

# Files of a database, by their paths in its directory.
_OF_DATABASES = (DATABASE_MANIFEST, "d/*", f"process-*/{DATABASE_MANIFEST}", "process-*/d/*")

# Files of Orbax by their paths: in the directory of a checkpoint, and in the directory of a tree.
_OF_ORBAX = (ORBAX_CHECKPOINT, COMMITTED, orbax.INDICATOR)
_OF_ITEMS = (
    *(ORBAX_TREE, SHARDINGS, STRINGS, TREE_METADATA, AGGREGATE, COMMITTED),
    *(f"{ARRAY_METADATAS}/*", DATABASE_MANIFEST, "d/*"),
)
_MARKS_OF_ITEMS = (ORBAX_TREE, SHARDINGS, DATABASE_MANIFEST)
_ALL_DEPTHS = 10**6
_MOST_LISTINGS = 100
_ZARR3 = "zarr.json"


@dataclass(frozen=True, slots=True)
class _Planned:
    """A checkpoint at the time its removal was planned: its identity, its bytes, and its files."""

    identity: Identity
    nbytes: int
    files: frozenset[str]


@dataclass(frozen=True, slots=True)
class Pruned:
    """The result of `prune`, or with `dry_run` its plan.

    removed       names of the removed checkpoints
    kept          names of the checkpoints that stay
    left          entries with the name of a step that stay and do not count, with the reason: they are not complete
                  checkpoints, or another program wrote them
    other_files   files that do not belong to a removed checkpoint, such as notes, and are removed with it; by the name
                  of the checkpoint
    scores        removed score files whose checkpoint no longer exists
    nbytes        the bytes of the removed checkpoints
    freed         the bytes that this frees: files that are linked into checkpoints that stay are not freed

    Example:

        >>> plan = checkpoint.prune("run", keep=2, dry_run=True)
        >>> plan.removed, plan.kept
        (('step-100',), ('step-200', 'step-300'))
    """

    directory: str
    removed: tuple[str, ...]
    kept: tuple[str, ...]
    left: dict[str, str]
    nbytes: int
    other_files: dict[str, tuple[str, ...]] = field(default_factory=dict)
    scores: tuple[str, ...] = ()
    planned: dict[str, _Planned] = field(default_factory=dict, repr=False)  # of `removed`
    freed: int = 0


@uninterrupted
def prune(
    directory: str | os.PathLike[str],
    *,
    keep: int | Keep | Sequence[Keep],
    pattern: str | None = None,
    foreign: bool = False,
    check: bool = False,
    dry_run: bool = False,
) -> Pruned:
    """Delete the checkpoints in a directory that no rule keeps, and the leftovers of interrupted saves.

    Only directories that eformer wrote under the name of a step are removed: step-100, run-100, checkpoint_100,
    ckpt-100, 100. Names that differ before the number (run-100 beside step-100) are series, and count separately. Other
    files and directories stay untouched. Entries that cannot be read, and runs with steps of their own, do not count
    and are never deleted. Nor are the newest checkpoint of a series, the step that a run resumed from, and checkpoints
    that a symbolic link in the directory points to. In a bucket, checkpoints that a reader holds or that a save is
    replacing also stay, and are in `left`.

    keep      the number of checkpoints of each series that stay, or rules as for `Run`; a checkpoint stays if any rule
              keeps it
    pattern   count files and directories of this name instead: a name with one `*` for the number, such as `ema-*`
    foreign   also count checkpoints of other programs, such as steps of Orbax, like `Keep(foreign=True)`
    check     verify the checkpoints that stay first; if one is damaged, delete nothing
    dry_run   delete nothing, only return the plan

    Files in a checkpoint's directory that do not belong to it, such as notes, are removed with it. `other_files` of the
    plan lists them, and the log names some before they are removed. Raise ValueError if files were added after the plan
    was made, or if no checkpoint has the metric of a rule, which may be misspelt.

    Only `check` reads checkpoints of Orbax in a bucket, because it has to copy them. Without it, the newest checkpoint
    of a series that can be read without a copy stays beside them; if none can, all stay.

    Example:

        >>> prune("run", keep=2, dry_run=True).removed
        ('step-100',)
        >>> prune("run", keep=2, check=True).kept
        ('step-200', 'step-300')
        >>> prune("run", keep=[Keep(last=2), Keep(every=1000), Keep(best=3, by="eval.loss")])
        >>> prune("run", keep=2, pattern="step-*")
    """
    plan = plan_removal(directory, keep, pattern=pattern, foreign=foreign, check=check, strict=True)
    if check:
        _require_sound(plan)
    if dry_run:
        return plan
    for name, files in plan.other_files.items():
        logger.warning(
            "%s/%s is removed with files that are not part of it: %s", plan.directory, name, few(files)
        )
    done = remove_planned(plan)
    for name in plan.removed:
        if name in done.left:
            logger.warning("%s/%s stays: %s", plan.directory, name, done.left[name])
    return done


def plan_removal(
    directory: str | os.PathLike[str],
    keep: int | Keep | Sequence[Keep],
    *,
    pattern: str | None = None,
    foreign: bool = False,
    check: bool = False,
    strict: bool = False,
) -> Pruned:
    """Decide which checkpoints to delete, and remember the identity of their files and directories.

    check    the caller verifies the checkpoints that stay
    strict   raise ValueError if no checkpoint has the metric of a rule; otherwise all stay
    """
    if isinstance(keep, int) and keep < 1:
        raise ValueError(f"keep={keep}: at least one checkpoint must stay")
    if not (rules := keep_from(keep)):
        raise ValueError(f"keep={keep!r}: no rule selects checkpoints to keep")
    names = STEPS if pattern is None else StepNames.like(pattern)
    store = store_at(directory)
    if not is_there(store):
        raise NotFoundError(f"{store.url} is not a directory")
    _refuse_checkpoint(store)
    series, left = _listed(store, names, foreign=foreign or any(rule.foreign for rule in rules))
    if not series:
        raise _nothing_to_prune(store, pattern, left)
    rules = tuple(replace(rule, foreign=True) for rule in rules)  # the rest is in `left`
    facts = [[retention.facts_of(step, rules) for step in one] for one in series]
    if strict and (unknown := unknown_metrics((fact for one in facts for fact in one), rules)):
        raise ValueError(
            f"{store.url}: {unknown}; nothing was removed. Correct the rule, or score a step first"
        )
    chosen = (_others(store, *one, rules, check=check) for one in zip(series, facts, strict=True))
    others = {step.name: step for several in chosen for step in several}
    found = [step.name for one in series for step in one]
    removed, stay = [n for n in found if n in others], [n for n in found if n not in others]
    identities = retention.identities_of(store, removed)
    sizes = usage(store, [*identities])
    planned = {
        name: _Planned(identity, sizes[name], _files_in(others[name].path))
        for name, identity in identities.items()
    }
    other_files = {
        name: files for name, one in planned.items() if (files := _other_files(others[name], one.files))
    }
    scores, nbytes = (*retention.orphaned_scores(store),), sum(sizes.values())
    freed = nbytes if on_disk(store) is None else freed_by_removal(store, [*identities])
    return Pruned(store.url, (*planned,), (*stay,), left, nbytes, other_files, scores, planned, freed)


def _nothing_to_prune(store: Store, pattern: str | None, left: Mapping[str, str]) -> NotFoundError:
    found = f"; found {few([f'{name}: {why}' for name, why in left.items()])}" if left else ""
    names = "named by their steps, such as step-100" if pattern is None else f"called {pattern}"
    advice = "" if left or pattern is not None else "; pattern= counts other names, such as 'ema-*'"
    return NotFoundError(f"{store.url} has no checkpoints {names}{found}{advice}")


def _others(
    store: Store, series: Sequence[Step], facts: Sequence[StepFacts], rules: Sequence[Keep], *, check: bool
) -> list[Step]:
    """Return the steps that no rule keeps."""
    now, names = time.time(), few([step.name for step in series])
    by_name = dict(zip((step.name for step in series), facts, strict=True))
    found = retention.removable(store, by_name, rules, now=now)
    warnings = [*warnings_of(facts, rules, now).values()]
    if not can_remove(facts, rules):
        warnings.append(f"all of {names} stay: {unknown_metrics(facts, rules)}")
    stay = set() if check else retention.seen_last(series)
    if found and stay.issuperset(step.number for step in series):
        warnings.append(
            f"all of {names} stay: eformer would have to copy them to read them, as check=True does"
        )
    for warning in warnings:
        logger.warning("%s: %s", store.url, warning)
    return [step for step in series if step.name in found and step.number not in stay]


def _files_in(path: str) -> frozenset[str]:
    """List the files in a directory, at any depth; none if it is a file, or was removed meanwhile."""
    try:
        return frozenset(store_at(path).sizes("", _ALL_DEPTHS))
    except (FileNotFoundError, NotADirectoryError):
        return frozenset()


def _other_files(step: Step, there: Collection[str]) -> tuple[str, ...]:
    """Return the files in the directory of a checkpoint that do not belong to it."""
    found = found_of(step)
    if found.manifest.format == orbax.FORMAT:
        part = _files_of_orbax(there)
    elif ORBAX_CHECKPOINT in there and MANIFEST not in there:
        part = _files_of_items(found, there)
    else:
        part = _files_of(found, there)
    return tuple(sorted({*there} - part))


def _files_of_items(found: Found, there: Collection[str]) -> set[str]:
    """Return the files of a step whose items are checkpoints by eformer. Files of handlers do not count."""
    items = {tree.root.partition("/")[0] for tree in found.manifest.trees.values()}
    documents = set(found.trees.also) if isinstance(found.trees, Trees) else set()
    part = _files_of_orbax(there) | {f"{name}/{JSON_FILE}" for name in documents}
    for item in items:
        inside = {path.removeprefix(f"{item}/") for path in there if path.startswith(f"{item}/")}
        part |= {f"{item}/{path}" for path in _files_of(find_step(found.store.path_to(item)), inside)}
    return part & {*there}


def _files_of(found: Found, there: Collection[str]) -> set[str]:
    """Return the files of a checkpoint: files with leaves, indexes, descriptions, and files of its saves."""
    trees = found.trees.values()
    known = {tree.path_of(number) for tree in trees for number in range(len(tree.files))}
    roots = [tree.root for tree in trees if tree.is_database]
    named = {MANIFEST, INDEX, SIGNATURE, *(f"{root}/{DATABASE_MARK}" for root in roots)}
    named |= {CHECKPOINTER_FILE} if _is_of_checkpointer(found) else set()
    if found.manifest.format == ARRAYS and INDEX in there:
        named |= {_OF_ORIGINAL, *(f"{prefix}{_STRUCTURE}" for prefix in found.trees)}
    log = found.manifest.log or CommitLog()
    saves = {*found.manifest.save_ids, *log.done, *log.dead}
    databases = [f"{glob.escape(root)}/{name}" for root in roots for name in _OF_DATABASES]
    return {
        path
        for path in there
        if path in known
        or path in named
        or _is_of_saves(path, saves, has_leases=on_disk(found.store) is None)
        or _is_beside(path, known)
        or _matches(path, databases)
    }


def _is_of_saves(path: str, saves: Collection[str], *, has_leases: bool) -> bool:
    """Tell by its name whether a file belongs to a save: one of `saves` wrote it, it is in a scratch directory, or it
    is a lease in a bucket."""
    top = path.partition("/")[0]
    if has_leases and top == LEASES:
        return True
    return SCRATCH.fullmatch(top) is not None or not ids_in({top}).isdisjoint(saves)


def _is_beside(path: str, known: Collection[str]) -> bool:
    """Tell whether a file describes files that are known: the index of shards, or the record of a process."""
    folder, _, name = path.rpartition("/")
    if name.endswith(INDEX_SUFFIX):
        return not folder and any(file.startswith(name.removesuffix(INDEX_SUFFIX)) for file in known)
    return PROCESS_RECORD.fullmatch(name) is not None and f"{folder}/{ZARRAY}" in known


def _is_of_checkpointer(found: Found) -> bool:
    """Tell whether the Checkpointer wrote the file of facts in a checkpoint."""
    try:
        data = read_whole(found.store, CHECKPOINTER_FILE)[0]
        return "is_temporary" in parse_json(data, dict[str, Any], CHECKPOINTER_FILE)
    except (FileNotFoundError, FormatError):
        return False


def _files_of_orbax(there: Collection[str]) -> set[str]:
    """Return the files of a checkpoint of Orbax by their names, in its directory or in the directory of an item. Do not
    read its trees, because that would copy them from a bucket."""
    items = {folder for folder, name in map(split, there) if name in _MARKS_OF_ITEMS}
    arrays = {folder for folder, name in map(split, there) if name in (ZARRAY, _ZARR3)}
    return {
        path
        for path in there
        if _matches(path, _OF_ORBAX)
        or any(_matches(below, _OF_ITEMS) for below in _below(path, items))
        or (_below(path, items) and _below(path, arrays))
    }


def _below(path: str, folders: Collection[str]) -> list[str]:
    """Return the path of a file relative to each of these folders that contains it, at any depth."""
    parts = path.split("/")
    outer = ["/".join(parts[:depth]) for depth in range(len(parts))]
    return ["/".join(parts[depth:]) for depth, folder in enumerate(outer) if folder in folders]


def _matches(path: str, patterns: Iterable[str]) -> bool:
    """Match a path with patterns part by part: `*` does not match a slash."""
    parts = path.split("/")
    wanted = (pattern.split("/") for pattern in patterns)
    return any(len(want) == len(parts) and all(map(fnmatchcase, parts, want)) for want in wanted)


def remove_planned(plan: Pruned) -> Pruned:
    """Delete exactly the planned checkpoints, with their scores and signatures. Raise ValueError if a checkpoint has
    been replaced since, or has new files.

    Then delete the leftovers of interrupted saves, without asking: no reader has seen them. Return the plan as carried
    out: a checkpoint stays if a reader of a bucket holds it, or if it contains a mount point.
    """
    store, held, removed = store_at(plan.directory), dict[str, str](), list[str]()
    is_bucket, freed = on_disk(store) is None, 0
    there = store.kinds()
    if RUN_FILE in there:
        numbers = {name: step_number(name) for name in plan.planned}
        remember_metrics(
            store, [Step(n, store.path_to(name)) for name, n in numbers.items() if n is not None]
        )
    try:
        for name, planned in plan.planned.items():
            with suppress(FileNotFoundError):  # the run has removed it
                _refuse_new_files(store, name, planned.files)
                nbytes = planned.nbytes if is_bucket else freed_by_removal(store, [name])  # by the links left
                if why := retention.remove_step(store, name, planned.identity):
                    held[name] = why
                    continue
                freed += nbytes
            removed.append(name)
            signature = signature_name(name)  # only of a file: the signature of a directory lies in it
            is_signed = there.get(name) == there.get(signature) == "file"
            remove_files(store, [signature] if is_signed else [])
    finally:  # also after a failed removal, which may leave files
        _sweep(store, removed, () if on_disk(store) else plan.kept)
    nbytes = sum(plan.planned[name].nbytes for name in removed)
    return replace(plan, removed=tuple(removed), left=plan.left | held, nbytes=nbytes, freed=freed)


def _refuse_new_files(store: Store, name: str, planned: Collection[str]) -> None:
    """Raise ValueError if a directory contains files that were not there when its removal was planned.

    Files of a save that has begun since do not count: the removal sees such a save by its lease or its index.
    """
    there = _files_in(store.path_to(name)).difference(planned)
    saves = ids_in(path.partition("/")[0] for path in there)
    new = [p for p in sorted(there) if not _is_of_saves(p, saves, has_leases=on_disk(store) is None)]
    if new:
        raise ValueError(
            f"{store.path_to(name)} has changed since its removal was planned, and was not removed; it has new files: "
            f"{few(new)}"
        )


def _sweep(store: Store, removed: Collection[str], known: Collection[str]) -> None:
    """Sweep a run, and all directories in it that have the name of a step, except known steps. Then delete score files
    whose step no longer exists."""
    sweep(store, "")
    for name, kind in store.kinds().items():
        if kind == "directory" and name not in known and step_number(name) is not None:
            sweep(store, name)
    remove_files(store, retention.orphaned_scores(store, removed))


def _refuse_checkpoint(store: Store) -> None:
    """Raise ValueError if the directory itself is a checkpoint: its files may be numbered like steps."""
    names, place = list(store.kinds()), on_disk(store)
    marks = (*MARKS, ZARRAY, *(orbax.marks(place) if place is not None else ()))
    if index := [name for name in names if name in marks or name.endswith(INDEX_SUFFIX)]:
        raise ValueError(
            f"{store.url} is itself a checkpoint: it contains {index[0]}. Pass the directory that contains the steps"
        )


def _listed(store: Store, names: StepNames, *, foreign: bool) -> tuple[list[list[Step]], dict[str, str]]:
    """List complete checkpoints by series, and the other entries, except entries that the run has removed meanwhile.

    List again if nothing remains: a run that removes steps has newer steps.
    """
    for _ in range(_MOST_LISTINGS):
        series, left = _series(store, names, foreign=foreign)
        there = store.kinds()
        stay = {name: why for name, why in left.items() if name in there}
        if series or stay or not left:
            return series, stay
    return [], {}


def _series(store: Store, names: StepNames, *, foreign: bool) -> tuple[list[list[Step]], dict[str, str]]:
    """List complete checkpoints by series, in the order of their steps, and the reason to skip each other entry."""
    found: dict[str, list[Step]] = defaultdict(list)
    left: dict[str, str] = {}
    for name, kind in store.kinds().items():
        parsed = names.parse(name) if _may_be_step(name, kind, names) else None
        if parsed is None or Path(store.path_to(name)).is_symlink():
            continue
        if kind == "directory" and is_removed(store, name):
            continue
        step = Step(int(parsed[1]), store.path_to(name))
        if problem := _problem(store, step, kind):
            left[name] = f"it is not a complete checkpoint: {problem}"
        elif is_foreign(step) and not foreign:
            by = found_of(step).manifest.format
            left[name] = f"another program wrote it ({by}); foreign=True also counts and removes such steps"
        else:
            found[parsed[0]].append(step)
    return [sorted(series, key=lambda step: (step.number, step.name)) for series in found.values()], left


def _may_be_step(name: str, kind: Kind, names: StepNames) -> bool:
    """Tell whether an entry may be a step: a directory, or with a pattern also a file that is not a shard."""
    is_shard = split_shard(name.removesuffix(SUFFIX)) is not None
    return not is_shard and not name.startswith(".") and (kind == "directory" or names is not STEPS)


def _problem(store: Store, step: Step, kind: Kind) -> str | None:
    """Return why this is not a complete checkpoint; None if it is. Does not check digests."""
    if kind == "directory" and store.exists(f"{step.name}/{ZARRAY}"):
        return "it is a single array"
    if problem := step.problem():
        return problem
    if found_of(step).manifest.format == ARRAYS and not store.exists(f"{step.name}/{INDEX}"):
        return "it contains arrays without an index, and perhaps other data"
    return None


def _require_sound(plan: Pruned) -> None:
    for name in plan.kept:
        try:
            found = verify(store_at(plan.directory).path_to(name))
        except (FormatError, FileNotFoundError) as error:
            raise CorruptionError(
                f"nothing was removed, because a checkpoint to keep cannot be read: {name}: {error}"
            ) from error
        if found.damages:
            raise CorruptionError(f"nothing was removed, because a checkpoint to keep is damaged: {found}")
