"""Describe leaves to be saved, and the files that will hold them.

A format lays sources out in planned files. The record is made of them when they are written and their digests are
known: a `PlannedFile` becomes a `DataFile`, a `PlannedExtent` an `Extent`.

Tests: tests/engine/saving/test_commit.py, tests/engine/formats/test_process_records.py.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from msgspec.structs import replace

from eformer._engine.record.boxes import Box
from eformer._engine.record.by_process import ProcessRecord
from eformer._engine.record.digests import NO_DIGEST, xxh3_128
from eformer._engine.record.dtypes import dtype_from_name, from_raw
from eformer._engine.record.manifest import Coding, DataFile, Extent, LeafEntry, coverage_of
from eformer._engine.record.pieces import count_pieces

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import numpy as np

    from eformer._engine.record.manifest import RecordedSharding

ArrayBox = tuple[Box, Any]
"""A box of a leaf, and the array that holds it: in host memory, on a device, or a `LazyArray`."""


class LazyArray:
    """An array that is not in memory, and is read box by box.

    `in_order` tells whether reading a box of rows reads no more than the bytes of that box. `slow_axis` is the axis to
    split the array along, so that reading all boxes reads little more than the array once. `inners` are the arrays that
    it is computed from; `is_read_together` tells that a read takes a box of all of them at a time. `keeps_dtype` tells
    that a rule has given it its dtype, which no `dtype=` changes, `is_changed` that its values are computed, and `how`
    says it in words. `entry` is the record of the leaf that it is, or whose kind and sharding it keeps.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    in_order: bool
    slow_axis: int = 0
    keeps_dtype: bool = False
    is_changed: bool = False
    is_read_together: bool = False
    how: str = ""
    entry: LeafEntry | None = None
    inners: Sequence[LazyArray] = ()

    def read(self, box: Box) -> np.ndarray[Any, Any]:
        """Read one box."""
        raise NotImplementedError

    def forget(self) -> None:
        """Drop decoded chunks. The caller reads no further box."""


class Source(Struct, frozen=True, gc=False):
    """A leaf to be saved, and the boxes of it that this process holds.

    whole          the host array of the leaf, or its stored bytes, if the leaf is in one place, as most leaves are
    parts          otherwise, the boxes of the leaf and their arrays
    regions        the boxes that this process writes
    shard          the shape of the box on one device
    held_only_by   the process that alone holds the leaf; -1 if several processes hold it
    writes_start   whether this process writes the beginning of the leaf
    fingerprint    the fingerprint to record, if the digests of the extents do not give it
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    home: str = "jax"
    key: str | None = None
    sharding: RecordedSharding | None = None
    whole: np.ndarray[Any, Any] | bytes | None = None
    parts: Sequence[ArrayBox] = ()
    regions: Sequence[Box] = ()
    shard: tuple[int, ...] | None = None
    held_only_by: int = 0
    writes_start: bool = True
    fingerprint: str | None = None

    @property
    def itemsize(self) -> int:
        return dtype_from_name(self.dtype).itemsize

    @property
    def boxes(self) -> Sequence[ArrayBox]:
        """Return the boxes that this process holds."""
        if self.whole is None:
            return self.parts
        whole = self.whole
        if isinstance(whole, bytes):
            whole = from_raw(memoryview(whole), self.dtype, self.shape)
        return [(Box.whole(self.shape), whole)]

    @property
    def own_regions(self) -> Sequence[Box]:
        """Return the boxes that this process writes."""
        return self.regions if self.whole is None else [Box.whole(self.shape)]

    @property
    def is_all_here(self) -> bool:
        """Tell whether this process holds every element of the leaf."""
        if self.whole is not None:
            return True
        return sum(box.size for box, _ in self.parts) == math.prod(self.shape)

    def entry(self, extents: tuple[Extent, ...] = (), sha256: str | None = None) -> LeafEntry:
        return LeafEntry(
            self.dtype, self.shape, extents, self.home, self.key, self.sharding, sha256, self.fingerprint
        )


class PlannedExtent(Struct, gc=False):
    """A box of a leaf to be written to a file. `region` is None for the whole leaf.

    `digests` has one entry for each piece. `is_packed` marks four-bit numbers that are stored two to a byte. `written`
    has the numbers of the pieces that this process writes, the first and the one after the last; None for all.
    """

    source: Source
    region: Box | None
    shape: tuple[int, ...]
    nbytes: int
    digests: list[str]
    offset: int = 0
    coding: Coding | None = None
    is_packed: bool = False
    written: tuple[int, int] | None = None

    @property
    def box(self) -> Box:
        return self.region or Box.whole(self.source.shape)

    def extent(self, file: int) -> Extent:
        region = None if self.region is None else (self.region.start, self.region.stop)
        digests = self.digests[0] if len(self.digests) == 1 else "".join(self.digests)
        return Extent(file, self.offset, self.nbytes, digests, region, self.coding)


class PlannedFile(Struct, gc=False):
    """A file to be written: a header that belongs to no leaf, followed by boxes of leaves.

    `is_there` marks a file that is a link to a file of an earlier checkpoint, and is not written.
    """

    name: str
    extents: list[PlannedExtent]
    nbytes: int
    header: bytes = b""
    is_there: bool = False


def no_digests(shape: tuple[int, ...], nbytes: int, itemsize: int, block: int) -> list[str]:
    """Return one empty digest for each piece of a box of this shape."""
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
    """Record the leaves in the files."""
    entries: dict[str, LeafEntry] = {}
    more: dict[str, list[Extent]] = {}  # of the few leaves with more than one extent
    for number, file in enumerate(files):
        for planned in file.extents:
            source, extent = planned.source, planned.extent(number)
            name = source.name
            entry = source.entry((extent,), sha256.get(name))
            first = entries.setdefault(name, entry)
            if first is not entry:
                more.setdefault(name, [*first.extents]).append(extent)
    for name, extents in more.items():
        entries[name] = replace(entries[name], extents=tuple(extents))
    return entries


def process_record(files: Sequence[PlannedFile], sha256: Mapping[str, str]) -> ProcessRecord:
    """Record the extents that one of several processes wrote into these files."""
    entries = leaf_entries(files, sha256)
    extents = {name: entry.extents for name, entry in entries.items()}
    return ProcessRecord(extents, {name: sha256[name] for name in extents if name in sha256})


def coverage(files: Iterable[PlannedFile]) -> int:
    """Add up the coverage of all boxes in the files."""
    extents = (extent for file in files for extent in file.extents)
    return sum(coverage_of(e.source.name, math.prod(e.shape)) for e in extents) % 2**64
