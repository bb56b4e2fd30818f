"""Read a msgpack message into a tree with the places of the arrays in the message instead of the arrays."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from eformer._engine.formats.msgpack.reader import PRNG_KEY, read_array_head, read_at_most
from eformer._engine.record.dtypes import dtype_from_name
from eformer.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from eformer._engine.formats.msgpack.reader import Message

_MAX_HEAD = 2**11  # bytes of a shape and a name
_MAX_VALUES = 2**20  # more take seconds to read, and no checkpoint has so many


class ArrayLocation(Struct, frozen=True):
    """An array whose elements are these `ranges` of the message, (offset, nbytes) each.

    `key` names the generator of a typed PRNG key.
    """

    dtype: str
    shape: tuple[int, ...]
    ranges: tuple[tuple[int, int], ...]
    key: str | None = None

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def locate_arrays(message: Message) -> Any:
    """Read the tree in a message, with an ArrayLocation for each array. The bytes of arrays are not read."""
    return read_at_most(_MAX_VALUES, message, _LocationMaker())


class _LocationMaker:
    def make(self, payload: Any, at: int) -> ArrayLocation:
        shape, name, start, stop = read_array_head(memoryview(bytes(payload[:_MAX_HEAD])))
        if stop != len(payload) or not _is_shape(shape) or not isinstance(name, str):
            raise FormatError("wrong payload of an extension: not a shape, a dtype and bytes")
        key = PRNG_KEY.fullmatch(name)
        dtype, nbytes = "uint32" if key else name, stop - start
        if dtype_from_name(dtype).itemsize * math.prod(shape) != nbytes:
            raise FormatError(f"{dtype}{shape} does not take the {nbytes} bytes that are stored for it")
        if key and not shape:
            raise FormatError("a PRNG key is an array of numbers, but this is a single number")
        return ArrayLocation(dtype, tuple(shape), ((at + start, nbytes),), key[1] if key else None)

    def join(self, shape: list[int], chunks: Sequence[Any]) -> ArrayLocation:
        if not all(isinstance(chunk, ArrayLocation) and chunk.key is None for chunk in chunks):
            raise FormatError("the chunks of an array are not arrays of numbers")
        ranges = tuple(span for chunk in chunks for span in chunk.ranges)
        return ArrayLocation(chunks[0].dtype, tuple(shape), ranges)


def _is_shape(shape: Any) -> bool:
    return isinstance(shape, list) and all(type(length) is int and length >= 0 for length in shape)
