"""Describe leaves to be saved: their dtype and shape, and where their elements are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec import Struct

from eformer._engine.record.regions import Region

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from eformer._engine.record.manifest import RecordedSharding

ArrayBox = tuple[Region, Any]
"""A box of a leaf, and the array that holds it: in host memory, on a device, or a `LazyArray`."""


class Source(Struct, frozen=True, gc=False):
    """A leaf to be saved, and the part of it that this process holds.

    whole      the host array of a leaf that is in one place, which most leaves are
    parts      otherwise, the boxes of the leaf and their arrays
    regions    the boxes that this process writes
    shard      the shape of what one device holds
    owner      the process that holds the leaf alone; -1 if several hold it
    is_first   whether this process writes the beginning of the leaf
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


class LazyArray:
    """An array that is not in memory, and is read box by box.

    `in_order` tells whether reading a box of rows reads no more than the bytes of that box.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    in_order: bool

    def read(self, region: Region) -> np.ndarray[Any, Any]:
        """Read one box."""
        raise NotImplementedError

    def forget(self) -> None:
        """Drop decoded chunks; no further box will be read."""
