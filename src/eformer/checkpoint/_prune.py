"""Old checkpoints of a run, out of the way. Needs no jax."""

from __future__ import annotations

import re
import secrets
import shutil
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from eformer.checkpoint._formats.find import find
from eformer.checkpoint._store.local import list_names, local_path, rename, sync_directory
from eformer.checkpoint._verify import verify
from eformer.errors import EformerError, NotFoundError

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence
    from pathlib import Path

_STEP = re.compile(r"(?P<before>.*?)(?P<step>\d+)(?P<after>\.safetensors)?")


@dataclass(frozen=True, slots=True)
class Pruned:
    """What `prune` removed, or would; `kept`; and `left` alone, with the reasons: what is no whole checkpoint."""

    directory: str
    removed: tuple[str, ...]
    kept: tuple[str, ...]
    left: dict[str, str]
    nbytes: int


def prune(
    directory: str | os.PathLike[str], *, keep: int, check: bool = False, dry_run: bool = False
) -> Pruned:
    """Of the checkpoints in a directory, called by their steps (run-100, step_200, 300), the last `keep` are left.

    One that cannot be read counts for nothing, and stays: it is nobody's to remove but yours. With `check` those that
    are kept are read and verified first; if one is damaged, nothing is removed. Series of other names (ema-100 beside
    run-100) are counted apart.
    """
    if keep < 1:
        raise ValueError(f"keep={keep}: at least one checkpoint has to stay")
    where = local_path(directory)
    if not where.is_dir():
        raise NotFoundError(f"there is no directory {where}")
    series, left = _series(where)
    removed = [name for names in series for name in names[:-keep]]
    kept = [name for names in series for name in names[-keep:]]
    if not removed and not kept:
        raise NotFoundError(f"{where} has no checkpoints that are called by their steps, such as run-100")
    nbytes = sum(_nbytes(where / name) for name in removed)
    if check:
        _require_sound(where, kept)
    if not dry_run:
        for name in removed:
            _remove(where, name)
    return Pruned(str(where), tuple(removed), tuple(kept), left, nbytes)


def _series(where: Path) -> tuple[list[list[str]], dict[str, str]]:
    """Names of whole checkpoints, by series, the last step last; and what else is called like one."""
    steps: dict[tuple[str, str], list[tuple[int, str]]] = defaultdict(list)
    left: dict[str, str] = {}
    for name in list_names(where):
        match = _STEP.fullmatch(name)
        if not match or name.startswith(".") or (where / name).is_symlink():
            continue
        if problem := _problem(where / name):
            left[name] = problem
        else:
            steps[match["before"], match["after"] or ""].append((int(match["step"]), name))
    return [[name for _, name in sorted(found)] for found in steps.values()], left


def _problem(path: Path) -> str | None:
    """Why it is no whole checkpoint; digests aside."""
    try:
        found = find(path)
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


def _require_sound(where: Path, kept: Sequence[str]) -> None:
    for name in kept:
        report = verify(where / name)
        if not report.ok:
            raise EformerError(f"nothing was removed, because one that stays is damaged: {report}")


def _nbytes(path: Path) -> int:
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return sum(file.lstat().st_size for file in files)


def _remove(where: Path, name: str) -> None:
    """First out of sight: what is half removed is never taken for a checkpoint."""
    hidden = where / f".eformer-{secrets.token_hex(8)}.tmp"
    rename(where / name, hidden)
    sync_directory(where)
    if hidden.is_dir():
        shutil.rmtree(hidden)
    else:
        hidden.unlink()
