"""Compress and decompress: zstd, and the codecs of zarr chunks that other programs wrote."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import zstandard

from eformer.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Buffer  # type: ignore[attr-defined,unused-ignore]  # Python 3.12


# ------------------------------------------------------------------------------------------- chunks


def zstd_compress(data: Buffer) -> bytes:
    """Compress at level 1, which is faster than most disks; higher levels hardly shrink the weights of a model."""
    return zstandard.ZstdCompressor(level=1).compress(data)


def decoded(
    codec: str, data: np.ndarray[Any, Any], shape: tuple[int, ...], itemsize: int, detail: str
) -> bytes | np.ndarray[Any, Any]:
    """Decode a chunk of this shape; raise a FormatError if it does not decode to as many bytes.

    `codec` is "zstd", "zarr" (by TensorStore, with the array's metadata as `detail`), or "" for plain bytes.
    """
    nbytes = itemsize * math.prod(shape)
    chunk: bytes | np.ndarray[Any, Any] = data
    if codec == "zstd":
        chunk = _zstd_decompress(data, nbytes)
    elif codec == "zarr":
        chunk = _decoded_by_tensorstore(data, shape, nbytes, detail)
    if len(chunk) != nbytes:
        raise FormatError(f"{len(chunk)} bytes, expected {nbytes}")
    return chunk


def _zstd_decompress(data: Buffer, nbytes: int) -> bytes:
    try:
        # Checked first, because zstd allocates as much as the frame says.
        if zstandard.frame_content_size(data) not in (-1, nbytes):
            raise FormatError(f"zstd that does not decompress to {nbytes} bytes")
        return zstandard.ZstdDecompressor().decompress(data, max_output_size=nbytes, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise FormatError(f"not zstd, or damaged: {error}") from error


def _decoded_by_tensorstore(
    data: np.ndarray[Any, Any], shape: tuple[int, ...], nbytes: int, metadata: str
) -> np.ndarray[Any, Any]:
    """Decode a chunk with any compressor, order and byte order that TensorStore knows, as an array in its memory."""
    import tensorstore as ts  # late: rarely needed, and slow to import

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
    except Exception as error:  # damaged chunks make TensorStore raise anything
        raise FormatError(f"TensorStore cannot decode it: {error}") from error
    return np.frombuffer(np.ascontiguousarray(chunk).tobytes(), np.uint8)


# A failed allocation in TensorStore ends the process.
_MAX_DECODED = 2**31  # bytes
_BLOSC_HEADER = 16


def _refuse_bomb(data: np.ndarray[Any, Any], nbytes: int, compressor: dict[str, Any] | None) -> None:
    """Refuse a chunk that claims an impossible or excessive size, before TensorStore allocates memory for it."""
    codec = (compressor or {}).get("id", "")
    is_wrong = nbytes > _MAX_DECODED
    if codec == "":
        is_wrong = len(data) != nbytes
    elif codec == "blosc":  # its header has the decoded length
        is_wrong |= len(data) < _BLOSC_HEADER or int.from_bytes(data[4:8].tobytes(), "little") != nbytes
    if is_wrong:
        raise FormatError(
            f"{len(data)} bytes, {codec or 'not compressed'}, cannot be a chunk of {nbytes} bytes"
        )
