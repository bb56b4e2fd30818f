"""Digests of bytes: xxh3-128 and SHA-256."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import xxhash

from eformer.errors import CorruptionError, FormatError

if TYPE_CHECKING:
    from collections.abc import Buffer, Iterable  # type: ignore[attr-defined,unused-ignore]  # Python 3.12


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


# -------------------------------------------------------------------------------- a document's own digest

DIGEST_DIGITS = 32

NO_DIGEST = "0" * DIGEST_DIGITS

_ZEROS = NO_DIGEST.encode()
_MARK = b'"digest":"'
_MARK_WITHIN = 64  # the digest is the first field, also where something stands around the document


def stamp_digest(data: bytes) -> bytes:
    """`data` with the zeros of its first field, the digest, replaced by the digest of everything."""
    start = _own_digest_start(data)
    digest = xxh3_128(data).encode()
    return data[:start] + digest + data[start + DIGEST_DIGITS :]


def has_own_digest(beginning: bytes) -> bool:
    """Whether this could be the beginning of something sealed."""
    return _own_digest_start(beginning) >= 0


def check_own_digest(data: bytes, origin: str) -> None:
    start = _own_digest_start(data)
    if start < 0:
        raise FormatError(f"{origin} is not a manifest of eformer, or its beginning is damaged")
    stop = start + DIGEST_DIGITS
    digest = xxh3_128_of([data[:start], _ZEROS, memoryview(data)[stop:]]).encode()
    if digest != data[start:stop]:
        raise CorruptionError(
            f"{origin} is damaged: its {len(data)} bytes digest to {digest.decode()}, recorded is "
            f"{data[start:stop].decode(errors='replace')}; restore the file from a copy"
        )


def _own_digest_start(data: bytes) -> int:
    found = data.find(_MARK, 0, _MARK_WITHIN)
    return found + len(_MARK) if found >= 0 else -1
