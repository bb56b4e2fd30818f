"""Plain numbers, scalars of numpy and arrays without axes: each becomes the other that `like` has, exactly or not."""

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
    """Return the kind of Python number that holds every element of this dtype; None if there is none."""
    kind = type(np.zeros((), DTYPES[name]).item()) if name in DTYPES else None
    return kind if kind in _KINDS else None


def is_scalar(leaf: Any) -> bool:
    """Tell numbers that lie on no device from arrays, even from those without axes."""
    return isinstance(leaf, (*_KINDS, np.generic))


def as_array(value: Any, dtype: str, cast: str | None = None) -> np.ndarray[Any, Any] | None:
    """Make an array without axes of a number; None if `dtype` is for another kind, or cannot hold the number.

    A scalar of numpy has a dtype already, which has to be this one. `cast` is what floating numbers may be rounded to.
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
    # As text, because nan is not nan, and -0.0 is 0.0.
    is_exact = repr(array.item()) == repr(value)
    return array if is_exact or (kind is float and cast == dtype) else None


def as_scalar(array: Any, leaf: Any) -> Any:
    """Make of an array without axes the number that `leaf` is; anything else stays what it is."""
    if not is_scalar(leaf) or not isinstance(array, np.ndarray) or array.shape:
        return array
    return array.astype(leaf.dtype)[()] if isinstance(leaf, np.generic) else array.item()


def fitted(value: Any, leaf: Any, cast: str | None = None) -> Any:
    """Make of a stored value what the plain `leaf` is; None if that is another kind, or cannot hold it."""
    if isinstance(leaf, np.generic):
        array = as_array(value, leaf.dtype.name, cast)
        return None if array is None else array[()]
    if (kind := kind_of(leaf)) is None:
        return value if type(value) is type(leaf) else None
    if kind_of(value) is not kind:
        return None
    return value.item() if isinstance(value, np.generic) else value
