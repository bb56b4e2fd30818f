"""Find the checkpoint at a path, in any format and by any program.

Tests: tests/engine/loading/test_load.py, tests/engine/formats/test_safetensors_others.py,
tests/engine/stores/test_bucket.py.
"""

from __future__ import annotations

import os  # noqa: TC003
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NoReturn, TypeVar

from eformer._engine.formats.found import DirectoryReader, Found, Place, kinds_if_there
from eformer._engine.formats.others import (
    flax_directory,
    orbax,
    peft,
    torch,
    torch_distributed,
    zarr3,
)
from eformer._engine.formats.others import sniff as files
from eformer._engine.formats.safetensors import read as safetensors
from eformer._engine.formats.safetensors.names import INDEX_SUFFIX, SUFFIX
from eformer._engine.formats.steps import (
    RUN_FILE,
    is_checkpoint,
    is_of_orbax,
    last_step_in,
    may_be_run,
    steps_from_last,
)
from eformer._engine.formats.zarr import read as arrays
from eformer._engine.record.indexes import INDEX, MANIFEST, ORBAX_TREE
from eformer._engine.record.names import with_nearest
from eformer._engine.record.signature import Verifier, signature_name
from eformer._engine.record.step_names import OF_RUN
from eformer._engine.record.text import few
from eformer._engine.stores.local import is_there, on_disk, resolved
from eformer._engine.stores.locate import locate, store_at
from eformer._engine.stores.signed import SignedStore, claimed_signer, scope_of, signed_store
from eformer._engine.tasks.interrupts import uninterrupted
from eformer._engine.tasks.turns import turns
from eformer.errors import (
    CorruptionError,
    EformerError,
    FormatError,
    NotFoundError,
    SignatureError,
    VersionError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from eformer._engine.stores.base import Store, Version

    _Path = str | os.PathLike[str]
    _Choose = Callable[[_Path], _Path]

T = TypeVar("T")

FOREIGN = (
    arrays.FOREIGN,
    safetensors.FOREIGN,
    orbax.FORMAT,
    peft.FORMAT,
    torch_distributed.FORMAT,
    zarr3.FORMAT,
    *files.FORMATS,
)

_MOST_SHOWN = 8
_EMPTY_RUN = (
    "the run has no step yet. Wait for its first save; `eformer serve` shows it as soon as it is there"
)
_FEW_RESTARTS = 5
_MOST_RESTARTS = 100  # saves that may replace a checkpoint, one after the other, while it is being read


def find(path: str | os.PathLike[str], signed_by: Verifier | None = None) -> Found:
    """Find the checkpoint at `path`: a directory, its index or manifest, one of its files, a single file, or the common
    beginning of the names of several files. The path of one shard leads to the whole model.

    With `signed_by`, a public key, only files that its owner has signed are read.
    """
    if signed_by is not None:
        return _find_signed(*locate(path), signed_by)
    place = Place(store_at(path))
    return _in_directory(place) if place.is_there else _find_in(*place.store.parent())


def find_step(path: str | os.PathLike[str]) -> Found:
    """Find the checkpoint at exactly `path`. Raise NotFoundError for a run, whose checkpoints lie below it."""
    found = find(path)
    if found.path.startswith(f"{store_at(path).url}/"):
        raise NotFoundError(f"it is a run, not a step; its newest step is {found.path}")
    return found


def signed_place(store: Store, name: str) -> tuple[Store, str, str]:
    """Locate the signature of a checkpoint. Return the store and the name of the checkpoint, and the signed file or ""
    for the directory. For a run, locate the signature of its last step. Raise SignatureError without a signature."""
    scope = scope_of(store, name)
    if scope is not None:
        return store, name, scope
    real = resolved(store, name) if name else (store, name)
    if real[0].path_to(real[1]) != store.path_to(name):  # a link that the caller names may lead anywhere
        return signed_place(*real)
    is_run = not name and not is_checkpoint(store)
    if is_run and (last := next(steps_from_last(store), None)) is not None:
        return signed_place(store.at(last[1]), "")
    if name and not any(each.startswith(name) for each in kinds_if_there(store)):
        _missing(store, name)
    where, signature = store.path_to(name) if name else store.url, store.path_to(signature_name(name))
    raise SignatureError(f"{where} is not signed: there is no {signature}")


def signer_of(found: Found) -> str | None:
    """Return the id of the key that a signature claims, unchecked; None if the checkpoint is not signed."""
    store, name = locate(found.path)
    scope = scope_of(store, name)
    return None if scope is None else claimed_signer(store, scope)


def _find_signed(store: Store, name: str, signed_by: Verifier) -> Found:
    store, name, scope = signed_place(store, name)
    inside = signed_store(store, scope, signed_by)
    with inside.watched():
        found = _find_in(inside, name)
    if not isinstance(found.store, SignedStore):  # a reader would read the files past the checks
        raise SignatureError(f"{found.path} cannot be read as a signed checkpoint")
    return replace(found, signed_by=signed_by)


def _find_in(store: Store, name: str) -> Found:
    if not name or (name == INDEX and store.exists(name)):
        return _in_directory(Place(store))
    if not store.exists(name):
        return safetensors.by_base_name(store, name) or _missing(store, name)
    return files.in_other_file(store, name) or safetensors.in_file(store, name)


def _same(path: _Path) -> _Path:
    return path


def look_at(
    path: _Path, use: Callable[[Found], T], signed_by: Verifier | None = None, choose: _Choose = _same
) -> T:
    """Call `use` with the checkpoint at `path`, and return its result. Start again if a newer save replaces it.

    `choose` returns the path of the step to take from the path of a run; it is called again at each start.
    """

    def attempt(found: Found) -> T:
        with reading(found):
            return use(found)

    return reread(path, attempt, signed_by, choose)


def was_replaced(found: Found) -> bool:
    """Tell whether the checkpoint was replaced or removed since it was found.

    For a run this is also true if another step is the newest now.
    """
    try:
        if find(found.path, found.signed_by).manifest.digest != found.manifest.digest:
            return True
    except NotFoundError:
        return True
    return has_new_versions(found)


def has_new_versions(found: Found) -> bool:
    """Tell whether files that no manifest names have been replaced since the checkpoint was found."""
    return any(_version(found, name) != seen for name, seen in found.versions.items())


class ReplacedError(Exception):
    """Makes `reread` start again with the newer checkpoint. Never reaches the caller."""


@uninterrupted
def reread(
    path: _Path, use: Callable[[Found], T], signed_by: Verifier | None = None, choose: _Choose = _same
) -> T:
    """Call `use` with the checkpoint at `path`, and return its result. Start again if it raises `ReplacedError`.

    Wait before for a save of this process to this path that runs in the background. After a few restarts, hold back
    further saves of this process to this path, which would replace the checkpoint faster than it can be read.
    """
    return reread_all([path], lambda found: use(*found), signed_by, choose)


def reread_all(
    paths: Sequence[_Path],
    use: Callable[[Sequence[Found]], T],
    signed_by: Verifier | None = None,
    choose: _Choose = _same,
) -> T:
    """Call `use` with the checkpoints at several paths. If one is replaced, find all of them again and start again."""
    if turns.has_background:
        turns.wait_for_background(_places(paths))
    with ExitStack() as stack:
        for restart in range(_MOST_RESTARTS):
            if restart == _FEW_RESTARTS:
                stack.enter_context(turns.held_back(_places(paths)))
            try:
                return use([find(choose(path), signed_by) for path in paths])
            except ReplacedError:
                continue
    raise FormatError(
        f"{' or '.join(map(str, paths))} was replaced {_MOST_RESTARTS} times while it was being read; try again later"
    )


def _places(paths: Sequence[str | os.PathLike[str]]) -> set[str]:
    """Return the keys of saves that could replace a checkpoint at `paths`: of the paths and the directories above."""
    stores = [store_at(path) for path in paths]
    return {key for store in stores for key in (store.key, f"{store.key}{SUFFIX}", store.parent()[0].key)}


@contextmanager
def reading(found: Found) -> Iterator[None]:
    """Turn errors of reading a checkpoint that was replaced meanwhile into `ReplacedError`.

    Wrap only the reading itself: errors of the caller's functions must pass unchanged. If the checkpoint is still in
    place, a missing file is a CorruptionError, and other errors are raised unchanged.
    """
    try:
        with found.store.watched() if isinstance(found.store, SignedStore) else nullcontext():
            yield
    except NotFoundError:
        raise
    except (FileNotFoundError, CorruptionError) as error:
        if was_replaced(found):
            raise ReplacedError from error
        if isinstance(error, CorruptionError):
            raise
        raise CorruptionError(f"{found.path}: the manifest names a file that is missing: {error}") from error


def _version(found: Found, name: str) -> Version | None:
    try:
        return found.store.read(name, 0, 0)[1].version
    except (FileNotFoundError, FormatError):
        return None


def _missing(store: Store, name: str) -> NoReturn:
    if not (there := kinds_if_there(store)) and not is_there(store):
        raise NotFoundError(f"no checkpoint at {store.path_to(name)}: {store.url} does not exist")
    if other := files.name_tensorflow(name, there):
        raise FormatError(f"{store.url}: {other}")
    step = f"{OF_RUN}{name}"  # the caller gave the number alone
    _, hint = next(with_nearest([step if step in there else name], there))
    raise NotFoundError(f"no checkpoint at {store.path_to(name)}{hint}")


@dataclass(frozen=True, slots=True)
class _Step:
    """A step and its checkpoint. If it cannot be read, `found` is None and `problem` is the reason."""

    number: int
    name: str
    found: Found | None = None
    problem: str = ""
    is_newer_version: bool = False


def newest_step(store: Store) -> tuple[str, Found] | None:
    """Find the newest step of a run, and its name; None for a run without steps.

    Raise CorruptionError if it is damaged, and VersionError if a newer eformer wrote it: an older step in its place
    would silently give old weights. A step that is removed or replaced meanwhile is not damaged, so a problem counts
    only if a second look finds the same problem, and the step still exists.
    """
    if name := later_of_flax(store):
        return name, find_step(store.path_to(name))
    seen: _Step | None = None
    for _ in range(_MOST_RESTARTS):
        if (step := next(_looked_at(store), None)) is None:
            return None
        if step.found:
            return step.name, step.found
        if step == seen and (step.number, step.name) in steps_from_last(store):
            break
        seen = step
    assert seen
    raise _damaged(store, seen)


def later_of_flax(store: Store) -> str | None:
    """Name the file of flax that is a newer step than the last one in a directory."""
    if (last := last_step_in(store)) is None:
        return None
    return flax_directory.later_in(store, last[0], store.kinds())


def _looked_at(store: Store) -> Iterator[_Step]:
    """Read the steps of a run, the newest first."""
    for number, name in steps_from_last(store):
        try:
            found = find_step(store.path_to(name))
            if problem := problem_of(found):
                yield _Step(number, name, problem=problem)
            else:
                yield _Step(number, name, found)
        except VersionError as error:
            yield _Step(number, name, problem=str(error), is_newer_version=True)
        except (FormatError, FileNotFoundError) as error:
            # Orbax writes its marks first. In a bucket, a step with marks and no tree is not finished, and not damaged.
            if on_disk(store) is None and isinstance(error, NotFoundError) and is_of_orbax(store, name):
                continue
            yield _Step(number, name, problem=_missing_file(error) or str(error))


def _missing_file(error: Exception) -> str | None:
    """Return a text that names the missing file of a FileNotFoundError; None for other errors."""
    name = error.filename if isinstance(error, FileNotFoundError) else None
    return f"{name} is missing" if name else None


def _damaged(store: Store, newest: _Step) -> FormatError:
    """Return the error for a newest step that cannot be read. It names the last earlier step that can be read."""
    kind = VersionError if newest.is_newer_version else CorruptionError
    problems = [f"{newest.name}: {newest.problem}"]
    try:
        for step in _looked_at(store):
            if step.number < newest.number and step.found:
                state = "is of a newer version" if newest.is_newer_version else "is damaged"
                before = "the step before" if len(problems) == 1 else "the last whole step"
                return kind(
                    f"{store.url}: the newest step, {newest.number}, {state}: {newest.problem}; {before} is "
                    f"{store.path_to(step.name)}. Pass that path to use it"
                )
            if step.number < newest.number:
                problems.append(f"{step.name}: {step.problem}")
    except OSError as error:  # the damage matters more than an error while looking for an earlier step
        problems.append(str(error))
    return kind(f"no step of {store.url} is whole: {few(problems)}")


def _by_steps(place: Place) -> Found | None:
    """Find the newest step of a run.

    This reader comes before the readers of Orbax, which know only steps of Orbax, and before the reader of arrays,
    because interrupted saves leave arrays in the directories of steps.
    """
    if not may_be_run(place.names) or (last := last_step_in(place.store)) is None:
        return None
    if flax_directory.later_in(place.store, last[0], place.names):
        return None
    if found := _readable_of_orbax(place.store, last[1]):
        return found
    newest = newest_step(place.store)
    return newest[1] if newest else None


def _readable_of_orbax(store: Store, name: str) -> Found | None:
    """Find a step of Orbax; None for other steps, or if none of its trees can be read.

    One readable tree is enough: a load of it does not need the other items. Refuse a link that leads out of the run.
    """
    if not is_of_orbax(store, name):
        return None
    if (run := on_disk(store)) is not None:
        orbax.inside_run(run, name)
    try:
        found = find_step(store.path_to(name))
        return (
            found
            if found.foreign.is_costly or any(_can_be_read(found, prefix) for prefix in found.trees)
            else None
        )
    except (FormatError, FileNotFoundError):
        return None


def _can_be_read(found: Found, prefix: str) -> bool:
    try:
        return found.trees[prefix] is not None
    except (EformerError, FileNotFoundError):
        return False


# The order matters. A manifest without an index of arrays beside it decides, then the index. Files of Orbax may lie
# beside safetensors files, so the marks of Orbax come before them.
DIRECTORY_READERS: tuple[DirectoryReader, ...] = (
    safetensors.by_manifest,
    arrays.by_index,
    _by_steps,
    flax_directory.by_steps,
    orbax.by_marks,
    peft.by_config,
    safetensors.by_files,
    arrays.without_index,
    flax_directory.by_model,
    torch_distributed.by_metadata,
    torch.by_model_files,
    zarr3.by_description,
    files.refuse_tensorflow,
    torch_distributed.refuse_unfinished,
)


def problem_of(found: Found) -> str | None:
    """Name a file of a checkpoint that is missing or has a wrong length; None if all files are there.

    Digests are not checked. Checkpoints that would have to be copied to this machine are not checked at all.
    """
    if found.foreign.is_costly:
        return None
    for tree in found.trees.values():
        files = found.files(tree)
        try:
            for number, file in enumerate(tree.files):
                if (nbytes := files.nbytes(number)) != file.nbytes:
                    return f"{file.name} is {nbytes} bytes long, expected {file.nbytes}"
        finally:
            files.close()
    return None


def _in_directory(place: Place) -> Found:
    store = place.store
    for read in DIRECTORY_READERS:
        if found := read(place):
            if found.manifest.is_empty:
                raise NotFoundError(
                    f"no checkpoint at {store.url}: it was removed, or never saved completely"
                )
            if not found.foreign.is_costly and not found.trees:
                raise NotFoundError(f"{store.url} holds no trees: its index lists none")
            return found
    newest = newest_step(store)
    return newest[1] if newest else _nothing_in(store, place.names)


def _nothing_in(store: Store, names: list[str]) -> NoReturn:
    if not names:
        raise NotFoundError(f"{store.url} holds no checkpoint: it is empty. If it is a run, {_EMPTY_RUN}")
    directory = on_disk(store)
    inner = [name for name in names if directory is not None and _looks_like_one(directory / name)]
    there = ", ".join(names[:_MOST_SHOWN]) or "nothing"
    hint = f". Is it one of {inner[:_MOST_SHOWN]}?" if inner else ""
    if RUN_FILE in names and not inner:
        raise NotFoundError(f"{store.url} holds no checkpoint: {_EMPTY_RUN}")
    raise NotFoundError(
        f"{store.url} holds no checkpoint: looked for {INDEX}, {MANIFEST}, *{INDEX_SUFFIX}, *{SUFFIX}, "
        f"{torch.MODEL}, *{torch_distributed.SUFFIX}, {flax_directory.MODEL}, checkpoint_N of flax, Orbax's "
        f"{ORBAX_TREE} or a tree in msgpack called checkpoint, and zarr arrays; found {there}{hint}"
    )


def _looks_like_one(path: Path) -> bool:
    if path.is_symlink():  # it may lead out of the directory, where no file is opened for a hint
        return False
    if any((path / name).exists() for name in (INDEX, MANIFEST)) or orbax.marks(path):
        return True
    return path.name.endswith((SUFFIX, *files.SUFFIXES))
