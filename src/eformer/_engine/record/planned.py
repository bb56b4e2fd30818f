"""Describe leaves that are to be saved, and the files that they will be in.

A format makes planned files of sources. When these are written and their digests are known, they become the record:
a `PlannedFile` a `DataFile`, a `PlannedExtent` an `Extent`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from eformer._engine.record.digests import NO_DIGEST, xxh3_128
from eformer._engine.record.dtypes import dtype_from_name
from eformer._engine.record.manifest import Coding, DataFile, Extent, LeafEntry, ProcessRecord, weight_of
from eformer._engine.record.pieces import count_pieces
from eformer._engine.record.regions import Region

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import numpy as np

    from eformer._engine.record.manifest import RecordedSharding

ArrayBox = tuple[Region, Any]
"""A box of a leaf and the array that holds it: in host memory, on a device, or a `LazyArray`."""


class LazyArray:
    """An array that is somewhere else, and is read box by box.

    `in_order` if a box of rows takes no more than its own bytes to read.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    in_order: bool

    def read(self, region: Region) -> np.ndarray[Any, Any]:
        raise NotImplementedError

    def forget(self) -> None:
        """Drop what is kept for the next box: none will be read."""


class Source(Struct, frozen=True, gc=False):
    """A leaf to be saved: what it is, and the part of it that this process has.

    `whole` is the host array of a leaf that lies in one place, which is nearly every leaf; else `parts` hold
    its boxes, `regions` are those that this process writes, and `shard` is the shape of what a device holds.

    A leaf that lies on the devices of one process, or in its memory, has an `owner`; -1 for one that lies on several.
    `is_first` for the process that writes its beginning.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    home: str = "jax"
    key: str | None = None
    sharding: RecordedSharding | None = None
    whole: np.ndarray[Any, Any] | None = None
    parts: Sequence[ArrayBox] = ()
    regions: Sequence[Region] = ()
    shard: tuple[int, ...] | None = None
    owner: int = 0
    is_first: bool = True

    @property
    def itemsize(self) -> int:
        return dtype_from_name(self.dtype).itemsize

    @property
    def boxes(self) -> Sequence[ArrayBox]:
        """The boxes that this process has."""
        return self.parts if self.whole is None else [(Region.whole(self.shape), self.whole)]

    @property
    def own_regions(self) -> Sequence[Region]:
        """The regions that this process writes."""
        return self.regions if self.whole is None else [Region.whole(self.shape)]

    @property
    def is_all_here(self) -> bool:
        """Whether this process has every element of the leaf."""
        if self.whole is not None:
            return True
        return sum(region.size for region, _ in self.parts) == math.prod(self.shape)

    def entry(self, extents: Sequence[Extent] = (), sha256: str | None = None) -> LeafEntry:
        return LeafEntry(self.dtype, self.shape, tuple(extents), self.home, self.key, self.sharding, sha256)


class PlannedExtent(Struct, gc=False):
    """A box of a leaf on its way into a file. `region` is None for the whole leaf.

    `digests` has room for one digest a piece. `is_packed` for four-bit numbers, two of which share a byte.
    """

    source: Source
    region: Region | None
    shape: tuple[int, ...]
    nbytes: int
    digests: list[str]
    offset: int = 0
    coding: Coding | None = None
    is_packed: bool = False

    @property
    def box(self) -> Region:
        return self.region or Region.whole(self.source.shape)

    def extent(self, file: int) -> Extent:
        region = (self.region.start, self.region.stop) if self.region else None
        return Extent(file, self.offset, self.nbytes, "".join(self.digests), region, self.coding)


class PlannedFile(Struct, gc=False):
    """A file to be written: a header that belongs to no leaf, and boxes of leaves behind it.

    `is_there` for a file that is linked to one of an earlier checkpoint, and need not be written.
    """

    name: str
    extents: list[PlannedExtent]
    nbytes: int
    header: bytes = b""
    is_there: bool = False


def no_digests(shape: tuple[int, ...], nbytes: int, itemsize: int, block: int) -> list[str]:
    """Make room for as many digests as a box of this shape has pieces."""
    return [NO_DIGEST] * (1 if 0 < nbytes <= block else count_pieces(shape, itemsize, block))


# --------------------------------------------------------------------------------------------- record


def data_files(files: Iterable[PlannedFile]) -> list[DataFile]:
    """Record the files, with the digests of their headers."""
    digests: dict[bytes, str] = {b"": ""}  # most headers are alike
    found = []
    for file in files:
        header = file.header
        if header not in digests:
            digests[header] = xxh3_128(header)
        found.append(DataFile(file.name, file.nbytes, len(header), digests[header]))
    return found


def leaf_entries(files: Iterable[PlannedFile], sha256: Mapping[str, str]) -> dict[str, LeafEntry]:
    """Record the leaves that are in the files."""
    sources: dict[str, Source] = {}
    extents: dict[str, list[Extent]] = {}
    for number, file in enumerate(files):
        for planned in file.extents:
            name = planned.source.name
            sources[name] = planned.source
            extents.setdefault(name, []).append(planned.extent(number))
    return {name: source.entry(extents[name], sha256.get(name)) for name, source in sources.items()}


def process_record(files: Sequence[PlannedFile], sha256: Mapping[str, str]) -> ProcessRecord:
    """Record what one of several processes wrote into these files."""
    entries = leaf_entries(files, sha256)
    extents = {name: entry.extents for name, entry in entries.items()}
    return ProcessRecord(extents, {name: sha256[name] for name in extents if name in sha256})


def weight(files: Iterable[PlannedFile]) -> int:
    """Add up the weights of all elements in the files; see `weight_of`."""
    extents = (extent for file in files for extent in file.extents)
    return sum(weight_of(e.source.name, math.prod(e.shape)) for e in extents) % 2**64
