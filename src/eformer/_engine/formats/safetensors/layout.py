"""Plan safetensors files: group the leaves by file, and choose their offsets.

Tests: tests/engine/formats/test_safetensors.py, tests/engine/loading/test_read_plan.py.
"""

from __future__ import annotations

import math
from collections import defaultdict
from functools import lru_cache
from typing import TYPE_CHECKING

from eformer._engine.formats.safetensors.header import Tensor, described_as, header_bytes
from eformer._engine.formats.safetensors.names import box_name
from eformer._engine.record.digests import NO_DIGEST
from eformer._engine.record.dtypes import dtype_from_name
from eformer._engine.record.pieces import ALIGNMENT
from eformer._engine.record.planned import PlannedExtent, PlannedFile, Source, no_digests

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from eformer._engine.record.boxes import Box

# safetensors readers refuse a header of more than 100 MB.
MAX_HEADER_BYTES = 90_000_000
_HEADER_BYTES_A_LEAF = 150
_RECORD_BYTES_A_LEAF = 250  # the extent, digest and SHA-256 of a leaf, in files of several processes


def plan_files(
    sources: Sequence[Source],
    tensors: Mapping[str, str],
    max_bytes: int,
    block: int,
    *,
    has_record: bool = False,
) -> list[PlannedFile]:
    """Choose a file and an offset for every box. Offsets count from the beginning of the file's data.

    `tensors` has each leaf's name in a file. The planned files have no names and no headers yet.
    """
    extents: dict[str, PlannedExtent] = {}
    for source in sources:
        for extent in plan_extents(source, block):
            extents[tensor_of(extent, tensors)] = extent
    files = []
    sizes = {name: extent.nbytes for name, extent in extents.items()}
    for names in group_by_file(sizes, max_bytes, has_record=has_record):
        inside = [extents[name] for name in names]
        inside.sort(key=lambda extent: _order(extent.source.dtype, extent.nbytes))
        offset = 0
        for extent in inside:
            extent.offset = offset
            offset += extent.nbytes
        files.append(PlannedFile("", inside, offset))
    return files


def group_by_file(sizes: Mapping[str, int], limit: int, *, has_record: bool = False) -> list[list[str]]:
    """Group leaves into files of at most `limit` bytes, module after module, in their order.

    A module that fits into one file is not divided. A leaf larger than the limit has a file of its own.
    """
    files: list[list[str]] = []
    used = header = 0
    modules = _modules(sizes)
    if sizes and _fit_one_file(sizes, limit):
        return [[name for module in modules for name in module]]
    for module in modules:
        total = sum(sizes[name] for name in module)
        if used + total > limit >= total:
            used = limit + 1  # begin a new file, which takes the module whole
        for name in module:
            nbytes = len(name.encode()) + _HEADER_BYTES_A_LEAF
            if has_record:
                nbytes += 2 * len(name.encode()) + _RECORD_BYTES_A_LEAF
            header += nbytes
            if not files or used + sizes[name] > limit or header > MAX_HEADER_BYTES:
                files.append([])
                used, header = 0, nbytes
            files[-1].append(name)
            used += sizes[name]
    return files


def _fit_one_file(sizes: Mapping[str, int], limit: int) -> bool:
    """Tell quickly whether all leaves surely fit into one file, by an upper bound for the bytes of their names."""
    most = _HEADER_BYTES_A_LEAF + _RECORD_BYTES_A_LEAF
    header = most * len(sizes) + 3 * 4 * sum(map(len, sizes))  # each name three times, four bytes a character
    return sum(sizes.values()) <= limit and header <= MAX_HEADER_BYTES


def _modules(names: Iterable[str]) -> Iterable[list[str]]:
    """Group names by the part before their last dot, modules in order of their first leaf."""
    modules: dict[str, list[str]] = defaultdict(list)
    for name in names:
        modules[name.rpartition(".")[0]].append(name)
    return modules.values()


@lru_cache(2**16)  # most leaves of a tree are alike
def _order(dtype: str, nbytes: int) -> tuple[bool, int]:
    """Return the sort key of an extent. The format allows no gaps, so an extent's length decides the alignment of the
    next: first lengths that keep it aligned for XLA, then larger elements, which keep it aligned for numpy."""
    return nbytes % ALIGNMENT != 0, -dtype_from_name(dtype).itemsize


def plan_extents(source: Source, block: int) -> Iterable[PlannedExtent]:
    """Plan the boxes of a leaf that this process writes."""
    if source.whole is not None:
        return (_extent(source, None, source.shape, block),)
    return [
        _extent(source, None if box.shape == source.shape else box, box.shape, block)
        for box in source.regions
    ]


def _extent(source: Source, box: Box | None, shape: tuple[int, ...], block: int) -> PlannedExtent:
    nbytes, pieces, is_packed = _room(source.dtype, shape, block)
    return PlannedExtent(source, box, shape, nbytes, [NO_DIGEST] * pieces, 0, None, is_packed)


@lru_cache(2**16)
def _room(dtype: str, shape: tuple[int, ...], block: int) -> tuple[int, int, bool]:
    """Return the length of a box in a file, the number of its digests, and whether two elements share a byte."""
    itemsize = dtype_from_name(dtype).itemsize
    nbytes = stored_nbytes(dtype, shape)
    if nbytes < itemsize * math.prod(shape):
        return nbytes, 1, True
    return nbytes, len(no_digests(shape, nbytes, itemsize, block)), False


def own_nbytes(source: Source) -> int:
    """Return the number of bytes of a leaf that this process writes."""
    return sum(stored_nbytes(source.dtype, box.shape) for box in source.own_regions)


def stored_nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Return the length of an array in a file. It is the length in memory, except that four-bit floats share bytes."""
    nbytes = math.prod(shape) * dtype_from_name(dtype).itemsize
    return nbytes // 2 if dtype == "float4_e2m1fn" and nbytes % 2 == 0 else nbytes


def header_of(file: PlannedFile, tensors: Mapping[str, str], metadata: Mapping[str, str]) -> bytes:
    described = {}
    for e in file.extents:
        tag, shape = described_as(e.source.dtype, e.shape, e.nbytes)
        described[tensor_of(e, tensors)] = Tensor(tag, shape, (e.offset, e.offset + e.nbytes))
    return header_bytes(metadata, described)


def tensor_of(extent: PlannedExtent, tensors: Mapping[str, str]) -> str:
    """Return the tensor's name in the file for a planned box."""
    return box_name(tensors[extent.source.name], extent.region)
