"""Bytes to bytes, and bytes to digests: gzip, zstd, zarr's chunks; xxh3-128, sha256."""

from __future__ import annotations

import gzip
import hashlib
import math
import zlib
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import xxhash
import zstandard

from eformer.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Buffer, Iterable  # type: ignore[attr-defined,unused-ignore]  # Python 3.12


# What decoding JSON that is none may raise: not JSON, not UTF-8, nested without end.
MALFORMED_JSON = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def xxh3_128(data: Buffer) -> str:
    """The digest that guards stored bytes against decay: quick, and no match for an adversary."""
    return xxhash.xxh3_128_hexdigest(data)


def xxh3_128_of(parts: Iterable[Buffer]) -> str:
    """The digest of parts that lie apart."""
    hasher = xxhash.xxh3_128()
    for part in parts:
        hasher.update(part)
    return hasher.hexdigest()


Hasher = xxhash.xxh3_128
"""The same for parts that come one by one: `update`, `hexdigest`."""


def xxh3_64_number(data: Buffer) -> int:
    """A short digest as a number, to add up with others."""
    return xxhash.xxh3_64_intdigest(data)


def sha256_of(parts: Iterable[Buffer]) -> str:
    hasher = hashlib.sha256()
    for part in parts:
        hasher.update(part)
    return hasher.hexdigest()


# ------------------------------------------------------------------------------------------- chunks


def zstd_compress(data: Buffer) -> bytes:
    """Level 1, which is faster than most disks; the weights of a model hardly get smaller with more."""
    return zstandard.ZstdCompressor(level=1).compress(data)


def decoded(
    codec: str, data: np.ndarray[Any, Any], shape: tuple[int, ...], itemsize: int, detail: str
) -> bytes | np.ndarray[Any, Any]:
    """The bytes of a chunk of this shape that was stored by this codec; refuses what decodes to anything else."""
    nbytes = itemsize * math.prod(shape)
    chunk: bytes | np.ndarray[Any, Any] = data
    if codec == "zstd":
        chunk = _zstd_decompress(data, nbytes)
    elif codec == "zarr":
        chunk = _decoded_by_tensorstore(data, shape, nbytes, detail)
    if len(chunk) != nbytes:
        raise FormatError(f"{len(chunk)} bytes, expected are {nbytes}")
    return chunk


def _zstd_decompress(data: Buffer, nbytes: int) -> bytes:
    try:
        if zstandard.frame_content_size(data) not in (
            -1,
            nbytes,
        ):  # it would be allocated, however much it is
            raise FormatError("it is of another length")
        return zstandard.ZstdDecompressor().decompress(data, max_output_size=nbytes, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise FormatError(f"not zstd, or damaged: {error}") from error


def _decoded_by_tensorstore(
    data: np.ndarray[Any, Any], shape: tuple[int, ...], nbytes: int, metadata: str
) -> np.ndarray[Any, Any]:
    """A chunk of an array whose compressor, order or byte order is not ours: as an array of its own, in memory."""
    import tensorstore as ts  # late: seldom needed, and slow to import

    try:
        described = msgspec.json.decode(metadata) | {"shape": shape, "chunks": shape}
        _refuse_bomb(data, nbytes, described.get("compressor"))
        separator = described.get("dimension_separator") or "."
        name = separator.join("0" for _ in shape) or "0"
        memory = {"driver": "memory", "path": "chunk/"}
        context = ts.Context()
        ts.KvStore.open(memory, context=context).result().write(name, data.tobytes()).result()
        spec = {"driver": "zarr", "kvstore": memory, "metadata": described}
        chunk = ts.open(spec, context=context, create=True).result().read().result()
    except FormatError:
        raise
    except Exception as error:  # it may find anything wrong with what somebody else wrote
        raise FormatError(f"TensorStore cannot read it: {error}") from error
    return np.frombuffer(np.ascontiguousarray(chunk).tobytes(), np.uint8)


# What fails to allocate memory in there ends the process.
_MOST_DECODED = 2**31
_BLOSC_HEADER = 16


def _refuse_bomb(data: np.ndarray[Any, Any], nbytes: int, compressor: dict[str, Any] | None) -> None:
    codec = (compressor or {}).get("id", "")
    is_wrong = nbytes > _MOST_DECODED
    if codec == "":
        is_wrong = len(data) != nbytes
    elif codec == "blosc":  # whose header says how long it is
        is_wrong |= len(data) < _BLOSC_HEADER or int.from_bytes(data[4:8].tobytes(), "little") != nbytes
    if is_wrong:
        raise FormatError(f"{len(data)} bytes, {codec or 'not compressed'}, are no chunk of {nbytes}")


# --------------------------------------------------------------------------------------------- gzip


def gzip_compress(data: Buffer) -> bytes:
    """Equal input gives equal output: the header holds neither time nor name."""
    return zlib.compress(data, level=6, wbits=16 + zlib.MAX_WBITS)


def gzip_decompress(data: bytes) -> bytes:
    if not data:
        raise FormatError("not gzip: no bytes at all")
    try:
        return gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        raise FormatError(f"not gzip, or damaged: {error}") from error
