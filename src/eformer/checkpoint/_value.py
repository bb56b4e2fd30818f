"""Plain Python values as JSON and back, exactly: types, non-finite floats and big integers included.

What JSON says natively stays as it is (null, booleans, text, small integers, finite floats); the rest is
an object with one key, the type: {"tuple": [...]}, {"bytes": "<base64>"}, {"numpy": ["int64", "<base64>"]}.
"""

from __future__ import annotations

import base64
import math
import reprlib
import struct
from typing import TYPE_CHECKING, Any

import numpy as np

from eformer.checkpoint._leaf import escape, unescape
from eformer.checkpoint._ndarray import DTYPES, dtype_from_name, from_raw
from eformer.errors import StructureError

if TYPE_CHECKING:
    from collections.abc import Callable

# Beyond this other JSON readers round to a double.
_SAFE_INT = 2**53


def value_to_json(value: Any) -> Any:
    """JSON for `value`; one that has no exact form becomes {"opaque": repr}, and does not come back."""
    kind = type(value)
    if value is None or kind is bool:
        return value
    if kind is str:
        return _text_to_json(value)
    if kind is int:
        return value if -_SAFE_INT <= value <= _SAFE_INT else {"int": hex(value)}
    if kind is float:
        if math.isnan(value):  # there are many, and which one it was is part of the value
            return {"nan": struct.pack(">d", value).hex()}
        return value if math.isfinite(value) else {"float": str(value)}
    return _tagged(value)


def _text_to_json(text: str) -> Any:
    # JSON text is UTF-8, which has no lone surrogates; Python strings (file names, say) may.
    return (
        text if text.isascii() or not any("\ud800" <= c <= "\udfff" for c in text) else {"str": escape(text)}
    )


def _tagged(value: Any) -> Any:
    kind = type(value)
    if kind is complex:
        return {"complex": [value_to_json(value.real), value_to_json(value.imag)]}
    if kind is bytes:
        return {"bytes": base64.b64encode(value).decode()}
    if kind is tuple or kind is list:
        return {kind.__name__: [value_to_json(item) for item in value]}
    if kind is set or kind is frozenset:  # sorted: equal sets are equal JSON
        return {kind.__name__: [value_to_json(item) for item in sorted(value, key=repr)]}
    if kind is dict:
        return {"dict": [[value_to_json(k), value_to_json(v)] for k, v in value.items()]}
    if isinstance(value, np.dtype) and DTYPES.get(value.name) == value:
        return {"dtype": value.name}
    if isinstance(value, np.generic) and value.dtype.name in DTYPES:
        return {"numpy": [value.dtype.name, base64.b64encode(value.tobytes()).decode()]}
    return {"opaque": f"{kind.__module__}:{kind.__qualname__} {repr(value)[:200]}"}


def value_from_json(document: Any) -> Any:
    """The value that `value_to_json` was given; refuses what it cannot have written."""
    if document is None or type(document) in (bool, str, int, float):
        return document
    try:
        ((tag, content),) = document.items()
        return _READERS[tag](content)
    except StructureError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError, struct.error) as error:
        raise StructureError(f"not a recorded value: {reprlib.repr(document)}") from error


def _opaque(content: str) -> Any:
    raise StructureError(f"this value was not recorded, only what it looked like: {content}")


_READERS: dict[str, Callable[[Any], Any]] = {
    "str": unescape,
    "int": lambda c: int(c, 16),
    "float": float,
    "nan": lambda c: struct.unpack(">d", bytes.fromhex(c))[0],
    "complex": lambda c: complex(*map(value_from_json, c)),
    "bytes": lambda c: base64.b64decode(c, validate=True),
    "tuple": lambda c: tuple(map(value_from_json, c)),
    "list": lambda c: list(map(value_from_json, c)),
    "set": lambda c: set(map(value_from_json, c)),
    "frozenset": lambda c: frozenset(map(value_from_json, c)),
    "dict": lambda c: {value_from_json(k): value_from_json(v) for k, v in c},
    "dtype": dtype_from_name,
    "numpy": lambda c: from_raw(memoryview(base64.b64decode(c[1], validate=True)), c[0], ())[()],
    "opaque": _opaque,
}
