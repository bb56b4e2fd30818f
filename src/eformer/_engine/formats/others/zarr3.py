"""Directories of zarr-python: groups of zarr 3 with their arrays, and directories that are one array of zarr 2 or 3.

TensorStore decodes the chunks. Groups of zarr 2 are read by `formats/zarr`.

Tests: tests/compat/test_zarr_python.py.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from eformer._engine.formats.found import Foreign, Found, Place, foreign_found
from eformer._engine.formats.left_out import MOST_DEPTH, left_out
from eformer._engine.formats.nested_names import components_of, nest
from eformer._engine.formats.others.orbax_arrays import (
    ArrayStore,
    ChunkFiles,
    ZarrArray,
    describe_leaf,
    open_arrays,
)
from eformer._engine.formats.zarr.layout import count_chunks
from eformer._engine.formats.zarr.read import missing_chunks, read_attributes, to_metadata
from eformer._engine.record.dtypes import DTYPES
from eformer._engine.record.manifest import DataFile, LeafEntry, foreign_tree
from eformer._engine.record.names import BARE_LEAF
from eformer._engine.record.text import few
from eformer._engine.record.values import parse_json, parse_lenient
from eformer._engine.record.zarray import ZARR_JSON, ZARRAY, parse_zarray
from eformer._engine.stores.base import Store, Version, read_whole
from eformer._engine.stores.local import on_disk
from eformer.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from eformer._engine.formats.others.orbax_arrays import Chunk

FORMAT = "zarr 3"

# The codecs that TensorStore knows.
_CODECS = {"bytes", "blosc", "crc32c", "gzip", "sharding_indexed", "transpose", "zstd"}
_MAX_CODECS = 16  # levels of codecs inside others


class _Codec(msgspec.Struct):
    name: str
    configuration: _Configuration = msgspec.field(default_factory=lambda: _Configuration())


class _Configuration(msgspec.Struct):
    """The configuration of a codec: the codecs inside its shards."""

    codecs: list[_Codec] = []


class _Node(msgspec.Struct):
    """A `zarr.json` of a group or an array. The fields after `attributes` are for arrays."""

    zarr_format: int
    node_type: str
    attributes: dict[str, Any] = {}
    data_type: Any = None
    codecs: list[_Codec] = []
    storage_transformers: list[Any] = []


def by_description(place: Place) -> Found | None:
    """Find the tree of a group of zarr 3, or of a directory that is a single array."""
    names = set(place.names)
    if not names & {ZARR_JSON, ZARRAY}:
        return None
    store = place.store
    if on_disk(store) is None:
        raise FormatError(
            f"{store.url} is zarr 3, which is only read from local disks; copy it to a disk first"
        )
    if ZARR_JSON in names:
        nodes, versions = _read_nodes(store)
        if all(node.node_type == "group" for node in nodes.values()):
            return None
        return _describe(store, "zarr3", nodes, versions)
    data, entry = read_whole(store, ZARRAY)
    parse_zarray(data, store.path_to(ZARRAY)).require_readable(store.path_to(ZARRAY))
    attributes = read_attributes(store, [""]).get("", {})
    return _describe(store, "zarr", {"": _Node(2, "array", attributes)}, {ZARRAY: entry.version})


def _read_nodes(store: Store) -> tuple[dict[str, _Node], dict[str, Version]]:
    """Read the descriptions of all groups and arrays, by path. Directories below an array hold its chunks."""
    nodes: dict[str, _Node] = {}
    versions: dict[str, Version] = {}
    todo = [("", 0)]
    while todo:
        path, depth = todo.pop()
        kinds = store.kinds(path)
        if ZARR_JSON in kinds:
            name = f"{path}/{ZARR_JSON}" if path else ZARR_JSON
            nodes[path], versions[name] = _read_node(store, name)
            if nodes[path].node_type == "array":
                _require_known(path, nodes[path])
                continue
        if depth < MOST_DEPTH:
            below = [name for name, kind in kinds.items() if kind == "directory" and name[0] != "."]
            todo += [(f"{path}/{name}" if path else name, depth + 1) for name in below]
    return nodes, versions


def _read_node(store: Store, name: str) -> tuple[_Node, Version]:
    data, entry = read_whole(store, name)
    where = store.path_to(name)
    problem = f"{where} does not describe a group or an array of zarr 3"
    try:
        node = parse_json(data, _Node, problem)
    except FormatError as error:
        node = parse_lenient(data, _Node, problem)
        if node.node_type == "array":
            raise FormatError(
                f"{where} has NaN or Infinity among its attributes, which is not JSON, so that TensorStore does not "
                "open the array. It is not damaged: remove these attributes"
            ) from error
    if node.zarr_format != 3 or node.node_type not in ("array", "group"):
        raise FormatError(
            f"{where} is of format {node.zarr_format} and kind {node.node_type[:40]!r}, which is not zarr 3"
        )
    return node, entry.version


def _require_known(path: str, node: _Node) -> None:
    """Refuse codecs and dtypes that TensorStore does not decode, before it calls the array damaged."""
    where = f"leaf {path[:200]!r}" if path else "the array"
    unknown = sorted({name for name in _codec_names(node.codecs) if name not in _CODECS})
    if unknown or node.storage_transformers:
        codec = few([repr(name[:40]) for name in unknown]) or "a storage transformer"
        raise FormatError(
            f"{where} is encoded by {codec}, which eformer does not decode. It is not damaged: write it again, for "
            f"example with zstd. Known codecs are {', '.join(sorted(_CODECS))}"
        )
    if not isinstance(node.data_type, str) or node.data_type not in DTYPES:
        raise FormatError(f"{where} is of the type {str(node.data_type)[:80]}, which eformer does not store")


def _codec_names(codecs: list[_Codec], depth: int = 0) -> Iterator[str]:
    """List the names of codecs, including codecs inside shards."""
    for codec in codecs:
        yield codec.name
        if depth < _MAX_CODECS:
            yield from _codec_names(codec.configuration.codecs, depth + 1)


def _describe(store: Store, driver: str, nodes: dict[str, _Node], versions: dict[str, Version]) -> Found:
    directory = on_disk(store)
    assert directory is not None
    paths = [path for path, node in nodes.items() if node.node_type == "array"]
    leaves = {path or BARE_LEAF: ZarrArray(path) for path in paths}
    arrays_in = ArrayStore(directory, False, driver, stores_all_chunks=True)
    opened = open_arrays(arrays_in, leaves)
    chunks: list[Chunk] = []
    entries: dict[str, LeafEntry] = {}
    for name, leaf in leaves.items():
        _require_chunks(store, leaf.path, opened[leaf.path])
        entries[name] = describe_leaf(leaf, opened[leaf.path], chunks, 0)
    if BARE_LEAF in entries and "" in paths:
        structure: Any = BARE_LEAF
    else:
        structure, entries = nest(entries, components_of)
    tree = foreign_tree(
        files=tuple(DataFile(chunk.name, chunk.nbytes) for chunk in chunks),
        metadata=to_metadata({path: node.attributes for path, node in nodes.items()}),
        structure=structure,
        leaves=entries,
    )
    tree.check_leaves()
    read = {""} if "" in paths else {*paths, *versions}
    foreign = Foreign(lambda _: ChunkFiles(chunks), find_left_out=partial(left_out, store, read))
    return foreign_found(store.url, store, FORMAT, {"": tree}, versions, foreign)


def _require_chunks(store: Store, path: str, array: Any) -> None:
    """Refuse an array that has fewer files than chunks: missing chunks are not read as zeros."""
    chunk = tuple(max(1, size) for size in array.chunk_layout.write_chunk.shape or ())
    expected = count_chunks(tuple(array.shape), chunk)
    found = sum(
        not name.rpartition("/")[2].startswith((".", "zarr.")) for name in store.sizes(path, array.rank + 1)
    )
    if found < expected:
        raise missing_chunks(f"leaf {path!r}", expected - found, expected)
