"""Checkpoints of Orbax, read through TensorStore alone: versions 0 and 1, zarr 2 and 3, in a database or without.

    _METADATA               of a tree: its leaves' keys, and of what kind each is
    _sharding, _strings.json, array_metadatas/process_N     how arrays lay, texts, and whose numbers PRNG keys are
    manifest.ocdbt, d/, ocdbt.process_N/                    a database with the arrays; or else a directory for each
    checkpoint              up to 0.5.20, and of T5X: the tree in msgpack, with or without _METADATA beside it

A checkpoint is such a tree, or has one in a directory for each item; those of a `CheckpointManager` are in directories
that are called by their steps. Items of JSON become metadata of the trees beside them.
"""

from __future__ import annotations

import base64
import datetime as dt
import itertools
import json
import math
import os
import re
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np

from eformer._engine.formats.found import Found, Trees
from eformer._engine.formats.left_out import is_checkpoint, left_out
from eformer._engine.formats.markers import ORBAX_CHECKPOINT, ORBAX_TREE
from eformer._engine.formats.others.orbax_aggregate import NAME as AGGREGATE
from eformer._engine.formats.others.orbax_aggregate import (
    Aggregate,
    Named,
    Plain,
    is_aggregate,
    read_aggregate,
)
from eformer._engine.formats.others.orbax_chunks import Chunk, ChunkFiles, brief
from eformer._engine.formats.others.single_file import StoredArray, entry_of
from eformer._engine.formats.zarr.zarray import ZARRAY, chunks_of, count_chunks
from eformer._engine.record.dtypes import dtype_from_name
from eformer._engine.record.manifest import (
    Coding,
    DataFile,
    Extent,
    LeafEntry,
    Manifest,
    RecordedSharding,
    TreeEntry,
    foreign_tree,
)
from eformer._engine.record.names import BARE_LEAF, escape, is_inside, join_name
from eformer._engine.record.text import few
from eformer._engine.record.values import MALFORMED_JSON, parse_json, value_to_json
from eformer._engine.stores.base import read_whole
from eformer._engine.stores.inside import walk
from eformer._engine.stores.local import LocalStore
from eformer._engine.stores.local_files import LocalFiles
from eformer._engine.stores.ocdbt import DATABASE_MANIFEST as MANIFEST
from eformer._engine.stores.ocdbt import list_arrays, require_plain_files
from eformer._engine.stores.virtual_files import ChainedFiles, VirtualFiles
from eformer.errors import CorruptionError, FormatError, NotFoundError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from eformer._engine.stores.base import Files
    from eformer._engine.stores.virtual_files import VirtualFile

FORMAT = "orbax"

_SHARDINGS = "_sharding"
_TEXTS = "_strings.json"
_ARRAYS = "array_metadatas"
_COMMITTED = "commit_success.txt"
_INDICATOR = "orbax.checkpoint"  # an empty file, by which version 1 knows its checkpoints

_MOST_DEPTH = 100
_EMPTY: dict[str, Any] = {
    "None": None, "NamedTuple": None, "Dict": {"dict": {}}, "List": {"list": []}, "Tuple": {"tuple": []},
}  # fmt: skip

# ------------------------------------------------------------------------------------------- finding


def in_directory(directory: Path, names: Sequence[str]) -> Found | None:
    """The checkpoint of Orbax that a directory holds; of steps, the last one. None if there is none."""
    if _is_tree(directory):
        return _found(directory, {"": _Item(directory)})
    if ORBAX_CHECKPOINT not in names and (steps := steps_in(directory, names)):
        return in_directory(directory / steps[-1], _names(directory / steps[-1]))
    handlers = _checkpoint(directory).item_handlers
    items = {name: item for name in names if (item := _item(directory / name, handlers))}
    if items:
        return _found(directory, items)
    if ORBAX_CHECKPOINT in names:
        raise NotFoundError(
            f"{directory} is a checkpoint of Orbax, but no item in it has {ORBAX_TREE}: no tree was saved, or its save "
            "has not finished"
        )
    return None


def marks(directory: Path) -> list[str]:
    """List the files by which the directory itself is a checkpoint of Orbax, and not only what is in it."""
    found = [name for name in (ORBAX_TREE, ORBAX_CHECKPOINT) if (directory / name).is_file()]
    return [*found, AGGREGATE] if is_aggregate(directory) else found


def _names(directory: Path) -> list[str]:
    return list(LocalStore(directory).kinds())


_UNFINISHED = ".orbax-checkpoint-tmp"


def _is_tree(path: Path) -> bool:
    return (path / ORBAX_TREE).is_file() or is_aggregate(path)


class _Item(msgspec.Struct, frozen=True):
    """A tree in a directory. One that is a single array, or a PRNG key, is stored as a dict of it."""

    directory: Path
    is_array: bool = False
    about: str | None = None  # a directory beside it with what is known of a key


_ARRAY = "checkpoint"
_JAX_KEY, _NUMPY_KEY = "jax_random_key", "np_random_key"


def _item(path: Path, handlers: Mapping[str, Any]) -> _Item | None:
    if _UNFINISHED in path.name or path.is_symlink() or not path.is_dir():
        return None
    is_array = str(handlers.get(path.name)).endswith(".ArrayCheckpointHandler")
    if _is_tree(path) or (is_array and _is_array(path)):
        return _Item(path, is_array=is_array)
    for name in (_JAX_KEY, _NUMPY_KEY):
        inner, about = path / name, f"{name}_metadata"
        if not inner.is_symlink() and (_is_tree(inner) or (name == _JAX_KEY and _is_array(inner))):
            return _Item(inner, is_array=name == _JAX_KEY, about=about)
    return None


def _is_array(path: Path) -> bool:
    """Tell whether this is an item that is one array, as versions before 0.12 stored it."""
    return (path / _ARRAY / ZARRAY).is_file() or (path / MANIFEST).is_file()


def _is_typed(about: Path) -> bool:
    try:
        return bool(_json(about)["typed"])
    except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
        raise FormatError(f"{about} does not say whether the PRNG key is typed: {error}") from error


def steps_in(directory: Path, names: Sequence[str]) -> list[str]:
    """The directories of finished steps, the last step last. While a step is being saved it has another name."""
    steps = []
    for name in names:
        before, _, digits = name.rpartition("_")
        if digits.isdecimal() and _is_step(directory / name, may_be_item=before not in ("", "checkpoint")):
            steps.append((int(digits), name))
    return [name for _, name in sorted(steps)]


def _is_step(path: Path, *, may_be_item: bool) -> bool:
    """Tell whether a directory with the name of a step is one. An item of such a name is a tree itself."""
    if path.is_symlink() or not path.is_dir():
        return (path / ORBAX_CHECKPOINT).is_file()
    if (path / ORBAX_CHECKPOINT).is_file() or (not may_be_item and _is_tree(path)):
        return True
    return not _is_tree(path) and any(_item(path / name, {}) for name in _names(path))


def _found(directory: Path, items: Mapping[str, _Item]) -> Found:
    readers: dict[str, _Reader] = {}
    stamps: dict[str, str] = {}
    checkpoint = _checkpoint(directory)
    documents = _documents(directory, items, checkpoint) if "" not in items else {}

    def describe(item: _Item) -> TreeEntry:
        reader = _Reader(directory, item)
        tree = reader.tree(checkpoint, documents)
        readers[tree.root] = reader
        stamps.update(reader.stamps)
        return tree

    def unread() -> tuple[str, ...]:
        return _left_out(directory, items, documents, trees, readers)

    trees = Trees({}, {prefix: partial(describe, item) for prefix, item in items.items()}, {})
    return Found(
        str(directory),
        LocalStore(directory),
        Manifest(format=FORMAT),
        trees,
        versions=stamps,
        open_files=lambda tree: readers[tree.root].files(),
        find_left_out=unread,
    )


def _documents(directory: Path, items: Mapping[str, _Item], checkpoint: _Checkpoint) -> dict[str, Any]:
    """Read the items that are a file of JSON, by name, unless the checkpoint's own metadata have that name."""
    taken = checkpoint.custom_metadata or {}
    found = {}
    for name in _names(directory):
        path = directory / name
        if name not in items and name not in taken and path.is_dir() and not path.is_symlink():
            with suppress(FormatError, OSError, ValueError, RecursionError):
                found[name] = value_to_json(_json(path))
    return found


def _json(directory: Path) -> Any:
    """Read the JSON in the only file of a directory."""
    (name,) = (name for name in _names(directory) if name != _COMMITTED)
    data, _ = read_whole(LocalStore(directory), name)
    if data.lstrip()[:1] not in (b"{", b"["):
        raise ValueError(f"{directory / name} is not a document")
    return json.loads(data)


def _left_out(
    directory: Path,
    items: Mapping[str, _Item],
    documents: Mapping[str, Any],
    trees: Mapping[str, TreeEntry],
    readers: Mapping[str, _Reader],
) -> tuple[str, ...]:
    read = {
        ORBAX_CHECKPOINT,
        _INDICATOR,
        *documents,
        *(name for name in _names(directory) if _UNFINISHED in name),
    }
    inside: list[str] = []
    for prefix, item in items.items():
        try:
            reader = readers[trees[prefix].root]
        except (FormatError, OSError):  # whoever reads the tree hears of it
            read.update([prefix] if prefix else _names(directory))
            continue
        inside += reader.left_out()
        read.update(reader.read())
        if item.about:
            read.add(f"{prefix}/{item.about}")
    others = [] if "" in items else [name for name in _names(directory) if name not in (*read, *items)]
    others = [name for name in others if _is_other_item(directory / name)]
    read.update(others)
    return tuple(sorted([*left_out(LocalStore(directory), read), *inside, *(f"{name}/" for name in others)]))


def _is_other_item(path: Path) -> bool:
    """Tell whether a directory beside the trees is an item of another kind, which is left out whatever its files are
    called."""
    if (
        path.name.startswith(".")
        or path.is_symlink()
        or not path.is_dir()
        or is_checkpoint(LocalStore(path.parent), path.name)
    ):
        return False
    return any(not entry.is_dir(follow_symlinks=False) for entry in walk(path))


# ------------------------------------------------------------------------------------------- reading


class _Key(msgspec.Struct):
    key: str
    key_type: int = 2

    @property
    def is_index(self) -> bool:
        return self.key_type == 1


class _Value(msgspec.Struct):
    value_type: str = "jax.Array"
    skip_deserialize: bool = False


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
    raw_item_handlers: Any = msgspec.field(name="item_handlers", default=None)

    @property
    def item_handlers(self) -> dict[str, Any]:
        """What has written each item, by name, if that is known."""
        return self.raw_item_handlers if isinstance(self.raw_item_handlers, dict) else {}

    @property
    def saved_at(self) -> str:
        with suppress(OverflowError, OSError, TypeError, ValueError):  # not known, or absurd
            return dt.datetime.fromtimestamp(self.commit_timestamp_nsecs // 10**9, dt.UTC).isoformat()  # type: ignore[operator]
        return ""


Home = Literal["jax", "numpy"]


class _InFile(msgspec.Struct, frozen=True):
    """An array in the file in msgpack."""

    stored: StoredArray
    home: Home


class _Array(msgspec.Struct, frozen=True):
    """A zarr array, by its path in the directory or in the database. T5X says its shape and its driver."""

    path: str
    home: Home
    key: str | None
    sharding: RecordedSharding | None
    is_number: bool = False
    shape: tuple[int, ...] | None = None
    driver: str | None = None


class _Reader:
    """One tree, with its chunks as they are found. The file in msgpack and parts of it are numbered before them."""

    def __init__(self, home: Path, item: _Item) -> None:
        self.home, self.item, self.directory = home, item, item.directory
        self.root = "" if item.directory == home else item.directory.relative_to(home).as_posix()
        self.about: _Tree | None = _optional(self.directory, ORBAX_TREE, _Tree)
        self.aggregate = read_aggregate(self.directory) if is_aggregate(self.directory) else None
        if item.is_array and not self.aggregate:
            self.about = self.about or _Tree({_ARRAY: _Leaf([_Key(_ARRAY)], _Value())})
        self.parts: list[VirtualFile] = []
        self.chunks: list[Chunk] = []
        self.is_database = self.about.use_ocdbt if self.about else None
        if self.is_database is None:
            self.is_database = (self.directory / MANIFEST).exists()
        self.arrays: dict[str, Any] = {}
        self.stamps = {self.at(AGGREGATE): self.aggregate.version} if self.aggregate else {}

    def at(self, name: str) -> str:
        """Return the path in the checkpoint of a name in the tree's directory."""
        return f"{self.root}/{name}" if self.root else name

    def tree(self, checkpoint: _Checkpoint, documents: Mapping[str, Any]) -> TreeEntry:
        leaves = self.from_metadata(self.about) if self.about else self.from_aggregate()
        structure: Any = self.aggregate.structure if self.aggregate else None
        if self.about:
            structure = _structure(list(self.about.tree_metadata.values()), str(self.directory))
        self.arrays = self.open_arrays(
            {name: leaf for name, leaf in leaves.items() if isinstance(leaf, _Array)}
        )
        self.parts = [
            leaf.stored.part for leaf in leaves.values() if isinstance(leaf, _InFile) and leaf.stored.part
        ]
        entries, values, part = {}, {}, 0
        for name, leaf in leaves.items():
            if isinstance(leaf, Plain):
                values[name] = leaf.value
            elif isinstance(leaf, _InFile):
                part += leaf.stored.part is not None
                entries[name] = entry_of(leaf.stored, leaf.home, part)
            elif leaf.is_number:
                values[name] = value_to_json(self.number(leaf.path, self.arrays[leaf.path]))
            else:
                entries[name] = self.entry(leaf, self.arrays[leaf.path])
        if self.item.is_array:
            entries, structure = self.alone(entries, values), BARE_LEAF
        metadata = {k: value_to_json(v) for k, v in (checkpoint.custom_metadata or {}).items()}
        return foreign_tree(
            saved_at=checkpoint.saved_at,
            written_by="orbax",
            files=tuple(self.data_files()),
            root=self.root,
            metadata={**documents, **metadata},
            values=values,
            structure=structure,
            leaves=entries,
        )

    def from_metadata(self, about: _Tree) -> dict[str, Plain | _InFile | _Array]:
        """List every stored leaf by name, as `_METADATA` does. The file in msgpack has to list the same ones."""
        texts = _optional(self.directory, _TEXTS, dict[str, str]) or {}
        shardings, keys = _shardings(self.directory), _key_kinds(self.directory)
        found: dict[str, Plain | _InFile | _Array] = {}
        for leaf in about.tree_metadata.values():
            kind, stored = leaf.value_metadata.value_type, leaf.stored_name
            if kind in _EMPTY:
                continue
            home: Home = "numpy" if kind == "np.ndarray" else "jax"
            listed = self.aggregate.leaves.get(leaf.name) if self.aggregate else None
            if isinstance(listed, StoredArray):
                found[leaf.name] = _InFile(listed, home)
            elif isinstance(listed, Plain):
                found[leaf.name] = listed
            elif leaf.value_metadata.skip_deserialize and not self.aggregate:
                raise CorruptionError(
                    f"leaf {leaf.name[:200]!r} is in {self.directory / AGGREGATE}, which is missing or damaged"
                )
            elif kind == "string":
                found[leaf.name] = Plain(value_to_json(self.text(texts, stored)))
            else:
                is_key, sharding = keys.get(stored), shardings.get(stored)
                found[leaf.name] = _Array(stored, home, is_key, sharding, is_number=kind == "scalar")
        if self.aggregate:
            self.require_same(self.aggregate, about, found)
        return found

    def require_same(
        self, aggregate: Aggregate, about: _Tree, found: Mapping[str, Plain | _InFile | _Array]
    ) -> None:
        """Refuse two lists of leaves that are not of one tree."""
        named = {name: leaf.path for name, leaf in aggregate.leaves.items() if isinstance(leaf, Named)}
        stored = {leaf.name: leaf.stored_name for leaf in about.tree_metadata.values()}
        problems = sorted(found.keys() ^ aggregate.leaves.keys())
        problems += [name for name, path in named.items() if path != stored.get(name, path)]
        if problems:
            raise FormatError(
                f"{self.directory}: {ORBAX_TREE} and the file {AGGREGATE!r} disagree about these leaves: "
                f"{few(problems)[:400]}"
            )

    def from_aggregate(self) -> dict[str, Plain | _InFile | _Array]:
        """List every leaf that the file in msgpack has, or names the array of."""
        assert self.aggregate
        shardings = _shardings(self.directory)
        found: dict[str, Plain | _InFile | _Array] = {}
        for name, leaf in self.aggregate.leaves.items():
            if isinstance(leaf, StoredArray):
                found[name] = _InFile(leaf, "jax")
            elif isinstance(leaf, Named):
                found[name] = _Array(
                    leaf.path, "jax", None, shardings.get(leaf.path), shape=leaf.shape, driver=leaf.driver
                )
            else:
                found[name] = leaf
        return found

    def alone(self, entries: Mapping[str, LeafEntry], values: Mapping[str, Any]) -> dict[str, LeafEntry]:
        """Return the only array of an item, as a PRNG key if it is the numbers of one."""
        if len(entries) != 1 or values:
            raise FormatError(
                f"{self.directory} should hold one array, and holds {len(entries) + len(values)} leaves"
            )
        (entry,) = entries.values()
        is_key = self.item.about and _is_typed(self.directory.parent / self.item.about)
        if is_key and entry.dtype == "uint32" and entry.shape[-1:] == (2,):
            # Orbax does not record the generator, and takes JAX's default; only that one has keys of two numbers.
            entry = msgspec.structs.replace(entry, key="threefry2x32", sharding=None)
        return {BARE_LEAF: entry}

    def data_files(self) -> Iterator[DataFile]:
        if self.aggregate:
            yield DataFile(AGGREGATE, self.aggregate.nbytes)
        for part in self.parts:
            yield DataFile(f"{AGGREGATE}/{part.name}", part.nbytes)
        for chunk in self.chunks:
            yield DataFile(chunk.name, chunk.nbytes)

    def files(self) -> Files:
        chunks = ChunkFiles(self.chunks)
        if not self.aggregate:
            return chunks
        inside = VirtualFiles(LocalFiles(self.home, [self.at(AGGREGATE)], self.stamps), self.parts)
        return ChainedFiles(inside, 1 + len(self.parts), chunks)

    def read(self) -> Iterator[str]:
        """List the paths of all that belongs to the tree."""
        names = [ORBAX_TREE, _SHARDINGS, _TEXTS, _ARRAYS]
        if self.aggregate:
            names.append(AGGREGATE)
        if self.is_database:
            names += [
                MANIFEST,
                "d",
                *(n for n in _names(self.directory) if n.startswith("ocdbt.process_")),
            ]
        else:
            names += filter(None, self.arrays)
        if "" in self.arrays:  # its chunks lie in the directory itself
            names += [name for name in _names(self.directory) if _OF_ARRAY.fullmatch(name)]
        return map(self.at, names)

    def left_out(self) -> list[str]:
        """List the arrays of the database that are no leaves."""
        if not self.is_database:
            return []
        require_plain_files(Path(os.path.realpath(self.directory)))
        there = list_arrays(self.directory)
        return [self.at(f"{MANIFEST}/{path}") for path in there if path not in self.arrays]

    def open_arrays(self, leaves: Mapping[str, _Array]) -> dict[str, Any]:
        """All at once: each takes a look at the disk."""
        if not leaves:
            return {}
        import tensorstore as ts  # late: slow to import, and only these need it

        # The caller's path may be a link, nothing below it.
        require_plain_files(Path(os.path.realpath(self.directory)), is_database=bool(self.is_database))
        context = ts.Context({"cache_pool": {"total_bytes_limit": _CACHE_BYTES}})
        begin = partial(ts.open, context=context, open=True, read=True)
        specs: dict[str, dict[str, Any]] = {}
        for name, leaf in leaves.items():
            if leaf.path in specs:
                raise FormatError(f"{self.directory} has two leaves that are stored as {leaf.path[:200]!r}")
            specs[leaf.path] = self.spec_of(name, leaf)
        try:
            begun = {path: begin(spec) for path, spec in specs.items()}
        except Exception as error:  # a path that is no text, say
            raise FormatError(f"{self.directory} cannot be read by TensorStore: {brief(error)}") from error
        arrays = {path: self.opened(path, future) for path, future in begun.items()}
        # Without a fill value all chunks are stored: of these, too, a missing one is not taken for zeros.
        lenient = [
            path for path, array in arrays.items() if _STRICT not in specs[path] and array.fill_value is None
        ]
        strict = {path: begin(specs[path] | {_STRICT: False}) for path in lenient}
        return arrays | {path: self.opened(path, future) for path, future in strict.items()}

    def spec_of(self, name: str, leaf: _Array) -> dict[str, Any]:
        path = leaf.path  # empty for a tree that is an array
        if path and not self.is_database and not is_inside(path):
            raise FormatError(f"{self.directory}: the leaf {name[:200]!r} leads out of it, to {path[:200]!r}")
        if path and not path.endswith("/"):
            path += "/"
        files = {"driver": "file", "path": f"{self.directory}/"}
        spec: dict[str, Any] = {
            "driver": leaf.driver or ("zarr3" if self.about and self.about.use_zarr3 else "zarr"),
            "kvstore": {"driver": "ocdbt", "base": files} if self.is_database else files,
            "path": path,
        }
        if self.about and self.about.store_array_data_equal_to_fill_value:
            spec[_STRICT] = False  # a chunk that is missing is not taken for zeros
        return spec

    def opened(self, name: str, future: Any) -> Any:
        try:
            return future.result()
        except Exception as error:  # it may find anything wrong with what somebody else wrote
            raise CorruptionError(
                f"leaf {name!r}: {self.directory} has no such array, or it is damaged: {brief(error)}"
            ) from error

    def entry(self, leaf: _Array, array: Any) -> LeafEntry:
        name, key, shape, dtype = leaf.path, leaf.key, tuple(array.shape), array.dtype.name
        if leaf.shape not in (None, shape):
            raise FormatError(
                f"leaf {name!r} should be of shape {list(leaf.shape or ())}, and is {list(shape)}"
            )
        try:
            itemsize = dtype_from_name(dtype).itemsize
        except FormatError as error:
            raise FormatError(f"leaf {name!r}: {error}") from error
        chunk = tuple(max(1, size) for size in array.chunk_layout.read_chunk.shape or ())
        _refuse_bomb(name, shape, chunk, itemsize)
        chunk = _box(shape, chunk)
        extents = []
        before = 1 + len(self.parts) if self.aggregate else 0
        for where, box in chunks_of(shape, chunk):
            nbytes = itemsize * math.prod(box.shape)
            region = None if box.shape == shape else (box.start, box.stop)
            # So that it is read as a whole.
            extents.append(Extent(before + len(self.chunks), 0, nbytes, "", region, Coding("", box.shape)))
            self.chunks.append(Chunk(f"{name}/{where}", array, box, nbytes))
        if key and (dtype != "uint32" or not shape):
            raise FormatError(f"leaf {name!r}: {dtype}{list(shape)} are no keys of {key!r}")
        return LeafEntry(dtype, shape, tuple(extents), leaf.home, key, None if key else leaf.sharding)

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
_OF_ARRAY = re.compile(r"\d+(\.\d+)*|c|zarr\.json")
_STRICT = "fill_missing_data_reads"
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


def _decoded(directory: Path, name: str, kind: Any) -> Any:
    problem = f"{directory / name} is damaged, or of a version that is not known"
    return parse_json(read_whole(LocalStore(directory), name)[0], kind, problem)


def _optional(directory: Path, name: str, kind: Any) -> Any:
    try:
        return _decoded(directory, name, kind)
    except FileNotFoundError:
        return None


def _checkpoint(directory: Path) -> _Checkpoint:
    try:
        found: _Checkpoint | None = _optional(directory, ORBAX_CHECKPOINT, _Checkpoint)
    except FormatError:  # Python's JSON has NaN and Infinity, ours has not
        with suppress(ValueError, RecursionError, msgspec.ValidationError):
            document = json.loads(read_whole(LocalStore(directory), ORBAX_CHECKPOINT)[0])
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
    for name in _names(below) if below.is_dir() else []:
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
