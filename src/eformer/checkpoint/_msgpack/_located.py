"""A msgpack message to a tree, in the place of whose arrays it says where in the message they lie."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from eformer.checkpoint._msgpack._reader import PRNG_KEY, read
from eformer.checkpoint._ndarray import from_raw
from eformer.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Sequence


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


def locate(view: memoryview) -> Any:
    """The tree in a message, of which only what is no array is looked at."""
    return read(view, _Locations())


class _Locations:
    def array(self, data: memoryview, name: str, shape: tuple[int, ...], at: int) -> Located:
        key = PRNG_KEY.fullmatch(name)
        dtype = "uint32" if key else name
        from_raw(data, dtype, shape)  # refuses what cannot be
        if key and not shape:
            raise FormatError("a single number is no PRNG key")
        return Located(dtype, shape, ((at, len(data)),), key[1] if key else None)

    def joined(self, shape: list[int], chunks: Sequence[Any]) -> Located:
        if not all(isinstance(chunk, Located) and chunk.key is None for chunk in chunks):
            raise FormatError("chunks that are no arrays of numbers")
        return Located(chunks[0].dtype, tuple(shape), tuple(r for chunk in chunks for r in chunk.ranges))
