"""The commit of a safetensors checkpoint: files under their names, then the manifest, then away with the old.

Every step leaves the directory with one whole checkpoint. A data file is never touched again once a manifest
names it; the manifest is swapped by a rename; what no manifest names any more is removed last.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import msgspec

from eformer.checkpoint._codec import MALFORMED_JSON
from eformer.checkpoint._formats._header import open_header
from eformer.checkpoint._formats._index import INDEX
from eformer.checkpoint._formats._names import (
    INDEX_SUFFIX,
    MANIFEST,
    SUFFIX,
    base_name,
    is_leftover,
    is_marked,
    plain_names,
    unique_names,
)
from eformer.checkpoint._formats._reading import read_manifest
from eformer.checkpoint._manifest import Manifest
from eformer.checkpoint._store.local import (
    list_names,
    locked,
    logger,
    read_small,
    remove,
    rename,
    replacing,
    sweep,
    sync_directory,
)
from eformer.checkpoint._store.many import sweep_trees
from eformer.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from eformer.checkpoint._manifest import TreeEntry

FORMAT = "safetensors"


def seal(directory: Path, prefix: str, tree: TreeEntry, scratch: Sequence[str]) -> None:
    """The tree, whose files lie complete and synced under their `scratch` names, is the checkpoint of `prefix`."""
    with locked(directory):
        manifest = read_manifest(directory) or Manifest(format=FORMAT)
        tree = _with_final_names(directory, prefix, tree, manifest)
        published = []
        try:
            for temporary, file in zip(scratch, tree.files, strict=True):
                rename(directory / temporary, directory / file.name)
                published.append(directory / file.name)
            sync_directory(directory)  # the names of the data before the name of the manifest
            manifest = manifest.with_tree(prefix, tree)
            with replacing(directory / MANIFEST) as new:
                new.write(manifest.to_json())
        except BaseException:
            if not is_sealed(directory, tree.save_id):
                for path in published:
                    remove(path)
            raise
        _finish(directory, manifest)


def is_sealed(directory: Path, save_id: str) -> bool:
    """Whether the manifest was in place when an error came; a sync of the directory may fail after it."""
    try:
        manifest = read_manifest(directory)
    except (OSError, FormatError):
        return True  # nothing is removed that might be named
    return manifest is not None and any(tree.save_id == save_id for tree in manifest.trees.values())


def check_place(directory: Path, prefix: str) -> bool:
    """Whether there is a checkpoint; refuses, before anything is written, files that are not ours to replace.

    A damaged manifest is not replaced either: it may name what can still be saved.
    """
    there = list_names(directory)  # before the manifest is read: a concurrent save may put one there
    manifest = read_manifest(directory)
    if manifest is None or prefix not in manifest.trees:
        base = base_name(prefix)
        if INDEX in there:
            raise FileExistsError(
                f"{directory / INDEX} is there: the directory holds a checkpoint of another format. Save to another "
                "directory, or with format='tensorstore'"
            )
        foreign = [MANIFEST] if manifest is None and MANIFEST in there else []
        if base + SUFFIX in there and not is_marked(_metadata(directory, base + SUFFIX)):
            foreign.append(base + SUFFIX)
        index = base + INDEX_SUFFIX
        if index in there and _save_of_index(directory, index) is None:
            foreign.append(index)
        if foreign:
            raise FileExistsError(
                f"{directory / foreign[0]} was not written by eformer; save to another directory"
            )
    return manifest is not None


def _with_final_names(directory: Path, prefix: str, tree: TreeEntry, manifest: Manifest) -> TreeEntry:
    """Plain names for a first save; a name that a manifest ever gave is not given twice."""
    names = plain_names(base_name(prefix), len(tree.files))
    if prefix in manifest.trees or not set(names).isdisjoint(list_names(directory)):
        names = unique_names(names, tree.save_id)
    files = tuple(
        msgspec.structs.replace(file, name=name) for file, name in zip(tree.files, names, strict=True)
    )
    return msgspec.structs.replace(tree, files=files)


# ------------------------------------------------------------------------------------------ afterwards


def _finish(directory: Path, manifest: Manifest) -> None:
    """Indexes that name the new files, then away with the old. Also what an earlier save left undone.

    The checkpoint is safe by now; what cannot be done is left to the next save.
    """
    try:
        bases: set[str] = set()
        for prefix, tree in sorted(manifest.trees.items()):  # the prefix "model" yields to none at all
            if base_name(prefix) not in bases:
                _bring_up_to_date(directory, base_name(prefix), tree)
            bases.add(base_name(prefix))
        named = {file.name for tree in manifest.trees.values() for file in tree.files}
        for name in _leftovers(directory, named):
            remove(directory / name)
        sweep(directory)
        sweep_trees(directory, ())
    except (OSError, FormatError) as error:
        logger.warning("%s is saved, but could not be tidied up: %s", directory, error)


def _bring_up_to_date(directory: Path, base: str, tree: TreeEntry) -> None:
    """An index, for readers that know safetensors and not us, wherever it is not plain which file to read."""
    path = directory / (base + INDEX_SUFFIX)
    names = [file.name for file in tree.files]
    saved = _save_of_index(directory, path.name)
    if (
        names == plain_names(base, 1) or not names or tree.parts == "torn"
    ):  # parts of tensors are of no use to them
        if saved is not None:
            remove(path)
    elif saved != tree.save_id:
        if path.is_symlink():  # it may lead out of the directory
            remove(path)
        with replacing(path) as file:
            file.write(_index(directory, tree))


def _index(directory: Path, tree: TreeEntry) -> bytes:
    weight_map: dict[str, str] = {}
    for file in tree.files:
        weight_map |= dict.fromkeys(open_header(directory, file.name).header.tensors, file.name)
    total = sum(file.nbytes - file.header_nbytes for file in tree.files)
    index = {"metadata": {"total_size": total, "eformer": tree.save_id}, "weight_map": weight_map}
    return msgspec.json.format(msgspec.json.encode(index), indent=2)


class _IndexMetadata(msgspec.Struct):
    eformer: str


class _IndexHead(msgspec.Struct):
    metadata: _IndexMetadata


def _save_of_index(directory: Path, name: str) -> str | None:
    """Which save of ours an index is of; None for one that is not ours, or is not there."""
    try:
        return msgspec.json.decode(read_small(directory, name) or b"", type=_IndexHead).metadata.eformer
    except (*MALFORMED_JSON, FileNotFoundError, FormatError):
        return None


def _leftovers(directory: Path, named: set[str]) -> Iterator[str]:
    for name in list_names(directory):
        if name.endswith(SUFFIX) and name not in named and is_leftover(name, _metadata(directory, name)):
            yield name


def _metadata(directory: Path, name: str) -> Mapping[str, str]:
    """What a file says of itself; nothing, if it is not a safetensors file."""
    with contextlib.suppress(FormatError, OSError):
        return open_header(directory, name).header.metadata
    return {}
