"""Checkpoints in zarr arrays: ours by the manifest in their index, others' by the index or by what is there."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from eformer._engine.formats.found import Found, Trees
from eformer._engine.formats.left_out import left_out
from eformer._engine.formats.process_records import joined_trees
from eformer._engine.formats.zarr.index import INDEX, Listed, read_index
from eformer._engine.formats.zarr.original_structure import OriginalStructure, parse_structure
from eformer._engine.formats.zarr.plain_arrays import counted_from, discover, tree_of_arrays
from eformer._engine.record.manifest import UNREADABLE, Manifest
from eformer._engine.record.names import is_inside
from eformer._engine.record.values import parse_json, value_to_json
from eformer._engine.stores.local import open_inside, read_small, stamp
from eformer._engine.stores.local_upload import has_unfinished
from eformer.errors import FormatError, NotFoundError, StructureError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from eformer._engine.record.manifest import TreeEntry

FOREIGN = "tensorstore, of another writer"

_METADATA = "checkpoint_metadata.json"

Stamps = dict[str, tuple[int, ...]]


def by_index(directory: Path) -> Found | None:
    """The checkpoint that the index of a directory tells of; None if it has no index."""
    index = read_index(directory)
    if index is None:
        return None
    manifest = index.manifest(str(directory / INDEX))
    stamps = _stamps(directory)
    others = {prefix: listed for prefix, listed in index.listed().items() if prefix not in manifest.trees}
    describe = {
        prefix: partial(_listed_tree, directory, prefix, arrays, stamps) for prefix, arrays in others.items()
    }
    also = {}
    if list(others) == [""]:  # version 1.0 had no prefixes: they were directories
        also = _directories(directory, others[""], stamps)
    if not index.is_ours:
        manifest = Manifest(format=FOREIGN)
    trees = joined_trees(directory, manifest.trees, describe, also)
    unread = partial(left_out, directory, {array.path for arrays in others.values() for array in arrays})
    return Found(
        directory,
        directory,
        manifest,
        trees,
        also=tuple(also),
        stamps=stamps,
        find_left_out=tuple if index.is_ours else unread,
    )


def _stamps(directory: Path) -> Stamps:
    descriptor = open_inside(directory, INDEX)
    try:
        return {INDEX: stamp(descriptor)}
    finally:
        os.close(descriptor)


def _listed_tree(directory: Path, prefix: str, listed: list[Listed], stamps: Stamps) -> TreeEntry:
    """A tree of the original: nested dicts, or what its structure file says."""
    metadata = _metadata(directory)
    unreadable = None
    try:
        if found := _structure(directory, prefix):
            metadata["custom_metadata"] = value_to_json(found.extras)
            arrays = _by_leaf(found, listed)
            return tree_of_arrays(
                directory, arrays, stamps, structure=found.document, values=found.values, metadata=metadata
            )
    except StructureError as error:  # the arrays can still be had, into a tree that the caller gives
        unreadable = {UNREADABLE: str(error)}
    below = prefix.replace(".", "/")  # as the original made directories of it
    tree = tree_of_arrays(directory, counted_from(below, listed), stamps, metadata=metadata)
    if unreadable is not None:
        tree = msgspec.structs.replace(tree, structure=msgspec.Raw(msgspec.json.encode(unreadable)))
    return tree


def _by_leaf(structure: OriginalStructure, listed: list[Listed]) -> dict[str, Listed]:
    by_path = {array.path: array for array in listed}
    return {name: by_path.get(path, Listed(path)) for name, path in structure.arrays.items()}


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
        data = read_small(directory, _METADATA) or b""
    except FileNotFoundError:
        return {}
    document = parse_json(data, dict[str, Any], f"{directory / _METADATA} is damaged")
    return {name: value_to_json(value) for name, value in document.items()}


def without_index(directory: Path) -> Found | None:
    """The arrays of a directory that has no index, as one tree; and each of its directories as a prefix."""
    listed = list(discover(directory))
    if not listed:
        return None
    if has_unfinished(directory):
        raise NotFoundError(
            f"{directory} holds no checkpoint: there are arrays, but they belong to a save that has not finished; "
            "save again to clean up"
        )
    stamps: Stamps = {}
    describe = {"": partial(tree_of_arrays, directory, counted_from("", listed), stamps)}
    also = _directories(directory, listed, stamps)
    trees = Trees({}, describe, also)
    return Found(
        directory,
        directory,
        Manifest(format=FOREIGN),
        trees,
        also=tuple(also),
        stamps=stamps,
        find_left_out=partial(left_out, directory, {array.path for array in listed}),
    )


def _directories(
    directory: Path, listed: Sequence[Listed], stamps: Stamps
) -> dict[str, Callable[[], TreeEntry]]:
    """Each outer directory of the arrays as a tree."""
    inner: dict[str, list[Listed]] = {}
    for array in listed:
        top, slash, _ = array.path.partition("/")
        if slash:
            inner.setdefault(top, []).append(array)
    return {
        top: partial(tree_of_arrays, directory, counted_from(top, arrays), stamps)
        for top, arrays in inner.items()
    }
