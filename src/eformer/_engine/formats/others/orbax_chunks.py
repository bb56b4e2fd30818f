"""Arrays that TensorStore reads, each chunk as if it were a file: by whatever codec, in whatever database."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct

from eformer.errors import CorruptionError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from eformer._engine.record.regions import Region


class Chunk(Struct, frozen=True):
    """A box of an array."""

    name: str
    array: Any
    box: Region
    nbytes: int


class ChunkFiles:
    """Chunks by number. Each is decoded as a whole, so it should be read at once."""

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        self._chunks = chunks

    def hold(self, numbers: Iterable[int]) -> None:
        """TensorStore opens what it needs when it needs it."""

    def read_into(self, number: int, memory: memoryview, offset: int) -> int:
        chunk = self._chunks[number]
        try:
            found = chunk.array[chunk.box.slices].read().result()
        except Exception as error:  # it may find anything wrong with what somebody else wrote
            raise CorruptionError(brief(error)) from error
        data = np.ascontiguousarray(found).reshape(-1).view(np.uint8)[offset : offset + len(memory)]
        memory[: len(data)] = data.data
        return len(data)

    def nbytes(self, number: int) -> int:
        return self._chunks[number].nbytes

    def map(self, number: int) -> None:
        """What has to be decoded cannot be mapped."""

    def rewritten(self) -> None:
        """TensorStore replaces chunks as a whole."""

    def close(self) -> None:
        self._chunks = ()


def brief(error: Exception) -> str:
    """What TensorStore says, without the specification of everything that it was doing."""
    return str(error).partition(" [")[0][:300]
