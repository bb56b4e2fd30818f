"""Find the checkpoints that a Checkpointer has finished, read the facts that it recorded, and remove them.

The code of runs names, lists and removes these checkpoints. The documentation of the Checkpointer asks for three other
rules, which this module has: a checkpoint under any name counts if it has a `metadata.json`; a damaged newest
checkpoint is skipped with a warning; and a temporary checkpoint is removed when a newer one is finished.

Tests: tests/serialization/test_checkpointer.py.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

import msgspec

from eformer._engine.formats.find import find, problem_of, reread
from eformer._engine.formats.found import kinds_if_there
from eformer._engine.formats.run_steps import RUN_METADATA, Step, steps
from eformer._engine.formats.steps import CHECKPOINTER_FILE
from eformer._engine.record.step_names import step_number
from eformer._engine.record.values import parse_json
from eformer._engine.runs.retention import remove_step
from eformer._engine.stores.base import read_whole
from eformer._engine.stores.checkpoints import identity_of
from eformer._engine.stores.local import is_there
from eformer._engine.stores.locate import store_at
from eformer.errors import EformerError, FormatError, NotFoundError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from eformer._engine.stores.base import Identity, Store

logger = logging.getLogger("eformer")

# ---------------------------------------------------------------------------------------------- find


def find_latest_checkpoint(base_path: str | os.PathLike[str]) -> str | None:
    """Return the path of the last finished checkpoint in `base_path`, or of `base_path` if it is one; None for neither.

    The last checkpoint has the highest step, whatever its time. Damaged checkpoints are skipped with a warning.

    Example:

        >>> find_latest_checkpoint("runs/llama")
        'runs/llama/run-1000'
    """
    root = str(base_path)
    names = kinds_if_there(store_at(root))
    # Not hidden directories, and checkpoints that were put aside: run-100.damaged.
    inner = [name for name, kind in names.items() if kind == "directory" and "." not in name]
    found = [_finished(os.path.join(root, name)) for name in inner]  # noqa: PTH118  URLs, too
    for step in sorted(filter(None, found), key=lambda step: (step.number, step.path), reverse=True):
        if (problem := step.problem()) is None:
            return step.path
        logger.warning("%s is skipped, because it is not whole: %s", step.path, problem)
    own = _finished(root) if CHECKPOINTER_FILE in names else None
    return root if own is not None and own.problem() is None else None


def _finished(path: str) -> Step | None:
    """Return a finished checkpoint with its step; None for any other path."""
    try:
        recorded = read_checkpoint_metadata(path).get("step", -1)
    except (EformerError, OSError):
        return None
    return Step(step_of(recorded if isinstance(recorded, int) else -1, path), path)


def is_checkpoint(path: str) -> bool:
    """Tell whether this is itself a checkpoint, and not a directory of checkpoints."""
    try:
        found = find(path)
    except NotFoundError:
        return False
    except (EformerError, OSError):  # damaged: the load names the damage
        return True
    try:
        return found.path not in {step.path for step in steps(path)}
    except NotFoundError:  # a file
        return True


def problem_at(path: str) -> str | None:
    """Return why this is not a whole checkpoint, or None. Wait for saves to it in the background."""
    try:
        return reread(path, problem_of)
    except (EformerError, OSError) as error:
        return str(error)


# ------------------------------------------------------------------------------------------- metadata


def step_of(step: int, destination: str) -> int:
    """Return the step; for a negative one, the number at the end of the name, or -1 if it has none."""
    if step >= 0:
        return int(step)
    number = step_number(destination.rstrip("/").rpartition("/")[2])
    return -1 if number is None else number


def write_metadata(path: str, facts: Mapping[str, Any]) -> None:
    """Replace `metadata.json` of a checkpoint, whole or not at all, without a read of the present file."""
    store = store_at(path)
    if not is_there(store):
        raise FileNotFoundError(f"{path} is gone, so its {CHECKPOINTER_FILE} is not written")
    upload = store.begin()
    try:
        upload.swap(CHECKPOINTER_FILE, msgspec.json.encode(facts), None)
    finally:
        upload.close()


def metadata_file(path: str) -> dict[str, Any] | None:
    """Read `metadata.json` of a checkpoint; None if the file is missing or cannot be read."""
    try:
        data, _ = read_whole(store_at(path), CHECKPOINTER_FILE)
        return parse_json(data, dict[str, Any], f"{path}: its {CHECKPOINTER_FILE} cannot be read")
    except (FileNotFoundError, NotADirectoryError, FormatError):
        return None


def read_checkpoint_metadata(checkpoint_path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return `step`, `timestamp` and `is_temporary` of a finished checkpoint, and the entries of callbacks.

    Raise FileNotFoundError if it is not finished.
    """
    path = str(checkpoint_path)
    if (written := metadata_file(path)) is not None:
        return written
    if (committed := _committed_facts(path)) is not None:
        return committed
    raise NotFoundError(
        f"{path} has no {CHECKPOINTER_FILE}: it is not a checkpoint, or its save was not finished"
    )


def _committed_facts(path: str) -> dict[str, Any] | None:
    """Return the facts that were committed together with a tree; None if no tree has any."""
    for tree in find(path).trees.values():
        facts = tree.metadata
        if "is_temporary" in facts or RUN_METADATA in facts:
            return {
                "step": facts.get("step", step_of(-1, path)),
                "timestamp": tree.saved_at,
                "is_temporary": facts.get("is_temporary", False),
            }
    return None


def is_temporary(path: str) -> bool:
    """Tell whether all records of a checkpoint call it temporary. A temporary checkpoint that was just replaced by a
    permanent one has records of both for a moment, and must stay."""
    try:
        said = [facts for facts in (metadata_file(path), _committed_facts(path)) if facts is not None]
    except (EformerError, OSError):
        return False
    return bool(said) and all(facts.get("is_temporary") is True for facts in said)


# --------------------------------------------------------------------------------------------- remove


def removable(store: Store, name: str) -> Identity | None:
    """Return the identity of a removable checkpoint; None if it is gone, or the newest finished checkpoint."""
    try:
        identity = identity_of(store, name)
    except FileNotFoundError:
        return None
    newest = find_latest_checkpoint(store.url)
    if newest is None or store_at(newest).key == store.at(name).key:
        logger.warning("%s is not removed: no newer checkpoint is finished", store.path_to(name))
        return None
    return identity


def remove(store: Store, name: str, identity: Identity) -> None:
    """Remove a checkpoint, as a run removes a step. Log errors."""
    try:
        if (why := remove_step(store, name, identity)) is not None:
            logger.warning("%s stays: %s", store.path_to(name), why)
    except FileNotFoundError:  # another removal was faster
        pass
    except (EformerError, OSError, ValueError):
        logger.exception("%s could not be removed", store.path_to(name))
