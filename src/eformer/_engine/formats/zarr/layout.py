"""Plan zarr arrays: a file for each chunk of a leaf, and `.zarray`, which is all header."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from msgspec import Struct

from eformer._engine.formats.zarr.zarray import chunk_shape, chunks_in, zarray
from eformer._engine.record.digests import NO_DIGEST
from eformer._engine.record.manifest import Coding
from eformer._engine.record.names import name_to_path
from eformer._engine.record.planned import PlannedExtent, PlannedFile, no_digests
from eformer._engine.record.zarray import ZARRAY

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from eformer._engine.record.options import SaveOptions
    from eformer._engine.record.planned import Source
    from eformer._engine.record.regions import Region

# A chunk is the least that other programs can read. One that has to be encoded is in memory as a whole.
_CHUNK_BYTES = 2**30
_ENCODED_CHUNK_BYTES = 8 * 2**20


def plan_arrays(
    sources: Sequence[Source], paths: Mapping[str, str], options: SaveOptions, block: int, mark: str
) -> Iterator[PlannedFile]:
    """Plan the files of all arrays: `.zarray`, by the process that writes the beginning of a leaf, then its chunks.

    `paths` are the directories of the arrays by leaf. Arrays carry the mark of their save, so that without an index
    they are not taken for a tree of another program.
    """
    is_encoded = options.ocdbt or options.compression
    limit = options.max_chunk_bytes or (_ENCODED_CHUNK_BYTES if is_encoded else _CHUNK_BYTES)
    plans: dict[object, _Plan] = {}  # thousands of leaves are alike
    for source in sources:
        regions = None if source.whole is not None else tuple(source.regions)
        key = source.dtype, source.shape, source.shard, regions
        plan = plans.get(key)
        if plan is None:
            plan = plans[key] = _plan(source, options.compression, limit, block, mark)
        yield from plan.files(source, paths[source.name])


class _Chunk(Struct, frozen=True):
    """A chunk that this process writes. `region` is None for the whole leaf, `pieces` the number of its digests."""

    name: str
    region: Region | None
    shape: tuple[int, ...]
    nbytes: int
    pieces: int


class _Plan(Struct, frozen=True):
    """The files of all arrays that are alike."""

    described: bytes
    coding: Coding | None
    chunk_nbytes: int
    chunks: Sequence[_Chunk]

    def files(self, source: Source, path: str) -> Iterator[PlannedFile]:
        if source.is_first:
            yield PlannedFile(f"{path}/{ZARRAY}", [], len(self.described), self.described)
        for chunk in self.chunks:
            digests = [NO_DIGEST] * chunk.pieces
            extent = PlannedExtent(source, chunk.region, chunk.shape, chunk.nbytes, digests, 0, self.coding)
            yield PlannedFile(f"{path}/{chunk.name}", [extent], self.chunk_nbytes)


def _plan(source: Source, compression: str | None, limit: int, block: int, mark: str) -> _Plan:
    itemsize = source.itemsize
    chunk = chunk_shape(source.shape, source.shard or source.shape, itemsize, limit)
    coding = Coding(compression, chunk) if compression else None
    chunks = []
    for name, box in _own_chunks(source, chunk):
        nbytes = itemsize * box.size
        pieces = 1 if coding else len(no_digests(box.shape, nbytes, itemsize, block))
        region = None if box.shape == source.shape else box
        chunks.append(_Chunk(name, region, box.shape, nbytes, pieces))
    described = zarray(source.dtype, source.shape, chunk, compression, mark)
    return _Plan(described, coding, itemsize * math.prod(chunk), chunks)


def array_path(leaf: str) -> str:
    """Return the directory of a leaf's array."""
    return "/".join(name_to_path(leaf))


def own_nbytes(source: Source) -> int:
    """Return how many bytes of a leaf this process writes, if they are not compressed."""
    return source.itemsize * sum(region.size for region in source.own_regions)


def _own_chunks(source: Source, chunk: tuple[int, ...]) -> Iterator[tuple[str, Region]]:
    """List the chunks that this process writes. They are cut so that none reaches over a region."""
    if math.prod(source.shape):
        for region in source.own_regions:
            yield from chunks_in(region, source.shape, chunk)
