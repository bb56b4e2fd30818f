"""The zarr arrays of an Orbax tree, in version 2 or 3, in a database or in directories: opened by TensorStore."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from eformer._engine.formats.others.orbax_chunks import brief, split_into_chunks
from eformer._engine.formats.zarr.zarray import count_chunks
from eformer._engine.record.check import MOST_EXPANSION
from eformer._engine.record.dtypes import dtype_from_name
from eformer._engine.record.manifest import Coding, Extent, LeafEntry
from eformer._engine.record.names import is_inside
from eformer._engine.stores.directory import walk
from eformer._engine.stores.ocdbt import DATABASE_MANIFEST, require_plain_files
from eformer.errors import CorruptionError, FormatError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from eformer._engine.formats.others.orbax_chunks import Chunk
    from eformer._engine.formats.others.orbax_leaves import ZarrArray
    from eformer._engine.formats.others.orbax_metadata import TreeMetadata

_CACHE_BYTES = 2**25
_MOST_FILLED = 2**36  # bytes of arrays that may be fill values alone
_MOST_UNSEEN = 2**28  # bytes of arrays, of which all chunks are stored, that are not compared with the files
_MOST_CHUNKS = 2**22  # that may be fill values alone
_FILL_MISSING = "fill_missing_data_reads"
_SCALAR_DTYPES = {
    "bool", "int4", "int8", "int16", "int32", "int64", "uint4", "uint8", "uint16", "uint32", "uint64", "float16",
    "bfloat16", "float32", "float64", "complex64", "complex128",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ArrayStore:
    """How the arrays of a tree are stored: in `directory`, or in the database that lies there.

    `stores_all_chunks` tells that a missing chunk is an error, and not a chunk of fill values.
    """

    directory: Path
    is_database: bool
    driver: str = "zarr"
    stores_all_chunks: bool = False


def array_store(directory: Path, tree: TreeMetadata | None) -> ArrayStore:
    """Find out how the arrays are stored: as `_METADATA` says, else by whether there is a database."""
    is_database = tree.use_ocdbt if tree else None
    if is_database is None:
        is_database = (directory / DATABASE_MANIFEST).exists()
    if tree is None:
        return ArrayStore(directory, is_database)
    driver = "zarr3" if tree.use_zarr3 else "zarr"
    return ArrayStore(directory, is_database, driver, tree.store_array_data_equal_to_fill_value)


def open_arrays(store: ArrayStore, leaves: Mapping[str, ZarrArray]) -> dict[str, Any]:
    """Open the arrays of these leaves, all at once; return TensorStore's arrays by path."""
    if not leaves:
        return {}
    import tensorstore as ts  # late: it is slow to import

    # The caller's path may be a link; nothing below it may.
    require_plain_files(Path(os.path.realpath(store.directory)), is_database=store.is_database)
    context = ts.Context({"cache_pool": {"total_bytes_limit": _CACHE_BYTES}})
    begin = partial(ts.open, context=context, open=True, read=True)
    specs = _specs(store, leaves)
    try:
        begun = {path: begin(spec) for path, spec in specs.items()}
    except Exception as error:  # such as a path that is not UTF-8
        raise FormatError(f"TensorStore cannot read {store.directory}: {brief(error)}") from error
    arrays = {path: _wait_for(store, path, future) for path, future in begun.items()}
    # An array without a fill value stores all of its chunks, so a missing one is an error as well.
    lenient = [
        path
        for path, array in arrays.items()
        if _FILL_MISSING not in specs[path] and array.fill_value is None
    ]
    strict = {path: begin(specs[path] | {_FILL_MISSING: False}) for path in lenient}
    return arrays | {path: _wait_for(store, path, future) for path, future in strict.items()}


def _specs(store: ArrayStore, leaves: Mapping[str, ZarrArray]) -> dict[str, dict[str, Any]]:
    specs: dict[str, dict[str, Any]] = {}
    for name, leaf in leaves.items():
        if leaf.path in specs:
            raise FormatError(f"{store.directory} has two leaves that are stored as {leaf.path[:200]!r}")
        specs[leaf.path] = _spec(store, name, leaf)
    return specs


def _spec(store: ArrayStore, name: str, leaf: ZarrArray) -> dict[str, Any]:
    path = leaf.path  # empty for a tree that is one array
    if path and not store.is_database and not is_inside(path):
        raise FormatError(f"leaf {name[:200]!r} leads out of {store.directory}, to {path[:200]!r}")
    inner = inner_database(store, path)
    if inner:
        path = path.removeprefix(f"{inner}/")
    if path and not path.endswith("/"):
        path += "/"
    files = {"driver": "file", "path": f"{store.directory / inner}/"}
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
    the array "b" in the database "a". Return "" if there is none."""
    inner = path.rpartition("/")[0]
    if not inner or not store.is_database or not is_inside(path):
        return ""
    return inner if (store.directory / inner / DATABASE_MANIFEST).is_file() else ""


def _wait_for(store: ArrayStore, path: str, future: Any) -> Any:
    try:
        return future.result()
    except Exception as error:  # damaged files make TensorStore raise anything
        raise CorruptionError(
            f"leaf {path!r}: {store.directory} has no such array, or it is damaged: {brief(error)}"
        ) from error


def require_stored(store: ArrayStore, arrays: Mapping[str, Any]) -> None:
    """Refuse arrays that are far larger than all files together, or of far more chunks: those are missing, which would
    be found out one by one. Missing chunks of smaller arrays may be fill values."""
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
    """Read a plain number. Orbax does not record whether it was Python's or numpy's; it comes back as Python's."""
    if array.rank or array.dtype.name not in _SCALAR_DTYPES:
        raise FormatError(
            f"leaf {path!r} of {store.directory} should be a scalar, but is "
            f"{array.dtype.name}{list(array.shape)}"
        )
    try:
        (whole,) = split_into_chunks(path, array, array.dtype.numpy_dtype.itemsize)
        return np.asarray(whole.read()).item()
    except FormatError:
        raise
    except Exception as error:  # damaged files make TensorStore raise anything
        raise CorruptionError(f"leaf {path!r} of {store.directory} cannot be read: {brief(error)}") from error


def split_leaf(leaf: ZarrArray, array: Any) -> list[Chunk]:
    """Check an array against its leaf and split it into the chunks to read."""
    shape, dtype = tuple(array.shape), array.dtype.name
    if leaf.shape not in (None, shape):
        raise FormatError(
            f"leaf {leaf.path!r} should be of shape {list(leaf.shape or ())}, but is of {list(shape)}"
        )
    try:
        itemsize = dtype_from_name(dtype).itemsize
    except FormatError as error:
        raise FormatError(f"leaf {leaf.path!r}: {error}") from error
    if leaf.key and (dtype != "uint32" or not shape):
        raise FormatError(
            f"leaf {leaf.path!r} should hold PRNG keys of {leaf.key!r}, but is {dtype}{list(shape)}"
        )
    return split_into_chunks(leaf.path, array, itemsize)


def describe_leaf(leaf: ZarrArray, array: Any, chunks: Sequence[Chunk], first_file: int) -> LeafEntry:
    """Describe an array whose chunks are the files from number `first_file` on."""
    shape = tuple(array.shape)
    extents = tuple(
        Extent(
            number,
            0,
            chunk.nbytes,
            "",
            None if chunk.box.shape == shape else (chunk.box.start, chunk.box.stop),
            Coding("", chunk.box.shape),  # so that the chunk is read as a whole
        )
        for number, chunk in enumerate(chunks, first_file)
    )
    sharding = None if leaf.key else leaf.sharding
    return LeafEntry(array.dtype.name, shape, extents, home=leaf.library, key=leaf.key, sharding=sharding)
