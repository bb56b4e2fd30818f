"""The commit of a safetensors checkpoint: files under their names, then the manifest, then away with the old.

Every step leaves the directory with one whole checkpoint. A data file is never touched again once a manifest
names it; the manifest is swapped by a rename; what no manifest names any more is removed last.
"""

from __future__ import annotations

import contextlib
import os
import stat
from typing import TYPE_CHECKING

import msgspec

from eformer._engine.formats.markers import ORBAX_TREE
from eformer._engine.formats.safetensors.header import open_header
from eformer._engine.formats.safetensors.names import (
    INDEX_SUFFIX,
    MANIFEST,
    PRIVATE,
    SUFFIX,
    base_name,
    is_leftover,
    is_marked,
    plain_names,
    renumbered,
    tensor_name,
    unique_names,
)
from eformer._engine.formats.safetensors.read import read_manifest
from eformer._engine.formats.zarr.index import INDEX
from eformer._engine.record.manifest import Manifest
from eformer._engine.record.values import MALFORMED_JSON
from eformer._engine.stores.local import list_names, logger, read_small, replacing_in, sweep
from eformer._engine.stores.local_upload import sweep_trees
from eformer.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from eformer._engine.record.manifest import TreeEntry
    from eformer._engine.stores.directory import Directory

FORMAT = "safetensors"


def seal(
    place: Directory, prefix: str, tree: TreeEntry, scratch: Sequence[str], kept: Mapping[str, str]
) -> None:
    """The tree, whose files lie complete and synced under their `scratch` names, is the checkpoint of `prefix`.

    Those of an earlier save that are `kept` have names already.
    """
    with place.locked():
        manifest = read_manifest(place.path) or Manifest(format=FORMAT)
        tree = _with_final_names(place, prefix, tree, manifest, kept)
        published = []
        try:
            for temporary, file in zip(scratch, tree.files, strict=True):
                if temporary in kept and _is_same(place, temporary, file.name):
                    continue  # it has been here before
                _publish(place, temporary, file.name)
                published.append(file.name)
            place.sync()  # the names of the data before the name of the manifest
            manifest = manifest.with_tree(prefix, tree)
            with replacing_in(place, MANIFEST) as new:
                new.write(manifest.to_json())
        except BaseException:
            if not is_sealed(place.path, tree.save_id):
                for name in published:
                    place.unlink(name)
            raise
        _finish(place, manifest)


def _publish(place: Directory, temporary: str, final: str) -> None:
    with _folder_of(place, temporary) as (folder, name):
        folder.rename(name, place, final)


def _is_same(place: Directory, temporary: str, final: str) -> bool:
    """Whether both are names of one file."""
    with _folder_of(place, temporary) as (folder, name):
        a, b = folder.status(name), place.status(final)
    return a is not None and b is not None and os.path.samestat(a, b)


@contextlib.contextmanager
def _folder_of(place: Directory, path: str) -> Iterator[tuple[Directory, str]]:
    """The directory that a scratch file is in, and its name there."""
    outer, _, name = path.rpartition("/")
    if not outer:
        yield place, name
        return
    with place.enter(outer) as folder:
        yield folder, name


def is_sealed(directory: Path, save_id: str) -> bool:
    """Whether the manifest was in place when an error came; a sync of the directory may fail after it."""
    try:
        manifest = read_manifest(directory)
    except (OSError, FormatError):
        return True  # nothing is removed that might be named
    return manifest is not None and any(tree.save_id == save_id for tree in manifest.trees.values())


def is_named(directory: Path, name: str) -> bool:
    """Whether a manifest names this file of the directory."""
    try:
        manifest = read_manifest(directory)
    except FormatError:
        return False
    trees = manifest.trees.values() if manifest else ()
    return any(file.name == name for tree in trees for file in tree.files)


def check_place(directory: Path, prefix: str) -> bool:
    """Whether there is a checkpoint; refuses, before anything is written, files that are not ours to replace.

    A damaged manifest is not replaced either: it may name what can still be saved.
    """
    there = list_names(directory)  # before the manifest is read: a concurrent save may put one there
    manifest = read_manifest(directory)
    if INDEX in there:
        raise FileExistsError(
            f"{directory / INDEX} is there: the directory holds a checkpoint of another format. Save to another "
            "directory, or with format='tensorstore'"
        )
    if manifest is None or prefix not in manifest.trees:
        base = base_name(prefix)
        foreign = [MANIFEST] if manifest is None and MANIFEST in there else []
        foreign += [ORBAX_TREE] if ORBAX_TREE in there else []
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


def _with_final_names(
    place: Directory, prefix: str, tree: TreeEntry, manifest: Manifest, kept: Mapping[str, str]
) -> TreeEntry:
    """Plain names for a first save that is all there is; a name that a manifest ever gave is given to no other file."""
    names = plain_names(base_name(prefix), len(tree.files) - len(kept))
    if kept or prefix in manifest.trees or not set(names).isdisjoint(place.kinds()):
        names = unique_names(names, tree.save_id)
    if any(name.endswith(PRIVATE) for name in kept.values()):  # nobody shall take the rest for the whole
        names = [name + PRIVATE for name in names]
    new = iter(names)
    files = tuple(
        msgspec.structs.replace(
            f, name=_free_name(place, f.name, kept[f.name]) if f.name in kept else next(new)
        )
        for f in tree.files
    )
    return msgspec.structs.replace(tree, files=files)


def _free_name(place: Directory, scratch: str, name: str) -> str:
    """The name of a file that is kept; another one if there is another file of that name, as in a copy of the directory
    that it is kept from."""
    while place.status(name) is not None and not _is_same(place, scratch, name):
        name = renumbered(name)
    return name


# ------------------------------------------------------------------------------------------ afterwards


def _finish(place: Directory, manifest: Manifest) -> None:
    """Indexes that name the new files, then away with the old. Also what an earlier save left undone.

    The checkpoint is safe by now; what cannot be done is left to the next save.
    """
    try:
        bases: set[str] = set()
        for prefix, tree in sorted(manifest.trees.items()):  # the prefix "model" yields to none at all
            if base_name(prefix) not in bases:
                _bring_up_to_date(place, base_name(prefix), tree)
            bases.add(base_name(prefix))
        named = {file.name for tree in manifest.trees.values() for file in tree.files}
        for name in _leftovers(place, named, bases):
            place.unlink(name)
        sweep(place)
        sweep_trees(place, None)
    except (OSError, FormatError) as error:
        logger.warning("%s is saved, but could not be tidied up: %s", place.path, error)


def _bring_up_to_date(place: Directory, base: str, tree: TreeEntry) -> None:
    """An index, for readers that know safetensors and not us, wherever it is not plain which file to read."""
    index = base + INDEX_SUFFIX
    names = [file.name for file in tree.files]
    saved = _save_of_index(place.path, index)
    is_of_use = tree.parts != "torn" and not any(name.endswith(PRIVATE) for name in names)
    status = place.status(index)
    if saved is None and status is not None and not stat.S_ISLNK(status.st_mode):
        logger.warning("%s was not written by eformer, and was left as it is", place.path / index)
        return
    if names == plain_names(base, 1) or not names or not is_of_use:
        if saved is not None:
            place.unlink(index)
    elif saved != tree.save_id:
        with replacing_in(place, index) as file:
            file.write(_index(place.path, tree))


def _index(directory: Path, tree: TreeEntry) -> bytes:
    if tree.parts:  # the headers of the files are all that says what is in them
        names = ((open_header(directory, file.name).header.tensors, file.name) for file in tree.files)
        weight_map = {tensor: name for tensors, name in names for tensor in tensors}
        total = sum(file.nbytes - file.header_nbytes for file in tree.files)
    else:  # files of earlier saves may hold what is no longer part of the tree
        weight_map = {
            tensor_name(leaf, entry.region_of(extent) if extent.region else None): tree.files[
                extent.file
            ].name
            for leaf, entry in tree.leaves.items()
            for extent in entry.extents
        }
        total = tree.nbytes
    index = {"metadata": {"total_size": total, "eformer": tree.save_id}, "weight_map": weight_map}
    return msgspec.json.format(msgspec.json.encode(index), indent=2)


class _IndexMetadata(msgspec.Struct):
    eformer: str


class _IndexHead(msgspec.Struct):
    metadata: _IndexMetadata


def _save_of_index(directory: Path, name: str) -> str | None:
    """Which save of ours an index is of, nothing if it is damaged; None for one that is not ours, or is not there."""
    try:
        data = read_small(directory, name) or b""
    except (OSError, FormatError):
        return None
    try:
        return msgspec.json.decode(data, type=_IndexHead).metadata.eformer
    except msgspec.ValidationError:  # it is sound, and says something else
        return None
    except MALFORMED_JSON:
        return "" if b'"eformer"' in data else None


def _leftovers(place: Directory, named: set[str], bases: set[str]) -> Iterator[str]:
    """Files of earlier saves of the trees that the manifest has. Those of other trees are none of its business: people
    copy single files."""
    for name in place.kinds():
        if (
            name.endswith((SUFFIX, PRIVATE))
            and name not in named
            and is_leftover(name, _metadata(place.path, name), bases)
        ):
            yield name


def _metadata(directory: Path, name: str) -> Mapping[str, str]:
    """What a file says of itself; nothing, if it is not a safetensors file."""
    with contextlib.suppress(FormatError, OSError):
        return open_header(directory, name).header.metadata
    return {}
