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
