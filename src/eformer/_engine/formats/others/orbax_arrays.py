"""Open the zarr arrays of an Orbax tree with TensorStore: version 2 or 3, in a database or in directories.

Tests: tests/compat/test_orbax.py, tests/compat/test_orbax_old.py.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct

from eformer._engine.formats.codecs import BLOSC_HEADER, require_blosc
from eformer._engine.formats.zarr.layout import chunks_in, chunks_of, count_chunks
from eformer._engine.record.check import MOST_EXPANSION, require_chunk_for
from eformer._engine.record.dtypes import dtype_from_name
from eformer._engine.record.manifest import Coding, Extent, LeafEntry, RecordedSharding
from eformer._engine.record.names import is_inside
from eformer._engine.record.values import locating
from eformer._engine.stores.directory import walk
from eformer._engine.stores.ocdbt import DATABASE_MANIFEST, require_plain_files
from eformer._engine.stores.virtual_files import UnchangingFiles
from eformer.errors import CorruptionError, FormatError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from eformer._engine.formats.others.orbax_metadata import TreeMetadata
    from eformer._engine.formats.others.single_file import Library
    from eformer._engine.record.boxes import Box

_CACHE_BYTES = 2**25
_MOST_FILLED = 2**36  # bytes of arrays that may consist of fill values alone
# Up to so many bytes, arrays that store all chunks are not compared with the lengths of the files.
_MOST_UNSEEN = 2**28
_MOST_CHUNKS = 2**22  # chunks that may consist of fill values alone
_MAX_CHUNKS = 2**16  # chunks of one array; beyond that, neighbours are read together
_FILL_MISSING = "fill_missing_data_reads"
_SCALAR_DTYPES = {
    "bool", "int4", "int8", "int16", "int32", "int64", "uint4", "uint8", "uint16", "uint32", "uint64", "float16",
    "bfloat16", "float32", "float64", "complex64", "complex128",
}  # fmt: skip

_AFTER_BLOSC = {"crc32c"}  # codecs that leave the header of blosc where it is


@dataclass(frozen=True, slots=True)
class ArrayStore:
    """The storage of a tree's arrays: `directory`, or the database in it.

    With `stores_all_chunks` a missing chunk is an error, without it a chunk of fill values.
    """

    directory: Path
    is_database: bool
    driver: str = "zarr"
    stores_all_chunks: bool = False


@dataclass(frozen=True, slots=True)
class ZarrArray:
    """A zarr array, by its path in the directory or in the database.

    key            the name of the generator, for a PRNG key
    is_scalar      marks an array that holds a plain number
    shape, driver  as recorded by T5X, which the array must match
    """

    path: str
    library: Library = "jax"
    key: str | None = None
    sharding: RecordedSharding | None = None
    is_scalar: bool = False
    shape: tuple[int, ...] | None = None
    driver: str | None = None


def array_store(directory: Path, tree: TreeMetadata | None) -> ArrayStore:
    """Return the storage of the arrays as `_METADATA` records it. Without a record, see whether a database exists."""
    is_database = tree.use_ocdbt if tree else None
    if is_database is None:
        is_database = (directory / DATABASE_MANIFEST).exists()
    if tree is None:
        return ArrayStore(directory, is_database)
    driver = "zarr3" if tree.use_zarr3 else "zarr"
    return ArrayStore(directory, is_database, driver, tree.store_array_data_equal_to_fill_value)


def open_arrays(store: ArrayStore, leaves: Mapping[str, ZarrArray]) -> dict[str, Any]:
    """Open the arrays of these leaves concurrently. Return TensorStore's arrays by path."""
    if not leaves:
        return {}
    import tensorstore as ts  # late: it is slow to import

    # The caller's path may be a link. Links below it are refused, because TensorStore would follow them anywhere.
    require_plain_files(Path(os.path.realpath(store.directory)), is_database=store.is_database)
    context = ts.Context({"cache_pool": {"total_bytes_limit": _CACHE_BYTES}})
    begin = partial(ts.open, context=context, open=True, read=True)
    specs = _specs(store, leaves)
    try:
        begun = {path: begin(spec) for path, spec in specs.items()}
    except Exception as error:  # such as a path that is not UTF-8
        raise FormatError(f"TensorStore cannot read {store.directory}: {brief(error)}") from error
    arrays = {path: _wait_for(store, path, future) for path, future in begun.items()}
    # An array without a fill value stores all of its chunks, so a missing chunk is an error there, too.
    lenient = [
        path
        for path, array in arrays.items()
        if _FILL_MISSING not in specs[path] and array.fill_value is None
    ]
    strict = {path: begin(specs[path] | {_FILL_MISSING: False}) for path in lenient}
    arrays |= {path: _wait_for(store, path, future) for path, future in strict.items()}
    _require_stored(store, arrays)
    return arrays


def _specs(store: ArrayStore, leaves: Mapping[str, ZarrArray]) -> dict[str, dict[str, Any]]:
    leaf_of: dict[str, str] = {}
    for name, leaf in leaves.items():
        if (other := leaf_of.setdefault(leaf.path, name)) != name:
            raise FormatError(
                f"{store.directory}: {other[:200]!r} and {name[:200]!r} are both the array {leaf.path[:200]!r}"
            )
    return {leaf.path: _spec(store, name, leaf) for name, leaf in leaves.items()}


def _spec(store: ArrayStore, name: str, leaf: ZarrArray) -> dict[str, Any]:
    path = leaf.path  # empty for a tree that is one array
    if path and not store.is_database and not is_inside(path):
        raise FormatError(f"leaf {name[:200]!r} leads out of {store.directory}, to {path[:200]!r}")
    inner = inner_database(store, path)
    if inner:
        path = path.removeprefix(f"{inner}/")
    if path and not path.endswith("/"):
        path += "/"
    where = os.path.realpath(store.directory / inner)  # TensorStore refuses a path with dots
    files = {"driver": "file", "path": f"{where}/"}
    spec: dict[str, Any] = {
        "driver": leaf.driver or store.driver,
        "kvstore": {"driver": "ocdbt", "base": files} if store.is_database else files,
        "path": path,
    }
    if store.stores_all_chunks:
        spec[_FILL_MISSING] = False
    return spec


def inner_database(store: ArrayStore, path: str) -> str:
    """Return the directory of the database in which Orbax 0.3.5 to 0.4.1 stored a leaf whose name has a slash: "a/b" is
    the array "b" in the database "a". Return "" if it does not exist."""
    inner = path.rpartition("/")[0]
    if not inner or not store.is_database or not is_inside(path):
        return ""
    return inner if (store.directory / inner / DATABASE_MANIFEST).is_file() else ""


def _wait_for(store: ArrayStore, path: str, future: Any) -> Any:
    try:
        return future.result()
    except Exception as error:  # TensorStore raises errors of many kinds for damaged files
        raise CorruptionError(
            f"leaf {path!r}: {store.directory} has no such array, or it is damaged: {brief(error)}"
        ) from error


def _require_stored(store: ArrayStore, arrays: Mapping[str, Any]) -> None:
    """Refuse arrays that are far larger, or have far more chunks, than all files together can hold: reads would find
    the missing chunks one by one, for hours. Missing chunks of smaller arrays may be fill values."""
    sizes = {path: array.size * (array.dtype.numpy_dtype.itemsize or 1) for path, array in arrays.items()}
    claimed, chunks = sum(sizes.values()), sum(map(_count_chunks, arrays.values()))
    most = _MOST_UNSEEN if store.stores_all_chunks else _MOST_FILLED
    if claimed <= most and chunks <= _MOST_CHUNKS:
        return
    nbytes = sum(entry.stat(follow_symlinks=False).st_size for _, entry in walk(store.directory))
    if claimed > max(most, nbytes * MOST_EXPANSION) or chunks > max(_MOST_CHUNKS, nbytes):
        path = max(sizes, key=lambda path: sizes[path])
        raise FormatError(
            f"{store.directory} cannot hold its arrays, of {claimed} bytes in {chunks} chunks, in files of {nbytes} "
            f"bytes; the largest is {path!r}, {arrays[path].dtype.name}{list(arrays[path].shape)}"
        )


def _count_chunks(array: Any) -> int:
    chunk = tuple(max(1, size) for size in array.chunk_layout.read_chunk.shape or ())
    return count_chunks(tuple(array.shape), chunk)


def read_scalar(store: ArrayStore, path: str, array: Any) -> Any:
    """Read a plain number. Orbax does not record whether it was Python's or numpy's, so it comes back as Python's."""
    if array.rank or array.dtype.name not in _SCALAR_DTYPES:
        raise FormatError(
            f"leaf {path!r} of {store.directory} is {array.dtype.name}{list(array.shape)}, expected a scalar"
        )
    (whole,) = split_into_chunks(path, array, array.dtype.numpy_dtype.itemsize)
    with locating(f"leaf {path!r} of {store.directory} cannot be read"):
        return np.asarray(whole.read()).item()


def describe_leaf(leaf: ZarrArray, array: Any, chunks: list[Chunk], first_file: int) -> LeafEntry:
    """Check an array against its leaf, and describe it. Its chunks are appended to `chunks`, the files from number
    `first_file` on."""
    shape, dtype = tuple(array.shape), array.dtype.name
    if leaf.shape not in (None, shape):
        raise FormatError(
            f"leaf {leaf.path!r} has the shape {list(shape)}, expected {list(leaf.shape or ())}"
        )
    with locating(f"leaf {leaf.path!r}"):
        itemsize = dtype_from_name(dtype).itemsize
    if leaf.key and (dtype != "uint32" or not shape):
        raise FormatError(f"leaf {leaf.path!r} is {dtype}{list(shape)}, expected PRNG keys of {leaf.key!r}")
    own = split_into_chunks(leaf.path, array, itemsize)
    extents = tuple(
        Extent(
            number,
            0,
            chunk.nbytes,
            "",
            None if chunk.box.shape == shape else (chunk.box.start, chunk.box.stop),
            Coding("", chunk.box.shape),  # a coding makes the load read the chunk as a whole
        )
        for number, chunk in enumerate(own, first_file + len(chunks))
    )
    chunks += own
    sharding = None if leaf.key else leaf.sharding
    return LeafEntry(dtype, shape, extents, home=leaf.library, key=leaf.key, sharding=sharding)


# ---------------------------- chunks, each as if it were a file, whatever its codec and its database


class Chunk(Struct, frozen=True):
    """A box of an array of TensorStore."""

    name: str
    array: Any
    box: Box
    nbytes: int
    blosc: BloscChunks | None = None

    def read(self) -> Any:
        """Read the box. Raise a CorruptionError if it cannot be decoded."""
        try:
            if self.blosc:
                self.blosc.require_claims(self.box)
            return self.array[self.box.slices].read().result()
        except Exception as error:  # TensorStore raises errors of many kinds for damaged files
            raise CorruptionError(brief(error)) from error


def split_into_chunks(path: str, array: Any, itemsize: int) -> list[Chunk]:
    """Split an array into the boxes to read: its chunks, or groups of chunks if the array has very many."""
    shape = tuple(array.shape)
    chunk_shape = tuple(max(1, size) for size in array.chunk_layout.read_chunk.shape or ())
    with locating(f"leaf {path!r}"):
        require_chunk_for(shape, chunk_shape, itemsize)
    blosc = blosc_chunks(path, array, chunk_shape, itemsize)
    return [
        Chunk(f"{path}/{where}", array, box, itemsize * math.prod(box.shape), blosc)
        for where, box in chunks_of(shape, _merged(shape, chunk_shape))
    ]


def _merged(shape: tuple[int, ...], chunk_shape: tuple[int, ...]) -> tuple[int, ...]:
    while count_chunks(shape, chunk_shape) > _MAX_CHUNKS:
        counts = [-(-size // part) for size, part in zip(shape, chunk_shape, strict=True)]
        axis = counts.index(max(counts))
        chunk_shape = (*chunk_shape[:axis], 2 * chunk_shape[axis], *chunk_shape[axis + 1 :])
    return chunk_shape


class ChunkFiles(UnchangingFiles):
    """Chunks as files, by number. Each read decodes a whole chunk, so read a chunk in one go.

    TensorStore opens files when it reads them, and replaces a chunk as a whole, so a read never mixes two versions.
    """

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        self._chunks = chunks

    def read_into(self, number: int, memory: memoryview, offset: int) -> int:
        found = self._chunks[number].read()
        data = np.ascontiguousarray(found).reshape(-1).view(np.uint8)[offset : offset + len(memory)]
        memory[: len(data)] = data.data
        return len(data)

    def nbytes(self, number: int) -> int:
        return self._chunks[number].nbytes

    def close(self) -> None:
        self._chunks = ()


def brief(error: Exception) -> str:
    """Shorten an error of TensorStore to its message, without the specification that follows."""
    return str(error).partition(" [")[0][:300]


# --------------------------------------------------------------------------------------------- blosc
#
# The headers of blosc chunks are checked before TensorStore decodes them: it allocates the claimed length, and a failed
# allocation in it ends the process. For all other codecs it stops at the length of the chunk.


class BloscChunks(Struct, frozen=True):
    """The chunks of an array that blosc compressed, in `store`. Their names are `start`, then numbers joined by
    `separator`."""

    store: Any
    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    nbytes: int
    start: str
    separator: str

    def require_claims(self, box: Box) -> None:
        """Refuse a box with a chunk that claims a wrong length. Missing chunks are left to TensorStore."""
        for name, _ in chunks_in(box, self.shape, self.chunk):
            key = self.start + name.replace(".", self.separator) if self.shape else self.start or "0"
            found = self.store.read(key, byte_range=slice(0, BLOSC_HEADER)).result()
            if found.state == "value":
                require_blosc(bytes(found.value), self.nbytes)


def blosc_chunks(path: str, array: Any, chunk: tuple[int, ...], itemsize: int) -> BloscChunks | None:
    """Return the chunks of an array if blosc compressed them, else None."""
    codec = array.codec.to_json()
    if "blosc" not in str(codec):
        return None
    metadata = array.spec().to_json()["metadata"]
    if codec["driver"] == "zarr":
        start, separator = "", metadata.get("dimension_separator") or "."
    else:
        _require_plain(path, codec["codecs"])
        start, separator = _key_encoding(metadata["chunk_key_encoding"])
        start += separator if start and array.rank else ""
    nbytes = itemsize * math.prod(chunk)
    return BloscChunks(array.kvstore, tuple(array.shape), chunk, nbytes, start, separator)


def _require_plain(path: str, codecs: list[Mapping[str, Any]]) -> None:
    """Refuse blosc inside shards or another compressor, where its header cannot be found."""
    names = [codec["name"] for codec in codecs]
    if "blosc" not in names or not _AFTER_BLOSC.issuperset(names[names.index("blosc") + 1 :]):
        raise FormatError(f"leaf {path!r}: blosc inside {', '.join(names)} is not supported")


def _key_encoding(encoding: Mapping[str, Any]) -> tuple[str, str]:
    is_v2 = encoding["name"] == "v2"
    separator = encoding.get("configuration", {}).get("separator", "." if is_v2 else "/")
    return "" if is_v2 else "c", separator
