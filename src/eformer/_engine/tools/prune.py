"""Delete old checkpoints of a run. No jax."""

from __future__ import annotations

import os  # noqa: TC003
import re
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from eformer._engine.formats.find import find, problem_of
from eformer._engine.formats.indexes import INDEXES, is_removed
from eformer._engine.formats.others import orbax
from eformer._engine.formats.safetensors.names import INDEX_SUFFIX, SUFFIX, split_shard
from eformer._engine.formats.steps import MARKS
from eformer._engine.formats.zarr.index import INDEX
from eformer._engine.formats.zarr.read import FOREIGN as ARRAYS
from eformer._engine.formats.zarr.zarray import ZARRAY
from eformer._engine.record.policies import keep_from, kept
from eformer._engine.record.signature import signature_name
from eformer._engine.runs.retention import facts_of, linked_in, remove_orphaned_scores
from eformer._engine.runs.steps import Step
from eformer._engine.stores.base import remove_files
from eformer._engine.stores.locate import store_at
from eformer._engine.tasks.interrupts import uninterrupted
from eformer._engine.tools.verify import verify
from eformer.errors import CorruptionError, EformerError, NotFoundError

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from eformer._engine.record.policies import Keep
    from eformer._engine.stores.base import Identity, Kind, Store

_STEP = re.compile(r"(?P<before>.*?)(?P<step>\d+)(?P<after>\.(safetensors|npz|msgpack|eqx))?")


@dataclass(frozen=True, slots=True)
class Pruned:
    """Describe what `prune` removed, or with `dry_run` would remove.

    removed   names of the removed checkpoints
    kept      names of the checkpoints that stay
    left      entries that are named like a step but are not a complete checkpoint, with the reason; they stay
    nbytes    the bytes of the removed checkpoints
    """

    directory: str
    removed: tuple[str, ...]
    kept: tuple[str, ...]
    left: dict[str, str]
    nbytes: int
    sizes: dict[str, int] = field(default_factory=dict, repr=False)  # of `removed`, as were the identities
    identities: tuple[Identity, ...] = field(default=(), repr=False)


@uninterrupted
def prune(
    directory: str | os.PathLike[str],
    *,
    keep: int | Keep | Sequence[Keep],
    check: bool = False,
    dry_run: bool = False,
) -> Pruned:
    """Delete the checkpoints in a directory that no rule keeps, and what saves that died have left there.

    Checkpoints are recognized by a name that ends in the step: run-100, step_200, 300. Series with different names
    (ema-100 beside run-100) are counted separately. Entries that cannot be read do not count and are never deleted;
    nor are the newest of a series, and checkpoints that a symbolic link in the directory points to. In a bucket, those
    that a reader holds or that are being saved to stay, too, and are in `left`.

    keep      how many checkpoints of each series stay, or rules as for `Run`, which are a union
    check     verify the checkpoints that stay first; if one is damaged, delete nothing
    dry_run   delete nothing, only return the plan

    Example:

        >>> prune("run", keep=2, dry_run=True).removed
        ('step-100',)
        >>> prune("run", keep=2, check=True).kept
        ('step-200', 'step-300')
        >>> prune("run", keep=[Keep(last=2), Keep(every=1000), Keep(best=3, by="eval.loss")])
    """
    plan = plan_removal(directory, keep)
    if check:
        _require_sound(plan)
    return plan if dry_run else remove(plan)


def plan_removal(directory: str | os.PathLike[str], keep: int | Keep | Sequence[Keep]) -> Pruned:
    """Decide which checkpoints to delete, and remember which files and directories they are."""
    if isinstance(keep, int) and keep < 1:
        raise ValueError(f"keep={keep}: at least one checkpoint must stay")
    if not (rules := keep_from(keep)):
        raise ValueError(f"keep={keep!r}: no rule says which checkpoints stay")
    store = store_at(directory)
    if not store.is_there():
        raise NotFoundError(f"{store.url} is not a directory")
    _refuse_checkpoint(store)
    series, left = _series(store)
    place = store.local_path()
    linked = linked_in(place) if place is not None else set()
    others = {step.name for one in series for step in _others(one, rules)} - linked
    names = [step.name for one in series for step in one]
    removed, stay = [n for n in names if n in others], [n for n in names if n not in others]
    if not names:
        raise NotFoundError(f"{store.url} has no checkpoints named by their steps, such as run-100")
    identities = {name: found for name in removed if (found := _identity(store, name)) is not None}
    sizes = store.usage([*identities])
    return Pruned(
        store.url, (*identities,), (*stay,), left, sum(sizes.values()), sizes, (*identities.values(),)
    )


def _identity(store: Store, name: str) -> Identity | None:
    """Return the identity of a checkpoint; None if it has gone: the run removes steps, too."""
    try:
        return store.identity(name, INDEXES)
    except FileNotFoundError:
        return None


def _others(series: Sequence[Step], rules: Sequence[Keep]) -> list[Step]:
    """Return the steps that no rule keeps."""
    stay = kept([facts_of(step, rules) for step in series], rules)
    return [step for step in series if step.number not in stay]


def remove(plan: Pruned) -> Pruned:
    """Delete exactly the planned checkpoints, with their scores and signatures. Raise if one has been replaced since.

    Then sweep what saves that died have left: nobody has seen it, so nobody needs to be asked. Return what was done:
    a checkpoint in a bucket that somebody holds stays.
    """
    store, held, removed = store_at(plan.directory), {}, []
    there = store.kinds()
    try:
        for name, identity in zip(plan.removed, plan.identities, strict=True):
            with suppress(FileNotFoundError):  # the run has removed it
                if not store.remove_checkpoint(name, INDEXES, identity):
                    held[name] = "a reader holds it, or a save to it is under way"
                    continue
            removed.append(name)
            remove_files(store, [signature] if (signature := signature_name(name)) in there else [])
    finally:  # also what is left of a removal that failed
        _sweep(store, removed, () if store.can_rename else plan.kept)
    nbytes = sum(plan.sizes[name] for name in removed)
    return replace(plan, removed=tuple(removed), left=plan.left | held, nbytes=nbytes)


def _sweep(store: Store, removed: Collection[str], known: Collection[str]) -> None:
    """Sweep a run, and all directories in it that have the name of a step, except for steps that are known; and remove
    the scores of steps that have gone."""
    store.sweep("", INDEXES)
    for name, kind in store.kinds().items():
        if kind == "directory" and name not in known and not name.startswith(".") and _STEP.fullmatch(name):
            store.sweep(name, INDEXES)
    remove_orphaned_scores(store, removed)


def _refuse_checkpoint(store: Store) -> None:
    """Refuse a directory that is one checkpoint, whose files may be numbered like steps."""
    names, place = list(store.kinds()), store.local_path()
    marks = (*MARKS, ZARRAY, *(orbax.marks(place) if place is not None else ()))
    if index := [name for name in names if name in marks or name.endswith(INDEX_SUFFIX)]:
        raise ValueError(
            f"{store.url} is itself a checkpoint: it contains {index[0]}. Pass the directory that contains the steps"
        )


def _series(store: Store) -> tuple[list[list[Step]], dict[str, str]]:
    """List complete checkpoints by series, in order of their steps; and the names of other entries with the reason."""
    steps: dict[tuple[str, str], list[Step]] = defaultdict(list)
    left: dict[str, str] = {}
    for name, kind in store.kinds().items():
        match = _STEP.fullmatch(name)
        is_shard = split_shard(name.removesuffix(SUFFIX)) is not None
        if not match or is_shard or name.startswith(".") or Path(store.path_to(name)).is_symlink():
            continue
        if kind == "directory" and is_removed(store, name):
            continue
        if problem := _problem(store, name, kind):
            left[name] = problem
        else:
            step = Step(int(match["step"]), store.path_to(name))
            steps[match["before"], match["after"] or ""].append(step)
    return [sorted(found, key=lambda step: (step.number, step.name)) for found in steps.values()], left


def _problem(store: Store, name: str, kind: Kind) -> str | None:
    """Say why this is not a complete checkpoint, or return None. Digests are not checked."""
    try:
        if kind == "directory" and store.exists(f"{name}/{ZARRAY}"):
            return "it is a single array"
        found = find(store.path_to(name))
        if found.manifest.format == ARRAYS and not store.exists(f"{name}/{INDEX}"):
            return "it contains arrays without an index, and perhaps other data"
        return problem_of(found)
    except (EformerError, OSError) as error:
        return str(error)


def _require_sound(plan: Pruned) -> None:
    for name in plan.kept:
        report = verify(store_at(plan.directory).path_to(name))
        if report.damages:
            raise CorruptionError(f"nothing was removed, because a checkpoint to keep is damaged: {report}")
