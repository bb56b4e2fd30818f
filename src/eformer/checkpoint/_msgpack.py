"""flax's msgpack: a tree of dicts, lists, tuples, plain values and arrays as one message, and back.

Plain msgpack, with extension types 1 (array), 2 (complex) and 3 (numpy scalar). The payload of 1 and 3 is a
message of its own: [shape, dtype name, bytes]. Two maps have a meaning:

    {"__msgpack_chunked_array__": true, "shape": {"0": ...}, "chunks": {"0": flat array, ...}}
    {"__msgpack_tuple__": [...]}                        ours: flax cannot write a tuple

A typed PRNG key is an array whose dtype name is key<implementation>: ours too.
"""

from __future__ import annotations

import math
import re
import struct
import sys
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np

from eformer.checkpoint._ndarray import from_raw, name_of_dtype, raw_pieces
from eformer.errors import FormatError, LeafError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    # A value to write, where it stands (None: the root, else the place of its parent and the last step),
    # and whether a list stands above it.
    Place = tuple["Place", Any] | None
    Item = tuple[Any, Place, bool]

_ARRAY, _COMPLEX, _SCALAR = 1, 2, 3
_CHUNKED = "__msgpack_chunked_array__"
_TUPLE = "__msgpack_tuple__"
_PRNG_KEY = re.compile(r"key<(\w{1,64})>")

# flax's writer stops at 511 levels. A tuple takes two in the message.
_MAX_TREE_DEPTH = 511
_MAX_MESSAGE_DEPTH = 2 * _MAX_TREE_DEPTH + 2

# The longest byte string or extension that msgpack can express.
_MAX_LENGTH = 2**32 - 1

_encode = msgspec.msgpack.Encoder().encode


# --------------------------------------------------------------------------------------------- writing


def pack(tree: Any, write: Callable[[Any], Any], *, max_chunk: int, sort_keys: bool) -> None:
    """Hands the message to `write`, piece by piece; large arrays as views of their own memory, not copied.

    Arrays of more than `max_chunk` bytes are split; `sort_keys` writes every dict in the order of its keys.
    """
    packer = _Packer(write, max_chunk, sort_keys)
    unfinished: list[Iterator[Item]] = [iter([(tree, None, False)])]
    while unfinished:
        for value, place, below_list in unfinished[-1]:
            children = packer.begin(value, place, below_list)
            if children is not None:
                unfinished.append(children)
                break
        else:
            unfinished.pop()
        if len(unfinished) > _MAX_TREE_DEPTH + 1:
            raise LeafError(f"the tree is nested more than {_MAX_TREE_DEPTH} deep, or contains itself")


def can_pack(leaf: Any) -> bool:
    """Whether `pack` takes this leaf; an array is judged by its dtype, its data is not touched."""
    if _is_jax_array(leaf) and not isinstance(leaf.dtype, np.dtype):
        return True  # an extended dtype: a typed PRNG key
    try:
        sample = np.empty(0, leaf.dtype) if isinstance(leaf, np.ndarray) or _is_jax_array(leaf) else leaf
        pack(sample, lambda piece: None, max_chunk=_MAX_LENGTH, sort_keys=False)
    except LeafError:
        return False
    return True


def _where(place: Place) -> str:
    steps = []
    while place is not None:
        place, step = place
        steps.append(str(step))
    return "/".join(reversed(steps)) or "the root"


class _Packer:
    """Writes values by type: a leaf whole, of a container the head, whose children it then returns."""

    def __init__(self, write: Callable[[Any], Any], max_chunk: int, sort_keys: bool) -> None:
        self.write = write
        self.max_chunk = max_chunk
        self.sort_keys = sort_keys
        self.writers: dict[type, Callable[[Any, Place, bool], Iterator[Item] | None]] = {
            **dict.fromkeys((type(None), bool, int, float, str), self.plain),
            **dict.fromkeys((bytes, bytearray, memoryview), self.bytes),
            np.ndarray: self.array,
            dict: self.map,
            list: self.list,
            tuple: self.tuple,
        }

    def begin(self, value: Any, place: Place, below_list: bool) -> Iterator[Item] | None:
        write = self.writers.get(type(value)) or self.other
        return write(value, place, below_list)

    def map(self, value: Any, place: Place, below_list: bool) -> Iterator[Item]:
        for reserved in (_CHUNKED, _TUPLE):
            if reserved in value:
                raise LeafError(
                    f"{_where(place)}: the key {reserved!r} has a meaning of its own in this format"
                )
        self.write(_head(len(value), 0x80, 0xDE))
        return self.map_items(value, place, below_list)

    def map_items(self, value: Any, place: Place, below_list: bool) -> Iterator[Item]:
        for key in self.ordered(value):
            here = (place, key)
            if type(key) not in _KEYS:
                raise LeafError(f"{_where(here)}: a key of type {type(key).__name__} cannot be stored")
            self.plain(key, here, below_list)
            yield value[key], here, below_list

    def ordered(self, value: Any) -> list[Any]:
        try:
            return sorted(value) if self.sort_keys else list(value)
        except TypeError:  # keys of several types have no order but their own
            return list(value)

    def list(self, value: Any, place: Place, below_list: bool) -> Iterator[Item]:
        # flax looks for large arrays to split in dicts alone, not below a list; its bytes are the standard.
        self.write(_head(len(value), 0x90, 0xDC))
        return ((child, (place, index), True) for index, child in enumerate(value))

    def tuple(self, value: Any, place: Place, below_list: bool) -> Iterator[Item]:
        self.write(_head(1, 0x80, 0xDE) + _encode(_TUPLE) + _head(len(value), 0x90, 0xDC))
        return ((child, (place, index), below_list) for index, child in enumerate(value))

    def plain(self, value: Any, place: Place, below_list: bool) -> None:
        try:
            self.write(_encode(value))
        except (OverflowError, UnicodeEncodeError) as error:
            raise LeafError(f"{_where(place)}: {repr(value)[:40]} cannot be stored ({error})") from error

    def bytes(self, value: Any, place: Place, below_list: bool) -> None:
        size = memoryview(value).nbytes
        if size > _MAX_LENGTH:
            raise LeafError(
                f"{_where(place)}: {size} bytes in one piece; msgpack holds at most {_MAX_LENGTH}"
            )
        self.write(_long_head(size, 0xC4))
        self.write(value)

    def other(self, value: Any, place: Place, below_list: bool) -> None:
        if isinstance(value, np.ma.MaskedArray):
            raise LeafError(f"{_where(place)}: the mask of a masked array cannot be stored")
        if isinstance(value, np.ndarray):
            self.array(value, place, below_list)
        elif isinstance(value, np.generic):
            self.extension(_SCALAR, np.asarray(value), place)
        elif isinstance(value, complex):
            pair = b"\x92" + _encode(value.real) + _encode(value.imag)
            self.write(_extension_head(_COMPLEX, len(pair)) + pair)
        elif _is_jax_array(value):
            self.jax_array(value, place, below_list)
        else:
            kind = type(value)
            raise LeafError(
                f"{_where(place)}: can not serialize {kind.__module__}.{kind.__qualname__}; msgpack holds "
                "arrays, plain values, dict, list and tuple; to_bytes takes registered objects apart"
            )

    def jax_array(self, value: Any, place: Place, below_list: bool) -> None:
        try:
            if isinstance(value.dtype, np.dtype):
                self.array(np.asarray(value), place, below_list)
            else:
                self.prng_key(value, place)
        except RuntimeError as error:  # deleted by donation, or partly on other hosts
            error.add_note(f"while serializing the leaf {_where(place)}")
            raise

    def prng_key(self, value: Any, place: Place) -> None:
        import jax  # late: numpy trees are read and written without it

        data = np.asarray(jax.random.key_data(value))
        self.extension(_ARRAY, data, place, name=f"key<{jax.random.key_impl(value)}>")

    def array(self, array: np.ndarray[Any, Any], place: Place, below_list: bool) -> None:
        limit = _MAX_LENGTH - 2**12 if below_list else self.max_chunk
        if array.nbytes > limit:
            self.chunked(array, place)
        else:
            self.extension(_ARRAY, array, place)

    def chunked(self, array: np.ndarray[Any, Any], place: Place) -> None:
        name = self.dtype_name(array, place)
        step = max(1, int(self.max_chunk / array.dtype.itemsize))
        starts = range(0, array.size, step)
        shape = {str(axis): size for axis, size in enumerate(array.shape)}
        self.write(_head(3, 0x80, 0xDE) + _encode(_CHUNKED) + _encode(True))
        self.write(_encode("shape") + _encode(shape) + _encode("chunks") + _head(len(starts), 0x80, 0xDE))
        rest = memoryview(b"")
        pieces = raw_pieces(array)
        for index, start in enumerate(starts):
            size = min(step, array.size - start)
            left = size * array.dtype.itemsize
            self.write(_encode(str(index)) + _array_head(_ARRAY, (size,), name, left))
            while left:
                rest = rest or memoryview(next(pieces))
                self.write(rest[:left])
                left, rest = left - len(rest[:left]), rest[left:]

    def extension(self, code: int, array: np.ndarray[Any, Any], place: Place, name: str = "") -> None:
        name = name or self.dtype_name(array, place)
        self.write(_array_head(code, array.shape, name, array.nbytes))
        for piece in raw_pieces(array):
            self.write(piece)

    def dtype_name(self, array: np.ndarray[Any, Any], place: Place) -> str:
        try:
            return name_of_dtype(array.dtype)
        except LeafError as error:
            raise LeafError(f"{_where(place)}: {error}") from None


_KEYS = {str, int, bool, float, bytes, type(None)}


def _is_jax_array(value: Any) -> bool:
    jax = sys.modules.get("jax")  # where nobody has imported jax there are none of its arrays
    return jax is not None and isinstance(value, jax.Array)


@lru_cache(4096)  # a model has few shapes and many arrays
def _array_head(code: int, shape: tuple[int, ...], name: str, nbytes: int) -> bytes:
    payload = b"\x93" + _encode(shape) + _encode(name) + _long_head(nbytes, 0xC4)
    return _extension_head(code, len(payload) + nbytes) + payload


def _extension_head(code: int, size: int) -> bytes:
    fixed = {1: 0xD4, 2: 0xD5, 4: 0xD6, 8: 0xD7, 16: 0xD8}.get(size)
    return bytes([fixed, code]) if fixed else _long_head(size, 0xC7) + bytes([code])


def _head(size: int, short: int, long: int) -> bytes:
    """The head of a map or a list."""
    if size < 16:
        return bytes([short | size])
    return struct.pack(">BH", long, size) if size < 2**16 else struct.pack(">BI", long + 1, size)


def _long_head(size: int, tag: int) -> bytes:
    """The head of bytes or of an extension: a length of one, two or four bytes."""
    if size < 2**8:
        return struct.pack(">BB", tag, size)
    return struct.pack(">BH", tag + 1, size) if size < 2**16 else struct.pack(">BI", tag + 2, size)


# --------------------------------------------------------------------------------------------- reading

# Above this size a message's framing is checked in C before anything is built from it, so that a broken one
# is refused in milliseconds and in no memory, however many small values it begins with. The reader then
# explains what is wrong if it finds the place among the first values: building those is cheap.
_CHECK_FRAMING_ABOVE = 2**16
_MOST_TO_EXPLAIN = 20_000

_Shape = Annotated[tuple[Annotated[int, msgspec.Meta(ge=0)], ...], msgspec.Meta(max_length=64)]
_decode_array = msgspec.msgpack.Decoder(tuple[_Shape, str, memoryview]).decode
_decode_complex = msgspec.msgpack.Decoder(tuple[float, float]).decode


def unpack(data: bytes | bytearray | memoryview) -> Any:
    """The tree in `data`. Arrays are views of it when it is immutable, and of a copy when it is not."""
    view = memoryview(data).cast("B")
    if not view.readonly:
        view = memoryview(bytes(view))
    if len(view) > _CHECK_FRAMING_ABOVE and (problem := _framing_problem(view)):
        return _Reader(view).message(most=_MOST_TO_EXPLAIN, beyond=problem)
    return _Reader(view).message()


def _framing_problem(view: memoryview) -> str | None:
    try:
        msgspec.msgpack.decode(view, type=msgspec.Raw)
    except RecursionError:
        return "nested too deeply"
    except msgspec.DecodeError as error:
        return str(error)
    return None


class _List:
    """A list being read."""

    __slots__ = ("items", "left")

    def __init__(self, size: int) -> None:
        self.items: list[Any] = []
        self.left = size

    def add(self, value: Any) -> None:
        self.items.append(value)
        self.left -= 1

    def finish(self) -> Any:
        return self.items

    @property
    def step(self) -> str:
        return str(len(self.items))


_NO_KEY: Any = object()


class _Map:
    """A map being read: keys and values in turn."""

    __slots__ = ("items", "key", "left")

    def __init__(self, size: int) -> None:
        self.items: dict[Any, Any] = {}
        self.key = _NO_KEY
        self.left = 2 * size

    def add(self, value: Any) -> None:
        if self.key is not _NO_KEY:
            self.items[self.key] = value
            self.key = _NO_KEY
        elif type(value) not in _KEYS:
            raise FormatError(f"a {type(value).__name__} as the key of a map")
        elif value in self.items:
            raise FormatError(f"duplicate key {repr(value)[:80]}")
        else:
            self.key = value
        self.left -= 1

    def finish(self) -> Any:
        if _TUPLE in self.items:
            return _tuple(self.items)
        return _unchunked(self.items) if _CHUNKED in self.items else self.items

    @property
    def step(self) -> str:
        return "" if self.key is _NO_KEY else str(self.key)


class _Reader:
    """Reads one message, without recursion: depth costs memory, never the interpreter's stack."""

    __slots__ = ("at", "open", "view")

    def __init__(self, view: memoryview) -> None:
        self.view = view
        self.at = 0
        self.open: list[_List | _Map] = []

    def message(self, most: int = sys.maxsize, beyond: str = "") -> Any:
        """The one value in the view; gives up after `most` parts of it with the reason `beyond`."""
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
                value = containers.pop().finish()
            while containers:
                container = containers[-1]
                container.add(value)
                if container.left:
                    break
                value = container.finish()
                containers.pop()
            else:
                return value
        raise FormatError(f"{beyond}, further on")

    def enter(self, container: _List | _Map) -> None:
        # Each element takes a byte at least: a claim that cannot be true is refused before it is believed.
        left = len(self.view) - self.at
        if container.left > left:
            raise FormatError(f"a container of {container.left} elements, and only {left} bytes")
        if len(self.open) == _MAX_MESSAGE_DEPTH:
            raise FormatError(f"nested more than {_MAX_MESSAGE_DEPTH} deep")
        self.open.append(container)

    def number(self, form: struct.Struct) -> Any:
        (value,) = form.unpack_from(self.view, self.at)
        self.at += form.size
        return value

    def take(self, size: int) -> memoryview:
        end = self.at + size
        if end > len(self.view):
            raise FormatError(f"{size} bytes announced, and only {len(self.view) - self.at} left")
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
    return str(reader.take(size), "utf-8")


def _bytes(reader: _Reader, size: int) -> bytes:
    return bytes(reader.take(size))


def _extension(reader: _Reader, size: int) -> Any:
    code = reader.number(_I8)
    payload = reader.take(size)
    try:
        if code == _ARRAY:
            return _array(payload)
        if code == _SCALAR:
            return _scalar(payload)
        if code == _COMPLEX:
            return complex(*_decode_complex(payload))
    except msgspec.DecodeError as error:
        raise FormatError(f"wrong payload of an extension: {error}") from error
    raise FormatError(f"unknown extension type {code}; 1 (array), 2 (complex) and 3 (scalar) are known")


def _unused(reader: _Reader) -> Any:
    raise FormatError(f"0xc1 at byte {reader.at - 1}, which msgpack never uses")


_I8, _U8 = struct.Struct(">b"), struct.Struct(">B")
_I16, _U16 = struct.Struct(">h"), struct.Struct(">H")
_I32, _U32 = struct.Struct(">i"), struct.Struct(">I")
_I64, _U64 = struct.Struct(">q"), struct.Struct(">Q")
_F32, _F64 = struct.Struct(">f"), struct.Struct(">d")

# What to do at each of the 256 tags.
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
    return "the input ends too early" if isinstance(error, (IndexError, struct.error)) else str(error)


def _array(payload: memoryview) -> Any:
    shape, name, data = _decode_array(payload)
    if name.startswith("key<") and (key := _PRNG_KEY.fullmatch(name)):
        return _prng_key(from_raw(data, "uint32", shape), key[1])
    return from_raw(data, name, shape)


def _scalar(payload: memoryview) -> Any:
    array = _array(payload)
    if not isinstance(array, np.ndarray) or array.shape != ():
        raise FormatError("an array with axes where a numpy scalar was announced")
    return array[()]


def _prng_key(data: np.ndarray[Any, Any], implementation: str) -> Any:
    import jax  # late: only files that hold keys need it

    try:
        return jax.random.wrap_key_data(jax.numpy.asarray(data), impl=implementation)
    except (TypeError, ValueError) as error:
        raise FormatError(f"not a PRNG key: {error}") from error


def _tuple(items: dict[Any, Any]) -> tuple[Any, ...]:
    content = items[_TUPLE]
    if len(items) != 1 or not isinstance(content, list):
        raise FormatError(f"{_TUPLE} needs one list and nothing beside it")
    return tuple(content)


def _unchunked(items: dict[Any, Any]) -> np.ndarray[Any, Any]:
    try:
        shape, chunks = _in_order(items["shape"]), _in_order(items["chunks"])
        if len(items) == 3 and chunks and all(type(n) is int and n >= 0 for n in shape):
            return _joined(shape, chunks)
    except (KeyError, AttributeError, TypeError) as error:
        raise FormatError(f"{_CHUNKED} needs a shape and chunks") from error
    raise FormatError(f"{_CHUNKED} needs a shape and chunks, and nothing beside them")


def _in_order(numbered: dict[str, Any]) -> list[Any]:
    return [numbered[str(index)] for index in range(len(numbered.keys()))]


def _joined(shape: list[int], chunks: list[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    if any(chunk.ndim != 1 or chunk.dtype != chunks[0].dtype for chunk in chunks):
        raise FormatError(f"the chunks of an array of shape {shape} are not flat, or not of one dtype")
    if sum(chunk.size for chunk in chunks) != math.prod(shape):
        raise FormatError(
            f"the chunks hold {sum(c.size for c in chunks)} elements, shape {shape} needs others"
        )
    return np.concatenate(chunks).reshape(shape)
