"""A msgpack message to a tree, in the place of whose arrays it says where in the message they lie."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from eformer._engine.formats.msgpack.reader import PRNG_KEY, read_head, read_some
from eformer._engine.record.dtypes import dtype_from_name
from eformer.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from eformer._engine.formats.msgpack.reader import Message

_MOST_HEAD = 2**11  # bytes, for a shape and a name
_MOST_VALUES = 2**20  # numbers, texts and arrays: what has more is no checkpoint, and takes seconds


class Located(Struct, frozen=True):
    """An array: its elements are these bytes of the message, (offset, nbytes) each. `key` names the generator of a
    typed PRNG key."""

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


def locate(message: Message) -> Any:
    """The tree in a message, of which only what is no array is looked at."""
    return read_some(message, _Locations(), _MOST_VALUES)


class _Locations:
    def array(self, payload: Any, at: int) -> Located:
        shape, name, start, stop = read_head(memoryview(bytes(payload[:_MOST_HEAD])))
        if stop != len(payload) or not _is_shape(shape) or not isinstance(name, str):
            raise FormatError("wrong payload of an extension: not a shape, a dtype and bytes")
        key = PRNG_KEY.fullmatch(name)
        dtype, nbytes = "uint32" if key else name, stop - start
        if dtype_from_name(dtype).itemsize * math.prod(shape) != nbytes:
            raise FormatError(f"{dtype}{shape} takes other than the {nbytes} bytes that it has")
        if key and not shape:
            raise FormatError("a single number is no PRNG key")
        return Located(dtype, tuple(shape), ((at + start, nbytes),), key[1] if key else None)

    def joined(self, shape: list[int], chunks: Sequence[Any]) -> Located:
        if not all(isinstance(chunk, Located) and chunk.key is None for chunk in chunks):
            raise FormatError("chunks that are no arrays of numbers")
        return Located(chunks[0].dtype, tuple(shape), tuple(r for chunk in chunks for r in chunk.ranges))


def _is_shape(shape: Any) -> bool:
    return isinstance(shape, list) and all(type(length) is int and length >= 0 for length in shape)
