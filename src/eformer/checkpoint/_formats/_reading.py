"""Finding the checkpoint at a path: ours by its manifest, others' by the headers of their files."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from eformer.checkpoint._codec import MALFORMED_JSON
from eformer.checkpoint._formats._foreign import (
    Files,
    files_of_directory,
    indexed_files,
    marked_file,
    tree_of,
)
from eformer.checkpoint._formats._header import Opened, parse_header, read_header
from eformer.checkpoint._formats._names import INDEX_SUFFIX, MANIFEST, base_name, is_marked
from eformer.checkpoint._leaf import with_nearest
from eformer.checkpoint._manifest import DataFile, Manifest, TreeEntry, check_seal, has_seal
from eformer.checkpoint._store.local import (
    list_names,
    local_path,
    open_inside,
    open_regular,
    read_small,
    stamp,
)
from eformer.errors import CorruptionError, FormatError, NotFoundError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

FOREIGN = "safetensors, of another writer"


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint: the directory that its files are in, and its manifest.

    `only` is the tree that the path led to. `stamps` tell the files whose headers were read from later ones of
    the same name; those that a manifest names are never replaced.
    """

    path: Path
    directory: Path
    manifest: Manifest
    trees: Mapping[str, TreeEntry]
    only: str | None = None
    stamps: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def tree(self, prefix: str | None) -> TreeEntry:
        """The tree of that prefix; if none is said, the one that was saved without, or the only one."""
        available = sorted(self.trees)
        if prefix is None:
            prefix = self.only
        if prefix is None and "" not in self.trees:
            if len(available) > 1:
                raise ValueError(f"{self.path} holds several trees; pass prefix=, one of {available}")
            prefix = next(iter(available), None)
        prefix = prefix or ""
        if prefix not in self.trees:
            hint = next(with_nearest([prefix], available))[1]
            raise ValueError(f"{self.path} has no prefix {prefix!r}{hint}; available are {available}")
        return self.trees[prefix]

    def open_files(self, tree: TreeEntry, needed: Iterable[int]) -> list[int]:
        """Descriptors by file number, -1 for those not needed. The caller closes them."""
        descriptors = [-1] * len(tree.files)
        try:
            for number in sorted(set(needed)):
                name = tree.files[number].name
                descriptors[number] = open_inside(self.directory, name)
                if self.stamps.get(name, seen := stamp(descriptors[number])) != seen:
                    raise FileNotFoundError(f"{self.directory / name} was replaced")
        except BaseException:
            close_files(descriptors)
            raise
        return descriptors


def close_files(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        if descriptor >= 0:
            os.close(descriptor)


def was_replaced(found: Found) -> bool:
    """Whether a newer save has taken the place of what was found, and so perhaps of its files."""
    now = find(found.path)
    return now.manifest.digest != found.manifest.digest or now.stamps != found.stamps


def find(path: str | os.PathLike[str]) -> Found:
    """The checkpoint at `path`: a directory, its manifest, one of its files, or a file that stands alone."""
    where = local_path(path)
    if where.is_dir():
        return _find_in_directory(where)
    if not where.exists():
        raise NotFoundError(f"there is nothing at {where}{_names_near(where)}")
    if where.name == MANIFEST:
        return _find_in_directory(where.parent)
    if where.name.endswith(INDEX_SUFFIX):
        return _find_by_index(where)
    return _find_file(Path(os.path.realpath(where)))  # a link that the caller names may lead anywhere


def _names_near(path: Path) -> str:
    if not path.parent.is_dir():
        return f"; not even {path.parent} exists"
    _, hint = next(with_nearest([path.name], list_names(path.parent)))
    return hint


def _find_in_directory(directory: Path, only: str | None = None) -> Found:
    manifest = read_manifest(directory)
    if manifest is None:
        return _foreign(directory, directory, files_of_directory(directory))
    return Found(directory, directory, manifest, manifest.trees, only)


def _find_by_index(path: Path) -> Found:
    manifest = read_manifest(path.parent)
    if manifest is None:
        return _foreign(path, path.parent, {"": indexed_files(path.parent, path.name)})
    prefixes = [prefix for prefix in sorted(manifest.trees) if base_name(prefix) + INDEX_SUFFIX == path.name]
    return _find_in_directory(path.parent, next(iter(prefixes), None))


def read_manifest(directory: Path) -> Manifest | None:
    """The manifest of a directory of ours; None where there is none, or one of something else."""
    origin = str(directory / MANIFEST)
    try:
        data = read_small(directory, MANIFEST, has_seal)
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
            return _find_in_directory(path.parent, prefix)
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
    check_seal(header, origin)
    try:
        return Manifest.parse(msgspec.json.decode(header[8:], type=_Outer).metadata.manifest, origin)
    except MALFORMED_JSON as error:
        raise FormatError(f"{origin} carries no manifest that can be read: {error}") from error
