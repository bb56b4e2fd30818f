"""Write `model.safetensors.index.json`, for readers that know safetensors and not the manifest."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from eformer._engine.formats.safetensors.header import read_tensor_names
from eformer._engine.formats.safetensors.names import (
    INDEX_SUFFIX,
    PRIVATE,
    base_name,
    plain_names,
)
from eformer._engine.record.values import MALFORMED_JSON, json_decoder
from eformer._engine.stores.base import read_whole
from eformer._engine.tasks.pool import run_all
from eformer.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from eformer._engine.record.manifest import Manifest, TreeEntry
    from eformer._engine.stores.base import Kind, Store, Upload, Version

logger = logging.getLogger("eformer")


def bring_up_to_date(store: Store, upload: Upload, manifest: Manifest) -> set[str]:
    """Write or remove the index of every tree. Return the names that their files begin with."""
    bases: set[str] = set()
    there = store.kinds()
    for prefix, tree in sorted(manifest.trees.items()):  # the prefix "model" yields to no prefix at all
        if base_name(prefix) not in bases:
            _update(store, upload, there, base_name(prefix), tree)
        bases.add(base_name(prefix))
    return bases


def _update(store: Store, upload: Upload, there: Mapping[str, Kind], base: str, tree: TreeEntry) -> None:
    """Keep an index wherever it is not plain which file to read."""
    index = base + INDEX_SUFFIX
    names = [file.name for file in tree.files]
    saved, version = save_of_index(store, index, there.get(index))
    if saved is None and version is not None:
        logger.warning("%s was not written by eformer, and was left as it is", store.path_to(index))
        return
    is_of_use = tree.parts != "torn" and not any(name.endswith(PRIVATE) for name in names)
    if names == plain_names(base, 1) or not names or not is_of_use:
        if saved is not None:
            upload.remove([index])
    elif saved != tree.save_id:
        upload.swap(index, _index(store, tree), version)


def _index(store: Store, tree: TreeEntry) -> bytes:
    """List the tensors of all files, by their headers: the manifest does not say what a leaf is called there."""
    names = [file.name for file in tree.files]
    tensors: dict[str, Iterable[str]] = {}

    def read(name: str) -> None:
        tensors[name] = read_tensor_names(store, name)

    run_all([partial(read, name) for name in names], store.read_threads)
    weight_map = {tensor: name for name in names for tensor in tensors[name]}
    total = sum(file.nbytes - file.header_nbytes for file in tree.files)
    index = {"metadata": {"total_size": total, "eformer": tree.save_id}, "weight_map": weight_map}
    return msgspec.json.format(msgspec.json.encode(index), indent=2)


class _IndexMetadata(msgspec.Struct):
    eformer: str


class _IndexHead(msgspec.Struct):
    metadata: _IndexMetadata


def save_of_index(store: Store, name: str, kind: Kind | None) -> tuple[str | None, Version | None]:
    """Return the save of ours that an index is of, and the version of its file.

    The save is "" for a damaged index of ours, and None for one of another program. Both are None if there is none,
    or only a link, which a new index replaces.
    """
    if kind is None:
        return None, None
    try:
        data, entry = read_whole(store, name)
    except (OSError, FormatError):
        return None, None if kind == "other" else ""
    try:
        return json_decoder(_IndexHead).decode(data).metadata.eformer, entry.version
    except msgspec.ValidationError:  # it is sound, and says something else
        saved = None
    except MALFORMED_JSON:
        saved = "" if b'"eformer"' in data else None
    return saved, None if saved is None and kind == "other" else entry.version
