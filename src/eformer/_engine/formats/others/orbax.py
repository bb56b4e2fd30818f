"""Checkpoints of Orbax, read through TensorStore alone: versions 0 and 1, zarr 2 and 3, with or without a database.

    _METADATA               the keys and the kinds of a tree's leaves
    _sharding, _strings.json, array_metadatas/process_N     shardings, texts, and the generators of PRNG keys
    manifest.ocdbt, d/, ocdbt.process_N/                    a database with the arrays; else each has a directory
    checkpoint              Orbax up to 0.5.20 and T5X: the tree in msgpack, with or without _METADATA beside it

A checkpoint is such a tree, or has a directory with a tree for each item. A `CheckpointManager` keeps each checkpoint
in a directory named after its step. Items that are JSON become metadata of the trees beside them, and are trees of
plain values themselves. Items may be checkpoints by eformer.

Tests: tests/compat/test_orbax_kinds.py, tests/compat/test_orbax_old.py, tests/compat/test_orbax.py.
"""

from __future__ import annotations

import os
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from eformer._engine.formats.found import Foreign, Found, Place, Trees, files_of
from eformer._engine.formats.left_out import is_eformer_checkpoint, left_out
from eformer._engine.formats.others.flax import flatten_message
from eformer._engine.formats.others.orbax_arrays import ChunkFiles
from eformer._engine.formats.others.orbax_metadata import (
    COMMITTED,
    JSON_FILE,
    SHARDINGS,
    read_checkpoint_metadata,
    read_json_item,
)
from eformer._engine.formats.others.orbax_reader import (
    AGGREGATE,
    ARRAY_NAME,
    PROCESS,
    OrbaxTree,
    TreeDirectory,
    is_aggregate,
    read_tree,
)
from eformer._engine.formats.own_items import (
    ItemManifests,
    damages_beside,
    joined_items,
    joined_manifest,
    own_items,
)
from eformer._engine.formats.safetensors.names import SUFFIX
from eformer._engine.record.indexes import MANIFEST, ORBAX_CHECKPOINT, ORBAX_TREE
from eformer._engine.record.manifest import Manifest, TreeEntry, foreign_tree
from eformer._engine.record.step_names import OF_ORBAX, step_number
from eformer._engine.record.values import value_to_json
from eformer._engine.record.zarray import ZARRAY
from eformer._engine.stores.directory import walk
from eformer._engine.stores.local import LocalStore, on_disk
from eformer._engine.stores.local_copy import LocalCopy, copy_of
from eformer._engine.stores.ocdbt import DATABASE_MANIFEST, list_arrays, require_plain_files
from eformer._engine.tasks.forks import Lock
from eformer.errors import EformerError, FormatError, NotFoundError

if TYPE_CHECKING:
    from pathlib import Path

    from eformer._engine.formats.others.orbax_metadata import CheckpointMetadata
    from eformer._engine.stores.base import Files, Store, Version

FORMAT = "orbax"

INDICATOR = "orbax.checkpoint"  # an empty file that marks checkpoints of version 1

UNFINISHED = ".orbax-checkpoint-tmp"  # in the name of a directory until its save has finished

_JAX_KEY, _NUMPY_KEY = "jax_random_key", "np_random_key"
_ARRAY_HANDLER = ".ArrayCheckpointHandler"

_MOST_ITEMS = 16  # directories to look into, in a bucket


def by_marks(place: Place) -> Found | None:
    """Find the Orbax checkpoint of a directory, unless safetensors files make it another checkpoint."""
    if MANIFEST in place.names:
        return None
    directory = on_disk(place.store)  # TensorStore reads it by its path
    if directory is None:
        return _in_bucket(place.store) if _is_one_in_bucket(place) else None
    if any(name.endswith(SUFFIX) for name in place.names) and not marks(directory):
        return None
    return in_local_directory(directory, place.names)


def in_local_directory(directory: Path, names: Sequence[str]) -> Found | None:
    """Find the Orbax checkpoint in a directory that holds these `names`, or its last step. Return None if it has
    neither."""
    checkpoint = read_checkpoint_metadata(directory)
    if tree := find_tree(directory, checkpoint.handler):
        return _Checkpoint(directory, {"": tree}, checkpoint, {}).to_found()
    if ORBAX_CHECKPOINT not in names and (steps := step_names_in(directory, names)):
        step = inside_run(directory, steps[-1])
        return in_local_directory(step, list(LocalStore(step).kinds()))
    items = {name: item for name in names if (item := find_item(directory / name, checkpoint.item_handlers))}
    if ORBAX_CHECKPOINT in names and (own := _own_items(directory, names, items, checkpoint)):
        documents = _read_documents(directory, names, {*items, *own, *(checkpoint.custom_metadata or {})})
        return _Checkpoint(directory, items, checkpoint, documents, own).to_found()
    if items or ORBAX_CHECKPOINT in names or _is_json_alone(names) or holds_documents(directory):
        documents = _read_documents(directory, names, {*items, *(checkpoint.custom_metadata or {})})
        if items or documents:
            return _Checkpoint(directory, items, checkpoint, documents).to_found()
    if ORBAX_CHECKPOINT in names:
        raise NotFoundError(
            f"{directory} is an Orbax checkpoint, but no item in it has {ORBAX_TREE}: no tree was saved, or its save "
            "has not finished"
        )
    return None


def _own_items(
    directory: Path, names: Sequence[str], items: Container[str], checkpoint: CheckpointMetadata
) -> ItemManifests:
    """Read the manifests of the items that are checkpoints by eformer. Links are not followed."""
    inside = [name for name in names if name not in items and not (directory / name).is_symlink()]
    return own_items(LocalStore(directory), inside, checkpoint.item_handlers)


def inside_run(run: Path, step: str) -> Path:
    """Return the path of a step. Refuse a link that leads out of the run, before its target is opened."""
    path, target = run / step, os.path.realpath(run / step)
    if path.is_symlink() and not target.startswith(f"{os.path.realpath(run)}/"):
        raise FormatError(
            f"{path} is a link to {target!r}, outside the run; pass that path if it is the step to read"
        )
    return path


def marks(directory: Path) -> list[str]:
    """List the files that mark the directory itself as an Orbax checkpoint, not only its items."""
    found = [name for name in (ORBAX_TREE, ORBAX_CHECKPOINT) if (directory / name).is_file()]
    return [*found, AGGREGATE] if is_aggregate(LocalStore(directory)) else found


# --------------------------------------------------- the directories that hold trees: items, and steps


def holds_tree(path: Path) -> bool:
    """Tell whether a directory holds a tree itself, not only in its items."""
    return (path / ORBAX_TREE).is_file() or is_aggregate(LocalStore(path))


def find_item(path: Path, handlers: Mapping[str, Any]) -> TreeDirectory | None:
    """Find the tree of the item at `path`. Return None if the item is unfinished or holds no tree.

    `handlers` has for each item the class name of the handler that wrote it.
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
    """Find the tree of a directory itself, or the single array that it holds.

    `handler` is the class name of the handler that wrote it, None if unknown.
    """
    is_array = str(handler).endswith(_ARRAY_HANDLER)
    if holds_tree(path):
        return TreeDirectory(path, is_single_array=is_array)
    if (is_array and _holds_array(path)) or _is_array_alone(path, is_item=is_item):
        return TreeDirectory(path, is_single_array=True)
    return None


def _holds_array(path: Path) -> bool:
    """Tell whether an item is a single array, as Orbax before 0.12 stored it."""
    return (path / ARRAY_NAME / ZARRAY).is_file() or (path / DATABASE_MANIFEST).is_file()


def _is_array_alone(path: Path, *, is_item: bool) -> bool:
    """Tell whether a directory holds an array as Orbax stores it, the marks of Orbax, and nothing else.

    Orbax does not always record the handler of an item. An item without any mark of Orbax is a directory of zarr
    arrays, one of which happens to have Orbax's name.
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
    if set(kinds.values()) != {
        "directory"
    }:  # scratch of a run has files, and may vanish while it is looked into
        return False
    return all(set(store.kinds(name)) - {COMMITTED} == {JSON_FILE} for name in kinds)


def step_names_in(directory: Path, names: Sequence[str]) -> list[str]:
    """List the directories of finished steps among `names`, the last step last. Until its save has finished, a step has
    another name."""
    numbers = OF_ORBAX.numbers(names)
    items = {name: name.rpartition("_")[0] not in ("", "checkpoint") for name in numbers}
    found = [name for name in numbers if _is_step(directory / name, may_be_item=items[name])]
    return sorted(found, key=lambda name: (numbers[name], name))


def _is_step(path: Path, *, may_be_item: bool) -> bool:
    """Tell whether a directory with the name of a step is a step, and not an item, which is a tree itself."""
    if path.is_symlink() or not path.is_dir():
        return (path / ORBAX_CHECKPOINT).is_file()
    if (path / ORBAX_CHECKPOINT).is_file():
        return True
    if holds_tree(path):
        return not may_be_item
    return has_items(path) or (not may_be_item and holds_documents(path))


def has_items(path: Path) -> bool:
    """Tell whether a directory has items that are trees."""
    return any(find_item(path / name, {}) for name in LocalStore(path).kinds())


def _is_json_alone(names: Sequence[str]) -> bool:
    """Tell whether a directory is an item of JSON itself. Orbax before 0.5.20 left no mark there."""
    return JSON_FILE in names and set(names) <= {JSON_FILE, COMMITTED, ORBAX_CHECKPOINT}


def _read_documents(directory: Path, names: Sequence[str], skip: Container[str]) -> dict[str, Any]:
    """Read the items that are JSON, by name, except the names to `skip`. A directory that is such an item itself has
    the name ""."""
    candidates = [""]
    if not _is_json_alone(names):
        paths = {name: directory / name for name in names if name not in skip}
        candidates = [name for name, path in paths.items() if path.is_dir() and not path.is_symlink()]
    found = {}
    for name in candidates:
        with suppress(FormatError, OSError, ValueError, RecursionError):
            found[name] = read_json_item(directory, name)
            value_to_json(found[name])
    return found


@dataclass(frozen=True, slots=True)
class _Checkpoint:
    """A checkpoint: by name, its `items` that are trees, its `documents`, the items that are JSON, and its `own` items,
    which are checkpoints by eformer.

    Documents are trees of plain values, which are only listed if the checkpoint has no other trees. Trees are read on
    first use: `read` has the trees so far by root, and `versions` the versions of their files.
    """

    directory: Path
    items: Mapping[str, TreeDirectory]
    metadata: CheckpointMetadata
    documents: Mapping[str, Any]
    own: ItemManifests = field(default_factory=dict)
    read: dict[str, OrbaxTree] = field(default_factory=dict)
    versions: dict[str, Version] = field(default_factory=dict)

    def to_found(self) -> Found:
        items = {name: partial(self._read_tree, item) for name, item in self.items.items()}
        documents = {name: partial(self._tree_of_document, name) for name in self.documents}
        has_trees = bool(items or self.own)
        trees = Trees({}, items if has_trees else documents, documents if has_trees else {})
        manifest = Manifest(format=FORMAT)
        if self.own:
            manifest = joined_manifest(self.own, self._metadata())
            trees = joined_items(LocalStore(self.directory), self.own, manifest, trees)
        return Found(
            str(self.directory),
            LocalStore(self.directory),
            manifest,
            trees,
            versions=self.versions,
            foreign=Foreign(
                self._open_files,
                find_left_out=lambda: self._left_out(trees),
                of_handlers=tuple(f"{name}/" for name in self._of_handlers()),
            ),
            check_beside=partial(damages_beside, LocalStore(self.directory), self.own),
        )

    def _metadata(self) -> dict[str, Any]:
        """Return the items that are JSON and the user's metadata, as JSON."""
        own = {name: value_to_json(value) for name, value in (self.metadata.custom_metadata or {}).items()}
        return {name: value_to_json(document) for name, document in self.documents.items()} | own

    def _of_handlers(self) -> list[str]:
        """List the items of unknown kinds of a step by eformer whose handlers are recorded."""
        known = {*self.items, *self.own, *self.documents}
        names = self.metadata.item_handlers if self.own else {}
        return [name for name in names if name not in known and _is_unread_item(self.directory / name)]

    def _read_tree(self, item: TreeDirectory) -> TreeEntry:
        metadata = self._metadata()
        tree = read_tree(self.directory, item, metadata=metadata, saved_at=self.metadata.saved_at)
        self.read[tree.root] = tree
        self.versions.update(tree.versions)
        return tree.record

    def _tree_of_document(self, name: str) -> TreeEntry:
        structure, leaves = flatten_message(self.documents[name])
        values = {leaf: value_to_json(value) for leaf, value in leaves.items()}
        return foreign_tree(
            saved_at=self.metadata.saved_at,
            written_by="orbax",
            files=(),
            root=name,
            values=values,
            structure=structure,
            leaves={},
        )

    def _open_files(self, tree: TreeEntry) -> Files:
        if tree.root in self.read:
            return self.read[tree.root].open_files()
        return files_of(LocalStore(self.directory), tree) if tree.has_digests else ChunkFiles([])

    def _left_out(self, trees: Mapping[str, TreeEntry]) -> tuple[str, ...]:
        names = list(LocalStore(self.directory).kinds())
        read = {
            ORBAX_CHECKPOINT,
            INDICATOR,
            *self.documents,
            *(name for name in names if UNFINISHED in name),
        }
        if "" in self.documents:
            read.add(JSON_FILE)
        unused: list[str] = []
        for name, item in self.items.items():
            try:
                tree = self.read[trees[name].root]
            except (FormatError, OSError):  # a load of the tree reports the error
                read.update([name] if name else names)
                continue
            unused += tree.list_unused_arrays()
            read.update(tree.list_own_paths())
            if item.key_metadata:
                read.add(f"{name}/{item.key_metadata}")
        read.update(self._of_handlers())
        rest = [] if "" in self.items else [name for name in names if name not in (*read, *self.items)]
        unread = [name for name in rest if _is_unread_item(self.directory / name)]
        read.update(unread)
        return tuple(
            sorted([*left_out(LocalStore(self.directory), read), *unused, *(f"{name}/" for name in unread)])
        )


def _is_unread_item(path: Path) -> bool:
    """Tell whether a directory beside the trees is an item of an unknown kind, whatever the names of its files."""
    if path.name.startswith(".") or path.is_symlink() or not path.is_dir():
        return False
    if is_eformer_checkpoint(LocalStore(path.parent), path.name):
        return False
    return any(not entry.is_dir(follow_symlinks=False) for _, entry in walk(path))


# --------------------------------------------------------------------------------------- in a bucket
#
# A checkpoint is copied to this machine when one of its trees is first used, because TensorStore reads databases and
# arrays by the paths of their files. It could read from some buckets itself, but with its own credentials, options and
# errors, unlike all other reads of eformer.


def _in_bucket(store: Store) -> Found:
    """Describe the checkpoint of a directory that is not on this machine. It is copied on first use."""
    trees = _CopiedTrees(store)
    foreign = Foreign(
        lambda tree: trees.found().files(tree),
        find_left_out=lambda: trees.found().left_out(),
        is_costly=True,
    )
    return Found(store.url, store, Manifest(format=FORMAT), trees, foreign=foreign)


def _is_one_in_bucket(place: Place) -> bool:
    if ORBAX_TREE in place.names or ORBAX_CHECKPOINT in place.names:
        return True
    if any(name.endswith(SUFFIX) for name in place.names):
        return False
    if AGGREGATE in place.names and is_aggregate(place.store):
        return True
    items = [name for name, kind in place.store.kinds().items() if kind == "directory"]
    items = [name for name in items if step_number(name) is None][:_MOST_ITEMS]
    return any(place.store.is_file(f"{name}/{ORBAX_TREE}") for name in items)


class _CopiedTrees(Mapping[str, "TreeEntry"]):
    """The trees of a checkpoint in a bucket. The first thread that needs a tree copies the checkpoint, once."""

    def __init__(self, store: Store) -> None:
        self._store, self._lock = store, Lock()
        self._copy: LocalCopy | None = None
        self._found: Found | None = None

    def found(self) -> Found:
        """Return the copy of the checkpoint on this machine."""
        with self._lock:
            if self._found is None:
                self._copy = copy_of(self._store)
                names = sorted(path.name for path in self._copy.path.iterdir())
                self._found = in_local_directory(self._copy.path, names)
            if self._found is None:
                raise NotFoundError(f"no checkpoint at {self._store.url}: its save by Orbax has not finished")
            return self._found

    def __getitem__(self, prefix: str) -> TreeEntry:
        found = self.found()
        try:
            return found.trees[prefix]
        except EformerError as error:
            raise type(error)(str(error).replace(found.path, self._store.url)) from error

    def __iter__(self) -> Iterator[str]:
        return iter(self.found().trees)

    def __len__(self) -> int:
        return len(self.found().trees)
