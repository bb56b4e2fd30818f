"""Read and write the header of a safetensors file: a length, then JSON with the place of each tensor.

Tests: tests/engine/formats/safetensors/test_header.py, tests/engine/formats/test_safetensors_others.py.
"""

from __future__ import annotations

import json
import math
import struct
from collections import Counter
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import msgspec

from eformer._engine.record.dtypes import DTYPES, MOST_AXES
from eformer._engine.record.pieces import ALIGNMENT
from eformer._engine.record.values import MALFORMED_JSON, parse_json
from eformer.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from eformer._engine.stores.base import Entry, Store, Version

MAX_JSON_BYTES = 100_000_000  # other readers refuse more
_MAX_POINTER = 1024  # bytes of a pointer file of Git LFS
_HEADER_AHEAD = 2**16  # bytes of the first read; most headers are shorter

_TAGS = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "I16": "int16", "U16": "uint16", "F16": "float16", "BF16": "bfloat16",
    "I32": "int32", "U32": "uint32", "F32": "float32", "I64": "int64", "U64": "uint64", "F64": "float64",
    "C64": "complex64", "F8_E5M2": "float8_e5m2", "F8_E4M3": "float8_e4m3fn", "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz", "F4": "float4_e2m1fn",
}  # fmt: skip
_TAG_OF = {dtype: tag for tag, dtype in _TAGS.items()}


class Tensor(msgspec.Struct, frozen=True, gc=False):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class Header(msgspec.Struct, frozen=True):
    """The header of a file of `nbytes`, whose data begins at `start`."""

    start: int
    metadata: dict[str, str]
    tensors: dict[str, Tensor]
    nbytes: int
    version: Version = ""


@lru_cache(2**16)  # most leaves of a tree are alike
def described_as(dtype: str, shape: tuple[int, ...], nbytes: int) -> tuple[str, tuple[int, ...]]:
    """Return the dtype and the shape of a leaf for other readers. A dtype without a name in the format appears as
    integers of its size, four-bit integers as their values in eight bits. The manifest records the true dtype."""
    size = math.prod(shape)
    tag = _TAG_OF.get(dtype)
    if tag == "F4" and 2 * nbytes != size:  # the format cannot hold an odd number of four-bit floats
        tag = "U8"
    if tag:
        return tag, shape
    if dtype in ("int1", "int2", "int4"):
        return "I8", shape
    itemsize = nbytes // size if size else 1
    if itemsize <= 8:
        return f"U{8 * itemsize}", shape
    return "U64", (*shape, itemsize // 8)


def header_bytes(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> bytes:
    """Encode a header. Pad it so that the data is aligned, and XLA can use it without a copy."""
    text = msgspec.json.encode({"__metadata__": dict(metadata), **tensors})
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    if len(text) > MAX_JSON_BYTES:
        raise FormatError(
            f"{len(tensors)} leaves need a header of {len(text)} bytes; safetensors allows {MAX_JSON_BYTES}. "
            "Save to a directory instead of one file"
        )
    return struct.pack("<Q", len(text)) + text


def open_header(store: Store, name: str) -> Header:
    """Read and check the header of a safetensors file at the top of the store."""
    raw, entry = read_header(store, name)
    return parse_header(raw, entry.nbytes, store.path_to(name), entry.version)


def read_header(store: Store, name: str) -> tuple[bytes, Entry]:
    """Read the bytes of a header without parsing them."""
    if "/" in name:
        raise FormatError(f"{name[:200]!r} is not the name of a file in {store.url}")
    data, entry = store.read(name, 0, _HEADER_AHEAD)
    length = header_length(data, entry.nbytes, store.path_to(name))
    if length <= len(data):
        return data[:length], entry
    rest, now = store.read(name, len(data), length - len(data))
    if now.version != entry.version:
        raise FileNotFoundError(f"{store.path_to(name)} was replaced while it was being read; try again")
    return data + rest, entry


def read_metadata(store: Store, name: str) -> dict[str, str]:
    """Read the metadata of a file. Its tensors are not parsed, which may be very many."""
    return metadata_in(read_header(store, name)[0], f"{store.path_to(name)} has no valid safetensors header")


def metadata_in(header: bytes, problem: str) -> dict[str, str]:
    """Parse the metadata of a header. Raise a FormatError that begins with `problem` if that fails."""
    return parse_json(header[8:], _Metadata, problem).metadata


class _Metadata(msgspec.Struct):
    metadata: dict[str, str] = msgspec.field(default_factory=dict, name="__metadata__")


def read_tensor_names(store: Store, name: str) -> list[str]:
    """Read the names of the tensors in a file that eformer wrote. Their places are not checked."""
    raw, _ = read_header(store, name)
    entries = parse_json(
        raw[8:], dict[str, msgspec.Raw], f"{store.path_to(name)} has no valid safetensors header"
    )
    return [tensor for tensor in entries if tensor != "__metadata__"]


def header_length(first: bytes, file_nbytes: int, origin: str) -> int:
    """Return the length of the whole header, given the first eight bytes of the file."""
    if len(first) < 8:
        raise FormatError(
            f"{origin} is not a safetensors file: it is {file_nbytes} bytes long, expected at least 8; "
            "restore it from a copy"
        )
    if first[:8] == b"version " and file_nbytes < _MAX_POINTER:
        raise FormatError(
            f"{origin} is a pointer of Git LFS, not the file itself: fetch the file with git lfs pull"
        )
    (length,) = struct.unpack("<Q", first[:8])
    if length > min(MAX_JSON_BYTES, file_nbytes - 8):
        raise FormatError(
            f"{origin} is not a safetensors file: it announces a header of {length} bytes, "
            f"but {file_nbytes - 8} bytes follow and at most {MAX_JSON_BYTES} are allowed"
        )
    return 8 + int(length)


def parse_header(data: bytes, file_nbytes: int, origin: str, version: Version = "") -> Header:
    """Parse a header. Refuse it unless its tensors tile the rest of the file exactly."""
    problem = f"{origin} has no valid safetensors header"
    entries = parse_json(data[8:], dict[str, msgspec.Raw], problem)
    raw_metadata = bytes(entries.pop(_METADATA, b""))
    metadata = parse_json(raw_metadata or b"{}", dict[str, str], problem)
    try:
        tensors = {name: _decode_tensor(raw) for name, raw in entries.items()}
    except MALFORMED_JSON as error:
        raise FormatError(f"{problem}: {error}") from error
    fields = len(tensors) * (1 + len(_FIELDS)) + bool(raw_metadata)
    # More colons than fields: a field is given twice, or a name contains a colon. Only then use the slow parser.
    if data.count(b":", 8) - raw_metadata.count(b":") != fields:
        _refuse_duplicates(data[8:], origin)
    _check_tiling(tensors, file_nbytes - len(data), origin)
    return Header(len(data), metadata, tensors, file_nbytes, version)


def _refuse_duplicates(text: bytes, origin: str) -> None:
    """Refuse two tensors of one name, a second `__metadata__` and repeated fields: JSON would keep the last of them."""
    try:
        entries = json.loads(text, object_pairs_hook=_Pairs, parse_int=str, parse_float=str)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{origin} has no valid safetensors header: {error}") from error
    for name in sorted(entries.duplicates()):
        twice = f"two {_METADATA}" if name == _METADATA else f"two tensors of the name {name[:200]!r}"
        raise FormatError(f"{origin} has {twice}")
    for name, found in entries:
        if name != _METADATA and (repeated := found.duplicates() & set(_FIELDS)):
            raise FormatError(f"{origin}: tensor {name[:200]!r} has the field {min(repeated)!r} twice")


class _Pairs(list[tuple[str, Any]]):
    """A JSON object with all its members, in order."""

    def duplicates(self) -> set[str]:
        return {name for name, number in Counter(name for name, _ in self).items() if number > 1}


_METADATA = "__metadata__"
_FIELDS = Tensor.__struct_fields__
_decode_tensor = msgspec.json.Decoder(Tensor).decode


def _check_tiling(tensors: Mapping[str, Tensor], nbytes: int, origin: str) -> None:
    end = 0
    for name, found in sorted(tensors.items(), key=lambda item: item[1].data_offsets):
        start, stop = found.data_offsets
        if start != end or stop < start:
            raise FormatError(
                f"{origin}: tensor {name[:200]!r} begins at {start}, but the previous one ends at {end}"
            )
        if len(found.shape) > MOST_AXES:
            raise FormatError(
                f"{origin}: tensor {name[:200]!r} has {len(found.shape)} axes, more than {MOST_AXES}"
            )
        bits = math.prod(found.shape) * element_bits(found, name, origin)
        if min(found.shape, default=0) < 0 or bits != 8 * (stop - start):
            raise FormatError(
                f"{origin}: tensor {name[:200]!r} of {found.dtype}{list(found.shape)} cannot have {stop - start} bytes"
            )
        end = stop
    if end != nbytes:
        raise FormatError(
            f"{origin}: its tensors take {end} bytes, but {nbytes} bytes follow the header; restore it from a copy"
        )


def element_bits(found: Tensor, name: str, origin: str) -> int:
    if found.dtype == "F4":
        return 4
    if found.dtype not in _TAGS:
        raise FormatError(
            f"{origin}: tensor {name[:200]!r} has the dtype {found.dtype[:40]!r}, which is not supported"
        )
    return 8 * DTYPES[_TAGS[found.dtype]].itemsize


def dtype_of(found: Tensor) -> str:
    return _TAGS[found.dtype]
