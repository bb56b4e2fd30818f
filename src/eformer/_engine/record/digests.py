"""Digests of bytes: xxh3-128 and SHA-256."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import xxhash

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
