"""Save the part of a tree that this process holds as a tree of its own, and load the parts as the whole tree: each
process its own part, or all parts together, on any mesh and number of processes.

The part is a list. Plain values, and arrays that only this process holds, are in it as they are. An array that other
processes hold, too, is in it as the distinct boxes that the devices of this process hold. A table in the metadata of
the save says which leaf each element of the list belongs to.

Tests: tests/engine/runs/test_near.py, tests/multihost/test_near.py.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING, Any

import jax
import msgspec

from eformer._engine.formats.run_steps import RUN_METADATA, facts_of_run
from eformer._engine.loading.load import load_tree
from eformer._engine.record.dtypes import name_of_dtype
from eformer._engine.record.indexes import SAFETENSORS
from eformer._engine.record.manifest import (
    LeafEntry,
    Manifest,
    RecordedSharding,
    TreeEntry,
    boxed_tree,
    encode_leaves,
)
from eformer._engine.record.values import parse_json
from eformer._engine.runs.near_parts import JoinedStore, found_by_url
from eformer._engine.saving.snapshot import metadata_to_json
from eformer._engine.trees.devices import is_key
from eformer._engine.trees.flatten import flatten
from eformer._engine.trees.shardings import recorded_sharding
from eformer.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from eformer._engine.formats.found import Found
    from eformer._engine.loading.load import LoadedTree
    from eformer._engine.loading.request import Request
    from eformer._engine.record.manifest import BoxedTree, Extent
    from eformer._engine.runs.near_parts import PartStore

PART_METADATA = "eformer.part"


class _BoxedArray(msgspec.Struct, frozen=True, array_like=True):
    """An array of which only some boxes are in the part: the whole array as it is stored, and the start of each box."""

    dtype: str
    shape: tuple[int, ...]
    key: str | None
    sharding: RecordedSharding | None
    starts: tuple[tuple[int, ...], ...]


class _Table(msgspec.Struct, frozen=True):
    """The leaves of the tree in the order of the part, the arrays that are saved as boxes, and the structure."""

    names: list[str]
    cuts: dict[str, _BoxedArray]
    structure: msgspec.Raw


def own_part_of(tree: Any) -> tuple[list[Any], dict[str, str]]:
    """Return the part of the tree that this process holds, and the metadata that `load_own` needs."""
    leaves, structure = flatten(tree)
    part: list[Any] = []
    cuts: dict[str, _BoxedArray] = {}
    for name, leaf in leaves.items():
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            boxes = _boxes(leaf)
            cuts[name] = _boxed_array(leaf, tuple(boxes))
            part += boxes.values()
        else:
            part.append(leaf)
    table = _Table(list(leaves), cuts, msgspec.Raw(msgspec.json.encode(structure)))
    return part, {PART_METADATA: msgspec.json.encode(table).decode()}


def _boxes(array: jax.Array) -> dict[tuple[int, ...], jax.Array]:
    """Return the distinct boxes that the devices of this process hold, by their starts."""
    found: dict[tuple[int, ...], jax.Array] = {}
    for shard in array.addressable_shards:
        # The index of PRNG keys has one axis more, for the numbers inside of a key.
        start = tuple(s.indices(size)[0] for s, size in zip(shard.index, array.shape, strict=False))
        found.setdefault(start, shard.data)
    return found


def _boxed_array(array: jax.Array, starts: tuple[tuple[int, ...], ...]) -> _BoxedArray:
    sharding = recorded_sharding(array.sharding)
    if not is_key(array):
        return _BoxedArray(name_of_dtype(array.dtype), array.shape, None, sharding, starts)
    data = jax.eval_shape(jax.random.key_data, array)
    inner = (0,) * (len(data.shape) - array.ndim)
    key = str(jax.random.key_impl(array))
    return _BoxedArray(
        name_of_dtype(data.dtype), data.shape, key, sharding, tuple((*start, *inner) for start in starts)
    )


# --------------------------------------------------------------------------------------------- load


def load_own(path: str, common_id: str, request: Request) -> LoadedTree:
    """Load the whole tree from the part at `path`, while every other process loads it from its own part.

    Arrays with another sharding on the same mesh are moved between the devices. Raise FormatError if the part lacks a
    box that this process needs. `common_id` is the same in all processes if their parts belong together.
    """

    def see(found: Found) -> Found:
        whole = _whole_tree(found.tree(None), path, common_id)
        return dataclasses.replace(found, trees={"": whole}, only=None)

    return load_tree([path], dataclasses.replace(request, whole_of=see))


def _whole_tree(part: TreeEntry, path: str, common_id: str) -> BoxedTree:
    """Return the record of the whole tree that the part is of."""
    table = _table_of(part, path)
    arrays, values = _contents(part, table, path)
    return boxed_tree(part, arrays, save_id=common_id, raw_values=values, structure=table.structure)


def _table_of(part: TreeEntry, path: str) -> _Table:
    text = part.metadata.get(PART_METADATA)
    if not isinstance(text, str):
        raise FormatError(f"{path} is not a part of a tree: its metadata has no {PART_METADATA!r}")
    return parse_json(text.encode(), _Table, f"{path}: the table of its leaves cannot be read")


def _contents(part: TreeEntry, table: _Table, path: str) -> tuple[dict[str, LeafEntry], dict[str, Any]]:
    """Return the arrays and the plain values of the whole tree, by their names in it."""
    keys = map(str, itertools.count())
    arrays: dict[str, LeafEntry] = {}
    values: dict[str, Any] = {}
    try:
        for name in table.names:
            if (cut := table.cuts.get(name)) is not None:
                arrays[name] = _joined(cut, [part.leaves[next(keys)] for _ in cut.starts])
            elif (key := next(keys)) in part.raw_values:
                values[name] = part.raw_values[key]
            else:
                arrays[name] = part.leaves[key]
    except (KeyError, ValueError) as error:
        raise FormatError(
            f"{path}: the table of its leaves does not match its arrays and values: {error}"
        ) from error
    return arrays, values


def _joined(cut: _BoxedArray, boxes: Sequence[LeafEntry]) -> LeafEntry:
    """Return the record of the whole array, with each extent moved to its place in it."""
    extents = [
        _moved(extent, box, start, cut.shape)
        for box, start in zip(boxes, cut.starts, strict=True)
        for extent in box.extents
    ]
    home = boxes[0].home if boxes else "jax"
    return LeafEntry(cut.dtype, cut.shape, tuple(extents), home, cut.key, cut.sharding)


def _moved(extent: Extent, box: LeafEntry, start: tuple[int, ...], shape: tuple[int, ...]) -> Extent:
    if box.shape == shape:
        return extent
    found = box.region_of(extent)
    first, last = (
        tuple(a + b for a, b in zip(start, side, strict=True)) for side in (found.start, found.stop)
    )
    return msgspec.structs.replace(extent, region=(first, last))


# ---------------------------------------------------------------------------------- all parts as one tree


def load_joined(
    url: str, parts: Sequence[PartStore], own: int, common_id: str, request: Request
) -> LoadedTree:
    """Load the tree from all of its parts together, on any mesh and number of processes. Every process reads the boxes
    that its devices need, from the parts that have these. `own` and `common_id` as in `joined_tree` and `load_own`."""
    trees = [part.tree for part in parts]
    tree = joined_tree(trees, url, common_id, own=own, metadata=_joined_metadata(trees, own))
    manifest = Manifest(format=SAFETENSORS, trees={"": tree}).to_json()
    with found_by_url(JoinedStore(url, parts, manifest)) as path:
        return load_tree([path], request)


def _joined_metadata(parts: Sequence[TreeEntry], own: int) -> dict[str, Any]:
    """Return the metadata of one part, with the positions of all parts in the data."""
    found = {name: value for name, value in parts[own].metadata.items() if name != PART_METADATA}
    facts = [facts_of_run(part.metadata) for part in parts]
    if any("data" in each for each in facts):
        found[RUN_METADATA] = {**facts[own], "data": [_position_in(each) for each in facts]}
    return metadata_to_json(found)


def _position_in(facts: Mapping[str, Any]) -> Any:
    """Return the position of the process that has saved a part; "" without one."""
    positions = facts.get("data")
    return positions[0] if isinstance(positions, (list, tuple)) and positions else ""


def joined_tree(
    parts: Sequence[TreeEntry], url: str, common_id: str, *, own: int, metadata: dict[str, Any]
) -> TreeEntry:
    """Return the record of the whole tree, from the records of all of its parts. The files of part 3 are in the
    directory `3`.

    Plain values, and arrays that only one process holds, are taken from the part number `own`. Raise FormatError if the
    parts do not belong to one tree.
    """
    tables = [_table_of(part, f"{url}/{number}") for number, part in enumerate(parts)]
    if len({(*table.names, bytes(table.structure)) for table in tables}) > 1:
        raise FormatError(f"{url}: its parts have different leaves")
    if len({part.block for part in parts}) > 1:
        raise FormatError(f"{url}: its parts have pieces of different lengths")
    contents = [
        _contents(part, table, f"{url}/{number}")
        for number, (part, table) in enumerate(zip(parts, tables, strict=True))
    ]
    firsts = [*itertools.accumulate((len(part.files) for part in parts[:-1]), initial=0)]
    everywhere = {name for table in tables for name in table.cuts}
    arrays, values = contents[own]
    leaves = {}
    for name, entry in arrays.items():
        if name in everywhere:
            found = [
                (one[name], first) for (one, _), first in zip(contents, firsts, strict=True) if name in one
            ]
            leaves[name] = _of_all(name, found, url)
        else:
            leaves[name] = _renumbered(entry, firsts[own])
    files = tuple(
        msgspec.structs.replace(file, name=f"{number}/{part.path_of(at)}")
        for number, part in enumerate(parts)
        for at, file in enumerate(part.files)
    )
    return TreeEntry(
        save_id=common_id,
        saved_at=parts[own].saved_at,
        written_by=parts[own].written_by,
        block=parts[own].block,
        raw_origin=parts[own].raw_origin,
        files=files,
        raw_metadata=metadata,
        raw_values=values,
        structure=tables[own].structure,
        raw_leaves=encode_leaves(leaves),
    )


def _of_all(name: str, found: Sequence[tuple[LeafEntry, int]], url: str) -> LeafEntry:
    """Return an array with the boxes of all parts. Of equal boxes the first is taken. Each part's files are numbered
    from a number on."""
    first = found[0][0]
    kinds = {(entry.dtype, entry.shape, entry.key) for entry, _ in found}
    if len(kinds) > 1:
        raise FormatError(f"{url}: leaf {name!r} differs between its parts: {sorted(map(str, kinds))}")
    boxes: dict[Any, Extent] = {}
    for entry, number in found:
        for extent in _renumbered(entry, number).extents:
            boxes.setdefault(extent.region, extent)
    sharding = next((entry.sharding for entry, _ in found if entry.sharding), None)
    home = next((entry.home for entry, _ in found if entry.extents), first.home)
    return msgspec.structs.replace(first, extents=tuple(boxes.values()), sharding=sharding, home=home)


def _renumbered(entry: LeafEntry, first: int) -> LeafEntry:
    """Return an array whose extents are in files that are numbered from `first` on."""
    moved = (msgspec.structs.replace(extent, file=extent.file + first) for extent in entry.extents)
    return msgspec.structs.replace(entry, extents=tuple(moved))
