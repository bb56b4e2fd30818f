"""Plan zarr arrays: divide a leaf into chunks, one file for each, and describe it in `.zarray`, which is all header.

Tests: tests/engine/formats/zarr/test_layout.py, tests/engine/formats/test_zarr.py.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from eformer._engine.record.boxes import Box
from eformer._engine.record.digests import NO_DIGEST
from eformer._engine.record.dtypes import dtype_from_name
from eformer._engine.record.manifest import Coding
from eformer._engine.record.names import name_to_path
from eformer._engine.record.planned import PlannedExtent, PlannedFile, Source, no_digests
from eformer._engine.record.zarray import ZARRAY

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from eformer._engine.record.options import SaveOptions

# Other programs read whole chunks. A chunk that has to be encoded is in memory as a whole.
_CHUNK_BYTES = 2**30
_ENCODED_CHUNK_BYTES = 8 * 2**20

# The dtypes that numpy lacks and TensorStore writes into `.zarray` by name.
_BY_NAME = {
    "bfloat16", "int2", "int4", "float4_e2m1fn", "float8_e3m4", "float8_e4m3fn", "float8_e4m3fnuz",
    "float8_e4m3b11fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu",
}  # fmt: skip

_NUMPY_NAMES = {
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64",
    "complex64", "complex128",
}  # fmt: skip


def plan_arrays(
    sources: Sequence[Source], paths: Mapping[str, str], options: SaveOptions, block: int, save_id: str
) -> Iterator[PlannedFile]:
    """Plan the files of all arrays: `.zarray`, by the process that writes the beginning of a leaf, then its chunks.

    paths    for each leaf, the directory of its array
    save_id  marks the arrays: should their index get lost, they are not taken for a tree of another program. "" for no
             mark
    """
    is_encoded = options.ocdbt or options.compression
    limit = options.max_chunk_bytes or (_ENCODED_CHUNK_BYTES if is_encoded else _CHUNK_BYTES)
    plans: dict[object, _Plan] = {}  # thousands of leaves are alike
    for source in sources:
        boxes = None if source.whole is not None else tuple(source.regions)
        key = source.dtype, source.shape, source.shard, boxes
        plan = plans.get(key)
        if plan is None:
            plan = plans[key] = _plan(source, options.compression, limit, block, save_id)
        yield from plan.files(source, paths[source.name])


class _Chunk(Struct, frozen=True):
    """A chunk that this process writes. `box` is None for the whole leaf, `pieces` is the number of its digests."""

    name: str
    box: Box | None
    shape: tuple[int, ...]
    nbytes: int
    pieces: int


class _Plan(Struct, frozen=True):
    """The files of an array, planned once for all arrays that are alike."""

    described: bytes
    coding: Coding | None
    chunk_nbytes: int
    chunks: Sequence[_Chunk]

    def files(self, source: Source, path: str) -> Iterator[PlannedFile]:
        if source.writes_start:
            yield PlannedFile(f"{path}/{ZARRAY}", [], len(self.described), self.described)
        for chunk in self.chunks:
            digests = [NO_DIGEST] * chunk.pieces
            extent = PlannedExtent(source, chunk.box, chunk.shape, chunk.nbytes, digests, 0, self.coding)
            yield PlannedFile(f"{path}/{chunk.name}", [extent], self.chunk_nbytes)


def _plan(source: Source, compression: str | None, limit: int, block: int, save_id: str) -> _Plan:
    itemsize = source.itemsize
    chunk = chunk_shape(source.shape, source.shard or source.shape, itemsize, limit)
    coding = Coding(compression, chunk) if compression else None
    chunks = []
    # `chunk_shape` makes sure that no chunk reaches over the end of a box of this process.
    boxes = source.own_regions if math.prod(source.shape) else ()
    for name, box in (found for own in boxes for found in chunks_in(own, source.shape, chunk)):
        nbytes = itemsize * box.size
        pieces = 1 if coding else len(no_digests(box.shape, nbytes, itemsize, block))
        part = None if box.shape == source.shape else box
        chunks.append(_Chunk(name, part, box.shape, nbytes, pieces))
    described = zarray(source.dtype, source.shape, chunk, compression, save_id)
    return _Plan(described, coding, itemsize * math.prod(chunk), chunks)


def array_path(leaf: str) -> str:
    """Return the directory of a leaf's array."""
    return "/".join(name_to_path(leaf))


# ------------------------------------------------------- descriptions and chunks of arrays of zarr 2


@lru_cache(1024)
def zarray(
    dtype: str, shape: tuple[int, ...], chunks: tuple[int, ...], compression: str | None, save_id: str = ""
) -> bytes:
    """Return the contents of `.zarray`, marked with the id of the save, which other readers ignore."""
    compressor = {"id": compression, "level": 1} if compression else None
    described = {
        "chunks": chunks, "compressor": compressor, "dimension_separator": ".", "dtype": _tag(dtype),
        "fill_value": None, "filters": None, "order": "C", "shape": shape, "zarr_format": 2,
    }  # fmt: skip
    return msgspec.json.encode(described | {"eformer": save_id} if save_id else described)


@lru_cache(256)
def _tag(name: str) -> str:
    """Return the name of a dtype for other readers. A dtype that they do not know appears as integers of its size, or
    as raw bytes. The manifest records the true dtype."""
    if name in _BY_NAME:
        return name
    dtype = dtype_from_name(name)
    if name in _NUMPY_NAMES:
        return f"{'|' if dtype.itemsize == 1 else '<'}{dtype.kind}{dtype.itemsize}"
    if dtype.itemsize == 1:
        return "|u1"
    return "<i8" if dtype.kind in "mM" else f"|V{dtype.itemsize}"


def is_known_to_tensorstore(name: str) -> bool:
    """Tell whether TensorStore has a name for the dtype."""
    return name in _BY_NAME or name in _NUMPY_NAMES


def chunk_shape(shape: tuple[int, ...], shard: tuple[int, ...], itemsize: int, limit: int) -> tuple[int, ...]:
    """Return the shape of chunks: a whole shard, or as many of its rows as fit into the limit.

    All chunks of an array have one shape, and the first starts at the origin. A chunk that reaches over the end of the
    array is padded; the shape is such that the padding follows all elements. No chunk reaches over the end of a shard.
    """
    chunk = [max(1, size) for size in shard]
    for axis, size in enumerate(chunk):
        row = itemsize * math.prod(chunk[axis + 1 :])
        if row * size <= limit:
            break
        is_cut = shard[axis] != shape[axis]
        chunk[axis] = _rows(size, max(1, limit // row), is_cut)
        if chunk[axis] > 1:
            break
    return tuple(chunk)


def _rows(size: int, most: int, must_divide: bool) -> int:
    """Return the number of rows of a chunk, at most `most`, so that the chunks are as equal as possible."""
    if must_divide:
        return next(rows for rows in range(most, 0, -1) if size % rows == 0)
    return -(-size // -(-size // most))


def chunks_of(shape: tuple[int, ...], chunk: tuple[int, ...]) -> Iterator[tuple[str, Box]]:
    """Return the file name and the box of each chunk. An empty array has no chunks."""
    return chunks_in(Box.whole(shape), shape, chunk)


def chunks_in(box: Box, shape: tuple[int, ...], chunk: tuple[int, ...]) -> Iterator[tuple[str, Box]]:
    """Yield the chunks that make up a box of an array of this shape. The cost does not depend on other chunks."""
    size = box.shape
    for number in range(count_chunks(size, chunk)):
        place = _place_of(number, size, chunk)
        index = tuple(a // c + i for a, c, i in zip(box.start, chunk, place, strict=True))
        start = tuple(i * c for i, c in zip(index, chunk, strict=True))
        stop = tuple(min(a + c, s) for a, c, s in zip(start, chunk, shape, strict=True))
        yield ".".join(map(str, index)) or "0", Box(start, stop)


def _place_of(number: int, shape: tuple[int, ...], chunk: tuple[int, ...]) -> tuple[int, ...]:
    """Return the indices of a chunk, given its number in C order. An array may have too many chunks to list them."""
    place = []
    for s, c in zip(reversed(shape), reversed(chunk), strict=True):
        number, index = divmod(number, -(-s // c))
        place.append(index)
    return tuple(reversed(place))


def count_chunks(shape: tuple[int, ...], chunk: tuple[int, ...]) -> int:
    return math.prod(-(-s // c) for s, c in zip(shape, chunk, strict=True))
