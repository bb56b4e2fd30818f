"""Models of Hugging Face in files of PyTorch: `pytorch_model.bin`, or shards of it with an index."""

from __future__ import annotations

from dataclasses import replace
from functools import partial, reduce
from typing import TYPE_CHECKING, Any

import msgspec

from eformer._engine.formats.found import Foreign, foreign_found
from eformer._engine.formats.left_out import left_out
from eformer._engine.formats.nested_names import nest, split_spelled
from eformer._engine.formats.others import torch
from eformer._engine.formats.others.single_file import open_single_file
from eformer._engine.formats.quantized import quantization_of
from eformer._engine.record.manifest import foreign_tree
from eformer._engine.record.names import split_name, unescape
from eformer._engine.record.text import few
from eformer._engine.record.values import parse_json
from eformer._engine.stores.virtual_files import ChainedFiles
from eformer.errors import CorruptionError, FormatError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from eformer._engine.formats.found import Found, Place
    from eformer._engine.record.manifest import LeafEntry, TreeEntry
    from eformer._engine.stores.base import Files, Store

MODEL = "pytorch_model.bin"
INDEX = f"{MODEL}.index.json"

_MAX_INDEX = 2**26  # bytes


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def by_files(place: Place) -> Found | None:
    """Find the model of a directory that has one in files of PyTorch."""
    store = place.store
    if INDEX in place.names:
        return _in_shards(store, place.names)
    if MODEL not in place.names:
        return None
    found = _open(store, MODEL)
    return replace(found, path=store.url, foreign=_in_directory(found.foreign, store, {MODEL}))


def _in_directory(foreign: Foreign, store: Store, read: set[str]) -> Foreign:
    left, quantized = partial(left_out, store, read), partial(quantization_of, store)
    return replace(foreign, find_left_out=left, find_quantized=quantized)


def _open(store: Store, name: str) -> Found:
    with open_single_file(store, name) as file:
        first = file.read(0, 9)
        found = torch.in_archive(file, first) or torch.in_stream(file, first)
        if found is None:
            raise FormatError(f"{file.path} is not a file of torch.save: it begins with {first!r}")
        return found


def _in_shards(store: Store, there: Sequence[str]) -> Found:
    """Join the shards that an index lists. Each tensor is in the file that the index says, and in no other."""
    data, entry = store.read(INDEX, 0, _MAX_INDEX)
    where = store.path_to(INDEX)
    weights = parse_json(data, _Index, f"{where} is not an index of a model").weight_map
    names = sorted(set(weights.values()))
    if not names:
        raise FormatError(f"{where} lists no tensors")
    if lost := set(names) - set(there):
        raise CorruptionError(f"{where} names files that are missing: {few(sorted(lost))}")
    shards = [_open(store, name) for name in names]
    _require_listed(where, weights, names, shards)
    versions = {INDEX: entry.version}
    for shard in shards:
        versions |= shard.versions
    tree = _joined([shard.trees[""] for shard in shards])
    foreign = _in_directory(Foreign(lambda _: _files(shards)), store, {INDEX, *names})
    return foreign_found(store.url, store, torch.FORMAT, {"": tree}, versions, foreign)


def _require_listed(
    where: str, weights: Mapping[str, str], names: Sequence[str], shards: Sequence[Found]
) -> None:
    listed, there = set(weights.items()), set()
    for file, shard in zip(names, shards, strict=True):
        tree = shard.trees[""]
        if tree.raw_values or shard.left_out():
            more = few([*map(repr, tree.raw_values), *shard.left_out()])
            raise FormatError(f"{where}: {file} holds more than tensors; load it by its own name: {more}")
        there |= {(".".join(map(unescape, split_name(name))), file) for name in tree.leaves}
    if listed != there:
        wrong = few([f"{name!r} in {file}" for name, file in sorted(listed ^ there)])
        raise FormatError(f"{where} and the files do not agree on: {wrong}")


def _joined(trees: Sequence[TreeEntry]) -> TreeEntry:
    """Return one tree of the leaves and files of all."""
    leaves: dict[str, LeafEntry] = {}
    files: list[Any] = []
    for tree in trees:
        for name, leaf in tree.leaves.items():
            extents = (msgspec.structs.replace(e, file=e.file + len(files)) for e in leaf.extents)
            leaves[name] = msgspec.structs.replace(leaf, extents=tuple(extents))
        files += tree.files
    structure, leaves = nest(leaves, split_spelled)
    return foreign_tree(files=tuple(files), structure=structure, leaves=leaves)


def _files(shards: Sequence[Found]) -> Files:
    opened = [(shard.files(shard.trees[""]), len(shard.trees[""].files)) for shard in shards]
    return reduce(
        lambda first, then: (ChainedFiles(first[0], first[1], then[0]), first[1] + then[1]), opened
    )[0]
