"""Checkpoints in zarr arrays: ours by the manifest in their index, others' by the index or by what is there."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import msgspec

from eformer.checkpoint._codec import MALFORMED_JSON
from eformer.checkpoint._formats._found import Found
from eformer.checkpoint._formats._index import INDEX, Listed, read_index
from eformer.checkpoint._formats.foreign.arrays import counted_from, discover, tree_of_arrays
from eformer.checkpoint._formats.foreign.structure import OriginalStructure, parse_structure
from eformer.checkpoint._manifest import UNREADABLE, Manifest
from eformer.checkpoint._store.local import is_inside, open_inside, read_small, stamp
from eformer.checkpoint._store.many import has_unfinished
from eformer.checkpoint._value import value_to_json
from eformer.errors import FormatError, NotFoundError, StructureError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from eformer.checkpoint._manifest import TreeEntry

FOREIGN = "tensorstore, of another writer"

_METADATA = "checkpoint_metadata.json"

Stamps = dict[str, tuple[int, ...]]


def by_index(directory: Path) -> Found | None:
    """The checkpoint that the index of a directory tells of; None if it has no index."""
    index = read_index(directory)
    if index is None:
        return None
    manifest = index.manifest(str(directory / INDEX))
    trees, stamps = dict(manifest.trees), _stamps(directory)
    for prefix, listed in index.listed().items():
        if prefix not in trees:
            trees[prefix], looked_at = _listed_tree(directory, prefix, listed)
            stamps |= looked_at
    manifest = msgspec.structs.replace(manifest, trees=trees)
    if not index.is_ours:
        manifest = Manifest(format=FOREIGN, trees=trees)
        if not index.prefixes:  # version 1.0 had none: a prefix was a directory
            paths = [array.path for array in index.listed().get("", [])]
            trees = _with_directories(directory, trees, paths)
    return Found(directory, directory, manifest, trees, stamps=stamps)


def _stamps(directory: Path) -> Stamps:
    descriptor = open_inside(directory, INDEX)
    try:
        return {INDEX: stamp(descriptor)}
    finally:
        os.close(descriptor)


def _listed_tree(directory: Path, prefix: str, listed: list[Listed]) -> tuple[TreeEntry, Stamps]:
    """A tree of the original: nested dicts, or what its structure file says."""
    metadata = _metadata(directory)
    unreadable = None
    try:
        if found := _structure(directory, prefix):
            metadata["custom_metadata"] = value_to_json(found.extras)
            return tree_of_arrays(
                directory, found.arrays, structure=found.document, values=found.values, metadata=metadata
            )
    except StructureError as error:  # the arrays can still be had, into a tree that the caller gives
        unreadable = {UNREADABLE: str(error)}
    below = prefix.replace(".", "/")  # as the original made directories of it
    paths = counted_from(below, [array.path for array in listed])
    tree, stamps = tree_of_arrays(directory, paths, metadata=metadata)
    if unreadable is not None:
        tree = msgspec.structs.replace(tree, structure=msgspec.Raw(msgspec.json.encode(unreadable)))
    return tree, stamps


def _structure(directory: Path, prefix: str) -> OriginalStructure | None:
    name = f"{prefix}_structure.json"
    if not prefix or not is_inside(name) or "/" in name or not (directory / name).exists():
        return None
    try:
        found = parse_structure(read_small(directory, name) or b"", str(directory / name))
    except FormatError as error:
        raise StructureError(str(error)) from error
    if found.prefix != prefix:
        raise StructureError(f"{directory / name} is of the prefix {found.prefix!r}, not of {prefix!r}")
    return found


def _metadata(directory: Path) -> dict[str, Any]:
    """What the original recorded beside its index: one record for all prefixes."""
    try:
        document = msgspec.json.decode(read_small(directory, _METADATA) or b"", type=dict[str, Any])
    except FileNotFoundError:
        return {}
    except MALFORMED_JSON as error:
        raise FormatError(f"{directory / _METADATA} is damaged: {error}") from error
    return {name: value_to_json(value) for name, value in document.items()}


def without_index(directory: Path) -> Found | None:
    """The arrays of a directory that has no index, as one tree; and each of its directories as a prefix."""
    paths = list(discover(directory))
    if not paths:
        return None
    if has_unfinished(directory):
        raise NotFoundError(
            f"{directory} holds no checkpoint: there are arrays, but they belong to a save that has not finished; "
            "save again to clean up"
        )
    whole, stamps = tree_of_arrays(directory, counted_from("", paths))
    manifest = Manifest(format=FOREIGN, trees={"": whole})
    trees = _with_directories(directory, manifest.trees, paths)
    return Found(directory, directory, manifest, trees, stamps=stamps)


def _with_directories(
    directory: Path, trees: Mapping[str, TreeEntry], paths: Sequence[str]
) -> dict[str, TreeEntry]:
    """The trees, and each outer directory of the arrays as one more."""
    found = dict(trees)
    for top in sorted({path.split("/")[0] for path in paths if "/" in path}):
        inner = [path for path in paths if path.startswith(f"{top}/")]
        found[top], _ = tree_of_arrays(directory, counted_from(top, inner))
    return found
