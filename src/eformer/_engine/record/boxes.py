"""Copy the elements of a leaf out of the boxes that hold them, in C order and little endian."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from eformer._engine.record.dtypes import dtype_from_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from eformer._engine.record.planned import ArrayBox
    from eformer._engine.record.regions import Region


def contiguous(parts: Sequence[ArrayBox], region: Region, dtype: str) -> np.ndarray[Any, Any]:
    """Return the elements of `region` in C order, little endian, as `dtype`: a view if possible, otherwise a copy."""
    for box, array in parts:
        if box == region:
            return straight(array, dtype)
        if box.overlap(region) == region:
            return straight(array[region.inside(box).slices], dtype)
    whole = np.empty(region.shape, _little(dtype))
    found = 0
    for box, array in parts:
        if overlap := box.overlap(region):
            whole[overlap.inside(region).slices] = array[overlap.inside(box).slices]
            found += overlap.size
    if found != region.size:  # other elements would be uninitialized memory
        raise AssertionError(f"only {found} of the {region.size} elements of {region} were found")
    return whole


def to_bytes(array: np.ndarray[Any, Any], dtype: str) -> bytes:
    """Return the bytes of a whole small array in C order, little endian, as `dtype`."""
    little = _little(dtype)
    return (array if array.dtype == little else array.astype(little)).tobytes()


def straight(array: np.ndarray[Any, Any], dtype: str) -> np.ndarray[Any, Any]:
    """Return an array in C order, little endian, as `dtype`: itself if possible, otherwise a copy."""
    return np.ascontiguousarray(array, _little(dtype)) if array.ndim else np.asarray(array, _little(dtype))


@lru_cache(64)
def _little(dtype: str) -> np.dtype[Any]:
    return dtype_from_name(dtype).newbyteorder("<")
