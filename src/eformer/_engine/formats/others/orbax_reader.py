"""Describe one tree of an Orbax checkpoint in eformer's terms, and open its files.

Tests: tests/compat/test_orbax_old.py, tests/compat/test_orbax_kinds.py.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from eformer._engine.formats.others import flax
from eformer._engine.formats.others.orbax_arrays import (
    ChunkFiles,
    ZarrArray,
    array_store,
    describe_leaf,
    inner_database,
    open_arrays,
    read_scalar,
)
from eformer._engine.formats.others.orbax_metadata import (
    ARRAY_METADATAS,
    EMPTY_CONTAINERS,
    SHARDINGS,
    STRINGS,
    TREE_METADATA,
    build_structure,
    metadata_of_single_array,
    read_is_typed,
    read_key_generators,
    read_shardings,
    read_strings,
    read_tree_metadata,
)
from eformer._engine.formats.others.single_file import (
    ArrayInFile,
    Library,
    Window,
    describe_array,
    open_single_file,
)
from eformer._engine.record.indexes import ORBAX_TREE
from eformer._engine.record.manifest import DataFile, LeafEntry, TreeEntry, foreign_tree
from eformer._engine.record.names import BARE_LEAF
from eformer._engine.record.text import few
from eformer._engine.record.values import locating, value_to_json
from eformer._engine.stores.local import LocalStore
from eformer._engine.stores.ocdbt import DATABASE_MANIFEST, list_arrays, require_plain_files
from eformer._engine.stores.virtual_files import ChainedFiles, VirtualFile, VirtualFiles
from eformer.errors import CorruptionError, FormatError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from eformer._engine.formats.others.orbax_arrays import ArrayStore, Chunk
    from eformer._engine.formats.others.orbax_metadata import LeafMetadata, TreeMetadata
    from eformer._engine.stores.base import Files, Store, Version

ARRAY_NAME = "checkpoint"  # the name of the leaf of an item that is a single array
PROCESS = "ocdbt.process_"  # begins the name of a process's database, which is a part of the whole database
AGGREGATE = "checkpoint"  # the msgpack file

_PICKLE = 0x80  # the first byte of protocol 2 and above; in msgpack, an empty dict
_ELEMENT = "ELEMENT"  # in the msgpack file, the name of the leaf of an item that is a single array

# The files of an array that lies in the tree's own directory: chunks, and the metadata of zarr 3.
_FILE_OF_ARRAY = re.compile(r"\d+(\.\d+)*|c|zarr\.json")


@dataclass(frozen=True, slots=True)
class TreeDirectory:
    """A directory that holds one tree.

    is_single_array  marks an item that is a single array or PRNG key, which Orbax stores as a dict with one leaf
    key_metadata     the name of the directory beside it that describes a PRNG key
    """

    directory: Path
    is_single_array: bool = False
    key_metadata: str | None = None


@dataclass(frozen=True, slots=True)
class _Contents:
    """The leaves of a tree: arrays as `entries`, plain values as JSON, and the files that the entries refer to.

    Files are numbered: first the msgpack file, then `virtual_files`, which are parts of it, then `chunks`.
    """

    entries: Mapping[str, LeafEntry]
    values: Mapping[str, Any]
    virtual_files: list[VirtualFile]
    chunks: list[Chunk]
    array_paths: frozenset[str]


@dataclass(frozen=True, slots=True)
class OrbaxTree:
    """A tree in the directory `root` of a checkpoint, with its record."""

    checkpoint: Path
    root: str
    record: TreeEntry
    store: ArrayStore
    aggregate: Aggregate | None
    contents: _Contents

    @property
    def versions(self) -> dict[str, Version]:
        """Return the versions of the files that were read, by their paths in the checkpoint."""
        return {self._path(AGGREGATE): self.aggregate.version} if self.aggregate else {}

    def open_files(self) -> Files:
        """Open the files that the record refers to. The caller closes them."""
        chunks = ChunkFiles(self.contents.chunks)
        if not self.aggregate:
            return chunks
        virtual = self.contents.virtual_files
        file = LocalStore(self.checkpoint).open([self._path(AGGREGATE)], self.versions)
        return ChainedFiles(VirtualFiles(file, [(0, part) for part in virtual]), 1 + len(virtual), chunks)

    def list_own_paths(self) -> list[str]:
        """List the files and directories that belong to the tree, by their paths in the checkpoint."""
        directory = self.store.directory
        names = [ORBAX_TREE, SHARDINGS, STRINGS, ARRAY_METADATAS, TREE_METADATA]
        if self.aggregate:
            names.append(AGGREGATE)
        if self.store.is_database:
            names += [DATABASE_MANIFEST, "d"]
            names += [name for name in LocalStore(directory).kinds() if name.startswith(PROCESS)]
            for inner in self._inner_databases():
                names += [f"{inner}/{name}" for name in (DATABASE_MANIFEST, "d")]
        else:
            names += filter(None, self.contents.array_paths)
        above = {path.rpartition("/")[0] for path in self.contents.array_paths}
        names += [f"{folder}/{SHARDINGS}" for folder in above if folder]  # by 0.4.1, for names with a slash
        if "" in self.contents.array_paths:
            names += [name for name in LocalStore(directory).kinds() if _FILE_OF_ARRAY.fullmatch(name)]
        return [self._path(name) for name in names]

    def list_unused_arrays(self) -> list[str]:
        """List the arrays of the database that are not leaves, by their paths in the checkpoint."""
        if not self.store.is_database:
            return []
        require_plain_files(Path(os.path.realpath(self.store.directory)))
        unused = []
        for inner in ["", *self._inner_databases()]:
            above = f"{inner}/" if inner else ""
            used = {path.removeprefix(above) for path in self.contents.array_paths if path.startswith(above)}
            paths = list_arrays(self.store.directory / inner)
            unused += [self._path(f"{above}{DATABASE_MANIFEST}/{path}") for path in paths if path not in used]
        return unused

    def _inner_databases(self) -> list[str]:
        return sorted(
            {inner for path in self.contents.array_paths if (inner := inner_database(self.store, path))}
        )

    def _path(self, name: str) -> str:
        return f"{self.root}/{name}" if self.root else name


def read_tree(
    checkpoint: Path, place: TreeDirectory, *, metadata: Mapping[str, Any], saved_at: str
) -> OrbaxTree:
    """Read a tree of a checkpoint, without the elements of its arrays. `metadata` (as JSON) and `saved_at` become part
    of its record."""
    directory = place.directory
    root = "" if directory == checkpoint else directory.relative_to(checkpoint).as_posix()
    tree = read_tree_metadata(directory)
    aggregate = read_aggregate(directory) if is_aggregate(LocalStore(directory)) else None
    if place.is_single_array and not aggregate:
        tree = tree or metadata_of_single_array(ARRAY_NAME)
    store = array_store(directory, tree)
    if tree:
        leaves = leaves_in_metadata(directory, tree, aggregate)
        structure = build_structure(tree.leaves, str(directory))
    else:
        assert aggregate  # a directory with neither file holds no tree
        leaves, structure = leaves_in_aggregate(directory, aggregate), aggregate.structure
    contents = _describe(store, leaves, has_aggregate=aggregate is not None)
    entries = contents.entries
    if place.is_single_array or (not tree and list(leaves) == [_ELEMENT] and list(entries) == [_ELEMENT]):
        entries, structure = _unwrap(place, contents), BARE_LEAF
    record = foreign_tree(
        saved_at=saved_at,
        written_by="orbax",
        files=tuple(_data_files(aggregate, contents)),
        root=root,
        metadata=metadata,
        values=contents.values,
        structure=structure,
        leaves=dict(entries),
    )
    return OrbaxTree(checkpoint, root, record, store, aggregate, contents)


def _describe(store: ArrayStore, leaves: Mapping[str, Leaf], *, has_aggregate: bool) -> _Contents:
    arrays = open_arrays(store, {name: leaf for name, leaf in leaves.items() if isinstance(leaf, ZarrArray)})
    virtual = {
        name: leaf.virtual_file
        for name, leaf in leaves.items()
        if isinstance(leaf, ArrayInFile) and leaf.virtual_file
    }
    file_numbers = {name: number for number, name in enumerate(virtual, 1)}
    first_chunk = 1 + len(virtual) if has_aggregate else 0
    entries: dict[str, LeafEntry] = {}
    values: dict[str, Any] = {}
    chunks: list[Chunk] = []
    for name, leaf in leaves.items():
        if isinstance(leaf, PlainValue):
            values[name] = leaf.value
        elif isinstance(leaf, ArrayInFile):
            entries[name] = describe_array(leaf, file_numbers.get(name, 0))
        elif leaf.is_scalar:
            values[name] = value_to_json(read_scalar(store, leaf.path, arrays[leaf.path]))
        else:
            entries[name] = describe_leaf(leaf, arrays[leaf.path], chunks, first_chunk)
    return _Contents(entries, values, list(virtual.values()), chunks, frozenset(arrays))


def _unwrap(place: TreeDirectory, contents: _Contents) -> dict[str, LeafEntry]:
    """Return the only array of an item under the name of a bare leaf. An array that was a PRNG key becomes a key."""
    count = len(contents.entries) + len(contents.values)
    if len(contents.entries) != 1 or count != 1:
        raise FormatError(f"{place.directory} holds {count} leaves, expected a single array")
    (entry,) = contents.entries.values()
    is_typed = place.key_metadata and read_is_typed(place.directory.parent, place.key_metadata)
    if is_typed and entry.dtype == "uint32" and entry.shape[-1:] == (2,):
        # Orbax does not record the generator. It uses JAX's default, the only generator whose keys are two numbers.
        entry = msgspec.structs.replace(entry, key="threefry2x32", sharding=None)
    return {BARE_LEAF: entry}


def _data_files(aggregate: Aggregate | None, contents: _Contents) -> Iterator[DataFile]:
    if aggregate:
        yield DataFile(AGGREGATE, aggregate.nbytes)
    for part in contents.virtual_files:
        yield DataFile(f"{AGGREGATE}/{part.name}", part.nbytes)
    for chunk in contents.chunks:
        yield DataFile(chunk.name, chunk.nbytes)


# -------- the place of each leaf: listed in `_METADATA`, in the msgpack file, or in a zarr array


def leaves_in_metadata(directory: Path, tree: TreeMetadata, aggregate: Aggregate | None) -> dict[str, Leaf]:
    """Locate every leaf that `_METADATA` lists, by name. Refuse a msgpack file that lists different leaves."""
    strings, shardings = read_strings(directory), read_shardings(directory)
    generators = read_key_generators(directory)

    def locate(leaf: LeafMetadata) -> Leaf:
        kind, stored = leaf.value_metadata.value_type, leaf.stored_name
        library: Library = "numpy" if kind == "np.ndarray" else "jax"
        listed = aggregate.leaves.get(leaf.name) if aggregate else None
        if isinstance(listed, ArrayInFile):
            return replace(listed, library=library)
        if isinstance(listed, PlainValue):
            return listed
        if leaf.value_metadata.skip_deserialize and not aggregate:
            raise CorruptionError(
                f"leaf {leaf.name[:200]!r} is in {directory / AGGREGATE}, which is missing or damaged"
            )
        if kind == "string":
            if stored not in strings:
                raise CorruptionError(
                    f"leaf {stored!r} is a text, but {directory / STRINGS} does not have it"
                )
            return PlainValue(value_to_json(strings[stored]))
        key, sharding = generators.get(stored), shardings.get(stored)
        return ZarrArray(stored, library, key, sharding, is_scalar=kind == "scalar")

    stored = [leaf for leaf in tree.leaves if leaf.value_metadata.value_type not in EMPTY_CONTAINERS]
    found = {leaf.name: locate(leaf) for leaf in stored}
    if aggregate:
        _require_same_leaves(directory, tree, aggregate, found)
    return found


def leaves_in_aggregate(directory: Path, aggregate: Aggregate) -> dict[str, Leaf]:
    """Locate every leaf that the msgpack file of `directory` holds or refers to, by name."""
    shardings = read_shardings(directory)
    return {
        name: replace(leaf, sharding=shardings.get(leaf.path)) if isinstance(leaf, ZarrArray) else leaf
        for name, leaf in aggregate.leaves.items()
    }


def _require_same_leaves(
    directory: Path, tree: TreeMetadata, aggregate: Aggregate, found: Mapping[str, Leaf]
) -> None:
    external = {name: leaf.path for name, leaf in aggregate.leaves.items() if isinstance(leaf, ZarrArray)}
    stored = {leaf.name: leaf.stored_name for leaf in tree.leaves}
    # Orbax 0.5.4 to 0.5.20 names arrays for empty containers, and stores none of them.
    empty = stored.keys() - found.keys()
    problems = sorted(found.keys() ^ (aggregate.leaves.keys() - (empty & external.keys())))
    problems += [name for name, path in external.items() if path != stored.get(name, path)]
    if problems:
        raise FormatError(
            f"{directory}: {ORBAX_TREE} and the file {AGGREGATE!r} disagree about these leaves: "
            f"{few(problems)[:400]}"
        )


# ------------------------------------------------------------------------------------ the msgpack file
#
# Orbax up to 0.5.20, flax on top of it, and T5X keep a tree in this file: the structure and the small leaves. For every
# other leaf it names the array beside the file:
#
#     {"step": 3, "w": "PLACEHOLDER://params.w"}                                      Orbax
#     {"w": {"driver": "zarr", "kvstore": {"path": "target.w"}, "metadata": ...}}     T5X


@dataclass(frozen=True, slots=True)
class PlainValue:
    """A leaf that is a number, a text or another plain value, as JSON."""

    value: Any


# An array in the file, a plain value, or an array beside the file, whose driver and shape T5X records.
Leaf = ArrayInFile | PlainValue | ZarrArray


@dataclass(frozen=True, slots=True)
class Aggregate:
    """The contents of the msgpack file: the structure as JSON, and the place of each leaf by name."""

    nbytes: int
    version: Version
    structure: Any
    leaves: Mapping[str, Leaf]


def is_aggregate(store: Store) -> bool:
    """Tell whether the directory has the msgpack file: a file of its name that begins like a tree in msgpack."""
    try:
        first, entry = store.read(AGGREGATE, 0, 32)
    except (OSError, FormatError):
        return False
    if not first or (first[0] == _PICKLE and entry.nbytes > 1):
        return False
    return first[0] in flax.BEGINNINGS or flax.ORBAX_ARRAY.encode() in first


def read_aggregate(directory: Path) -> Aggregate:
    """Read the structure, the plain values and the places of the arrays, without the arrays themselves."""
    with (
        open_single_file(LocalStore(directory), AGGREGATE) as file,
        locating(f"{file.path} cannot be read"),
    ):
        structure, leaves = flax.flatten_message(flax.locate_arrays(Window(file)), flax.is_t5x_array)
        placed = {name: _place(leaf, name) for name, leaf in leaves.items()}
    return Aggregate(file.nbytes, file.version, structure, placed)


def _place(leaf: Any, name: str) -> Leaf:
    if isinstance(leaf, flax.ArrayLocation):
        return flax.to_array_in_file(leaf, name)
    if isinstance(leaf, dict):
        return _parse_t5x_array(leaf, name)
    if isinstance(leaf, str) and leaf.startswith(flax.ORBAX_ARRAY):
        return ZarrArray(leaf.removeprefix(flax.ORBAX_ARRAY))
    return PlainValue(flax.plain_value_to_json(leaf, name))


class _KvStore(msgspec.Struct):
    path: str


class _ArrayMetadata(msgspec.Struct):
    shape: tuple[int, ...]


class _Transform(msgspec.Struct, forbid_unknown_fields=True):
    """The domain of a whole array. A specification with other fields is not of a whole array, and refused."""

    input_exclusive_max: list[int | tuple[int]] = []
    input_inclusive_min: list[int] = []


class _Spec(msgspec.Struct, forbid_unknown_fields=True):
    driver: Literal["zarr", "zarr3"]
    kvstore: _KvStore
    metadata: _ArrayMetadata
    dtype: str = ""
    path: str = ""
    transform: _Transform | None = None

    @property
    def is_whole(self) -> bool:
        """Tell whether the specification stands for a whole array."""
        if self.transform is None:
            return True
        ends = [end[0] if isinstance(end, tuple) else end for end in self.transform.input_exclusive_max]
        return ends in ([], list(self.metadata.shape)) and not any(self.transform.input_inclusive_min)


def _parse_t5x_array(document: Mapping[Any, Any], name: str) -> ZarrArray:
    """Parse a TensorStore specification. Refuse a part of an array, and unknown fields."""
    try:
        spec = msgspec.convert(document, _Spec)
    except msgspec.ValidationError as error:
        problem = f"leaf {name[:200]!r} is a specification for TensorStore with unknown members"
        raise FormatError(f"{problem}: {error}") from error
    if not spec.is_whole:
        raise FormatError(
            f"leaf {name[:200]!r} is a part of an array, which is not supported: {document['transform']!r:.200}"
        )
    path = "/".join(part.removesuffix("/") for part in (spec.kvstore.path, spec.path) if part)
    return ZarrArray(path, driver=spec.driver, shape=spec.metadata.shape)
