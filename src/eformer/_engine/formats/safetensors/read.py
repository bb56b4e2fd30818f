"""Checkpoints in safetensors files: ours by their manifest, others' by the headers of the files."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from eformer._engine.formats.found import Found
from eformer._engine.formats.left_out import left_out
from eformer._engine.formats.process_records import joined_trees
from eformer._engine.formats.safetensors.header import Opened, parse_header, read_header
from eformer._engine.formats.safetensors.names import (
    INDEX_SUFFIX,
    MANIFEST,
    SUFFIX,
    base_name,
    is_marked,
    split_shard,
)
from eformer._engine.formats.safetensors.plain_files import (
    Files,
    files_of_directory,
    indexed_files,
    marked_file,
    tree_of,
)
from eformer._engine.record.digests import check_own_digest, has_own_digest
from eformer._engine.record.manifest import DataFile, Manifest, TreeEntry
from eformer._engine.record.values import parse_json
from eformer._engine.stores.local import list_names, open_regular, read_small
from eformer.errors import CorruptionError, FormatError

if TYPE_CHECKING:
    from collections.abc import Mapping

FOREIGN = "safetensors, of another writer"


def in_file(path: Path) -> Found:
    """What a path leads to that is no directory: an index, a file of a checkpoint, or one that stands alone."""
    if path.name == MANIFEST:
        return in_directory(path.parent)
    if path.name.endswith(INDEX_SUFFIX):
        return _find_by_index(path)
    return _find_file(Path(os.path.realpath(path)))  # a link that the caller names may lead anywhere


def by_base_name(path: Path) -> Path | None:
    """The file, index or first shard that a path without its suffix means, if it means one."""
    there = list_names(path.parent) if path.parent.is_dir() else []
    shards = [name for name in there if name.endswith(SUFFIX) and _base_of_shard(name) == path.name]
    for name in (path.name + INDEX_SUFFIX, path.name + SUFFIX, *shards):
        if name in there:
            return path.with_name(name)
    return None


def _base_of_shard(name: str) -> str | None:
    shard = split_shard(name.removesuffix(SUFFIX))
    return shard[0] if shard else None


def in_directory(directory: Path, only: str | None = None) -> Found:
    """The checkpoint of a directory, ours or of another writer."""
    manifest = read_manifest(directory)
    if manifest is None:
        groups = files_of_directory(directory)
        read = {name for files in groups.values() for name in files}
        found = _foreign(directory, directory, groups)
        return replace(found, find_left_out=partial(left_out, directory, read))
    return Found(directory, directory, manifest, joined_trees(directory, manifest.trees), only)


def _find_by_index(path: Path) -> Found:
    manifest = read_manifest(path.parent)
    if manifest is None:
        return _foreign(path, path.parent, {"": indexed_files(path.parent, path.name)})
    prefixes = [prefix for prefix in sorted(manifest.trees) if base_name(prefix) + INDEX_SUFFIX == path.name]
    return in_directory(path.parent, next(iter(prefixes), None))


def read_manifest(directory: Path) -> Manifest | None:
    """The manifest of a directory of ours; None where there is none, or one of something else."""
    origin = str(directory / MANIFEST)
    try:
        data = read_small(directory, MANIFEST, has_own_digest)
    except FileNotFoundError:
        return None
    if data is None:
        if ours := marked_file(directory):
            raise FormatError(f"{origin} is damaged, or of something else; but {ours} was written by eformer")
        return None
    return Manifest.from_json(data, origin)


def _foreign(path: Path, directory: Path, groups: Mapping[str, Files]) -> Found:
    trees = {prefix: tree_of(files) for prefix, files in groups.items()}
    stamps = {name: file.stamp for files in groups.values() for name, file in files.items()}
    return Found(path, directory, Manifest(format=FOREIGN, trees=trees), trees, stamps=stamps)


# --------------------------------------------------------------------------------------- single files


class _Ours(msgspec.Struct):
    digest: str
    manifest: str


class _Outer(msgspec.Struct):
    metadata: _Ours = msgspec.field(name="__metadata__")


def _find_file(path: Path) -> Found:
    descriptor = open_regular(path)
    try:
        raw, nbytes, seen = read_header(descriptor, str(path))
    finally:
        os.close(descriptor)
    if manifest := _own_manifest(raw, str(path)):
        trees = {prefix: _own_file(tree, path, len(raw)) for prefix, tree in manifest.trees.items()}
        return Found(path, path.parent, manifest, trees, stamps={path.name: seen})
    header = parse_header(raw, nbytes, str(path))
    if header.metadata.get("manifest", "").startswith('{"digest":"'):
        raise CorruptionError(f"{path} carries a manifest, but the beginning of its header is damaged")
    opened = Opened(header, nbytes, seen)
    return _in_checkpoint(path, opened) or _foreign(path, path.parent, {"": {path.name: opened}})


def _in_checkpoint(path: Path, opened: Opened) -> Found | None:
    """The checkpoint whose manifest, beside the file, names it. A manifest that cannot be read matters only to a
    file of ours."""
    try:
        manifest = read_manifest(path.parent)
    except FormatError:
        if is_marked(opened.header.metadata):
            raise
        return None
    for prefix, tree in manifest.trees.items() if manifest else ():
        if any(file.name == path.name for file in tree.files):
            return in_directory(path.parent, prefix)
    return None


def _own_file(tree: TreeEntry, path: Path, header_nbytes: int) -> TreeEntry:
    """The file cannot know its name, nor the length of the header that the manifest is in."""
    if len(tree.files) != 1:
        raise FormatError(f"{path}: the manifest of a single file names {len(tree.files)}")
    file = DataFile(path.name, header_nbytes + tree.files[0].nbytes, header_nbytes)
    return msgspec.structs.replace(tree, files=(file,))


def _own_manifest(header: bytes, origin: str) -> Manifest | None:
    """The manifest that a file carries in its metadata, if it was written with one."""
    if not header[8:].startswith(b'{"__metadata__":{"digest":"'):
        return None
    check_own_digest(header, origin)
    metadata = parse_json(header[8:], _Outer, f"{origin} carries no manifest that can be read").metadata
    return Manifest.parse(metadata.manifest, origin)
