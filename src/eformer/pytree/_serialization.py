"""State dicts and msgpack: bytes equal to flax's, and what flax cannot write.

Each reads the other's files. Beyond flax: tuples keep their type through `msgpack_serialize`, typed PRNG keys
come back, big-endian arrays are right, keys, shapes and dtypes are checked against the target, every class
registered with JAX is taken apart, and truncated, malformed or hostile bytes are a ValueError.
"""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np

from eformer._engine.formats.msgpack.views import unpack as _unpack
from eformer._engine.formats.msgpack.writer import can_pack as _can_pack
from eformer._engine.formats.msgpack.writer import pack as _pack
from eformer._engine.stores.durable import replacing as _replacing
from eformer._engine.trees.state_dicts import (
    current_path,
    from_state_dict,
    is_serializable,
    register_serialization_state,
    to_state_dict,
)
from eformer.errors import FormatError, MismatchError
from eformer.pytree._gzip import gzip_compress as _gzip_compress
from eformer.pytree._gzip import gzip_decompress as _gzip_decompress

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

# Arrays of more bytes than this are split into chunks, as flax does.
MAX_CHUNK_SIZE = 2**30


def msgpack_serialize(pytree: Any, in_place: bool = False) -> bytes:
    """The message for a tree of dict, list, tuple, plain values and arrays. Costs one copy of the arrays.

    Dicts are written in the order of their keys, or with `in_place` in their own. The tree is never
    modified: there is nothing to gain from it here.
    """
    message = io.BytesIO()
    _pack(pytree, message.write, max_chunk=MAX_CHUNK_SIZE, sort_keys=not in_place)
    return message.getvalue()


def msgpack_restore(encoded_pytree: bytes) -> Any:
    """The tree in a message. Arrays are read-only views of `encoded_pytree`: their bytes are not copied.

    A buffer that may change (a bytearray) is copied first; one that is read-only (a mapped file) is taken at
    its word. Arrays that were split into chunks are joined, which copies them.
    """
    return _unpack(encoded_pytree)


def to_bytes(target: Any) -> bytes:
    """The message for the state dict of `target`: any tree, or object of a registered type."""
    return msgpack_serialize(to_state_dict(target), in_place=True)


def from_bytes(target: Any, encoded_bytes: bytes) -> Any:
    """An object like `target` with the leaves of the message; for a target of None, the state dict itself.

    Keys, shapes and dtypes must be the target's, else one ValueError lists all differences. Arrays are numpy.
    """
    return from_state_dict(target, msgpack_restore(encoded_bytes))


def compress_bytes(data: bytes) -> bytes:
    """`data` as gzip; equal input gives equal output."""
    return _gzip_compress(data)


def decompress_bytes(data: bytes) -> bytes:
    """What was gzipped; a ValueError when `data` is damaged or no gzip."""
    return _gzip_decompress(data)


def to_compressed_bytes(target: Any) -> bytes:
    """`to_bytes`, gzipped."""
    return compress_bytes(to_bytes(target))


def from_compressed_bytes(target: Any, compressed_data: bytes) -> Any:
    """`from_bytes` of what was gzipped."""
    return from_bytes(target, decompress_bytes(compressed_data))


def save_to_file(target: Any, filepath: str) -> None:
    """Puts `to_bytes(target)` into a file that appears whole or not at all, and is durable on return.

    Arrays on the CPU go to the file from where they are; those of other devices, or spread over several,
    through a copy of one array at a time.
    """
    state = to_state_dict(target)
    with _replacing(_local(filepath)) as file:
        _pack(state, file.write, max_chunk=MAX_CHUNK_SIZE, sort_keys=False)


def load_from_file(target: Any, filepath: str) -> Any:
    """`from_bytes` of a file; errors name the file."""
    path = _local(filepath)
    try:
        return from_bytes(target, path.read_bytes())
    except MismatchError as error:
        raise MismatchError(error.problems, context=f"{path}: the state does not fit the target") from error
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from error


def _local(filepath: str | os.PathLike[str]) -> Path:
    text = os.fsdecode(filepath)
    if "://" in text:
        raise ValueError(f"{text} is no local path; to_bytes gives the bytes to put there")
    return Path(text)


def get_serialization_info(pytree: Any) -> dict[str, Any]:
    """Counts of a tree: leaves, elements, bytes in memory, dtypes, and whether `to_bytes` takes them."""
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
