"""Turn numpy arrays into bytes and back: dtype names, and elements in C order, little endian."""

from __future__ import annotations

import math
import re
import sys
from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from eformer.errors import FormatError, LeafError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MOST_AXES = 64  # of an array, by numpy

# A strided or big-endian array is copied in parts, so that writing it takes this much extra memory instead of a second
# copy of the array.
_COPIED_BYTES = 16 * 2**20

# Below this a copy is cheaper than a view.
_SMALL = 2**12

_BIG_ENDIAN = ">" if sys.byteorder == "little" else ">="


def _known_dtypes() -> dict[str, np.dtype[Any]]:
    """Map names to the numeric dtypes of numpy and all dtypes of ml_dtypes."""
    numbers = [np.dtype(code) for code in np.typecodes["AllInteger"] + np.typecodes["AllFloat"] + "?"]
    types = [t for t in vars(ml_dtypes).values() if isinstance(t, type) and issubclass(t, np.generic)]
    # Look dtypes up by name again: of several numpy integers of one size, only one is named int64.
    return {dtype.name: np.dtype(dtype.name) for dtype in (*numbers, *map(np.dtype, types))}


DTYPES = _known_dtypes()

# A multiple of zero is excluded: numpy divides by it, and the process dies (SIGFPE).
_DATETIME = re.compile(r"(datetime|timedelta)64(\[([1-9][0-9]{0,9})?(Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?")


def dtype_from_name(name: str) -> np.dtype[Any]:
    """Return the little-endian dtype named `name`. Names outside the table never reach numpy's dtype parser."""
    if dtype := DTYPES.get(name):
        return dtype
    if _DATETIME.fullmatch(name):
        with suppress(TypeError):  # a multiple beyond 2**31
            return np.dtype(name)
    raise FormatError(
        f"unknown dtype {name[:64]!r}; known dtypes: {', '.join(DTYPES)}, datetime64, timedelta64"
    )


@lru_cache(256)  # numpy takes two microseconds to name a dtype
def name_of_dtype(dtype: np.dtype[Any]) -> str:
    """Return the recorded name of a dtype. Raise LeafError if eformer cannot store arrays of it."""
    try:
        if dtype_from_name(dtype.name) == dtype.newbyteorder("<"):
            return dtype.name
    except FormatError:
        pass
    hint = "; store text as plain strings" if dtype.kind in "SUT" else ""
    raise LeafError(f"an array of dtype {dtype} cannot be stored{hint}")


# Common abbreviations, beside numpy's own names.
_ALIASES = {
    "bf16": "bfloat16", "fp16": "float16", "f16": "float16", "half": "float16", "fp32": "float32", "f32": "float32",
    "fp64": "float64", "f64": "float64", "e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2",
}  # fmt: skip


def is_floating(name: str) -> bool:
    return name.startswith(("float", "bfloat"))


def floating_dtype(dtype: Any) -> str:
    """Return the name of a floating dtype from its name, an alias, a type or a dtype."""
    try:
        name = _ALIASES.get(dtype, dtype) if isinstance(dtype, str) else np.dtype(dtype).name
    except TypeError:
        name = repr(dtype)
    known = [name for name in DTYPES if is_floating(name)]
    if name not in known:
        raise ValueError(f"{dtype!r} is not a floating dtype; known dtypes: {', '.join([*known, *_ALIASES])}")
    return name


def raw_pieces(array: np.ndarray[Any, Any]) -> Iterator[bytes | memoryview]:
    """Yield the elements as little-endian bytes in C order: a view if the memory has this layout, else copies."""
    if array.dtype.byteorder in _BIG_ENDIAN:
        for block in _blocks(array):
            yield block.astype(block.dtype.newbyteorder("<")).tobytes()
    elif array.nbytes <= _SMALL:
        yield array.tobytes()
    elif array.flags.c_contiguous:
        yield array.reshape(-1).view(np.uint8).data
    else:
        for block in _blocks(array):
            yield block.tobytes()


def _blocks(array: np.ndarray[Any, Any]) -> Iterator[np.ndarray[Any, Any]]:
    """Split `array` along its leading axes into boxes of at most `_COPIED_BYTES`, in C order."""
    if array.nbytes <= _COPIED_BYTES:
        yield array
        return
    rows = _COPIED_BYTES // (array.nbytes // len(array))
    if rows == 0:
        for row in array:
            yield from _blocks(row)
    else:
        for start in range(0, len(array), rows):
            yield array[start : start + rows]


def from_raw(data: memoryview, name: str, shape: Sequence[int]) -> np.ndarray[Any, Any]:
    """View `data` as an array, which is writable if `data` is."""
    dtype = dtype_from_name(name)
    if min(shape, default=0) < 0:
        raise FormatError(f"negative dimension in shape {list(shape)}")
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes != len(data):
        raise FormatError(f"{name}{list(shape)} takes {nbytes} bytes, found {len(data)}")
    try:
        return np.ndarray(shape, dtype, data)
    except ValueError as error:  # numpy's own limits: 64 axes, and sizes that overflow beside a zero
        raise FormatError(f"{name}{list(shape)}: {error}") from error


def pack_nibbles(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Pack an even number of four-bit elements, two in each byte, the first in the low half."""
    bits = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return (bits[0::2] & 15) | (bits[1::2] << 4)


def unpack_nibbles(data: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Unpack four-bit elements, two in each byte, to one element in each byte."""
    bits = np.empty(2 * len(data), np.uint8)
    bits[0::2], bits[1::2] = data & 15, data >> 4
    return bits
