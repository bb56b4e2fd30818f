"""Write the Hugging Face index, `model.safetensors.index.json`, for readers that do not know the manifest.

Tests: tests/engine/formats/test_safetensors.py, tests/engine/formats/safetensors/test_names.py.
"""

from __future__ import annotations

import logging
import math
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET

from eformer._engine.formats.safetensors.header import read_tensor_names
from eformer._engine.formats.safetensors.names import INDEX_SUFFIX, PRIVATE, base_name, plain_names
from eformer._engine.record.values import MALFORMED_JSON, json_decoder
from eformer._engine.stores.base import Kind, Store, Upload, Version, read_whole
from eformer._engine.stores.directory import Directory
from eformer._engine.stores.local import on_disk
from eformer._engine.tasks.pool import run_all
from eformer.errors import Damage, FormatError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from eformer._engine.record.manifest import Manifest, TreeEntry

logger = logging.getLogger("eformer")


def bring_up_to_date(store: Store, there: Mapping[str, Kind], upload: Upload, manifest: Manifest) -> set[str]:
    """Write or remove the Hugging Face index of every tree. `there` lists the directory. Return the names that the
    files of the trees begin with."""
    trees = _by_base(manifest)
    for base, tree in trees.items():
        _update(store, upload, there, base, tree)
    return {*trees}


def _by_base(manifest: Manifest) -> dict[str, TreeEntry]:
    """Return the trees by the beginning of their files' names. The prefix "model" yields to the tree without a prefix,
    whose files have the same names."""
    trees: dict[str, TreeEntry] = {}
    for prefix, tree in sorted(manifest.trees.items()):
        trees.setdefault(base_name(prefix), tree)
    return trees


def _update(store: Store, upload: Upload, there: Mapping[str, Kind], base: str, tree: TreeEntry) -> None:
    """Write the Hugging Face index of a tree with several files or an unusual file name; remove it from other trees."""
    index = base + INDEX_SUFFIX
    saved, version = save_of_index(store, index, there.get(index))
    if saved is None and version is not None:
        logger.warning("%s was not written by eformer; it is left as it is", store.path_to(index))
        return
    if not _is_wanted(base, tree):
        if saved is not None:
            upload.remove([index])
    elif saved != tree.save_id:
        upload.swap(index, _index(store, tree), version)


def _is_wanted(base: str, tree: TreeEntry) -> bool:
    names = [file.name for file in tree.files]
    is_of_use = tree.wholeness != "torn" and not any(name.endswith(PRIVATE) for name in names)
    return bool(names) and is_of_use and names != plain_names(base, 1)


def _index(store: Store, tree: TreeEntry) -> bytes:
    """List the tensors of all files, by their headers: the manifest does not have the tensors' names."""
    names = [file.name for file in tree.files]
    tensors: dict[str, Iterable[str]] = {}

    def read(name: str) -> None:
        tensors[name] = read_tensor_names(store, name)

    run_all([partial(read, name) for name in names], store.read_threads)
    weight_map = {tensor: name for name in names for tensor in tensors[name]}
    total = sum(file.nbytes - file.header_nbytes for file in tree.files)
    parameters = sum(math.prod(entry.shape) for entry in tree.listed_leaves().values())
    metadata = {"eformer": tree.save_id, "total_parameters": parameters, "total_size": total}
    index = {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}
    return msgspec.json.format(msgspec.json.encode(index), indent=2)


# -------------------------------------------------------------------------------------------- verify


def damaged_indexes(store: Store, manifest: Manifest) -> list[Damage]:
    """Compare the index of every tree with the headers of its files. Indexes of other programs are skipped."""
    damages = _differences(store, manifest)
    place = on_disk(store)
    if damages and place is not None:
        with suppress(OSError), Directory.open(place) as directory, directory.locked():
            # A save writes the indexes last and holds the lock until then, so only look again under the lock. A save
            # that begins now is noticed by its manifest.
            damages = _differences(store, manifest)
    return damages


def _differences(store: Store, manifest: Manifest) -> list[Damage]:
    there = store.kinds()
    # Saves to a bucket keep a log and have no lock: an index may be written after the manifest that names newer files.
    is_locked = manifest.log is UNSET
    found = []
    for base, tree in _by_base(manifest).items():
        name, is_wanted = base + INDEX_SUFFIX, _is_wanted(base, tree)
        if problem := _problem(store, name, there.get(name), tree, is_wanted=is_wanted, is_locked=is_locked):
            nbytes = store.read(name, 0, 0)[1].nbytes if there.get(name) == "file" else 0
            found.append(Damage("", name, 0, nbytes, f"{problem}. Only other readers use them"))
    return found


def _problem(
    store: Store, name: str, kind: Kind | None, tree: TreeEntry, *, is_wanted: bool, is_locked: bool
) -> str:
    """Describe the problem of an index; "" if it has none, or if another program wrote it.

    Without a lock that keeps saves apart, another save may be about to write the index.
    """
    if kind is None:
        return "are missing" if is_wanted and is_locked else ""
    saved, _ = save_of_index(store, name, kind)
    if not is_wanted:
        return "are of an earlier save" if saved and is_locked else ""
    if saved is None:
        return ""
    try:
        document = json_decoder(dict[str, Any]).decode(read_whole(store, name)[0])
    except (OSError, FormatError, *MALFORMED_JSON) as error:
        return f"cannot be read: {error}"
    if saved != tree.save_id:
        return f"are of the save {saved!r}, expected {tree.save_id!r}" if is_locked else ""
    try:
        is_same = _content(document) == _content(msgspec.json.decode(_index(store, tree)))
    except (OSError, FormatError):  # the files are damaged, which is reported for each of them
        return ""
    return "" if is_same else "do not list what the files hold"


def _content(index: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the facts that every version of eformer writes to an index."""
    metadata = index.get("metadata")
    return index.get("weight_map"), metadata.get("total_size") if isinstance(metadata, dict) else None


class _IndexMetadata(msgspec.Struct):
    eformer: str


class _IndexHead(msgspec.Struct):
    metadata: _IndexMetadata


def save_of_index(store: Store, name: str, kind: Kind | None) -> tuple[str | None, Version | None]:
    """Return the id of eformer's save that an index belongs to, and the version of its file.

    The id is "" for an empty index or a damaged one by eformer, and None for an index of another program. Both are None
    if the file does not exist, or is a link, which a new index replaces.
    """
    if kind is None:
        return None, None
    try:
        data, entry = read_whole(store, name)
    except (OSError, FormatError):
        return None, None if kind == "other" else ""
    try:
        return json_decoder(_IndexHead).decode(data).metadata.eformer, entry.version
    except msgspec.ValidationError:  # sound JSON, but not an index by eformer
        saved = None
    except MALFORMED_JSON:
        saved = "" if b'"eformer"' in data or not data.strip(b"\0") else None
    return saved, None if saved is None and kind == "other" else entry.version
