"""Map leaves that lie in their files as they are wanted: nothing is read until the arrays are used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from eformer._engine.record.check import is_whole
from eformer._engine.record.dtypes import dtype_from_name
from eformer._engine.record.pieces import offset_within
from eformer._engine.record.regions import Region
from eformer.errors import CorruptionError

if TYPE_CHECKING:
    from eformer._engine.loading.read_plan import Want
    from eformer._engine.record.manifest import TreeEntry
    from eformer._engine.stores.base import Files

Array = np.ndarray[Any, Any]


class MappedFiles:
    """Map the files of one tree into memory, each when it is first needed."""

    def __init__(self, tree: TreeEntry, files: Files) -> None:
        self.tree, self.files = tree, files
        self.memory: dict[int, Array | None] = {}

    def arrays(self, want: Want, alignment: int) -> list[Array] | None:
        """Return the arrays of the want's regions, or the one of the whole leaf, without reading them.

        Returns None if one of them does not lie in a file unchanged, at a multiple of `alignment`.
        """
        regions = [Region.whole(want.entry.shape)] if want.regions is None else want.regions
        if want.dtype != want.entry.dtype:
            return None
        found = []
        for region in regions:
            array = self.array(want, region, alignment)
            if array is None:
                return None
            found.append(array)
        return found

    def array(self, want: Want, region: Region, alignment: int) -> Array | None:
        """Return the array of one region; None if it has to be read."""
        entry, dtype = want.entry, dtype_from_name(want.entry.dtype)
        for extent in entry.extents:
            before = offset_within(region, entry.region_of(extent))
            if before is None or not region.size or is_whole(entry, extent):
                continue
            start = self.tree.files[extent.file].header_nbytes + extent.offset + before * dtype.itemsize
            memory = self.memory_of(extent.file)
            if memory is None or start % max(alignment, dtype.alignment):
                return None
            if start + region.size * dtype.itemsize > len(memory):
                raise CorruptionError(
                    f"leaf {want.name!r}: {self.tree.path_of(extent.file)} was cut short: it ends after {len(memory)} "
                    "bytes; restore the file from a copy, or load an older checkpoint"
                )
            return np.ndarray(region.shape, dtype, memory, start)
        return None

    def memory_of(self, number: int) -> Array | None:
        """Return the bytes of a file; None if its file system cannot map it."""
        if number not in self.memory:
            self.memory[number] = self.files.map(number)
        return self.memory[number]
