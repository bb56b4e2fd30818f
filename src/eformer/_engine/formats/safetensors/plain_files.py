"""Describe safetensors files of other programs, and directories of them, as eformer records its own."""

from __future__ import annotations

from collections import defaultdict
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from eformer._engine.formats.nested_names import nest, parts_of_name
from eformer._engine.formats.safetensors.header import Opened, dtype_of, open_header
from eformer._engine.formats.safetensors.names import INDEX_SUFFIX, SUFFIX, is_marked, shard_name, split_shard
from eformer._engine.record.indexes import MANIFEST
from eformer._engine.record.manifest import DataFile, Extent, LeafEntry, TreeEntry, foreign_tree
from eformer._engine.record.text import count, few
from eformer._engine.record.values import parse_json
from eformer._engine.stores.base import read_whole
from eformer.errors import FormatError, MismatchError, NotFoundError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from eformer._engine.stores.base import Store

Headers = dict[str, Opened]
"""Opened headers by file name."""


def files_of_directory(store: Store) -> dict[str, Headers]:
    """Open the safetensors files of a directory, by base name. A single base is returned as "", without a prefix."""
    names = store.kinds()
    indexes = [name for name in names if name.endswith(INDEX_SUFFIX)]
    stems = [name.removesuffix(SUFFIX) for name in names if name.endswith(SUFFIX)]
    if not stems:
        raise NotFoundError(
            f"{store.url} holds no checkpoint: {MANIFEST} was not written by eformer, and no *{SUFFIX} was found"
        )
    groups: dict[str, Headers] = {
        index.removesuffix(INDEX_SUFFIX): indexed_files(store, index) for index in indexes
    }
    named = {name for files in groups.values() for name in files}
    alone: dict[str, list[str]] = defaultdict(list)
    for stem in stems:
        if stem + SUFFIX not in named:
            alone[base_of_shard(stem + SUFFIX) or stem].append(stem + SUFFIX)
    for base, members in alone.items():
        groups[base] = groups.get(base, {}) | {name: open_header(store, name) for name in members}
    _refuse_unfinished(store, groups)
    for base, members in alone.items():
        _require_all_shards(store, base, members)
    return groups if len(groups) > 1 else {"": next(iter(groups.values()))}


def base_of_shard(name: str) -> str | None:
    """Return the base name of a file called like a shard, such as model-00001-of-00004.safetensors; None for others."""
    shard = split_shard(name.removesuffix(SUFFIX)) if name.endswith(SUFFIX) else None
    return shard[0] if shard else None


def shards_of(store: Store, base: str, names: Sequence[str]) -> Headers:
    """Open the shards of a model that has no index. Raise FormatError if some are missing."""
    _require_all_shards(store, base, names)
    return {name: open_header(store, name) for name in names}


def other_shards(store: Store, name: str) -> tuple[str, ...]:
    """List the other shards beside a file that is called like a shard of the same model."""
    base = base_of_shard(name)
    if base is None:
        return ()
    return tuple(other for other in store.kinds() if other != name and base_of_shard(other) == base)


def _require_all_shards(store: Store, base: str, names: Sequence[str]) -> None:
    shards = [shard for name in names if (shard := split_shard(name.removesuffix(SUFFIX)))]
    for total in {total for _, _, total in shards}:
        there = {index for _, index, count in shards if count == total}
        missing = [
            shard_name(base, index, total)
            for index in range(1, min(total, len(there) + 20) + 1)
            if index not in there
        ]
        if missing:
            raise FormatError(
                f"{store.url} does not have all {total} shards of {base!r}; missing: {few(missing)}. Copy them there, "
                "or pass the path of one file to read only that one"
            )


def _refuse_unfinished(store: Store, groups: Mapping[str, Headers]) -> None:
    marked = [n for files in groups.values() for n, file in files.items() if is_marked(file.header.metadata)]
    if marked:
        raise NotFoundError(
            f"{store.url} holds no checkpoint: {marked[0]} belongs to a save that has not finished, or whose "
            f"{MANIFEST} is missing. To read its tensors as plain safetensors, pass the path of that file"
        )


def marked_file(store: Store) -> str | None:
    """Return the name of a file that eformer wrote; None if there is none."""
    for name in store.kinds():
        if name.endswith(SUFFIX):
            with suppress(FormatError, OSError):
                if is_marked(open_header(store, name).header.metadata):
                    return name
    return None


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def index_of_shard(store: Store, name: str) -> str | None:
    """Return the name of the index in the same directory that lists a file; None if there is none.

    An index that cannot be read raises only if the file is called like one of its shards.
    """
    own = f"{base_of_shard(name)}{INDEX_SUFFIX}"
    indexes = [other for other in store.kinds() if other.endswith(INDEX_SUFFIX)]
    for index in sorted(indexes, key=lambda index: index != own):
        try:
            if name in _weight_map(store, index).values():
                return index
        except (FormatError, OSError):
            if index == own:
                raise
    return None


def _weight_map(store: Store, index: str) -> dict[str, str]:
    data, _ = read_whole(store, index)
    return parse_json(data, _Index, f"{store.path_to(index)} is not an index of safetensors files").weight_map


def indexed_files(store: Store, index: str) -> Headers:
    """Open the files that an index names. Raise FileNotFoundError if some are missing, MismatchError if the index does
    not match them."""
    weight_map = _weight_map(store, index)
    files = _open_all(store, index, sorted(set(weight_map.values())))
    there = {tensor: name for name, file in files.items() for tensor in file.header.tensors}
    problems = [
        f"tensor {tensor!r} should be in {weight_map.get(tensor, 'no file')}, but is in {there.get(tensor, 'no file')}"
        for tensor in sorted(weight_map.keys() | there.keys())
        if weight_map.get(tensor) != there.get(tensor)
    ]
    if problems:
        raise MismatchError(problems, context=f"{store.path_to(index)} does not match its files")
    return files


def _open_all(store: Store, index: str, names: Sequence[str]) -> Headers:
    files, missing = {}, []
    for name in names:
        try:
            files[name] = open_header(store, name)
        except FileNotFoundError:
            missing.append(name)
    if missing:
        raise FileNotFoundError(
            f"{store.path_to(index)} lists {count(len(names), 'file')}; missing: {few(missing)}. Copy them to "
            f"{store.url}, or remove the index to read single files"
        )
    return files


def tree_of(files: Headers) -> TreeEntry:
    """Describe the files as a tree of dicts, nested by the dots in the tensors' names. It has no digests."""
    tensors = {
        name: LeafEntry(dtype_of(found), found.shape, (_extent(number, found.data_offsets),))
        for number, file in enumerate(files.values())
        for name, found in file.header.tensors.items()
    }
    structure, leaves = nest(tensors, parts_of_name)
    return foreign_tree(
        files=tuple(DataFile(name, file.nbytes, file.header.start) for name, file in files.items()),
        metadata={k: v for file in files.values() for k, v in file.header.metadata.items()},
        structure=structure,
        leaves=leaves,
    )


def _extent(file: int, offsets: tuple[int, int]) -> Extent:
    return Extent(file, offsets[0], offsets[1] - offsets[0], "")
