"""Checkpoints of Orbax in a bucket: copied to this machine when a tree of them is first asked for.

TensorStore reads databases and arrays by the paths of their files. It could read from some buckets itself, but with
other credentials, other options and other errors than everything else here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from eformer._engine.formats.found import Found
from eformer._engine.formats.markers import ORBAX_CHECKPOINT, ORBAX_TREE
from eformer._engine.formats.others import orbax
from eformer._engine.formats.others.orbax_aggregate import NAME as AGGREGATE
from eformer._engine.formats.others.orbax_aggregate import is_aggregate_in
from eformer._engine.formats.safetensors.names import SUFFIX
from eformer._engine.record.indexes import MANIFEST
from eformer._engine.record.manifest import Manifest
from eformer._engine.record.step_names import step_number
from eformer._engine.stores.local import on_disk
from eformer._engine.stores.local_copy import copy_of
from eformer._engine.tasks.forks import Lock
from eformer.errors import EformerError, NotFoundError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from eformer._engine.formats.read_format import Place
    from eformer._engine.record.manifest import TreeEntry
    from eformer._engine.stores.base import Files, Store
    from eformer._engine.stores.local_copy import LocalCopy

_MOST_ITEMS = 16  # directories that are looked into


def by_marks(place: Place) -> Found | None:
    """Find the Orbax checkpoint of a directory that is not on this machine. Nothing is copied yet."""
    if on_disk(place.store) is not None or MANIFEST in place.names:
        return None
    return _Checkpoint(place.store).to_found() if _is_one(place) else None


def _is_one(place: Place) -> bool:
    if ORBAX_TREE in place.names or ORBAX_CHECKPOINT in place.names:
        return True
    if any(name.endswith(SUFFIX) for name in place.names):
        return False
    if AGGREGATE in place.names and is_aggregate_in(place.store):
        return True
    items = [name for name, kind in place.store.kinds().items() if kind == "directory"]
    items = [name for name in items if step_number(name) is None][:_MOST_ITEMS]
    return any(place.store.is_file(f"{name}/{ORBAX_TREE}") for name in items)


class _Checkpoint:
    """A checkpoint that is copied once, by the first thread that needs it."""

    def __init__(self, store: Store) -> None:
        self._store, self._lock = store, Lock()
        self._copy: LocalCopy | None = None
        self._copied: Found | None = None

    def to_found(self) -> Found:
        return Found(
            self._store.url,
            self._store,
            Manifest(format=orbax.FORMAT),
            _Trees(self),
            open_files=self._open_files,
            find_left_out=lambda: self.copied().left_out(),
            is_costly=True,
        )

    def copied(self) -> Found:
        with self._lock:
            if self._copied is None:
                self._copy = copy_of(self._store)
                names = sorted(path.name for path in self._copy.path.iterdir())
                self._copied = orbax.in_directory(self._copy.path, names)
            if self._copied is None:
                raise NotFoundError(f"no checkpoint at {self._store.url}: its save by Orbax has not finished")
            return self._copied

    def tree(self, prefix: str) -> TreeEntry:
        found = self.copied()
        try:
            return found.trees[prefix]
        except EformerError as error:
            raise type(error)(str(error).replace(found.path, self._store.url)) from error

    def _open_files(self, tree: TreeEntry) -> Files:
        return self.copied().files(tree)


class _Trees(Mapping[str, "TreeEntry"]):
    """The trees of a checkpoint, by prefix."""

    def __init__(self, checkpoint: _Checkpoint) -> None:
        self._checkpoint = checkpoint

    def __getitem__(self, prefix: str) -> TreeEntry:
        return self._checkpoint.tree(prefix)

    def __iter__(self) -> Iterator[str]:
        return iter(self._checkpoint.copied().trees)

    def __len__(self) -> int:
        return len(self._checkpoint.copied().trees)
