"""Old checkpoints of a run, out of the way. Needs no jax."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from eformer._engine.formats.find import find
from eformer._engine.formats.others import orbax
from eformer._engine.formats.safetensors.names import INDEX_SUFFIX, MANIFEST, SUFFIX, split_shard
from eformer._engine.formats.zarr.index import INDEX
from eformer._engine.formats.zarr.read import FOREIGN as ARRAYS
from eformer._engine.formats.zarr.zarray import ZARRAY
from eformer._engine.stores.inside import walk
from eformer._engine.stores.local import LocalStore
from eformer._engine.stores.locate import local_path
from eformer._engine.stores.removal import Identity, identity_of, remove_checkpoint
from eformer._engine.tools.verify import verify
from eformer.errors import CorruptionError, EformerError, NotFoundError

_STEP = re.compile(r"(?P<before>.*?)(?P<step>\d+)(?P<after>\.(safetensors|npz|msgpack|eqx))?")


@dataclass(frozen=True, slots=True)
class Pruned:
    """What `prune` removed, or would; `kept`; and `left` alone, with the reasons: what is no whole checkpoint."""

    directory: str
    removed: tuple[str, ...]
    kept: tuple[str, ...]
    left: dict[str, str]
    nbytes: int
    identities: tuple[Identity, ...] = field(default=(), repr=False)  # of what is removed


def prune(
    directory: str | os.PathLike[str], *, keep: int, check: bool = False, dry_run: bool = False
) -> Pruned:
    """Of the checkpoints in a directory, called by their steps (run-100, step_200, 300), the last `keep` are left.

    One that cannot be read counts for nothing, and stays: it is nobody's to remove but yours. So does one that a link
    beside it leads to. With `check` those that
    are kept are read and verified first; if one is damaged, nothing is removed. Series of other names (ema-100 beside
    run-100) are counted apart.
    """
    plan = planned(directory, keep)
    if check:
        _require_sound(plan)
    if not dry_run:
        remove(plan)
    return plan


def planned(directory: str | os.PathLike[str], keep: int) -> Pruned:
    """What there is to remove."""
    if keep < 1:
        raise ValueError(f"keep={keep}: at least one checkpoint has to stay")
    where = local_path(directory)
    if not where.is_dir():
        raise NotFoundError(f"there is no directory {where}")
    _refuse_checkpoint(where)
    series, left = _series(where)
    linked = _linked(where)
    removed = [name for names in series for name in names[:-keep] if name not in linked]
    kept = [name for names in series for name in names if name not in removed]
    if not removed and not kept:
        raise NotFoundError(f"{where} has no checkpoints that are called by their steps, such as run-100")
    nbytes = sum(_nbytes(where / name) for name in removed)
    identities = tuple(identity_of(where / name) for name in removed)
    return Pruned(str(where), tuple(removed), tuple(kept), left, nbytes, identities)


def _linked(where: Path) -> set[str]:
    """What links beside the steps lead to, or into: best -> step-100, best.bin -> step-100/model.safetensors."""
    real = os.path.realpath(where)
    leads = [os.path.realpath(path) for path in where.iterdir() if path.is_symlink()]
    return {lead.removeprefix(f"{real}/").partition("/")[0] for lead in leads if lead.startswith(f"{real}/")}


def remove(plan: Pruned) -> None:
    """Exactly what was planned, whatever has come since."""
    for name, identity in zip(plan.removed, plan.identities, strict=True):
        remove_checkpoint(Path(plan.directory), name, identity)


def _refuse_checkpoint(where: Path) -> None:
    """The files of one checkpoint may be numbered, too."""
    names = list(LocalStore(where).kinds())
    marks = (MANIFEST, INDEX, ZARRAY, *orbax.marks(where))
    if index := [name for name in names if name in marks or name.endswith(INDEX_SUFFIX)]:
        raise ValueError(
            f"{where} is a checkpoint itself: it has {index[0]}. What to prune is the directory that the steps are in"
        )


def _series(where: Path) -> tuple[list[list[str]], dict[str, str]]:
    """Names of whole checkpoints, by series, the last step last; and what else is called like one."""
    steps: dict[tuple[str, str], list[tuple[int, str]]] = defaultdict(list)
    left: dict[str, str] = {}
    for name in list(LocalStore(where).kinds()):
        match = _STEP.fullmatch(name)
        is_shard = split_shard(name.removesuffix(SUFFIX)) is not None
        if not match or is_shard or name.startswith(".") or (where / name).is_symlink():
            continue
        if problem := _problem(where / name):
            left[name] = problem
        else:
            steps[match["before"], match["after"] or ""].append((int(match["step"]), name))
    return [[name for _, name in sorted(found)] for found in steps.values()], left


def _problem(path: Path) -> str | None:
    """Why it is no whole checkpoint; digests aside."""
    try:
        if path.is_dir() and (path / ZARRAY).exists():
            return "it is an array"
        found = find(path)
        if found.manifest.format == ARRAYS and not (path / INDEX).exists():
            return "it holds arrays without an index, and perhaps something else"
        for tree in found.trees.values():
            files = found.files(tree)
            try:
                for number, file in enumerate(tree.files):
                    if files.nbytes(number) != file.nbytes:
                        return f"{file.name} has {files.nbytes(number)} bytes, recorded are {file.nbytes}"
            finally:
                files.close()
    except (EformerError, OSError) as error:
        return str(error)
    return None


def _require_sound(plan: Pruned) -> None:
    for name in plan.kept:
        report = verify(Path(plan.directory) / name)
        if report.damages:
            raise CorruptionError(f"nothing was removed, because one that stays is damaged: {report}")


def _nbytes(path: Path) -> int:
    if path.is_file():
        return path.stat().st_size
    files = (entry for entry in walk(path) if entry.is_file(follow_symlinks=False))
    return sum(entry.stat(follow_symlinks=False).st_size for entry in files)
