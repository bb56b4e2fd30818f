"""Change bytes and documents at random, as hostile and as damaged files are."""

from __future__ import annotations

import base64
import copy
import struct
from typing import TYPE_CHECKING, Any

from fuzz.documents import Embedded, Literal, Pairs, slots

if TYPE_CHECKING:
    from random import Random

NUMBERS = (
    0, 1, 2, 3, 7, 8, 63, 64, 65, 127, 128, 255, 256, 65535, 2**31 - 1, 2**31, 2**32, 2**32 + 1, 2**40, 2**53, 2**60,
    2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**19, 10**30, 10**400, -1, -2, -(2**31), -(2**63), -(10**30),
)  # fmt: skip
TEXTS = (
    "", "a", ".", "..", "/", "../outside/secret", "../outside", "/etc/hostname", "a/../../outside/secret", "a/b", "a//b",
    "\x00", "a\x00b", "\ud800", "\udfff\ud800", "é", "e\u0301", "\u202e", "\x1b[31m", "x" * 300, "x" * 5000, "%s", "{}",
    "float32", "bfloat16", "int4", "int2", "float4_e2m1fn", "uint32", "bool", "complex64", "float64", "object", "O", "<f4",
    ">f4", "|V2", "|O", "|b1", "<U4", "<M8[ns]", "numpy", "jax", "weak", "threefry2x32", "zstd", "zarr", "blosc", "gzip",
    "null", "NaN", "1", "-1", "1e400", "0" * 32, "f" * 64, "manifest.json", "model.safetensors", "tensorstore_index.json",
    "nan", "inf", "-inf", "0x7fffffff", "7ff8000000000000", "YWJj", "YW Jj=", "dict", "list", "tuple", "None", "whole", "torn",
)  # fmt: skip
TAGS = (
    "str", "int", "float", "nan", "complex", "bytes", "tuple", "list", "set", "frozenset", "dict", "dtype", "numpy scalar",
    "numpy", "ml_dtypes", "jax.numpy", "code", "opaque", "leaf", "none", "namedtuple", "node",
)  # fmt: skip


def value(rng: Random) -> Any:
    """Make a value that a reader may not expect."""
    kind = rng.randrange(12)
    if kind < 4:
        return rng.choice(NUMBERS)
    if kind < 7:
        return rng.choice(TEXTS)
    if kind == 7:
        return rng.choice((None, True, False, 0.5, -0.0, 1e308))
    if kind == 8:
        return rng.choice(([], {}, [[]], [None], [0], [0, 0], {"": None}, [[0], [1]], {"a": {}}))
    if kind == 9:
        return {rng.choice(TAGS): value(rng)}
    if kind == 10:
        return [value(rng) for _ in range(rng.randrange(4))]
    return Literal(
        rng.choice(
            ("NaN", "Infinity", "-Infinity", "1e999", "-0", "[" * 3000 + "]" * 3000, "0.1e-400", "01", "'a'")
        )
    )


def document(content: Any, rng: Random, others: list[Any]) -> None:
    """Change a document in one place. Values may come from elsewhere in it, or from `others`."""
    places = slots(content)
    if not places:
        return
    holder, key = rng.choice(places)
    kind = rng.randrange(10)
    if kind < 3:
        holder[key] = value(rng)
    elif kind < 5:
        source = slots(rng.choice(others)) if others and rng.random() < 0.3 else places
        if source:
            there, name = rng.choice(source)
            holder[key] = copy.deepcopy(there[name])
    elif kind < 7:
        holder[key] = _tweaked(holder[key], rng)
    elif kind == 7:
        del holder[key]
    else:
        _added(content, holder, key, rng)


def _added(content: Any, holder: Any, key: Any, rng: Random) -> None:
    """Add an item, rename a key, or give a key twice."""
    if isinstance(holder, list):
        holder.insert(rng.randrange(len(holder) + 1), rng.choice((holder[key], value(rng))))
        return
    kind = rng.randrange(3)
    if kind == 0:
        holder[rng.choice((*TEXTS, *TAGS))] = rng.choice((holder[key], value(rng)))
    elif kind == 1:
        holder[rng.choice((*TEXTS, *TAGS, f"{key}.", f"{key}/x", key[:-1]))] = holder.pop(key)
    else:
        _given_twice(content, holder, key, rng)


def _given_twice(content: Any, holder: Any, key: Any, rng: Random) -> None:
    twice = Pairs(holder, (key, rng.choice((holder[key], value(rng)))))
    for outer, name in slots(content):
        if outer[name] is holder:
            outer[name] = twice
            return


def _tweaked(found: Any, rng: Random) -> Any:
    if isinstance(found, bool) or found is None or isinstance(found, (Literal, Embedded, Pairs)):
        return value(rng)
    if isinstance(found, (int, float)):
        return rng.choice((found + 1, found - 1, -found, found * 2, found * 1000, str(found), [found], float(found)
                           if abs(found) < 10**300 else 0, found + 2**32, found // 2 if isinstance(found, int) else 0))  # fmt: skip
    if isinstance(found, str):
        if rng.random() < 0.5 and (inner := _decoded(found)):
            return base64.b64encode(damaged(inner, rng, [])).decode()
        at = rng.randrange(len(found) + 1)
        return rng.choice((found[:at], found[at:], found[:at] + rng.choice(TEXTS) + found[at:], found * 2, found.swapcase(),
                           found[:at] + chr(rng.randrange(256)) + found[at + 1 :]))  # fmt: skip
    if isinstance(found, list):
        return rng.choice((found[::-1], found * 2, found[:-1], [found], found[1:], found * 40))
    if isinstance(found, dict):
        keys = list(found)
        rng.shuffle(keys)
        return rng.choice(({key: found[key] for key in keys}, [found], list(found.items()), list(found)))
    return value(rng)


def _decoded(text: str) -> bytes:
    """Return what a text in base64 says, such as a pickle; nothing for any other text."""
    try:
        return base64.b64decode(text, validate=True) if len(text) >= 12 else b""
    except ValueError:
        return b""


# ------------------------------------------------------------------------------------------------ bytes


def damaged(data: bytes, rng: Random, others: list[bytes]) -> bytes:
    """Flip, cut, repeat or splice bytes."""
    if not data:
        return bytes(rng.randrange(256) for _ in range(rng.randrange(1, 20)))
    at = _place(len(data), rng)
    kind = rng.randrange(9)
    if kind < 3:
        return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]
    if kind == 3:
        return (
            data[:at]
            + bytes([rng.choice((0, 1, 0x7F, 0x80, 0xFE, 0xFF, rng.randrange(256)))])
            + data[at + 1 :]
        )
    if kind == 4:
        return data[:at]
    stop = min(len(data), at + rng.choice((1, 2, 4, 8, 16, 64, len(data))))
    if kind == 5:
        return data[:at] + data[stop:]
    if kind == 6:
        return data[:stop] + data[at:stop] * rng.choice((1, 1, 2, 20)) + data[stop:]
    if kind == 7:
        number = rng.choice(NUMBERS) % 2**64
        packed = struct.pack(rng.choice(("<Q", ">Q")), number)[: rng.choice((1, 2, 4, 8))]
        return data[:at] + packed + data[at + len(packed) :]
    other = rng.choice(others) if others else data
    start = rng.randrange(len(other) + 1)
    piece = other[start : start + rng.choice((1, 4, 16, 256))]
    return data[:at] + piece + data[at + (len(piece) if rng.random() < 0.5 else 0) :]


def _place(length: int, rng: Random) -> int:
    """Choose a byte, often near the beginning or the end, where formats keep what they say of themselves."""
    kind = rng.randrange(4)
    if kind == 0:
        return min(length - 1, rng.randrange(64))
    if kind == 1:
        return max(0, length - 1 - rng.randrange(64))
    return rng.randrange(length)
