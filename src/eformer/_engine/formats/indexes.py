"""What stores have to know of indexes to remove checkpoints: how one looks that says that there is none."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from eformer._engine.formats.safetensors.directory import FORMAT as SAFETENSORS
from eformer._engine.formats.safetensors.names import MANIFEST
from eformer._engine.formats.zarr.index import FORMAT as ARRAYS
from eformer._engine.formats.zarr.index import INDEX, Index
from eformer._engine.record.manifest import Manifest
from eformer._engine.record.values import parse_json
from eformer._engine.stores.base import MOST_EMPTY
from eformer._engine.stores.local import on_disk
from eformer.errors import EformerError

if TYPE_CHECKING:
    from eformer._engine.record.manifest import CommitLog
    from eformer._engine.stores.base import Store


class _Indexes:
    """The index of arrays, and the manifest of safetensors files."""

    of_directories = INDEX
    of_files = MANIFEST

    def parse(self, name: str, data: bytes) -> Manifest | None:
        try:
            if name == MANIFEST:
                return Manifest.from_json(data, name)
            return parse_json(data, Index, name).manifest(name)
        except EformerError:
            return None

    def empty(self, name: str, log: CommitLog) -> bytes:
        if name == MANIFEST:
            return Manifest(format=SAFETENSORS, log=log).to_json()
        manifest = Manifest(format=ARRAYS, log=log)
        return Index(eformer=msgspec.Raw(msgspec.json.encode(manifest))).to_json()


INDEXES = _Indexes()


def has_mark(store: Store, directory: str, mark: str) -> bool | None:
    """Tell whether a file marks a directory as a checkpoint; None if it is there and says that there is none."""
    name = f"{directory}/{mark}"
    if on_disk(store) is not None or mark not in (MANIFEST, INDEX):
        return store.is_file(name)
    try:
        data, entry = store.read(name, 0, MOST_EMPTY)
    except FileNotFoundError:
        return False
    manifest = INDEXES.parse(mark, data) if entry.nbytes <= MOST_EMPTY else None
    return None if manifest and manifest.is_empty else True


def is_removed(store: Store, directory: str) -> bool:
    """Tell whether the index of a directory says that there is no checkpoint."""
    return any(has_mark(store, directory, mark) is None for mark in (MANIFEST, INDEX))
