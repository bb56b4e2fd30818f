"""Read a msgpack message into a tree. Errors name the problem and the byte of the message.

The format is flax's: a tree of dicts, lists, tuples, plain values and arrays as one message. It is plain msgpack with
extension types 1 (array), 2 (complex) and 3 (numpy scalar). The payload of 1 and 3 is a message of its own:
[shape, dtype name, bytes]. Two maps have a special meaning:

    {"__msgpack_chunked_array__": true, "shape": {"0": ...}, "chunks": {"0": flat array, ...}}
    {"__msgpack_tuple__": [...]}                        an extension by eformer: flax cannot write a tuple

A typed PRNG key is an array whose dtype name is key<implementation>, also an extension by eformer.

Tests: tests/engine/formats/test_msgpack.py, tests/compat/test_files_msgpack.py.
"""

from __future__ import annotations

import math
import re
import struct
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, Protocol

import msgspec
import numpy as np

from eformer._engine.record.dtypes import MOST_AXES, from_raw
from eformer.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from eformer._engine.formats.others.single_file import Window

    Message = memoryview | Window  # bytes in memory or in a file, of which a long slice is not read yet

# The framing of a larger message is checked in C before any value is built, so that a broken message is refused in
# milliseconds and without memory, however many small values it begins with. The reader then locates the problem if it
# is among the first values, which are cheap to build.
_CHECK_FRAMING_ABOVE = 2**16  # bytes
_MAX_VALUES_TO_EXPLAIN = 20_000
PRNG_KEY = re.compile(r"key<(\w{1,64})>")

_Shape = Annotated[tuple[Annotated[int, msgspec.Meta(ge=0)], ...], msgspec.Meta(max_length=MOST_AXES)]
decode_array = msgspec.msgpack.Decoder(tuple[_Shape, str, memoryview]).decode
_decode_complex = msgspec.msgpack.Decoder(tuple[float, float]).decode

ARRAY, COMPLEX, SCALAR = 1, 2, 3

CHUNKED = "__msgpack_chunked_array__"
TUPLE = "__msgpack_tuple__"

# Levels of a message; a tuple takes two. Flax's writer stops at 511 levels, the check of the framing at the
# interpreter's recursion limit of 1000.
MAX_DEPTH = 900

# The longest byte string or extension that msgpack can express.
MAX_LENGTH = 2**32 - 1

_KEYS = frozenset({str, int, bool, float, complex, bytes, type(None)})


class ArrayMaker(Protocol):
    """Makes the leaves of the tree for the arrays of a message."""

    def make(self, payload: Any, at: int) -> Any:
        """Make the leaf of an array from the payload of its extension, which begins at byte `at` of the message."""

    def join(self, shape: list[int], chunks: Sequence[Any]) -> Any:
        """Make the leaf of an array from flat chunks of one dtype, which together have all elements of the shape."""


def _read(view: memoryview, arrays: ArrayMaker) -> Any:
    """Read the tree in a view. The view must not change meanwhile."""
    if len(view) > _CHECK_FRAMING_ABOVE and (problem := _framing_problem(view)):
        return _Reader(view, arrays).message(most=_MAX_VALUES_TO_EXPLAIN, beyond=problem)
    return _Reader(view, arrays).message()


def read_at_most(most: int, message: Message, arrays: ArrayMaker) -> Any:
    """Read the tree in a message that need not be in memory. Refuse a message of more than `most` values."""
    return _Reader(message, arrays).message(most, f"more than {most:,} values")


def read_array_head(head: memoryview) -> tuple[Any, Any, int, int]:
    """Read the beginning of an array's payload: its shape, its dtype's name, and the start and stop of its bytes."""
    reader = _Reader(head, _NoArrays())
    try:
        if reader.number(_U8) != _THREE_VALUES:
            raise FormatError("not an array")
        shape, name = (
            reader.tree(MOST_AXES + 2, "a shape with too many axes"),
            reader.tree(1, "a dtype without a name"),
        )
        nbytes = reader.number(_LENGTHS[reader.number(_U8)])
    except (ValueError, struct.error, IndexError, KeyError) as error:
        raise FormatError(f"wrong payload of an extension: {_reason(error)}") from error
    return shape, name, reader.at, reader.at + nbytes


class _NoArrays:
    """Refuses arrays in places where a shape or a name is expected."""

    def make(self, *_: Any) -> NoReturn:
        raise FormatError("an array inside the description of an array")

    join = make


def _framing_problem(view: memoryview, *, in_thread: bool = False) -> str | None:
    try:
        msgspec.msgpack.decode(view, type=msgspec.Raw)
    except msgspec.DecodeError as error:
        return str(error)
    except RecursionError:
        if in_thread:
            return f"nested more than {MAX_DEPTH} deep"
        # The message or the caller's stack is deep. A new thread has an empty stack, and tells which.
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(_framing_problem, view, in_thread=True).result()
    return None


class _List:
    """A list that is being read."""

    __slots__ = ("items", "left")

    def __init__(self, size: int) -> None:
        self.items: list[Any] = []
        self.left = size

    def add(self, value: Any) -> None:
        self.items.append(value)
        self.left -= 1

    def finish(self, arrays: ArrayMaker) -> Any:
        return self.items

    @property
    def step(self) -> str:
        return str(len(self.items))


_NO_KEY: Any = object()


class _Map:
    """A map that is being read, keys and values in turn."""

    __slots__ = ("items", "key", "left")

    def __init__(self, size: int) -> None:
        self.items: dict[Any, Any] = {}
        self.key = _NO_KEY
        self.left = 2 * size

    def add(self, value: Any) -> None:
        if self.key is not _NO_KEY:
            self.items[self.key] = value
            self.key = _NO_KEY
        elif not can_be_key(value):
            raise FormatError(f"a {type(value).__name__} as the key of a map")
        elif value in self.items:
            raise FormatError(f"duplicate key {repr(value)[:80]}")
        else:
            self.key = value
        self.left -= 1

    def finish(self, arrays: ArrayMaker) -> Any:
        if TUPLE in self.items:
            return _make_tuple(self.items)
        return _join_chunks(self.items, arrays) if CHUNKED in self.items else self.items

    @property
    def step(self) -> str:
        return "" if self.key is _NO_KEY else str(self.key)


class _Reader:
    """A reader of one message. It does not recurse, so depth costs memory and never the interpreter's stack."""

    __slots__ = ("arrays", "at", "open", "view")

    def __init__(self, view: Message, arrays: ArrayMaker) -> None:
        self.view, self.arrays = view, arrays
        self.at = 0
        self.open: list[_List | _Map] = []

    def message(self, most: int = sys.maxsize, beyond: str = "") -> Any:
        """Read the only value in the view. Give up after `most` values inside it, for the reason `beyond`."""
        try:
            value = self.tree(most, beyond)
        except (ValueError, struct.error, IndexError) as error:
            raise FormatError(f"msgpack, {self.where()}: {_reason(error)}") from error
        if self.at != len(self.view):
            raise FormatError(f"msgpack: {len(self.view) - self.at} bytes follow the end, at byte {self.at}")
        return value

    def where(self) -> str:
        path = "/".join(container.step[:80] for container in self.open)
        return f"at byte {self.at} of {len(self.view)}" + (f", in {path[:400]!r}" if path else "")

    def tree(self, most: int, beyond: str) -> Any:
        view, containers = self.view, self.open
        for _ in range(most):
            tag = view[self.at]
            self.at += 1
            value = _READERS[tag](self)
            kind = type(value)
            if kind is _Map or kind is _List:
                self.enter(value)
                if value.left:
                    continue
                value = containers.pop().finish(self.arrays)
            while containers:
                container = containers[-1]
                container.add(value)
                if container.left:
                    break
                value = container.finish(self.arrays)
                containers.pop()
            else:
                return value
        raise FormatError(f"{beyond}, further on")

    def enter(self, container: _List | _Map) -> None:
        # Each element takes at least one byte, so false claims are refused before memory is allocated.
        left = len(self.view) - self.at
        if container.left > left:
            raise FormatError(f"a container of {container.left} elements, but only {left} bytes are left")
        if len(self.open) == MAX_DEPTH:
            raise FormatError(f"nested more than {MAX_DEPTH} deep")
        self.open.append(container)

    def number(self, form: struct.Struct) -> Any:
        (value,) = form.unpack(self.view[self.at : self.at + form.size])
        self.at += form.size
        return value

    def take(self, size: int) -> Any:
        end = self.at + size
        if end > len(self.view):
            raise FormatError(f"{size} bytes announced, but only {len(self.view) - self.at} left")
        taken = self.view[self.at : end]
        self.at = end
        return taken


def _number(form: struct.Struct) -> Callable[[_Reader], Any]:
    return lambda reader: reader.number(form)


def _sized(form: struct.Struct, read: Callable[[_Reader, int], Any]) -> Callable[[_Reader], Any]:
    return lambda reader: read(reader, reader.number(form))


def _fixed(read: Callable[[_Reader, int], Any], size: int) -> Callable[[_Reader], Any]:
    return lambda reader: read(reader, size)


def _constant(value: Any) -> Callable[[_Reader], Any]:
    return lambda reader: value


def _text(reader: _Reader, size: int) -> str:
    return str(bytes(reader.take(size)), "utf-8")


def _bytes(reader: _Reader, size: int) -> bytes:
    return bytes(reader.take(size))


def _extension(reader: _Reader, size: int) -> Any:
    code = reader.number(_I8)
    payload = reader.take(size)
    try:
        if code == ARRAY:
            return reader.arrays.make(payload, reader.at - size)
        if code == SCALAR:
            return _scalar(memoryview(bytes(payload)))
        if code == COMPLEX:
            return complex(*_decode_complex(bytes(payload)))
    except msgspec.DecodeError as error:
        raise FormatError(f"wrong payload of an extension: {error}") from error
    raise FormatError(f"unknown extension type {code}; known are 1 (array), 2 (complex) and 3 (scalar)")


def _unused(reader: _Reader) -> Any:
    raise FormatError(f"0xc1 at byte {reader.at - 1}, which is not valid msgpack")


_I8, _U8 = struct.Struct(">b"), struct.Struct(">B")
_I16, _U16 = struct.Struct(">h"), struct.Struct(">H")
_I32, _U32 = struct.Struct(">i"), struct.Struct(">I")
_I64, _U64 = struct.Struct(">q"), struct.Struct(">Q")
_F32, _F64 = struct.Struct(">f"), struct.Struct(">d")

_THREE_VALUES = 0x93
_LENGTHS = {0xC4: _U8, 0xC5: _U16, 0xC6: _U32}

# The functions that read a value, indexed by its tag.
_READERS: tuple[Callable[[_Reader], Any], ...] = (
    *map(_constant, range(128)),
    *(lambda reader, size=size: _Map(size) for size in range(16)),
    *(lambda reader, size=size: _List(size) for size in range(16)),
    *map(partial(_fixed, _text), range(32)),
    *(_constant(None), _unused, _constant(False), _constant(True)),
    *(_sized(form, _bytes) for form in (_U8, _U16, _U32)),
    *(_sized(form, _extension) for form in (_U8, _U16, _U32)),
    *map(_number, (_F32, _F64, _U8, _U16, _U32, _U64, _I8, _I16, _I32, _I64)),
    *map(partial(_fixed, _extension), (1, 2, 4, 8, 16)),
    *(_sized(form, _text) for form in (_U8, _U16, _U32)),
    *(lambda reader, form=form: _List(reader.number(form)) for form in (_U16, _U32)),
    *(lambda reader, form=form: _Map(reader.number(form)) for form in (_U16, _U32)),
    *map(_constant, range(-32, 0)),
)


def _reason(error: Exception) -> str:
    if isinstance(error, KeyError):
        return "the bytes of an array are missing"
    return "the input ends too early" if isinstance(error, (IndexError, struct.error)) else str(error)


def _scalar(payload: memoryview) -> Any:
    shape, name, data = decode_array(payload)
    if shape:
        raise FormatError("an array with axes where a numpy scalar was expected")
    return from_raw(data, name, shape)[()]


def _make_tuple(items: dict[Any, Any]) -> tuple[Any, ...]:
    content = items[TUPLE]
    if len(items) != 1 or not isinstance(content, list):
        raise FormatError(f"{TUPLE} needs one list and nothing else")
    return tuple(content)


def _join_chunks(items: dict[Any, Any], arrays: ArrayMaker) -> Any:
    try:
        shape, chunks = _by_number(items["shape"]), _by_number(items["chunks"])
        if len(items) == 3 and chunks and all(type(n) is int and n >= 0 for n in shape):
            _require_flat(shape, chunks)
            return arrays.join(shape, chunks)
    except (KeyError, AttributeError, TypeError) as error:
        raise FormatError(f"{CHUNKED} needs a shape and chunks") from error
    raise FormatError(f"{CHUNKED} needs a shape and chunks, and nothing else")


def _by_number(numbered: dict[str, Any]) -> list[Any]:
    return [numbered[str(index)] for index in range(len(numbered.keys()))]


def _require_flat(shape: list[int], chunks: Sequence[Any]) -> None:
    if any(chunk.ndim != 1 or chunk.dtype != chunks[0].dtype for chunk in chunks):
        raise FormatError(f"the chunks of an array of shape {shape} are not flat, or not of one dtype")
    if sum(chunk.size for chunk in chunks) != math.prod(shape):
        raise FormatError(
            f"the chunks hold {sum(c.size for c in chunks)} elements, but shape {shape} has {math.prod(shape)}"
        )


def can_be_key(value: Any) -> bool:
    """Tell whether a value can be the key of a dict: a hashable leaf."""
    return type(value) in _KEYS or isinstance(value, np.generic)


# ------------------------------------------------------ a tree whose arrays are views of the message


def unpack_tree(data: bytes | bytearray | memoryview) -> Any:
    """Read the tree in `data`. Its arrays are views of `data` if `data` is read-only, else of a copy."""
    view = memoryview(data).cast("B")
    if not view.readonly:
        view = memoryview(bytes(view))
    return _read(view, _ViewMaker())


class _ViewMaker:
    def make(self, payload: memoryview, at: int) -> Any:
        shape, name, data = decode_array(payload)
        if name.startswith("key<") and (key := PRNG_KEY.fullmatch(name)):
            return _prng_key(from_raw(data, "uint32", shape), key[1])
        return from_raw(data, name, shape)

    def join(self, shape: list[int], chunks: Sequence[Any]) -> np.ndarray[Any, Any]:
        array = np.concatenate(chunks).reshape(shape)
        array.flags.writeable = False  # like the views
        return array


def _prng_key(data: np.ndarray[Any, Any], implementation: str) -> Any:
    import jax  # late: only files with PRNG keys need it

    try:
        return jax.random.wrap_key_data(jax.numpy.asarray(data), impl=implementation)
    except (TypeError, ValueError) as error:
        raise FormatError(f"not a PRNG key: {error}") from error
