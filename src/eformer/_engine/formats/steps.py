"""Find the steps of a run: directories whose names end in a number, each a checkpoint.

Tests: tests/engine/runs/test_steps.py, tests/engine/tools/test_prune.py, tests/engine/pages/test_addresses.py.
"""

from __future__ import annotations

import operator
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, SupportsIndex

from eformer._engine.formats.found import kinds_if_there
from eformer._engine.formats.others.orbax import has_items
from eformer._engine.formats.safetensors.names import INDEX_SUFFIX, PRIVATE, SUFFIX
from eformer._engine.formats.safetensors.read import marked_file
from eformer._engine.formats.zarr.read import array_at, discover
from eformer._engine.record.indexes import (
    INDEX,
    INDEXES,
    MANIFEST,
    MOST_EMPTY,
    ORBAX_CHECKPOINT,
    ORBAX_TREE,
    manifest_in,
)
from eformer._engine.record.step_names import OF_CHECKPOINTER, OF_RUN, step_name, step_number
from eformer._engine.stores.durable import SCRATCH
from eformer._engine.stores.local import on_disk
from eformer._engine.stores.removal import DATABASE_MARK
from eformer._engine.tasks.pool import run_all
from eformer.errors import EformerError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from eformer._engine.stores.base import Kind, Store

RUN_FILE = "run.json"  # in the directory of a run: names the job that writes the run
CHECKPOINTER_FILE = "metadata.json"  # in a finished step of the documented Checkpointer

MARKS = (MANIFEST, INDEX, ORBAX_TREE, ORBAX_CHECKPOINT)


def checked_number(step: SupportsIndex) -> int:
    """Return the number of a step as an int. Raise if it is no number of a step: the step would get a name that no
    listing finds."""
    try:
        number = int(operator.index(step))
    except TypeError:
        raise TypeError(f"step={step!r}: expected a whole number, the count of finished steps") from None
    if not 0 <= number < 10**18:
        raise ValueError(f"step={number}: expected a number from 0 on, of at most 18 digits")
    return number


def steps_in(store: Store) -> list[tuple[int, str]]:
    """List the steps of a run by number and name, the last step last. No manifest is read.

    A directory is not a step if it has neither an index, nor a manifest, nor a mark of Orbax (another program made it,
    or its save was not committed), if its index says that the step was removed, or if it is a run with steps of its
    own. On disk, where a save publishes whole directories, a directory that has lost its index is a damaged step and is
    listed: step-100 with files that may hold leaves, and run-100 with files or arrays that eformer wrote.
    """
    if on_disk(store) is not None:
        if not (found := sorted(steps_from_last(store))):
            store.kinds()  # raises if the directory does not exist
        return found
    names = sorted(_names_by_number(store.kinds()).items())
    are_steps = _looked_at(store, [name for _, several in names for name in several])
    chosen = [(number, [name for name in several if are_steps[name]]) for number, several in names]
    return [(number, several[0]) for number, several in chosen if several]


def _looked_at(store: Store, names: Sequence[str]) -> dict[str, bool]:
    """Tell which directories are steps. They are looked at in parallel, because each takes requests to a bucket."""
    found: dict[str, bool] = {}

    def look(name: str) -> None:
        found[name] = _is_step(store, name)

    run_all([partial(look, name) for name in names], store.read_threads)
    return found


def steps_from_last(store: Store) -> Iterator[tuple[int, str]]:
    """Find the steps of a run by number and name, the last step first. A directory is only looked into when the caller
    asks for the next step.

    If none of the listed names is a step, list again until the names stay the same: a run that keeps one step commits
    the next step and removes the last one, which may happen between the listing and the look.
    """
    before: object = None
    is_found = False
    while not is_found and before != (names := sorted(_names_in(store).items(), reverse=True)):
        before = names
        for step in _steps_among(store, names):
            is_found = True
            yield step


def last_step_in(store: Store) -> tuple[int, str] | None:
    """Return the last step of a run by number and name. Earlier steps are not looked into."""
    return next(steps_from_last(store), None)


def name_of_step(store: Store, number: int) -> str:
    """Return the name that a step of a run has, or will have. Other steps are not looked into."""
    names = _names_in(store).get(number, [])
    return next((name for _, name in _steps_among(store, [(number, names)])), step_name(number))


def name_to_save(store: Store, number: int) -> str:
    """Return the name to save a step under: the name it has, or a new one beside a step of Orbax, which is left as it
    is. Raise FileExistsError for a link: the save would replace the link's target."""
    name = name_of_step(store, number)
    if is_of_orbax(store, name):
        name = step_name(number)
    if store.kind(name) not in (None, "directory"):
        raise FileExistsError(
            f"{store.path_to(name)} is a file or a link, expected a directory; move it away"
        )
    return name


def remains_in(store: Store, known: Collection[str]) -> list[str]:
    """List the directories that are named like steps but are none: remains of dead saves and of removals. The steps in
    `known` are not looked at again."""
    names = [name for several in _names_in(store).values() for name in several]
    return [name for name in names if name not in known and not _is_step(store, name)]


def is_checkpoint(store: Store) -> bool:
    """Tell whether a directory has the mark of a checkpoint."""
    return any(store.is_file(mark) for mark in MARKS)


def is_of_orbax(store: Store, name: str) -> bool:
    """Tell whether a step has a mark of Orbax, itself or in its items, and no mark of eformer."""
    if any(store.is_file(f"{name}/{mark}") for mark in (MANIFEST, INDEX)):
        return False
    is_marked = any(store.is_file(f"{name}/{mark}") for mark in (ORBAX_TREE, ORBAX_CHECKPOINT))
    return is_marked or _has_items_of_orbax(store, name)


def _has_items_of_orbax(store: Store, name: str) -> bool:
    """Tell whether a directory is a step of Orbax whose items alone have marks, as Orbax wrote before 0.5.20."""
    directory = on_disk(store)
    with suppress(EformerError, OSError):
        return directory is not None and store.kind(name) == "directory" and has_items(directory / name)
    return False


def may_be_run(names: Collection[str]) -> bool:
    """Tell by the names in a directory whether it may be a run: one of them names a step, and the directory is not a
    checkpoint itself. Weights beside the steps make it a checkpoint, unless a job has claimed it as a run."""
    is_checkpoint = any(name in MARKS for name in names)
    has_weights = any(name.endswith((SUFFIX, INDEX_SUFFIX)) for name in names)
    if is_checkpoint or (has_weights and RUN_FILE not in names):
        return False
    return any(step_number(name) is not None for name in names)


def is_run(store: Store) -> bool:
    """Tell whether a directory is a run: it has steps, and is not itself a checkpoint."""
    try:
        return may_be_run(store.kinds()) and last_step_in(store) is not None
    except (OSError, EformerError):
        return False


def _names_in(store: Store) -> dict[int, list[str]]:
    return _names_by_number(kinds_if_there(store))


def _names_by_number(kinds: Mapping[str, Kind]) -> dict[int, list[str]]:
    """List the directories, and links to directories, with names of steps. For each number, eformer's name is first."""
    found: dict[int, list[str]] = {}
    for name, kind in kinds.items():
        if kind != "file" and (number := step_number(name)) is not None:
            found.setdefault(number, []).append(name)
    return {
        number: sorted(names, key=lambda name: not name.startswith(OF_RUN)) for number, names in found.items()
    }


def _steps_among(store: Store, names: Iterable[tuple[int, list[str]]]) -> Iterator[tuple[int, str]]:
    for number, several in names:
        if (name := next((name for name in several if _is_step(store, name)), None)) is not None:
            yield number, name


def _is_step(store: Store, name: str) -> bool:
    for mark in MARKS:
        if (is_marked := has_mark(store, name, mark)) is not False:
            return bool(is_marked)
    return on_disk(store) is not None and (
        _has_lost_its_mark(store, name) or _has_items_of_orbax(store, name)
    )


def _has_lost_its_mark(store: Store, name: str) -> bool:
    """Tell by its name and its files whether a directory without a mark is a damaged step.

    A directory with scratch in it belongs to a save that is under way or died. A directory with only a configuration,
    notes or weights in another format belongs to no save. Other programs use names such as run-100 as well: under such
    a name, the directory must have files that eformer wrote.
    """
    is_of_run = name.startswith(OF_RUN)
    if not is_of_run and not name.startswith(OF_CHECKPOINTER):
        return False
    if (kind := store.kind(name)) != "directory":
        return kind == "other" and is_of_run  # a broken link: the disk with the step is missing
    inside = store.at(name)
    try:
        kinds = inside.kinds()
    except FileNotFoundError:  # removed since it was listed
        return False
    if RUN_FILE in kinds or any(SCRATCH.fullmatch(inner) for inner in kinds):
        return False
    has_files = _may_hold_leaves(kinds) if is_of_run else _has_files_of_ours(inside, kinds)
    return has_files and not is_run(inside)


def _may_hold_leaves(kinds: Mapping[str, Kind]) -> bool:
    """Tell whether a directory contains directories, or files of the kinds that eformer writes."""
    return any(
        kind == "directory" or inner.endswith((SUFFIX, PRIVATE, INDEX_SUFFIX))
        for inner, kind in kinds.items()
        if not inner.startswith(".")
    )


def _has_files_of_ours(store: Store, kinds: Mapping[str, Kind]) -> bool:
    """Tell whether a directory has a safetensors file, a database or an array that eformer wrote. Only the first array
    is looked at."""
    if marked_file(store) or any(store.is_file(f"{inner}/{DATABASE_MARK}") for inner in kinds):
        return True
    first = next(discover(store), None)
    array = first and array_at(store, first.path)
    return bool(array and array.eformer)


def has_mark(store: Store, directory: str, mark: str) -> bool | None:
    """Tell whether a file marks a directory as a checkpoint. Return None if the file says that the checkpoint was
    removed."""
    name = f"{directory}/{mark}"
    if on_disk(store) is not None or mark not in INDEXES:
        return store.is_file(name)
    try:
        data, entry = store.read(name, 0, MOST_EMPTY)
    except FileNotFoundError:
        return False
    manifest = manifest_in(mark, data) if entry.nbytes <= MOST_EMPTY else None
    return None if manifest and manifest.is_empty else True


def is_removed(store: Store, directory: str) -> bool:
    """Tell whether the index of a directory says that the checkpoint was removed."""
    return any(has_mark(store, directory, mark) is None for mark in INDEXES)
