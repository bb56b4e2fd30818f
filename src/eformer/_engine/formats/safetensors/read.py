"""Find checkpoints in safetensors files, by a manifest of eformer or by the headers of the files.

Tests: tests/engine/formats/test_safetensors_others.py, tests/engine/formats/test_safetensors.py.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from eformer._engine.formats.found import Foreign, Found, Place, foreign_found, kinds_if_there
from eformer._engine.formats.left_out import left_out
from eformer._engine.formats.nested_names import nest, parts_of_name
from eformer._engine.formats.process_records import joined_trees
from eformer._engine.formats.quantized import quantization_of
from eformer._engine.formats.safetensors.header import (
    Header,
    dtype_of,
    metadata_in,
    open_header,
    parse_header,
    read_header,
)
from eformer._engine.formats.safetensors.hf_index import damaged_indexes
from eformer._engine.formats.safetensors.names import (
    INDEX_SUFFIX,
    SUFFIX,
    base_name,
    is_marked,
    shard_name,
    split_shard,
)
from eformer._engine.record.digests import check_own_digest, has_own_digest
from eformer._engine.record.indexes import INDEX, MANIFEST
from eformer._engine.record.manifest import DataFile, Extent, LeafEntry, Manifest, TreeEntry, foreign_tree
from eformer._engine.record.text import count, few
from eformer._engine.record.values import parse_json
from eformer._engine.stores.base import Store, Version, read_whole
from eformer._engine.stores.local import resolved
from eformer.errors import CorruptionError, FormatError, MismatchError, NotFoundError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

FOREIGN = "safetensors, of another writer"

Headers = dict[str, Header]
"""Headers by file name."""


def in_file(store: Store, name: str) -> Found:
    """Find the checkpoint that a file belongs to. The file may be an index, a file of a checkpoint, a shard of a model
    or a single file."""
    if name == MANIFEST:
        return in_directory(store)
    if name.endswith(INDEX_SUFFIX):
        return _find_by_index(store, name)
    # The caller named the file, so it may be a link that leads anywhere.
    return find_file(*resolved(store, name), (store, name))


def by_base_name(store: Store, base: str) -> Found | None:
    """Find the checkpoint of the index, the file or the shards that a name without suffix stands for. Return None if
    none of them exists."""
    there = kinds_if_there(store)
    for name in (base + INDEX_SUFFIX, base + SUFFIX):
        if name in there:
            return in_file(store, name)
    shards = [name for name in there if base_of_shard(name) == base]
    if not shards:
        return None
    first = shards[0]
    if whole := _in_checkpoint(store, first, open_header(store, first)) or _find_by_shard(store, first):
        return whole
    _require_all_shards(store, base, shards)
    return _foreign(store.path_to(base), store, {"": {name: open_header(store, name) for name in shards}})


def by_manifest(place: Place) -> Found | None:
    """Find the checkpoint that the manifest of a directory describes. Return None for a manifest of another program,
    for a manifest without trees, which may lie beside a checkpoint of another format, and beside an index of arrays:
    saves of arrays look at no manifest, so the index decides."""
    if place.has(INDEX):
        return None
    try:
        data, _ = read_whole(place.store, MANIFEST)
    except (FileNotFoundError, FormatError):  # FormatError: it is a link or a directory
        return None
    if not has_own_digest(data):
        return None
    manifest = Manifest.from_json(data, place.store.path_to(MANIFEST))
    return None if manifest.is_empty else _ours(place.store, manifest)


def by_files(place: Place) -> Found | None:
    """Find the checkpoint of a directory that has a manifest or safetensors files."""
    is_one = MANIFEST in place.names or any(name.endswith(SUFFIX) for name in place.names)
    return in_directory(place.store) if is_one else None


def in_directory(store: Store, only: str | None = None) -> Found:
    """Find the checkpoint of a directory, by eformer or another program."""
    manifest, _ = read_manifest(store)
    if manifest is None:
        groups = files_of_directory(store)
        read = {name for files in groups.values() for name in files}
        return _foreign(store.url, store, groups, find_left_out=partial(left_out, store, read))
    return _ours(store, manifest, only)


def _ours(store: Store, manifest: Manifest, only: str | None = None) -> Found:
    trees, check = joined_trees(store, manifest.trees), partial(damaged_indexes, store, manifest)
    return Found(store.url, store, manifest, trees, only, check_beside=check)


def _find_by_index(store: Store, name: str) -> Found:
    """Find the tree of an index. A tree by eformer is read as the manifest says, which has the newest save; a tree of
    another program as the index says."""
    manifest, _ = read_manifest(store)
    trees = sorted(manifest.trees) if manifest else []
    for prefix in trees:
        if base_name(prefix) + INDEX_SUFFIX == name:
            return in_directory(store, prefix)
    return _foreign(store.path_to(name), store, {"": indexed_files(store, name)})


def _find_by_shard(store: Store, name: str) -> Found | None:
    """Find the whole model of a shard, by the index beside it; None if no index lists the file."""
    index = index_of_shard(store, name)
    return _find_by_index(store, index) if index else None


def read_manifest(store: Store) -> tuple[Manifest | None, Version | None]:
    """Read the manifest of a directory and its version. Return no manifest if the file does not exist, or eformer did
    not write it."""
    try:
        data, entry = read_whole(store, MANIFEST)
    except FileNotFoundError:
        return None, None
    if not has_own_digest(data):
        if ours := marked_file(store):
            raise FormatError(
                f"{store.path_to(MANIFEST)} is damaged, or was not written by eformer, but {ours} was; restore the "
                "manifest from a copy"
            )
        return None, entry.version
    return Manifest.from_json(data, store.path_to(MANIFEST)), entry.version


def _foreign(
    path: str,
    store: Store,
    groups: Mapping[str, Headers],
    places: Sequence[Store] = (),
    find_left_out: Callable[[], tuple[str, ...]] = tuple,
) -> Found:
    """Describe files of another program. `places` are the directories that may have the configuration of the model, in
    order; by default `store`."""
    trees = {prefix: tree_of(files) for prefix, files in groups.items()}
    versions = {name: file.version for files in groups.values() for name, file in files.items()}
    first, *also = places or [store]
    quantized = partial(quantization_of, first, also=also, beside=trees.values())
    foreign = Foreign(find_left_out=find_left_out, find_quantized=quantized)
    return foreign_found(path, store, FOREIGN, trees, versions, foreign)


# --------------------------------------------------------------------------------------- single files


def find_file(store: Store, name: str, link: tuple[Store, str] | None = None) -> Found:
    """Find the checkpoint of a safetensors file. It may have a manifest of its own, belong to a directory, or be of
    another program.

    `link` is the place where the caller found the file, if that is a link.
    """
    path = store.path_to(name)
    raw, entry = read_header(store, name)
    if manifest := _own_manifest(raw, path):
        if len(manifest.trees) != 1:
            raise FormatError(
                f"{path}: the manifest of a single file has {len(manifest.trees)} trees, expected one"
            )
        trees = {prefix: _own_file(tree, path, name, len(raw)) for prefix, tree in manifest.trees.items()}
        return Found(path, store, manifest, trees, versions={name: entry.version})
    header = parse_header(raw, entry.nbytes, path, entry.version)
    if header.metadata.get("manifest", "").startswith('{"digest":"'):
        raise CorruptionError(
            f"{path} carries a manifest, but the beginning of its header is damaged; restore it from a copy"
        )
    # In a cache of Hugging Face the index and the configuration lie beside the link, not beside the file.
    places = [(store, name)] if link is None else [link, (store, name)]
    by_shard = (found for place in places if (found := _find_by_shard(*place)))
    whole = _in_checkpoint(store, name, header) or next(by_shard, None)
    if whole:
        return whole
    unread = partial(other_shards, *places[0])
    return _foreign(path, store, {"": {name: header}}, [place for place, _ in places], unread)


def _in_checkpoint(store: Store, name: str, header: Header) -> Found | None:
    """Find the checkpoint whose manifest, in the same directory, names the file. If the manifest cannot be read, raise
    for a file that eformer wrote, and return None for other files."""
    try:
        prefix = prefix_of_file(store, name)
    except FormatError:
        if is_marked(header.metadata):
            raise
        return None
    return None if prefix is None else in_directory(store, prefix)


def prefix_of_file(store: Store, name: str) -> str | None:
    """Return the prefix of the tree whose manifest, in the same directory, names the file; None if none does."""
    manifest, _ = read_manifest(store)
    for prefix, tree in manifest.trees.items() if manifest else ():
        if any(file.name == name for file in tree.files):
            return prefix
    return None


def _own_file(tree: TreeEntry, path: str, name: str, header_nbytes: int) -> TreeEntry:
    """Add the file's name and the length of its header, which a manifest inside the file cannot contain."""
    if len(tree.files) != 1:
        raise FormatError(
            f"{path}: the manifest of a single file names {len(tree.files)} files, expected one"
        )
    file = DataFile(name, header_nbytes + tree.files[0].nbytes, header_nbytes)
    return msgspec.structs.replace(tree, files=(file,))


def _own_manifest(header: bytes, origin: str) -> Manifest | None:
    """Return the manifest in the metadata of a file; None if the metadata has none."""
    if not header[8:].startswith(b'{"__metadata__":{"digest":"'):
        return None
    check_own_digest(header, origin)
    metadata = metadata_in(header, f"{origin} has an unreadable manifest")
    return Manifest.parse(metadata.get("manifest", ""), origin)


# ------------------------------------ files of other programs, described as eformer records its own


def files_of_directory(store: Store) -> dict[str, Headers]:
    """Open the safetensors files of a directory, grouped by base name. If all have one base name, return it as ""."""
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
    """Return the base name of a file named like a shard, such as model-00001-of-00004.safetensors; None otherwise."""
    shard = split_shard(name.removesuffix(SUFFIX)) if name.endswith(SUFFIX) else None
    return shard[0] if shard else None


def other_shards(store: Store, name: str) -> tuple[str, ...]:
    """List the other shards of the model beside a file that is named like a shard."""
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
    marked = [n for files in groups.values() for n, file in files.items() if is_marked(file.metadata)]
    if marked:
        raise NotFoundError(
            f"{store.url} holds no checkpoint: {marked[0]} belongs to a save that has not finished, or whose "
            f"{MANIFEST} is missing. To read its tensors as plain safetensors, pass the path of that file"
        )


def marked_file(store: Store) -> str | None:
    """Return the name of a file that eformer wrote; None if there is none."""
    return next((name for name in store.kinds() if name.endswith(SUFFIX) and is_ours(store, name)), None)


def is_ours(store: Store, name: str) -> bool:
    """Tell whether a file is a whole safetensors file that eformer wrote."""
    with suppress(FormatError, OSError):
        return is_marked(open_header(store, name).metadata)
    return False


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def index_of_shard(store: Store, name: str) -> str | None:
    """Return the name of the index in the same directory that lists a file; None if no index does.

    An index that cannot be read raises only if the file is named like one of its shards.
    """
    own = f"{base_of_shard(name)}{INDEX_SUFFIX}"
    indexes = [other for other in store.kinds() if other.endswith(INDEX_SUFFIX)]
    for index in sorted(indexes, key=lambda index: index != own):
        try:
            if name in weight_map(store, index)[0].values():
                return index
        except (FormatError, OSError):
            if index == own:
                raise
    return None


def weight_map(store: Store, index: str) -> tuple[dict[str, str], Version]:
    """Read the index of a model in several files: the file of each tensor, and the version of the index."""
    data, entry = read_whole(store, index)
    found = parse_json(data, _Index, f"{store.path_to(index)} is not an index of a model's files")
    return found.weight_map, entry.version


def indexed_files(store: Store, index: str) -> Headers:
    """Open the files that an index names. Raise FileNotFoundError if files are missing, MismatchError if the index does
    not match them."""
    listed, _ = weight_map(store, index)
    files = _open_all(store, index, sorted(set(listed.values())))
    there = {tensor: name for name, file in files.items() for tensor in file.tensors}
    problems = [
        f"tensor {tensor!r} should be in {listed.get(tensor, 'no file')}, but is in {there.get(tensor, 'no file')}"
        for tensor in sorted(listed.keys() | there.keys())
        if listed.get(tensor) != there.get(tensor)
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
        name: LeafEntry(dtype_of(found), found.shape, (Extent(number, start, stop - start, ""),))
        for number, file in enumerate(files.values())
        for name, found in file.tensors.items()
        for start, stop in [found.data_offsets]
    }
    structure, leaves = nest(tensors, parts_of_name)
    return foreign_tree(
        files=tuple(DataFile(name, file.nbytes, file.start) for name, file in files.items()),
        metadata={k: v for file in files.values() for k, v in file.metadata.items()},
        structure=structure,
        leaves=leaves,
    )
