"""Convert trees to state dicts and msgpack. The bytes are equal to flax's, and both read each other's files.

Beyond flax: tuples keep their type through `msgpack_serialize`, typed PRNG keys and big-endian arrays are supported,
keys, shapes and dtypes are checked against the target, every class registered with JAX works, and truncated,
malformed or hostile bytes raise a ValueError.
"""

from __future__ import annotations

import gzip
import io
import os
import zlib
from contextlib import suppress
from functools import partial
from typing import IO, TYPE_CHECKING, Any

import jax
import numpy as np

from eformer._engine.formats.msgpack.reader import unpack as _unpack
from eformer._engine.formats.msgpack.writer import can_pack as _can_pack
from eformer._engine.formats.msgpack.writer import pack as _pack
from eformer._engine.record.signature import signature_name as _signature_name
from eformer._engine.stores.directory import Directory as _Directory
from eformer._engine.stores.durable import replacing as _replacing
from eformer._engine.stores.journal import sweep_dead as _sweep
from eformer._engine.stores.urls import is_file_url as _is_file_url
from eformer._engine.stores.urls import local_path as _local_path
from eformer._engine.tasks.interrupts import check as _check
from eformer._engine.tasks.interrupts import uninterrupted as _uninterrupted
from eformer._engine.trees.state_dicts import (
    current_path,
    from_state_dict,
    is_serializable,
    register_serialization_state,
    to_state_dict,
)
from eformer.errors import FormatError, MismatchError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = [
    "MAX_CHUNK_SIZE",
    "compress_bytes",
    "current_path",
    "decompress_bytes",
    "from_bytes",
    "from_compressed_bytes",
    "from_state_dict",
    "get_serialization_info",
    "is_serializable",
    "load_from_file",
    "msgpack_restore",
    "msgpack_serialize",
    "register_serialization_state",
    "save_to_file",
    "to_bytes",
    "to_compressed_bytes",
    "to_state_dict",
]

# Larger arrays, in bytes, are split into chunks, as flax does.
MAX_CHUNK_SIZE = 2**30


def msgpack_serialize(pytree: Any, in_place: bool = False) -> bytes:
    """Serialize `pytree`, of dicts, lists, tuples, plain values and arrays, to msgpack. Makes one copy of the arrays.

    Dicts are sorted by key; `in_place=True` keeps their own order. The tree is never modified.

    Example:

        >>> msgpack_restore(msgpack_serialize({"w": np.ones(2), "step": 3}))
        {'step': 3, 'w': array([1., 1.])}
    """
    message = io.BytesIO()
    _pack(pytree, message.write, max_chunk=MAX_CHUNK_SIZE, sort_keys=not in_place)
    return message.getvalue()


def msgpack_restore(encoded_pytree: bytes) -> Any:
    """Restore the tree in a message. Arrays are read-only views of `encoded_pytree`, without a copy.

    A writable buffer, such as a bytearray, is copied first; a read-only one, such as a mapped file, must not change.
    Arrays that were split into chunks are joined, which copies them.
    """
    return _unpack(encoded_pytree)


def to_bytes(target: Any) -> bytes:
    """Serialize the state dict of `target`, which is any tree or an object of a registered type."""
    return msgpack_serialize(to_state_dict(target), in_place=True)


def from_bytes(target: Any, encoded_bytes: bytes) -> Any:
    """Restore an object like `target` with the leaves of the message; for None, return the state dict itself.

    Keys, shapes and dtypes must match the target, else one ValueError lists all differences. Arrays are numpy arrays.
    `encoded_bytes` is a message of `to_bytes`, or of flax.

    Example:

        >>> from_bytes({"w": np.zeros(2)}, to_bytes({"w": np.ones(2)}))
        {'w': array([1., 1.])}
    """
    return from_state_dict(target, msgpack_restore(encoded_bytes))


def compress_bytes(data: bytes) -> bytes:
    """Compress `data` with gzip. Equal input gives equal output, because the header has no time and no name."""
    return zlib.compress(data, level=6, wbits=16 + zlib.MAX_WBITS)


def decompress_bytes(data: bytes) -> bytes:
    """Decompress gzip. Raises a ValueError if `data` is damaged or not gzip."""
    if not data:
        raise FormatError("not gzip: the input is empty")
    try:
        return gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        raise FormatError(f"not gzip, or damaged: {error}") from error


def to_compressed_bytes(target: Any) -> bytes:
    """Serialize `target` with `to_bytes`, and compress it with gzip."""
    return compress_bytes(to_bytes(target))


def from_compressed_bytes(target: Any, compressed_data: bytes) -> Any:
    """Decompress `compressed_data`, which is gzip, and restore an object like `target` with `from_bytes`."""
    return from_bytes(target, decompress_bytes(compressed_data))


@_uninterrupted
def save_to_file(target: Any, filepath: str) -> None:
    """Write `to_bytes(target)` to `filepath`, atomically and durably. On any error the previous file is left intact.

    Arrays on the CPU are written without a copy; arrays on other devices, or on several, are copied one at a time.
    Files that killed calls have left in the directory are removed.
    """
    state = to_state_dict(target)
    path = _local(filepath)
    with _replacing(path) as file:
        with _Directory.open(path.parent) as directory:
            _sweep(directory)
        _pack(state, partial(_write, file), max_chunk=MAX_CHUNK_SIZE, sort_keys=False)
    with suppress(OSError):  # a signature that stays would call the new file altered
        path.with_name(_signature_name(path.name)).unlink()


def _write(file: IO[bytes], data: Any) -> int:
    _check()
    return file.write(data)


def load_from_file(target: Any, filepath: str) -> Any:
    """Restore an object like `target` from the file at `filepath`, with `from_bytes`. Errors name the file."""
    path = _local(filepath)
    try:
        return from_bytes(target, path.read_bytes())
    except MismatchError as error:
        raise MismatchError(error.problems, context=f"{path}: the state does not fit the target") from error
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from error


def _local(filepath: str | os.PathLike[str]) -> Path:
    text = os.fsdecode(filepath)
    if "://" in text and not _is_file_url(text):
        raise ValueError(f"{text} is not a local path; use to_bytes, and write the bytes there yourself")
    return _local_path(text)


def get_serialization_info(pytree: Any) -> dict[str, Any]:
    """Count the leaves, elements and bytes of `pytree`, list its dtypes, and tell whether `to_bytes` accepts it."""
    leaves = jax.tree_util.tree_leaves(to_state_dict(pytree))
    return {
        "num_leaves": len(leaves),
        "tree_structure": str(jax.tree_util.tree_structure(pytree)),
        "total_elements": sum(int(leaf.size) if _is_array(leaf) else 1 for leaf in leaves),
        "memory_bytes": sum(map(_nbytes, leaves)),
        "is_serializable": all(map(_can_pack, leaves)),
        "dtypes": sorted(
            {str(leaf.dtype.name) if _is_array(leaf) else type(leaf).__name__ for leaf in leaves}
        ),
    }


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, (np.ndarray, np.generic, jax.Array, jax.ShapeDtypeStruct))


def _nbytes(leaf: Any) -> int:
    if _is_array(leaf):
        return int(leaf.size) * int(leaf.dtype.itemsize)
    if isinstance(leaf, (str, bytes, bytearray)):
        return len(leaf)
    return np.asarray(leaf).nbytes if isinstance(leaf, (bool, int, float, complex)) else 0
