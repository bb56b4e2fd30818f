"""Bytes to bytes, and bytes to digests: gzip, xxh3-128, sha256."""

from __future__ import annotations

import gzip
import hashlib
import zlib
from typing import TYPE_CHECKING

import msgspec
import xxhash

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


def sha256(data: Buffer) -> str:
    return hashlib.sha256(data).hexdigest()


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
