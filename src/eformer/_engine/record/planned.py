"""Leaves that are to be saved: what each is, and where its elements are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec import Struct

from eformer._engine.record.regions import Region

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from eformer._engine.record.manifest import RecordedSharding

ArrayBox = tuple[Region, Any]
"""A box of a leaf and the array that holds it: in host memory, on a device, or `LazyArray`."""


class Source(Struct, frozen=True, gc=False):
    """A leaf to be saved: what it is, and this process's part of it.

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


class LazyArray:
    """An array that is somewhere else, and is read box by box. `in_order` if a box of rows takes no more than its own
    bytes to read."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    in_order: bool

    def read(self, region: Region) -> np.ndarray[Any, Any]:
        raise NotImplementedError

    def forget(self) -> None:
        """What is kept for the next box, which there is none of."""
