"""Plan zarr arrays: a file for each chunk of a leaf, and `.zarray`, which is all header."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from eformer._engine.formats.zarr.zarray import ZARRAY, chunk_shape, chunks_in, zarray
from eformer._engine.record.digests import NO_DIGEST
from eformer._engine.record.manifest import Coding
from eformer._engine.record.names import name_to_path
from eformer._engine.record.planned import PlannedExtent, PlannedFile, no_digests

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
    for source in sources:
        yield from _plan_array(source, paths[source.name], options.compression, limit, block, mark)


def _plan_array(
    source: Source, path: str, compression: str | None, limit: int, block: int, mark: str
) -> Iterator[PlannedFile]:
    itemsize = source.itemsize
    chunk = chunk_shape(source.shape, source.shard or source.shape, itemsize, limit)
    chunk_nbytes = itemsize * math.prod(chunk)
    coding = Coding(compression, chunk) if compression else None
    if source.is_first:
        described = zarray(source.dtype, source.shape, chunk, compression, mark)
        yield PlannedFile(f"{path}/{ZARRAY}", [], len(described), described)
    for name, box in _own_chunks(source, chunk):
        nbytes = itemsize * box.size
        digests = [NO_DIGEST] if coding else no_digests(box.shape, nbytes, itemsize, block)
        region = None if box.shape == source.shape else box
        extent = PlannedExtent(source, region, box.shape, nbytes, digests, 0, coding)
        yield PlannedFile(f"{path}/{name}", [extent], chunk_nbytes)


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
