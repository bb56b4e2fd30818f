"""Chunks of arrays that TensorStore reads, each as if it were a file, whatever its codec and its database."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct

from eformer._engine.formats.others.orbax_blosc import BloscChunks, blosc_chunks
from eformer._engine.formats.zarr.zarray import chunks_of, count_chunks
from eformer._engine.record.check import require_chunk_for
from eformer._engine.stores.virtual_files import UnchangingFiles
from eformer.errors import CorruptionError, FormatError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from eformer._engine.record.regions import Region

_MAX_CHUNKS = 2**16  # of one array


class Chunk(Struct, frozen=True):
    """A box of an array of TensorStore."""

    name: str
    array: Any
    box: Region
    nbytes: int
    blosc: BloscChunks | None = None

    def read(self) -> Any:
        """Read the box. Raise a FormatError, or anything, if it cannot be decoded."""
        if self.blosc:
            self.blosc.require_claims(self.box)
        return self.array[self.box.slices].read().result()


def split_into_chunks(path: str, array: Any, itemsize: int) -> list[Chunk]:
    """Split an array into the boxes to read: its chunks, or several together if there are very many."""
    shape = tuple(array.shape)
    chunk_shape = tuple(max(1, size) for size in array.chunk_layout.read_chunk.shape or ())
    try:
        require_chunk_for(shape, chunk_shape, itemsize)
    except FormatError as error:
        raise FormatError(f"leaf {path!r}: {error}") from error
    blosc = blosc_chunks(path, array, chunk_shape, itemsize)
    return [
        Chunk(f"{path}/{where}", array, box, itemsize * math.prod(box.shape), blosc)
        for where, box in chunks_of(shape, _merged(shape, chunk_shape))
    ]


def _merged(shape: tuple[int, ...], chunk_shape: tuple[int, ...]) -> tuple[int, ...]:
    while count_chunks(shape, chunk_shape) > _MAX_CHUNKS:
        counts = [-(-size // part) for size, part in zip(shape, chunk_shape, strict=True)]
        axis = counts.index(max(counts))
        chunk_shape = (*chunk_shape[:axis], 2 * chunk_shape[axis], *chunk_shape[axis + 1 :])
    return chunk_shape


class ChunkFiles(UnchangingFiles):
    """Chunks by number. Each read decodes a whole chunk, so a chunk should be read at once.

    TensorStore opens files when it reads them, and replaces a chunk as a whole, so a read never mixes two.
    """

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        self._chunks = chunks

    def read_into(self, number: int, memory: memoryview, offset: int) -> int:
        chunk = self._chunks[number]
        try:
            found = chunk.read()
        except Exception as error:  # damaged files make TensorStore raise anything
            raise CorruptionError(brief(error)) from error
        data = np.ascontiguousarray(found).reshape(-1).view(np.uint8)[offset : offset + len(memory)]
        memory[: len(data)] = data.data
        return len(data)

    def nbytes(self, number: int) -> int:
        return self._chunks[number].nbytes

    def close(self) -> None:
        self._chunks = ()


def brief(error: Exception) -> str:
    """Shorten an error of TensorStore to its message, without the specification that follows."""
    return str(error).partition(" [")[0][:300]
