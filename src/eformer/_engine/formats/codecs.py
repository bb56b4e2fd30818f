"""Compress and decompress: zstd, and the codecs of zarr chunks that other programs wrote.

Tests: tests/engine/formats/test_zarr.py, tests/engine/formats/test_hostile_arrays.py, tests/compat/test_zarr_python.py.
"""

from __future__ import annotations

import bz2
import math
import zlib
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import zstandard

from eformer._engine.record.zarray import parse_zarray
from eformer.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Buffer, Callable  # type: ignore[attr-defined,unused-ignore]  # Python 3.12

# ------------------------------------------------------------------------------------------- chunks


def zstd_compress(data: Buffer) -> bytes:
    """Compress at level 1, which is faster than most disks. Higher levels hardly shrink the weights of a model."""
    return zstandard.ZstdCompressor(level=1).compress(data)


def decoded(
    codec: str, data: np.ndarray[Any, Any], shape: tuple[int, ...], itemsize: int, detail: str
) -> bytes | np.ndarray[Any, Any]:
    """Decode a chunk of this shape. Raise a FormatError if it does not decode to the bytes of the shape.

    `codec` is "zstd", "zarr" (as the array's metadata in `detail` says), or "" for plain bytes. Memory is bounded by a
    small multiple of the chunk, whatever length the data claims.
    """
    nbytes = itemsize * math.prod(shape)
    chunk: bytes | np.ndarray[Any, Any] = data
    if codec == "zstd":
        chunk = _zstd_decompress(data, nbytes)
    elif codec == "zarr":
        chunk = _zarr_decode(data, shape, itemsize, detail)
    if len(chunk) != nbytes:
        raise FormatError(f"{len(chunk)} bytes, expected {nbytes}")
    return chunk


def _zstd_decompress(data: Buffer, nbytes: int) -> bytes:
    try:
        # Checked first, because zstd allocates as many bytes as the frame claims.
        if zstandard.frame_content_size(data) not in (-1, nbytes):
            raise FormatError(f"zstd data that does not decompress to {nbytes} bytes")
        return zstandard.ZstdDecompressor().decompress(data, max_output_size=nbytes, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise FormatError(f"not zstd, or damaged: {error}") from error


# ------------------------------------------------------------------------------- chunks of other programs


def _zarr_decode(
    data: np.ndarray[Any, Any], shape: tuple[int, ...], itemsize: int, metadata: str
) -> np.ndarray[Any, Any]:
    """Decode a chunk of zarr 2, whichever its compressor, memory order and byte order."""
    described, nbytes = parse_zarray(metadata, "its recorded .zarray"), itemsize * math.prod(shape)
    if described.filters:
        raise FormatError(f"filters are not supported: {str(described.filters)[:200]}")
    if described.codec == "blosc":
        return _decoded_by_tensorstore(data, shape, nbytes, metadata)
    chunk = np.frombuffer(_decompress(described.codec, data, nbytes), np.uint8)
    if len(chunk) != nbytes:
        raise FormatError(f"{len(chunk)} bytes, expected {nbytes}")
    if described.is_big_endian:
        chunk = chunk.view(str(described.dtype)).byteswap().view(np.uint8)
    if described.order == "F":
        elements = chunk.view(f"V{itemsize}").reshape(shape, order="F")
        chunk = np.ascontiguousarray(elements).reshape(-1).view(np.uint8)
    return chunk


def _decompress(codec: str, data: np.ndarray[Any, Any], nbytes: int) -> Buffer:
    if codec == "":
        return data
    if codec == "zstd":
        return _zstd_decompress(data, nbytes)
    if codec in ("zlib", "gzip"):
        return _inflate(codec, lambda: zlib.decompressobj(31 if codec == "gzip" else 15), data, nbytes)
    if codec == "bz2":
        return _inflate(codec, bz2.BZ2Decompressor, data, nbytes)
    raise FormatError(f"unknown compressor {codec[:40]!r}")


def _inflate(codec: str, begin: Callable[[], Any], data: Buffer, nbytes: int) -> bytes:
    """Decompress streams that follow each other. Stop one byte after `nbytes`, which proves that the data is too long,
    so that a short stream cannot fill the memory."""
    rest, found = memoryview(data), b""
    try:
        while rest and len(found) <= nbytes:
            stream = begin()
            found += stream.decompress(rest, nbytes + 1 - len(found))
            if not stream.eof and len(found) <= nbytes:
                raise FormatError(f"{codec} data that ends early")
            rest = memoryview(stream.unused_data)
    except (zlib.error, OSError, EOFError) as error:
        raise FormatError(f"not {codec}, or damaged: {error}") from error
    if len(found) > nbytes:
        raise FormatError(f"{codec} data that decompresses to more than {nbytes} bytes")
    return found


def _decoded_by_tensorstore(
    data: np.ndarray[Any, Any], shape: tuple[int, ...], nbytes: int, metadata: str
) -> np.ndarray[Any, Any]:
    """Decode a chunk that blosc compressed: give it to TensorStore as the only chunk of an array in memory."""
    import tensorstore as ts  # late: it is slow to import

    require_blosc(data[:BLOSC_HEADER].tobytes(), nbytes)
    try:
        described = msgspec.json.decode(metadata) | {"shape": shape, "chunks": shape}
        separator = described.get("dimension_separator") or "."
        name = separator.join("0" for _ in shape) or "0"
        memory = {"driver": "memory", "path": "chunk/"}
        context = ts.Context()
        ts.KvStore.open(memory, context=context).result().write(name, data.tobytes()).result()
        spec = {"driver": "zarr", "kvstore": memory, "metadata": described}
        chunk = ts.open(spec, context=context, create=True).result().read().result()
    except Exception as error:  # TensorStore raises errors of many kinds for damaged chunks
        raise FormatError(f"TensorStore cannot decode it: {error}") from error
    return np.frombuffer(np.ascontiguousarray(chunk).tobytes(), np.uint8)


BLOSC_HEADER = 16  # bytes
_MOST_BLOSC = 2**31  # bytes


def require_blosc(header: bytes, nbytes: int) -> None:
    """Refuse a chunk of blosc unless its header claims to decode to `nbytes`: TensorStore allocates the claimed length,
    and a failed allocation there ends the process."""
    claimed = int.from_bytes(header[4:8], "little")
    if len(header) < BLOSC_HEADER or claimed != nbytes or nbytes > _MOST_BLOSC:
        raise FormatError(
            f"blosc data that claims to decode to {claimed} bytes cannot be a chunk of {nbytes} bytes"
        )
