"""Convert plain Python values to JSON and back exactly: types, non-finite floats and big integers included.

Values that JSON can express stay as they are (null, booleans, text, small integers, finite floats). Any other value
becomes an object with one key, the type: {"tuple": [...]}, {"bytes": "<base64>"}, {"numpy": "float32"}.
"""

from __future__ import annotations

import base64
import json
import math
import os
import reprlib
import struct
import sys
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import numpy as np

from eformer._engine.record.dtypes import DTYPES, from_raw
from eformer._engine.record.names import escape, unescape
from eformer.errors import FormatError, StructureError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


# The errors of decoding malformed JSON: invalid syntax, invalid UTF-8, or nesting that is too deep.
MALFORMED_JSON = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)

# Other JSON readers round larger integers to a double.
_SAFE_INT = 2**53

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LeftToCode:
    """A leaf that is a function or a placeholder. Only its name is stored; the program that loads provides the leaf."""

    name: str

    def __repr__(self) -> str:
        return f"<{self.name}, left to the code>"


def parse_json(data: bytes | str | msgspec.Raw, kind: type[T], problem: str) -> T:
    """Parse JSON from outside; raise a FormatError that begins with `problem` if it is malformed or of another kind."""
    try:
        return json_decoder(kind).decode(data)
    except MALFORMED_JSON as error:
        raise FormatError(f"{problem}: {error}") from error


def parse_lenient(data: bytes, kind: type[T], problem: str) -> T:
    """Parse JSON as Python writes it, with NaN, Infinity and lone surrogates, which `parse_json` refuses."""
    try:
        return msgspec.convert(json.loads(data), kind)
    except (*MALFORMED_JSON, ValueError) as error:
        raise FormatError(f"{problem}: {str(error)[:200]}") from error


@contextmanager
def locating(where: str) -> Iterator[None]:
    """Put `where` before the message of a FormatError that the block raises."""
    try:
        yield
    except FormatError as error:
        raise type(error)(f"{where}: {error}") from error


_decoders: dict[Any, Any] = {}
_decoders_lock = threading.RLock()  # reentrant: the handler of a signal may fork while this thread holds it
# Fork only while no thread makes a decoder: the child would keep it half made.
os.register_at_fork(
    before=_decoders_lock.acquire,
    after_in_parent=_decoders_lock.release,
    after_in_child=_decoders_lock.release,
)


def json_decoder(kind: type[T]) -> msgspec.json.Decoder[T]:
    """Return the decoder of JSON of this kind. It is made once, by one thread.

    If two threads decode a new class at the same time, msgspec may use an incomplete description of it, and crash.
    """
    found: msgspec.json.Decoder[T] | None = _decoders.get(kind)
    if found is None:
        with _decoders_lock:
            found = _decoders[kind] = msgspec.json.Decoder(kind)
    return found


def value_to_json(value: Any) -> Any:
    """Convert `value` to JSON. A value without an exact form becomes {"opaque": repr}, which cannot be restored."""
    try:
        return _to_json(value)
    except RecursionError:  # it contains itself, or is nested too deeply
        return _opaque(value)


def code_to_json(leaf: Any) -> Any:
    """Record a leaf that is left to the code, by its name."""
    named = leaf if hasattr(leaf, "__qualname__") else type(leaf)
    return {"code": f"{named.__module__}.{named.__qualname__}"}


def _to_json(value: Any) -> Any:
    kind = type(value)
    if value is None or kind is bool:
        return value
    if kind is str:
        return _text_to_json(value)
    if kind is int:
        return value if -_SAFE_INT <= value <= _SAFE_INT else {"int": hex(value)}
    if kind is float:
        if math.isnan(value):  # many different bits are NaN
            return {"nan": struct.pack(">d", value).hex()}
        return value if math.isfinite(value) else {"float": str(value)}
    return _tagged(value)


def _text_to_json(text: str) -> Any:
    # JSON text is UTF-8, which has no lone surrogates; Python strings, such as file names, may have some.
    has_surrogates = not text.isascii() and any("\ud800" <= c <= "\udfff" for c in text)
    return {"str": escape(text)} if has_surrogates else text


def _tagged(value: Any) -> Any:
    kind = type(value)
    if kind is complex:
        return {"complex": [_to_json(value.real), _to_json(value.imag)]}
    if kind is bytes:
        return {"bytes": base64.b64encode(value).decode()}
    if kind is tuple or kind is list:
        return {kind.__name__: [_to_json(item) for item in value]}
    if kind is set or kind is frozenset:  # sorted: equal sets are equal JSON
        return {kind.__name__: sorted((_to_json(item) for item in value), key=json.dumps)}
    if kind is dict:
        return {"dict": [[_to_json(k), _to_json(v)] for k, v in value.items()]}
    if isinstance(value, np.dtype) and DTYPES.get(value.name) == value:
        return {"dtype": value.name}
    if isinstance(value, np.generic) and value.dtype.name in DTYPES:
        return {"numpy scalar": [value.dtype.name, base64.b64encode(value.tobytes()).decode()]}
    if module := _module_of_scalar_type(value):
        return {module: value.__name__}
    return _opaque(value)


def _module_of_scalar_type(value: Any) -> str | None:
    """Return the module of `value` if it is a scalar type, such as jnp.float32: many static fields are."""
    name = getattr(value, "__name__", None)
    for module in _SCALAR_TYPES:
        if isinstance(name, str) and name in DTYPES and getattr(sys.modules.get(module), name, None) is value:
            return module
    return None


_SCALAR_TYPES = ("numpy", "ml_dtypes", "jax.numpy")


def _opaque(value: Any) -> Any:
    kind = type(value)
    return {"opaque": f"{kind.__module__}:{kind.__qualname__} {reprlib.repr(value)[:200]}"}


def value_from_json(document: Any) -> Any:
    """Return the value that was converted to this JSON. Raise StructureError if `value_to_json` cannot have made it."""
    try:
        return _from_json(document)
    except (
        AttributeError,
        ArithmeticError,
        LookupError,
        RecursionError,
        TypeError,
        ValueError,
        struct.error,
    ) as error:
        if isinstance(error, StructureError):
            raise
        raise StructureError(f"not a recorded value: {reprlib.repr(document)}") from error


def is_recorded(document: Any) -> bool:
    """Tell whether `value_from_json` can restore this value."""
    try:
        value_from_json(document)
    except StructureError:
        return False
    return True


def _from_json(document: Any) -> Any:
    if document is None or type(document) in (bool, str, int, float):
        return document
    ((tag, content),) = document.items()
    return _READERS[tag](content)


def _int(content: str) -> int:
    value = int(content, 16)
    if hex(value) != content:
        raise ValueError(content)
    return value


def _nan(content: str) -> float:
    value: float = struct.unpack(">d", bytes.fromhex(content))[0]
    if not math.isnan(value):
        raise ValueError(content)
    return value


def _complex(content: Any) -> complex:
    real, imaginary = map(_from_json, content)
    return complex(float(real), float(imaginary))


def _numpy_scalar(content: Any) -> Any:
    name, data = content
    return from_raw(memoryview(base64.b64decode(data, validate=True)), name, ())[()]


def _scalar_type(module: str) -> Callable[[str], Any]:
    return lambda name: getattr(sys.modules[module], DTYPES[name].name)


def _opaque_read(content: str) -> Any:
    raise StructureError(f"this value was not recorded, only its repr: {content[:300]}")


_READERS: dict[str, Callable[[Any], Any]] = {
    "str": unescape,
    "int": _int,
    "float": {"inf": math.inf, "-inf": -math.inf}.__getitem__,
    "nan": _nan,
    "complex": _complex,
    "bytes": lambda c: base64.b64decode(c, validate=True),
    "tuple": lambda c: tuple(map(_from_json, c)),
    "list": lambda c: list(map(_from_json, c)),
    "set": lambda c: set(map(_from_json, c)),
    "frozenset": lambda c: frozenset(map(_from_json, c)),
    "dict": lambda c: {_from_json(k): _from_json(v) for k, v in c},
    "dtype": DTYPES.__getitem__,
    "numpy scalar": _numpy_scalar,
    **{module: _scalar_type(module) for module in _SCALAR_TYPES},
    "code": lambda c: LeftToCode(str(c)),
    "opaque": _opaque_read,
}
