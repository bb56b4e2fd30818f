"""The directories of an Orbax checkpoint that hold trees: items, and steps of a `CheckpointManager`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from eformer._engine.formats.others.orbax_aggregate import is_aggregate
from eformer._engine.formats.others.orbax_metadata import COMMITTED, JSON_FILE, SHARDINGS
from eformer._engine.record.indexes import ORBAX_CHECKPOINT, ORBAX_TREE
from eformer._engine.record.step_names import OF_ORBAX
from eformer._engine.record.zarray import ZARRAY
from eformer._engine.stores.local import LocalStore
from eformer._engine.stores.ocdbt import DATABASE_MANIFEST, list_arrays, require_plain_files

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

PROCESS = "ocdbt.process_"  # at the beginning of the names of databases that are parts of another
UNFINISHED = ".orbax-checkpoint-tmp"  # in the name of a directory while it is being saved
ARRAY_NAME = "checkpoint"  # of the only leaf of an item that is one array

_JAX_KEY, _NUMPY_KEY = "jax_random_key", "np_random_key"
_ARRAY_HANDLER = ".ArrayCheckpointHandler"


@dataclass(frozen=True, slots=True)
class TreeDirectory:
    """A directory that holds one tree.

    Orbax stores an item that is a single array or PRNG key as a dict with one leaf; `is_single_array` marks it.
    `key_metadata` names the directory beside it that describes a PRNG key.
    """

    directory: Path
    is_single_array: bool = False
    key_metadata: str | None = None


def holds_tree(path: Path) -> bool:
    """Tell whether a directory holds a tree itself, not only in its items."""
    return (path / ORBAX_TREE).is_file() or is_aggregate(LocalStore(path))


def find_item(path: Path, handlers: Mapping[str, Any]) -> TreeDirectory | None:
    """Find the tree of the item at `path`; return None if it is unfinished or holds no tree.

    `handlers` has the class names of the handlers that wrote the items, by item.
    """
    if UNFINISHED in path.name or path.is_symlink() or not path.is_dir():
        return None
    if tree := find_tree(path, handlers.get(path.name), is_item=True):
        return tree
    for name in (_JAX_KEY, _NUMPY_KEY):
        key, is_jax = path / name, name == _JAX_KEY
        if not key.is_symlink() and (holds_tree(key) or (is_jax and _holds_array(key))):
            return TreeDirectory(key, is_single_array=is_jax, key_metadata=f"{name}_metadata")
    return None


def find_tree(path: Path, handler: Any, *, is_item: bool = False) -> TreeDirectory | None:
    """Find the tree of a directory itself, or the array that it holds.

    `handler` is the class name of the handler that wrote it, or None if that is not known.
    """
    is_array = str(handler).endswith(_ARRAY_HANDLER)
    if holds_tree(path):
        return TreeDirectory(path, is_single_array=is_array)
    if (is_array and _holds_array(path)) or _is_array_alone(path, is_item=is_item):
        return TreeDirectory(path, is_single_array=True)
    return None


def _holds_array(path: Path) -> bool:
    """Tell whether an item is one array, as Orbax before 0.12 stored it."""
    return (path / ARRAY_NAME / ZARRAY).is_file() or (path / DATABASE_MANIFEST).is_file()


def _is_array_alone(path: Path, *, is_item: bool) -> bool:
    """Tell whether a directory holds an array as Orbax stores it, the marks of Orbax, and nothing else.

    Orbax does not always record what wrote an item. Without any mark of Orbax, an item is taken for a directory of zarr
    arrays, of which one happens to have this name.
    """
    if not _holds_array(path):
        return False
    there, marks = set(LocalStore(path).kinds()), {SHARDINGS, COMMITTED, ORBAX_CHECKPOINT}
    names = there - marks
    if DATABASE_MANIFEST not in names:
        is_marked = there & marks or (path.parent / ORBAX_CHECKPOINT).is_file()
        return names == {ARRAY_NAME} and (not is_item or bool(is_marked))
    if any(name not in (DATABASE_MANIFEST, "d") and not name.startswith(PROCESS) for name in names):
        return False
    require_plain_files(path)
    return list_arrays(path) == [ARRAY_NAME]


def holds_documents(path: Path) -> bool:
    """Tell whether a directory holds items of JSON and nothing else. Orbax before 0.5.20 left no mark there."""
    store = LocalStore(path)
    kinds = store.kinds()
    if set(kinds.values()) != {"directory"}:  # scratch of a run is not entered: it may go
        return False
    return all(set(store.kinds(name)) - {COMMITTED} == {JSON_FILE} for name in kinds)


def steps_in(directory: Path, names: Sequence[str]) -> list[str]:
    """List the directories of finished steps among `names`, the last step last.

    A step that is being saved has another name and is not listed.
    """
    numbers = OF_ORBAX.numbers(names)
    items = {name: name.rpartition("_")[0] not in ("", "checkpoint") for name in numbers}
    found = [name for name in numbers if _is_step(directory / name, may_be_item=items[name])]
    return sorted(found, key=lambda name: (numbers[name], name))


def _is_step(path: Path, *, may_be_item: bool) -> bool:
    """Tell whether a directory with the name of a step is one, and not an item, which is a tree itself."""
    if path.is_symlink() or not path.is_dir():
        return (path / ORBAX_CHECKPOINT).is_file()
    if (path / ORBAX_CHECKPOINT).is_file() or (not may_be_item and holds_tree(path)):
        return True
    if holds_tree(path):
        return False
    return has_items(path) or (not may_be_item and holds_documents(path))


def has_items(path: Path) -> bool:
    """Tell whether a directory has items that are trees."""
    return any(find_item(path / name, {}) for name in LocalStore(path).kinds())
