"""Delete old checkpoints of a run. No jax."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from eformer._engine.formats.find import find, problem_of
from eformer._engine.formats.others import orbax
from eformer._engine.formats.safetensors.names import INDEX_SUFFIX, MANIFEST, SUFFIX, split_shard
from eformer._engine.formats.zarr.index import INDEX
from eformer._engine.formats.zarr.read import FOREIGN as ARRAYS
from eformer._engine.formats.zarr.zarray import ZARRAY
from eformer._engine.record.policies import keep_from, kept
from eformer._engine.runs.retention import facts_of, linked_in
from eformer._engine.runs.steps import Step, score_name
from eformer._engine.stores.directory import Directory
from eformer._engine.stores.inside import walk
from eformer._engine.stores.journal import sweep_dead
from eformer._engine.stores.local import LocalStore
from eformer._engine.stores.local_paths import local_path
from eformer._engine.stores.removal import Identity, identity_of, remove_checkpoint, remove_file
from eformer._engine.tools.verify import verify
from eformer.errors import CorruptionError, EformerError, NotFoundError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from eformer._engine.record.policies import Keep

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
    identities: tuple[Identity, ...] = field(default=(), repr=False)  # of `removed`


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
    nor are the newest of a series, and checkpoints that a symbolic link in the directory points to.

    keep      how many checkpoints of each series stay, or rules as for `Run`, which are a union
    check     verify the checkpoints that stay first; if one is damaged, delete nothing
    dry_run   delete nothing, only return the plan

    Example:

        >>> prune("run", keep=2, dry_run=True).removed
        ('step-100', 'step-200')
        >>> prune("run", keep=2, check=True).kept
        ('step-300', 'step-400')
        >>> prune("run", keep=[Keep(last=2), Keep(every=1000), Keep(best=3, by="eval.loss")])
    """
    plan = plan_removal(directory, keep)
    if check:
        _require_sound(plan)
    if not dry_run:
        remove(plan)
    return plan


def plan_removal(directory: str | os.PathLike[str], keep: int | Keep | Sequence[Keep]) -> Pruned:
    """Decide which checkpoints to delete, and remember which files and directories they are."""
    if isinstance(keep, int) and keep < 1:
        raise ValueError(f"keep={keep}: at least one checkpoint must stay")
    if not (rules := keep_from(keep)):
        raise ValueError(f"keep={keep!r}: no rule says which checkpoints stay")
    where = local_path(directory)
    if not where.is_dir():
        raise NotFoundError(f"{where} is not a directory")
    _refuse_checkpoint(where)
    series, left = _series(where)
    linked = linked_in(where)
    others = {step.name for one in series for step in _others(one, rules)} - linked
    names = [step.name for one in series for step in one]
    removed, stay = [n for n in names if n in others], [n for n in names if n not in others]
    if not names:
        raise NotFoundError(f"{where} has no checkpoints named by their steps, such as run-100")
    there = {name: facts for name in removed if (facts := _facts_of(where / name)) is not None}
    nbytes = sum(nbytes for nbytes, _ in there.values())
    identities = tuple(identity for _, identity in there.values())
    return Pruned(str(where), tuple(there), tuple(stay), left, nbytes, identities)


def _facts_of(path: Path) -> tuple[int, Identity] | None:
    """Return the size of a checkpoint and its identity; None if it has gone: the run removes steps, too."""
    try:
        return _nbytes(path), identity_of(path)
    except FileNotFoundError:
        return None


def _others(series: Sequence[Step], rules: Sequence[Keep]) -> list[Step]:
    """Return the steps that no rule keeps."""
    stay = kept([facts_of(step, rules) for step in series], rules)
    return [step for step in series if step.number not in stay]


def remove(plan: Pruned) -> None:
    """Delete exactly the planned checkpoints, with their scores. Raise if one has been replaced since.

    Then sweep what saves that died have left: nobody has seen it, so nobody needs to be asked.
    """
    where = Path(plan.directory)
    for name, identity in zip(plan.removed, plan.identities, strict=True):
        if os.path.lexists(where / name):  # else the run has removed it
            remove_checkpoint(where, name, identity)
        remove_file(where, score_name(name))
    with Directory.open(where) as place:
        sweep_dead(place)
        for name, kind in place.kinds().items():
            if kind == "directory" and not name.startswith(".") and _STEP.fullmatch(name):
                sweep_dead(place, name)


def _refuse_checkpoint(where: Path) -> None:
    """Refuse a directory that is one checkpoint, whose files may be numbered like steps."""
    names = list(LocalStore(where).kinds())
    marks = (MANIFEST, INDEX, ZARRAY, *orbax.marks(where))
    if index := [name for name in names if name in marks or name.endswith(INDEX_SUFFIX)]:
        raise ValueError(
            f"{where} is itself a checkpoint: it contains {index[0]}. Pass the directory that contains the steps"
        )


def _series(where: Path) -> tuple[list[list[Step]], dict[str, str]]:
    """List complete checkpoints by series, in order of their steps; and the names of other entries with the reason."""
    steps: dict[tuple[str, str], list[Step]] = defaultdict(list)
    left: dict[str, str] = {}
    for name in list(LocalStore(where).kinds()):
        match = _STEP.fullmatch(name)
        is_shard = split_shard(name.removesuffix(SUFFIX)) is not None
        if not match or is_shard or name.startswith(".") or (where / name).is_symlink():
            continue
        if problem := _problem(where / name):
            left[name] = problem
        else:
            steps[match["before"], match["after"] or ""].append(Step(int(match["step"]), str(where / name)))
    return [sorted(found, key=lambda step: (step.number, step.name)) for found in steps.values()], left


def _problem(path: Path) -> str | None:
    """Say why this is not a complete checkpoint, or return None. Digests are not checked."""
    try:
        if path.is_dir() and (path / ZARRAY).exists():
            return "it is a single array"
        found = find(path)
        if found.manifest.format == ARRAYS and not (path / INDEX).exists():
            return "it contains arrays without an index, and perhaps other data"
        return problem_of(found)
    except (EformerError, OSError) as error:
        return str(error)


def _require_sound(plan: Pruned) -> None:
    for name in plan.kept:
        report = verify(Path(plan.directory) / name)
        if report.damages:
            raise CorruptionError(f"nothing was removed, because a checkpoint to keep is damaged: {report}")


def _nbytes(path: Path) -> int:
    if path.is_file():
        return path.stat().st_size
    files = (entry for entry in walk(path) if entry.is_file(follow_symlinks=False))
    return sum(entry.stat(follow_symlinks=False).st_size for entry in files)
