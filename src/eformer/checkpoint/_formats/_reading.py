"""Finding the checkpoint at a path: ours by its manifest, others' safetensors by their headers."""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from eformer.checkpoint._formats._header import Header, dtype_of, header_length, parse_header
from eformer.checkpoint._formats._names import INDEX_SUFFIX, MANIFEST, SUFFIX, is_marked, split_shard
from eformer.checkpoint._leaf import escape, join_name, with_nearest
from eformer.checkpoint._manifest import (
    DataFile,
    Extent,
    LeafEntry,
    Manifest,
    TreeEntry,
    check_seal,
    encode_leaves,
)
from eformer.checkpoint._pieces import PIECE_BYTES
from eformer.checkpoint._store.local import (
    list_names,
    local_path,
    open_inside,
    open_regular,
    read_range,
    read_small,
)
from eformer.errors import CorruptionError, FormatError, MismatchError, NotFoundError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

FOREIGN = "safetensors, of another writer"


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint: the directory that its files are in, and its manifest. `only` is the tree that was asked for."""

    path: Path
    directory: Path
    manifest: Manifest
    trees: Mapping[str, TreeEntry]
    only: str | None = None

    def tree(self, prefix: str | None) -> TreeEntry:
        """The tree of that prefix; if none is said, the one that was saved without, or the only one."""
        prefix = self.only if prefix is None else prefix
        available = sorted(self.trees)
        if prefix is None:
            if "" in self.trees or len(self.trees) != 1:
                prefix = ""
            else:
                (prefix,) = self.trees
        if prefix in self.trees:
            return self.trees[prefix]
        if not prefix:
            raise ValueError(f"{self.path} holds several trees; pass prefix=, one of {available}")
        hint = next(with_nearest([prefix], available))[1]
        raise ValueError(f"{self.path} has no prefix {prefix!r}{hint}; available are {available}")

    def open_files(self, tree: TreeEntry, needed: Iterable[int]) -> list[int]:
        """Descriptors by file number, -1 for those not needed. The caller closes them."""
        descriptors = [-1] * len(tree.files)
        try:
            for number in sorted(set(needed)):
                descriptors[number] = open_inside(self.directory, tree.files[number].name)
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
    return find(found.path).manifest.digest != found.manifest.digest


def find(path: str | os.PathLike[str]) -> Found:
    """The checkpoint at `path`: a directory, its manifest, one of its files, or a file that stands alone."""
    where = local_path(path)
    if where.is_dir():
        return _find_in_directory(where)
    if where.name == MANIFEST and where.exists():
        return _find_in_directory(where.parent)
    if where.name.endswith(INDEX_SUFFIX) and where.exists():
        if (where.parent / MANIFEST).exists():
            return _find_in_directory(where.parent, file=None, index=where.name)
        return _foreign(where, where.parent, {"": _indexed_files(where.parent, where.name)})
    if where.exists():
        return _find_file(where)
    nearby = _names_near(where)
    raise NotFoundError(f"there is nothing at {where}{nearby}")


def _names_near(path: Path) -> str:
    if not path.parent.is_dir():
        return f"; not even {path.parent} exists"
    _, hint = next(with_nearest([path.name], list_names(path.parent)))
    return hint


def read_manifest(directory: Path) -> Manifest | None:
    """The manifest of a directory of ours; None where there is none."""
    try:
        data = read_small(directory, MANIFEST)
    except FileNotFoundError:
        return None
    return Manifest.from_json(data, str(directory / MANIFEST))


def _find_in_directory(directory: Path, file: str | None = None, index: str | None = None) -> Found:
    manifest = read_manifest(directory)
    if manifest is None:
        return _foreign(directory, directory, _foreign_files(directory))
    only = None
    for prefix, tree in manifest.trees.items():
        names = {data_file.name for data_file in tree.files}
        if file in names or (
            index and any(name.startswith(index.removesuffix(INDEX_SUFFIX)) for name in names)
        ):
            only = prefix
    return Found(directory, directory, manifest, manifest.trees, only)


# --------------------------------------------------------------------------------------- single files


class _Ours(msgspec.Struct):
    digest: str
    manifest: str


class _Outer(msgspec.Struct):
    metadata: _Ours = msgspec.field(name="__metadata__")


def read_header(directory: Path, name: str) -> tuple[bytes, int]:
    """The header of a safetensors file, and the length of the file."""
    descriptor = open_inside(directory, name)
    try:
        return _header_at(descriptor, str(directory / name))
    finally:
        os.close(descriptor)


def _header_at(descriptor: int, origin: str) -> tuple[bytes, int]:
    nbytes = os.fstat(descriptor).st_size
    length = header_length(read_range(descriptor, 0, 8), nbytes, origin)
    return read_range(descriptor, 0, length), nbytes


def _find_file(path: Path) -> Found:
    descriptor = open_regular(path)
    try:
        header, nbytes = _header_at(descriptor, str(path))
    finally:
        os.close(descriptor)
    if manifest := _own_manifest(header, str(path)):
        trees = {prefix: _own_file(tree, path.name, len(header)) for prefix, tree in manifest.trees.items()}
        return Found(path, path.parent, manifest, trees)
    parsed = parse_header(header, nbytes, str(path))
    if parsed.metadata.get("manifest", "").startswith('{"digest":"'):
        raise CorruptionError(f"{path} carries a manifest, but the beginning of its header is damaged")
    manifest = _manifest_beside(path, parsed)
    if manifest and any(f.name == path.name for tree in manifest.trees.values() for f in tree.files):
        return _find_in_directory(path.parent, file=path.name)
    return _foreign(path, path.parent, {"": {path.name: (parsed, nbytes)}})


def _manifest_beside(path: Path, header: Header) -> Manifest | None:
    """The manifest of the directory that a file is in. One that cannot be read matters only to a file of ours."""
    try:
        return read_manifest(path.parent)
    except FormatError:
        if is_marked(header.metadata):
            raise
        return None


def _own_file(tree: TreeEntry, name: str, header_nbytes: int) -> TreeEntry:
    """The file cannot know its name, nor the length of the header that the manifest is in."""
    (file,) = tree.files
    file = DataFile(name, header_nbytes + file.nbytes, header_nbytes)
    return msgspec.structs.replace(tree, files=(file,))


def _own_manifest(header: bytes, origin: str) -> Manifest | None:
    """The manifest that a file carries in its metadata, if it was written with one."""
    if not header[8:].startswith(b'{"__metadata__":{"digest":"'):
        return None
    check_seal(header, origin)
    try:
        return Manifest.parse(msgspec.json.decode(header[8:], type=_Outer).metadata.manifest, origin)
    except msgspec.MsgspecError as error:
        raise FormatError(f"{origin} carries no manifest that can be read: {error}") from error


# --------------------------------------------------------------------------------------- other writers

_Files = dict[str, tuple[Header, int]]


def _foreign_files(directory: Path) -> dict[str, _Files]:
    """The safetensors files of a directory by base name; alone, a base is no prefix."""
    names = list_names(directory)
    indexes = [name for name in names if name.endswith(INDEX_SUFFIX)]
    stems = [name.removesuffix(SUFFIX) for name in names if name.endswith(SUFFIX)]
    if not stems:
        there = ", ".join(names[:8]) or "nothing"
        raise NotFoundError(
            f"{directory} holds no checkpoint: looked for {MANIFEST}, *{INDEX_SUFFIX} and *{SUFFIX}; there is {there}"
        )
    groups: dict[str, _Files] = {
        index.removesuffix(INDEX_SUFFIX): _indexed_files(directory, index) for index in indexes
    }
    named = {name for files in groups.values() for name in files}
    alone: dict[str, list[str]] = defaultdict(list)
    for stem in stems:
        if stem + SUFFIX not in named:
            shard = split_shard(stem)
            alone[shard[0] if shard else stem].append(stem + SUFFIX)
    for base, members in alone.items():
        groups[base] = groups.get(base, {}) | {name: _parsed(directory, name) for name in members}
    _refuse_unfinished(directory, groups)
    for base, members in alone.items():
        _require_all_shards(directory, base, members)
    return groups if len(groups) > 1 else {"": next(iter(groups.values()))}


def _parsed(directory: Path, name: str) -> tuple[Header, int]:
    header, nbytes = read_header(directory, name)
    return parse_header(header, nbytes, str(directory / name)), nbytes


def _require_all_shards(directory: Path, base: str, names: Sequence[str]) -> None:
    shards = [shard for name in names if (shard := split_shard(name.removesuffix(SUFFIX)))]
    for total in {total for _, _, total in shards}:
        there = {index for _, index, count in shards if count == total}
        missing = [str(index) for index in range(1, min(total, len(there) + 20) + 1) if index not in there]
        if missing:
            raise FormatError(
                f"{directory}: of the {total} shards of {base!r} these are missing: {', '.join(missing)}"
            )


def _refuse_unfinished(directory: Path, groups: Mapping[str, _Files]) -> None:
    marked = [
        n for files in groups.values() for n, (header, _) in files.items() if is_marked(header.metadata)
    ]
    if marked:
        raise NotFoundError(
            f"{directory} holds no checkpoint: {marked[0]} belongs to a save that has not finished, or whose "
            f"{MANIFEST} is gone. To read what is in it as plain safetensors, pass the path of that file"
        )


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def _indexed_files(directory: Path, index: str) -> _Files:
    """The files that an index names; refuses an index that says something else than they do."""
    try:
        weight_map = msgspec.json.decode(read_small(directory, index), type=_Index).weight_map
    except (msgspec.MsgspecError, RecursionError) as error:
        raise FormatError(f"{directory / index} is no index of safetensors files: {error}") from error
    files = {name: _parsed(directory, name) for name in sorted(set(weight_map.values()))}
    there = {tensor: name for name, (header, _) in files.items() for tensor in header.tensors}
    problems = [
        f"tensor {tensor!r} should be in {weight_map.get(tensor, 'no file')}, and is in {there.get(tensor, 'none')}"
        for tensor in sorted(weight_map.keys() | there.keys())
        if weight_map.get(tensor) != there.get(tensor)
    ]
    if problems:
        raise MismatchError(problems, context=f"{directory / index} and the files disagree")
    return files


def _foreign(path: Path, directory: Path, groups: Mapping[str, _Files]) -> Found:
    trees = {prefix: _foreign_tree(files) for prefix, files in groups.items()}
    return Found(path, directory, Manifest(format=FOREIGN, trees=trees), trees)


def _foreign_tree(files: _Files) -> TreeEntry:
    tensors = {
        name: LeafEntry(dtype_of(found), found.shape, (_extent(number, found.data_offsets),))
        for number, (header, _) in enumerate(files.values())
        for name, found in header.tensors.items()
    }
    structure, names = nested(tensors)
    return TreeEntry(
        save_id="",
        saved_at="",
        written_by="",
        block=PIECE_BYTES,
        files=tuple(DataFile(name, nbytes, header.start) for name, (header, nbytes) in files.items()),
        raw_metadata={k: v for header, _ in files.values() for k, v in header.metadata.items()},
        structure=msgspec.Raw(msgspec.json.encode(structure)),
        raw_leaves=encode_leaves({names[name]: tensors[name] for name in tensors}),
    )


def _extent(file: int, offsets: tuple[int, int]) -> Extent:
    return Extent(file, offsets[0], offsets[1] - offsets[0], "")


def nested(tensors: Iterable[str]) -> tuple[Any, dict[str, str]]:
    """Dicts by the dots in the tensors' names, and the leaf that each became.

    Where "a" and "a.b" are both there, the latter keeps its dot: {"a": ..., "a.b": ...}.
    """
    taken = set(tensors)
    root: dict[str, Any] = {}
    names = {}
    for tensor in sorted(taken):
        parts = tensor.split(".")
        for depth in range(1, len(parts)):
            if ".".join(parts[:depth]) in taken:
                parts = [*parts[: depth - 1], ".".join(parts[depth - 1 :])]
                break
        path = [escape(part) for part in parts]
        names[tensor] = join_name(path)
        holder = root
        for part in path[:-1]:
            holder = holder.setdefault(part, {"dict": {}})["dict"]
        holder[path[-1]] = names[tensor]
    return {"dict": root}, names
