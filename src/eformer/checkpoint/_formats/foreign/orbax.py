"""Checkpoints of Orbax, read through TensorStore alone: versions 0 and 1, zarr 2 and 3, in a database or without.

    _METADATA               of a tree: its leaves' keys, and of what kind each is
    _sharding, _strings.json, array_metadatas/process_N     how arrays lay, texts, and whose numbers PRNG keys are
    manifest.ocdbt, d/, ocdbt.process_N/                    a database with the arrays; or else a directory for each

A checkpoint is such a tree, or has one in a directory for each item; those of a `CheckpointManager` are in directories
that are called by their steps.
"""

from __future__ import annotations

import base64
import datetime as dt
import itertools
import json
import math
import os
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from eformer.checkpoint._codec import MALFORMED_JSON
from eformer.checkpoint._formats._found import Found, Trees
from eformer.checkpoint._formats._zarr import chunks_of, count_chunks
from eformer.checkpoint._leaf import BARE_LEAF, escape, is_inside, join_name
from eformer.checkpoint._manifest import (
    Coding,
    DataFile,
    Extent,
    LeafEntry,
    Manifest,
    RecordedSharding,
    TreeEntry,
    encode_leaves,
)
from eformer.checkpoint._ndarray import dtype_from_name
from eformer.checkpoint._pieces import PIECE_BYTES
from eformer.checkpoint._store.chunks import Chunk, ChunkFiles, brief
from eformer.checkpoint._store.local import list_names, read_small
from eformer.checkpoint._store.ocdbt import MANIFEST, require_plain_files
from eformer.checkpoint._value import value_to_json
from eformer.errors import CorruptionError, FormatError, NotFoundError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

FORMAT = "orbax"

METADATA = "_METADATA"
_CHECKPOINT = "_CHECKPOINT_METADATA"
_SHARDINGS = "_sharding"
_TEXTS = "_strings.json"
_ARRAYS = "array_metadatas"

_MOST_DEPTH = 100
_EMPTY: dict[str, Any] = {
    "None": None, "NamedTuple": None, "Dict": {"dict": {}}, "List": {"list": []}, "Tuple": {"tuple": []},
}  # fmt: skip

# ------------------------------------------------------------------------------------------- finding


def in_directory(directory: Path, names: Sequence[str]) -> Found | None:
    """The checkpoint of Orbax that a directory holds; of steps, the last one. None if there is none."""
    if METADATA in names:
        return _found(directory, {"": directory})
    if _CHECKPOINT not in names and (steps := steps_in(directory, names)):
        return in_directory(directory / steps[-1], list_names(directory / steps[-1]))
    items = {name: directory / name for name in names if _is_item(directory / name)}
    if items:
        others = [name for name in names if name not in items and (directory / name).is_dir()]
        return _found(directory, items, [name for name in others if _UNFINISHED not in name])
    if _CHECKPOINT in names:
        raise NotFoundError(
            f"{directory} is a checkpoint of Orbax, but no item in it has {METADATA}: no tree was saved, or its save "
            "has not finished"
        )
    return None


_UNFINISHED = ".orbax-checkpoint-tmp"


def _is_item(path: Path) -> bool:
    return _UNFINISHED not in path.name and (path / METADATA).is_file() and not path.is_symlink()


def steps_in(directory: Path, names: Sequence[str]) -> list[str]:
    """The directories of finished steps, the last step last. While a step is being saved it has another name."""
    steps = [
        (int(digits), name)
        for name in names
        if (digits := name.rpartition("_")[2]).isdecimal() and (directory / name / _CHECKPOINT).is_file()
    ]
    return [name for _, name in sorted(steps)]


def _found(directory: Path, items: Mapping[str, Path], others: Sequence[str] = ()) -> Found:
    chunks: dict[str, list[Chunk]] = {}

    def describe(item: Path) -> TreeEntry:
        reader = _Reader(item)
        tree = reader.tree(_checkpoint(directory), "" if item == directory else item.name)
        chunks[tree.root] = reader.chunks
        return tree

    trees = Trees({}, {prefix: partial(describe, item) for prefix, item in items.items()}, {})
    manifest = Manifest(format=FORMAT)
    return Found(
        directory,
        directory,
        manifest,
        trees,
        open_files=lambda tree: ChunkFiles(chunks[tree.root]),
        others=tuple(others),
    )


# ------------------------------------------------------------------------------------------- reading


class _Key(msgspec.Struct):
    key: str
    key_type: int = 2

    @property
    def is_index(self) -> bool:
        return self.key_type == 1


class _Value(msgspec.Struct):
    value_type: str = "jax.Array"


class _Leaf(msgspec.Struct):
    key_metadata: list[_Key]
    value_metadata: _Value

    @property
    def stored_name(self) -> str:
        return ".".join(key.key for key in self.key_metadata)

    @property
    def name(self) -> str:
        return join_name(escape(key.key) for key in self.key_metadata)


class _Tree(msgspec.Struct):
    tree_metadata: dict[str, _Leaf]
    use_ocdbt: bool | None = None
    use_zarr3: bool = False
    store_array_data_equal_to_fill_value: bool = False
    custom_metadata: Any = None


class _Checkpoint(msgspec.Struct):
    commit_timestamp_nsecs: int | None = None
    custom_metadata: dict[str, Any] | None = None

    @property
    def saved_at(self) -> str:
        with suppress(OverflowError, OSError, TypeError, ValueError):  # not known, or absurd
            return dt.datetime.fromtimestamp(self.commit_timestamp_nsecs // 10**9, dt.UTC).isoformat()  # type: ignore[operator]
        return ""


class _Reader:
    """One tree, with its chunks as they are found."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.about = _decoded(directory, METADATA, _Tree)
        self.chunks: list[Chunk] = []

    def tree(self, checkpoint: _Checkpoint, root: str) -> TreeEntry:
        leaves = list(self.about.tree_metadata.values())
        texts = _optional(self.directory, _TEXTS, dict[str, str]) or {}
        arrays = self.open_arrays([leaf for leaf in leaves if _is_stored(leaf)])
        shardings, keys = _shardings(self.directory), _key_kinds(self.directory)
        entries, values = {}, {}
        for leaf in leaves:
            stored = leaf.stored_name
            kind = leaf.value_metadata.value_type
            if kind == "string":
                values[leaf.name] = value_to_json(self.text(texts, stored))
            elif kind == "scalar":
                values[leaf.name] = value_to_json(self.number(stored, arrays[stored]))
            elif _is_stored(leaf):
                home = "numpy" if kind == "np.ndarray" else "jax"
                entries[leaf.name] = self.entry(
                    stored, arrays[stored], home, keys.get(stored), shardings.get(stored)
                )
        return TreeEntry(
            save_id="",
            saved_at=checkpoint.saved_at,
            written_by="orbax",
            block=PIECE_BYTES,
            files=tuple(DataFile(chunk.name, chunk.nbytes) for chunk in self.chunks),
            raw_root=root,
            raw_metadata={k: value_to_json(v) for k, v in (checkpoint.custom_metadata or {}).items()},
            raw_values=values,
            structure=msgspec.Raw(msgspec.json.encode(_structure(leaves, str(self.directory)))),
            raw_leaves=encode_leaves(entries),
        )

    def open_arrays(self, leaves: Sequence[_Leaf]) -> dict[str, Any]:
        """All at once: each takes a look at the disk."""
        import tensorstore as ts  # late: slow to import, and only these need it

        is_database = self.about.use_ocdbt
        if is_database is None:
            is_database = (self.directory / MANIFEST).exists()
        # The caller's path may be a link, nothing below it.
        require_plain_files(Path(os.path.realpath(self.directory)), is_database=is_database)
        context = ts.Context({"cache_pool": {"total_bytes_limit": _CACHE_BYTES}})
        opening: dict[str, Any] = {}
        for leaf in leaves:
            name = leaf.stored_name
            if name in opening:
                raise FormatError(
                    f"{self.directory / METADATA} has two leaves that are stored as {name[:200]!r}"
                )
            spec = self.spec_of(leaf, is_database=is_database)
            try:
                opening[name] = ts.open(spec, context=context, open=True, read=True)
            except Exception as error:  # a path that is no text, say
                raise FormatError(
                    f"{self.directory} cannot be read by TensorStore: {brief(error)}"
                ) from error
        return {name: self.opened(name, future) for name, future in opening.items()}

    def spec_of(self, leaf: _Leaf, *, is_database: bool) -> dict[str, Any]:
        path = leaf.stored_name  # empty for a tree that is an array
        if path and not is_database and not is_inside(path):
            raise FormatError(f"{self.directory / METADATA}: the leaf {leaf.name[:200]!r} leads out of it")
        if path and not path.endswith("/"):
            path += "/"
        files = {"driver": "file", "path": f"{self.directory}/"}
        spec: dict[str, Any] = {
            "driver": "zarr3" if self.about.use_zarr3 else "zarr",
            "kvstore": {"driver": "ocdbt", "base": files} if is_database else files,
            "path": path,
        }
        if self.about.store_array_data_equal_to_fill_value:
            spec["fill_missing_data_reads"] = False  # a chunk that is missing is not taken for zeros
        return spec

    def opened(self, name: str, future: Any) -> Any:
        try:
            return future.result()
        except Exception as error:  # it may find anything wrong with what somebody else wrote
            raise CorruptionError(
                f"leaf {name!r}: {self.directory} has no such array, or it is damaged: {brief(error)}"
            ) from error

    def entry(
        self, name: str, array: Any, home: str, key: str | None, sharding: RecordedSharding | None
    ) -> LeafEntry:
        shape = tuple(array.shape)
        dtype = array.dtype.name
        try:
            itemsize = dtype_from_name(dtype).itemsize
        except FormatError as error:
            raise FormatError(f"leaf {name!r}: {error}") from error
        chunk = tuple(max(1, size) for size in array.chunk_layout.read_chunk.shape or ())
        _refuse_bomb(name, shape, chunk, itemsize)
        chunk = _box(shape, chunk)
        extents = []
        for where, box in chunks_of(shape, chunk):
            nbytes = itemsize * math.prod(box.shape)
            region = None if box.shape == shape else (box.start, box.stop)
            # So that it is read as a whole.
            extents.append(Extent(len(self.chunks), 0, nbytes, "", region, Coding("", box.shape)))
            self.chunks.append(Chunk(f"{name}/{where}", array, box, nbytes))
        if key and (dtype != "uint32" or not shape):
            raise FormatError(f"leaf {name!r}: {dtype}{list(shape)} are no keys of {key!r}")
        return LeafEntry(dtype, shape, tuple(extents), home, key, None if key else sharding)

    def number(self, name: str, array: Any) -> Any:
        """A scalar of Python, or of numpy, which Orbax does not tell apart."""
        if array.rank or array.dtype.name not in _NUMBERS:
            raise FormatError(
                f"leaf {name!r} of {self.directory} is said to be a scalar, and is {array.shape}"
            )
        try:
            return np.asarray(array.read().result()).item()
        except Exception as error:  # as above
            raise CorruptionError(
                f"leaf {name!r} of {self.directory} cannot be read: {brief(error)}"
            ) from error

    def text(self, texts: Mapping[str, str], name: str) -> str:
        if name not in texts:
            raise CorruptionError(f"leaf {name!r} is a text, and {self.directory / _TEXTS} does not have it")
        return texts[name]


_CACHE_BYTES = 2**25
_NUMBERS = {
    "bool", "int4", "int8", "int16", "int32", "int64", "uint4", "uint8", "uint16", "uint32", "uint64", "float16",
    "bfloat16", "float32", "float64", "complex64", "complex128",
}  # fmt: skip


_MOST_CHUNKS = 2**16  # of one array


def _box(shape: tuple[int, ...], chunk: tuple[int, ...]) -> tuple[int, ...]:
    """The chunk, or several that are read together: of an array there may be absurdly many."""
    while count_chunks(shape, chunk) > _MOST_CHUNKS:
        counts = [-(-size // part) for size, part in zip(shape, chunk, strict=True)]
        axis = counts.index(max(counts))
        chunk = (*chunk[:axis], 2 * chunk[axis], *chunk[axis + 1 :])
    return chunk


def _refuse_bomb(name: str, shape: tuple[int, ...], chunk: tuple[int, ...], itemsize: int) -> None:
    """TensorStore decodes whole chunks; what fails to allocate memory in there ends the process."""
    beyond = any(part > max(1, size) for part, size in zip(chunk, shape, strict=True))
    if beyond and itemsize * math.prod(chunk) > _MOST_BEYOND:
        raise FormatError(f"leaf {name!r}: an array of {list(shape)} has no chunks of {list(chunk)}")


_MOST_BEYOND = 2**26


def _is_stored(leaf: _Leaf) -> bool:
    return leaf.value_metadata.value_type not in (*_EMPTY, "string")


def _decoded(directory: Path, name: str, kind: Any) -> Any:
    try:
        return msgspec.json.decode(read_small(directory, name) or b"", type=kind)
    except MALFORMED_JSON as error:
        raise FormatError(
            f"{directory / name} is damaged, or of a version that is not known: {error}"
        ) from error


def _optional(directory: Path, name: str, kind: Any) -> Any:
    try:
        return _decoded(directory, name, kind)
    except FileNotFoundError:
        return None


def _checkpoint(directory: Path) -> _Checkpoint:
    try:
        found: _Checkpoint | None = _optional(directory, _CHECKPOINT, _Checkpoint)
    except FormatError:  # Python's JSON has NaN and Infinity, ours has not
        with suppress(ValueError, RecursionError, msgspec.ValidationError):
            document = json.loads(read_small(directory, _CHECKPOINT) or b"")
            return msgspec.convert(document, _Checkpoint)
        raise
    return found or _Checkpoint()


class _Sharding(msgspec.Struct):
    sharding_type: str = ""
    shape: list[int] = []
    axis_names: list[str] = []
    partition_spec: list[str | list[str] | None] = []


def _shardings(directory: Path) -> dict[str, RecordedSharding]:
    """By stored name. What cannot be understood is left out: an array can lie anywhere."""
    found: dict[str, RecordedSharding] = {}
    for name, text in (_optional(directory, _SHARDINGS, dict[str, str]) or {}).items():
        with suppress(*MALFORMED_JSON, ValueError):
            sharding = msgspec.json.decode(text, type=_Sharding)
            if sharding.sharding_type == "NamedSharding":
                spec = tuple(
                    tuple(axis) if isinstance(axis, list) else axis for axis in sharding.partition_spec
                )
                mesh = dict(zip(sharding.axis_names, sharding.shape, strict=True))
                found[base64.b64decode(name, validate=True).decode()] = RecordedSharding(spec, mesh)
    return found


class _ArrayMetadata(msgspec.Struct):
    param_name: str
    ext_metadata: dict[str, Any] | None = None


class _Described(msgspec.Struct):
    array_metadata: _ArrayMetadata


class _ArrayMetadatas(msgspec.Struct):
    array_metadatas: list[_Described]


def _key_kinds(directory: Path) -> dict[str, str]:
    """The generators of PRNG keys, by stored name."""
    below = directory / _ARRAYS
    found: dict[str, str] = {}
    for name in list_names(below) if below.is_dir() else []:
        for described in _decoded(below, name, _ArrayMetadatas).array_metadatas:
            kind = (described.array_metadata.ext_metadata or {}).get("random_key_impl")
            if isinstance(kind, str):
                found[described.array_metadata.param_name] = kind
    return found


# ----------------------------------------------------------------------------------------- structure


class _Node(msgspec.Struct):
    """A container, with its children by key; whether these are indices."""

    children: dict[str, Any]
    is_sequence: bool


def _structure(leaves: Sequence[_Leaf], origin: str) -> Any:
    """Dicts and lists. Which tuples, namedtuples and classes they were, Orbax does not record."""
    if len(leaves) == 1 and not leaves[0].key_metadata:
        return _end(leaves[0])
    root = _Node(
        {}, is_sequence=all(leaf.key_metadata[:1] and leaf.key_metadata[0].is_index for leaf in leaves)
    )
    for leaf in leaves:
        keys = leaf.key_metadata
        if not 0 < len(keys) <= _MOST_DEPTH:
            raise FormatError(f"{origin}: leaf {leaf.name[:200]!r} is nested {len(keys)} deep")
        node = root
        for key, following in itertools.pairwise(keys):
            inner = node.children.setdefault(key.key, _Node({}, is_sequence=following.is_index))
            if not isinstance(inner, _Node):
                raise FormatError(f"{origin}: {leaf.name[:200]!r} is inside of another leaf")
            node = inner
        if keys[-1].key in node.children:
            raise FormatError(f"{origin} has {leaf.name[:200]!r} twice")
        node.children[keys[-1].key] = _end(leaf)
    return _document(root)


def _end(leaf: _Leaf) -> Any:
    kind = leaf.value_metadata.value_type
    return _EMPTY.get(kind, leaf.name or BARE_LEAF)


def _document(node: Any) -> Any:
    if not isinstance(node, _Node):
        return node
    children = node.children
    is_numbered = node.is_sequence and all(key.isdecimal() and len(key) < 10 for key in children)
    numbers = sorted(children, key=int) if is_numbered else []
    if numbers and numbers == [str(number) for number in range(len(children))]:
        return {"list": [_document(children[number]) for number in numbers]}
    return {"dict": {escape(key): _document(child) for key, child in children.items()}}
