"""Convert between plain numbers, numpy scalars and arrays without axes, as `like` has them."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from eformer._engine.record.dtypes import DTYPES, is_floating

_KINDS = (bool, int, float, complex)  # in this order: a bool is an int, too


def kind_of(number: Any) -> type | None:
    """Return bool, int, float or complex for a number, None for anything else."""
    if isinstance(number, np.generic):
        return kind_of_dtype(number.dtype.name)
    return next((kind for kind in _KINDS if isinstance(number, kind)), None)


@lru_cache
def kind_of_dtype(name: str) -> type | None:
    """Return the kind of Python number that can hold every element of this dtype; None if no kind can."""
    kind = type(np.zeros((), DTYPES[name]).item()) if name in DTYPES else None
    return kind if kind in _KINDS else None


def is_scalar(leaf: Any) -> bool:
    """Tell plain numbers and numpy scalars from arrays, including arrays without axes."""
    return isinstance(leaf, (*_KINDS, np.generic))


def as_array(value: Any, dtype: str, cast: str | None = None) -> np.ndarray[Any, Any] | None:
    """Convert a number to an array without axes; return None if `dtype` is of another kind or cannot hold the number.

    A numpy scalar must have this dtype already. `cast` is the dtype that floating numbers may be rounded to.
    """
    if isinstance(value, np.generic):
        own = value.dtype.name
        own = cast if cast and is_floating(own) else own
        return np.asarray(value).astype(DTYPES[dtype]) if own == dtype else None
    kind = kind_of(value)
    if kind is None or kind is not kind_of_dtype(dtype):
        return None
    try:
        with np.errstate(all="ignore"):
            array = np.array(value, DTYPES[dtype])
    except OverflowError:
        return None
    # Compared as text, because nan is not equal to nan, and -0.0 is equal to 0.0.
    is_exact = repr(array.item()) == repr(value)
    return array if is_exact or (kind is float and cast == dtype) else None


def as_scalar(array: Any, leaf: Any) -> Any:
    """Convert an array without axes to a number of the same type as `leaf`; return anything else unchanged."""
    if not is_scalar(leaf) or not isinstance(array, np.ndarray) or array.shape:
        return array
    return array.astype(leaf.dtype)[()] if isinstance(leaf, np.generic) else array.item()


def fitted(value: Any, leaf: Any, cast: str | None = None) -> Any:
    """Convert a stored value to the type of the plain `leaf`; return None if that is of another kind or too small."""
    if isinstance(leaf, np.generic):
        array = as_array(value, leaf.dtype.name, cast)
        return None if array is None else array[()]
    if (kind := kind_of(leaf)) is None:
        return value if type(value) is type(leaf) else None
    if kind_of(value) is not kind:
        return None
    return value.item() if isinstance(value, np.generic) else value
