"""Copy small arrays out of the memory of a CPU device, without a numpy view of each.

JAX takes 2 microseconds for a view of an array whose dtype the buffer protocol has, and 8 for one of bfloat16, say:
that goes through an array object for each shard. Its address is known in half the time.
"""

from __future__ import annotations

import ctypes
import logging
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from eformer._engine.trees.devices import has_buffers, view_of

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger("eformer")

_MOST_AXES = 8  # of arrays that are tried out

# The memory of this process, by address. A slice of it is a copy.
_memory: Any = (ctypes.c_char * 2**62).from_address(0)


@lru_cache(1024)
def copier(dtype: np.dtype[Any], ndim: int, device: Any) -> Callable[[Any, int], bytes]:
    """Return the quickest function that copies arrays on a CPU in C order, given an array and its bytes, at least one.

    It waits until an array is computed, and raises a RuntimeError if it was deleted or donated.
    """
    if has_buffers(dtype) or ndim > _MOST_AXES:
        return _by_view
    layout = _default_layout(dtype, ndim, device)
    return _by_view if layout is None else _by_address(layout, has_order=ndim > 1)


def _by_view(array: Any, _: int) -> bytes:
    return view_of(array).tobytes()


def _by_address(layout: Any, *, has_order: bool = True) -> Callable[[Any, int], bytes]:
    def copy(array: Any, nbytes: int) -> bytes:
        array.block_until_ready()
        start = array.unsafe_buffer_pointer()
        data: bytes = _memory[start : start + nbytes]
        # An address does not keep the memory: only now is it known that nobody has donated the array meanwhile, as
        # another thread could. It counts as deleted before anything is written to its memory.
        if array.is_deleted() or (has_order and array._pjrt_layout != layout):
            return _by_view(array, nbytes)
        return data

    return copy


def _default_layout(dtype: np.dtype[Any], ndim: int, device: Any) -> Any:
    """Return JAX's name for elements in C order, if a copy by address is found to have them so; None otherwise."""
    import jax  # late: numpy trees are read and written without it

    sample = np.arange(2**ndim).astype(dtype).reshape((2,) * ndim)
    try:
        array: Any = jax.device_put(sample, device)
        copied = _by_address(array._pjrt_layout)(array, sample.nbytes)
        address = view_of(array).__array_interface__["data"][0]
        if copied == sample.tobytes() and array.unsafe_buffer_pointer() == address:
            return array._pjrt_layout
        reason: object = "other bytes"
    except Exception as error:  # noqa: BLE001  a version of JAX without these may raise anything
        reason = error
    logger.debug("arrays of %s are not copied by address, saving takes longer: %s", dtype, reason)
    return None
