"""Compute and check digests of bytes: xxh3-128 and SHA-256."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import xxhash

from eformer.errors import CorruptionError, FormatError

if TYPE_CHECKING:
    from collections.abc import Buffer, Callable, Iterable  # type: ignore[attr-defined,unused-ignore]  # Python 3.12


xxh3_128: Callable[[Buffer], str] = xxhash.xxh3_128_hexdigest
"""Digest stored bytes, to detect damage. Fast, but not secure against forgery."""


def xxh3_128_of(parts: Iterable[Buffer]) -> str:
    """Digest several buffers as one sequence of bytes."""
    hasher = xxhash.xxh3_128()
    for part in parts:
        hasher.update(part)
    return hasher.hexdigest()


Hasher = xxhash.xxh3_128
"""An xxh3-128 digest of bytes that arrive in several buffers: `update`, `hexdigest`."""


def xxh3_64_number(data: Buffer) -> int:
    """Return a short digest as a number, for sums of digests."""
    return xxhash.xxh3_64_intdigest(data)


def sha256_of(parts: Iterable[Buffer]) -> str:
    """Compute the SHA-256 of several buffers as one sequence of bytes."""
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
    """Replace the zeros in the first field of `data` by the digest of `data`."""
    start = _own_digest_start(data)
    digest = xxh3_128(data).encode()
    return data[:start] + digest + data[start + DIGEST_DIGITS :]


def has_own_digest(beginning: bytes) -> bool:
    """Tell whether a document with its own digest could begin with these bytes."""
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
