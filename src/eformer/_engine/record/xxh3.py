"""xxh3-128 in two halves: programs on devices compute accumulators, and numpy merges them into digests. Pure.

The algorithm, for inputs longer than 240 bytes: eight accumulators of 64 bits take in the input in stripes of 64 bytes.
Within a block of 16 stripes they only add, so the stripes of a block can be summed in any order. After each block the
accumulators are scrambled. The last partial block and the last 64 bytes are added without a scramble, and a merge of
the accumulators with the length gives the digest.

Tests: tests/engine/trees/test_device_digests.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

SHORTEST = 241  # bytes: xxh3 digests shorter inputs in other ways
STRIPE, STRIPES = 64, 16  # bytes of a stripe, stripes of a block
BLOCK = STRIPE * STRIPES
LANES = 8  # accumulators

_U64 = np.dtype("<u8")
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)

PRIME32 = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
_PRIME64 = (
    0x9E3779B185EBCA87,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x85EBCA77C2B2AE63,
    0x27D4EB2F165667C5,
)
_AVALANCHE = 0x165667919E3779F9

_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)


def _secret(start: int) -> np.ndarray[Any, Any]:
    return np.frombuffer(_SECRET, _U64, LANES, start)


INITIAL = np.array(
    [PRIME32[2], *_PRIME64[:4], PRIME32[1], _PRIME64[4], PRIME32[0]], np.uint64
)  # the accumulators before the first stripe
STRIPE_KEYS = np.stack([_secret(LANES * stripe) for stripe in range(STRIPES)])  # of each stripe of a block
SCRAMBLE_KEY = _secret(len(_SECRET) - STRIPE)
LAST_KEY = _secret(len(_SECRET) - STRIPE - 7)  # of the last 64 bytes


def merged_digests(accumulators: np.ndarray[Any, Any], nbytes: Sequence[int]) -> np.ndarray[Any, Any]:
    """Merge accumulators of shape [inputs, 8] into digests: the two halves of each, high and low, of 64 bits."""
    lengths = np.asarray(nbytes, np.uint64)
    with np.errstate(over="ignore"):
        low = _merged(accumulators, 11, lengths * np.uint64(_PRIME64[0]))
        high = _merged(accumulators, len(_SECRET) - STRIPE - 11, ~(lengths * np.uint64(_PRIME64[1])))
    return np.stack([high, low], axis=1)


def parsed_digests(digits: str) -> np.ndarray[Any, Any]:
    """Return concatenated hexadecimal digests as `merged_digests` returns them."""
    return np.frombuffer(bytes.fromhex(digits), ">u8").astype(np.uint64).reshape(-1, 2)


def digest_texts(digests: np.ndarray[Any, Any]) -> list[str]:
    """Return digests, as `merged_digests` returns them, in hexadecimal digits."""
    return [f"{high:016x}{low:016x}" for high, low in digests.tolist()]


def _merged(accumulators: np.ndarray[Any, Any], start: int, seed: Any) -> Any:
    """Merge the accumulators into 64 bits: 128-bit products of pairs, folded and added, then an avalanche."""
    mixed = accumulators ^ _secret(start)
    merged = seed
    for lane in range(0, LANES, 2):
        merged = merged + _folded_product(mixed[:, lane], mixed[:, lane + 1])
    merged = (merged ^ (merged >> np.uint64(37))) * np.uint64(_AVALANCHE)
    return merged ^ (merged >> _HALF)


def _folded_product(a: Any, b: Any) -> Any:
    """Return the exclusive or of both halves of the product of 128 bits."""
    low_low, high_low = (a & _LOW) * (b & _LOW), (a >> _HALF) * (b & _LOW)
    low_high, high_high = (a & _LOW) * (b >> _HALF), (a >> _HALF) * (b >> _HALF)
    cross = (low_low >> _HALF) + (high_low & _LOW) + low_high
    return (high_high + (high_low >> _HALF) + (cross >> _HALF)) ^ ((cross << _HALF) | (low_low & _LOW))
