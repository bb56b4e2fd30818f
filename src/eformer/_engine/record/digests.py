"""Compute and check digests of bytes: xxh3-128 and SHA-256."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import xxhash

from eformer.errors import CorruptionError, FormatError

if TYPE_CHECKING:
    from collections.abc import Buffer, Callable, Iterable  # type: ignore[attr-defined,unused-ignore]  # Python 3.12


xxh3_128: Callable[[Buffer], str] = xxhash.xxh3_128_hexdigest
"""Digest stored bytes, to detect decay. Fast, but not secure against forgery."""


def xxh3_128_of(parts: Iterable[Buffer]) -> str:
    """Digest several buffers as if they were one."""
    hasher = xxhash.xxh3_128()
    for part in parts:
        hasher.update(part)
    return hasher.hexdigest()


Hasher = xxhash.xxh3_128
"""The same digest for bytes that arrive one part at a time: `update`, `hexdigest`."""


def xxh3_64_number(data: Buffer) -> int:
    """Return a short digest as a number, which can be summed with others."""
    return xxhash.xxh3_64_intdigest(data)


def sha256_of(parts: Iterable[Buffer]) -> str:
    """Compute the SHA-256 of several buffers as if they were one."""
    hasher = hashlib.sha256()
    for part in parts:
        hasher.update(part)
    return hasher.hexdigest()


# -------------------------------------------------------------------------------- a document's own digest

DIGEST_DIGITS = 32

NO_DIGEST = "0" * DIGEST_DIGITS

_ZEROS = NO_DIGEST.encode()
_MARK = b'"digest":"'
_MARK_WITHIN = 64  # bytes: the digest is the first field, even if the document is embedded in another


def stamp_digest(data: bytes) -> bytes:
    """Replace the zeros in the first field of `data`, the digest, by the digest of all of it."""
    start = _own_digest_start(data)
    digest = xxh3_128(data).encode()
    return data[:start] + digest + data[start + DIGEST_DIGITS :]


def has_own_digest(beginning: bytes) -> bool:
    """Tell whether these bytes could begin a document with its own digest."""
    return _own_digest_start(beginning) >= 0


def check_own_digest(data: bytes, origin: str) -> None:
    """Raise if the document does not match the digest in its first field."""
    start = _own_digest_start(data)
    if start < 0:
        raise FormatError(f"{origin} is not an eformer manifest, or its beginning is damaged")
    stop = start + DIGEST_DIGITS
    digest = xxh3_128_of([data[:start], _ZEROS, memoryview(data)[stop:]]).encode()
    if digest != data[start:stop]:
        raise CorruptionError(
            f"{origin} is damaged: the digest of its {len(data)} bytes is {digest.decode()}, expected "
            f"{data[start:stop].decode(errors='replace')}; restore the file from a copy"
        )


def _own_digest_start(data: bytes) -> int:
    found = data.find(_MARK, 0, _MARK_WITHIN)
    return found + len(_MARK) if found >= 0 else -1
