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
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from eformer.checkpoint._ndarray import from_raw, name_of_dtype, raw_pieces
from eformer.errors import FormatError, LeafError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_ARRAY, _COMPLEX, _SCALAR = 1, 2, 3
_CHUNKED = "__msgpack_chunked_array__"
_TUPLE = "__msgpack_tuple__"
_PRNG_KEY = re.compile(r"key<(\w{1,64})>")

# flax's writer stops at 511 levels. A tuple takes two in the message.
_MAX_TREE_DEPTH = 511
_MAX_MESSAGE_DEPTH = 2 * _MAX_TREE_DEPTH + 2

# The longest byte string or extension that msgpack can express.
_MAX_LENGTH = 2**32 - 1

_MAX_AXES = 64


# --------------------------------------------------------------------------------------------- writing


def pack(tree: Any, write: Callable[[Any], Any], *, max_chunk: int, sort_keys: bool) -> None:
    """Hands the message to `write`, piece by piece; arrays as views of their own memory, never copied.

    Arrays of more than `max_chunk` bytes are split; `sort_keys` writes every dict in the order of its keys.
    """
    packer = _Packer(write, max_chunk, sort_keys)
    open_containers = [iter([_Item(tree, (), False)])]
    while open_containers:
        for item in open_containers[-1]:
            children = packer.begin(item)
            if children is not None:
                open_containers.append(children)
                break
        else:
            open_containers.pop()


def can_pack(leaf: Any) -> bool:
    """Whether `pack` takes this leaf; an array is judged by its dtype, its data is not touched."""
    if _is_jax_array(leaf) and not hasattr(leaf.dtype, "newbyteorder"):
        return True  # an extended dtype: a typed PRNG key
    try:
        sample = np.empty(0, leaf.dtype) if isinstance(leaf, np.ndarray) or _is_jax_array(leaf) else leaf
        pack(sample, lambda piece: None, max_chunk=_MAX_LENGTH, sort_keys=False)
    except LeafError:
        return False
    return True


class _Item:
    """A value to write, and where it stands in the tree."""

    __slots__ = ("below_list", "path", "value")

    def __init__(self, value: Any, path: tuple[Any, ...], below_list: bool) -> None:
        self.value = value
        self.path = path
        self.below_list = below_list

    @property
    def where(self) -> str:
        return "/".join(map(str, self.path)) or "the root"


class _Packer:
    def __init__(self, write: Callable[[Any], Any], max_chunk: int, sort_keys: bool) -> None:
        self.write = write
        self.max_chunk = max_chunk
        self.sort_keys = sort_keys
        self.encode = msgspec.msgpack.Encoder().encode

    def begin(self, item: _Item) -> Iterator[_Item] | None:
        """Writes a leaf whole, or the head of a container, whose children it then returns."""
        value, kind = item.value, type(item.value)
        if kind in (dict, list, tuple):
            return self.container(item)
        if value is None or kind in (bool, int, float, str):
            self.write(self.plain(value, item))
        elif isinstance(value, np.ndarray):
            self.array(value, item)
        elif isinstance(value, np.generic):
            self.extension(_SCALAR, np.asarray(value), item)
        elif isinstance(value, complex):
            pair = b"\x92" + self.encode(value.real) + self.encode(value.imag)
            self.write(_extension_head(_COMPLEX, len(pair)) + pair)
        elif kind in (bytes, bytearray, memoryview):
            self.write(_bytes_head(memoryview(value).nbytes, item.where))
            self.write(value)
        elif _is_jax_array(value):
            self.jax_array(value, item)
        else:
            raise LeafError(
                f"{item.where}: can not serialize {kind.__module__}.{kind.__qualname__}; msgpack holds "
                "arrays, plain values, dict, list and tuple; to_bytes takes registered objects apart"
            )
        return None

    def container(self, item: _Item) -> Iterator[_Item]:
        if len(item.path) >= _MAX_TREE_DEPTH:
            raise LeafError(f"the tree is nested more than {_MAX_TREE_DEPTH} deep, or contains itself")
        if isinstance(item.value, dict):
            return self.map(item)
        if isinstance(item.value, tuple):
            self.write(_map_head(1) + self.encode(_TUPLE))
        self.write(_list_head(len(item.value)))
        # flax looks for large arrays to split in dicts alone, not below a list; its bytes are the standard.
        below_list = item.below_list or isinstance(item.value, list)
        return (_Item(child, (*item.path, i), below_list) for i, child in enumerate(item.value))

    def map(self, item: _Item) -> Iterator[_Item]:
        for reserved in (_CHUNKED, _TUPLE):
            if reserved in item.value:
                raise LeafError(f"{item.where}: the key {reserved!r} has a meaning of its own in this format")
        self.write(_map_head(len(item.value)))
        return self.map_items(item)

    def map_items(self, item: _Item) -> Iterator[_Item]:
        for key in self.ordered(item.value):
            child = _Item(item.value[key], (*item.path, key), item.below_list)
            if type(key) not in (str, int, bool, float, bytes, type(None)):
                raise LeafError(f"{child.where}: a key of type {type(key).__name__} cannot be stored")
            self.write(self.plain(key, child))
            yield child

    def ordered(self, node: dict[Any, Any]) -> list[Any]:
        try:
            return sorted(node) if self.sort_keys else list(node)
        except TypeError:  # keys of several types have no order but their own
            return list(node)

    def plain(self, value: Any, item: _Item) -> bytes:
        try:
            return self.encode(value)
        except (OverflowError, UnicodeEncodeError) as error:
            raise LeafError(f"{item.where}: {repr(value)[:40]} cannot be stored ({error})") from error

    def jax_array(self, value: Any, item: _Item) -> None:
        import jax  # late: reading and writing numpy trees needs no jax

        try:
            if jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key):
                name = f"key<{jax.random.key_impl(value)}>"
                self.extension(_ARRAY, np.asarray(jax.random.key_data(value)), item, name)
            else:
                self.array(np.asarray(value), item)
        except RuntimeError as error:  # deleted by donation, or partly on other hosts
            error.add_note(f"while serializing the leaf {item.where}")
            raise

    def array(self, array: np.ndarray[Any, Any], item: _Item) -> None:
        if isinstance(array, np.ma.MaskedArray):
            raise LeafError(f"{item.where}: the mask of a masked array cannot be stored")
        limit = _MAX_LENGTH - 2**12 if item.below_list else self.max_chunk
        if array.nbytes > limit:
            self.chunked(array, item)
        else:
            self.extension(_ARRAY, array, item)

    def chunked(self, array: np.ndarray[Any, Any], item: _Item) -> None:
        step = max(1, int(self.max_chunk / array.dtype.itemsize))
        flat = array.reshape(-1)
        chunks = [flat[start : start + step] for start in range(0, flat.size, step)]
        shape = {str(axis): size for axis, size in enumerate(array.shape)}
        self.write(_map_head(3) + self.encode(_CHUNKED) + self.encode(True) + self.encode("shape"))
        self.write(self.encode(shape) + self.encode("chunks") + _map_head(len(chunks)))
        for index, chunk in enumerate(chunks):
            self.write(self.encode(str(index)))
            self.extension(_ARRAY, chunk, item)

    def extension(self, code: int, array: np.ndarray[Any, Any], item: _Item, name: str = "") -> None:
        try:
            name = name or name_of_dtype(array.dtype)
        except LeafError as error:
            raise LeafError(f"{item.where}: {error}") from None
        head = b"\x93" + self.encode(array.shape) + self.encode(name) + _bytes_head(array.nbytes, item.where)
        self.write(_extension_head(code, len(head) + array.nbytes) + head)
        for piece in raw_pieces(array):
            self.write(piece)


def _is_jax_array(value: Any) -> bool:
    jax = sys.modules.get("jax")  # where nobody has imported jax there are none of its arrays
    return jax is not None and isinstance(value, jax.Array)


def _map_head(size: int) -> bytes:
    return _sized(size, 15, 0x80, 0xDE)


def _list_head(size: int) -> bytes:
    return _sized(size, 15, 0x90, 0xDC)


def _sized(size: int, most: int, fixed: int, tag16: int) -> bytes:
    if size <= most:
        return bytes([fixed | size])
    return struct.pack(">BH", tag16, size) if size < 2**16 else struct.pack(">BI", tag16 + 1, size)


def _bytes_head(size: int, where: str) -> bytes:
    if size > _MAX_LENGTH:
        raise LeafError(f"{where}: {size} bytes in one piece; msgpack holds at most {_MAX_LENGTH}")
    return _long(size, 0xC4)


def _extension_head(code: int, size: int) -> bytes:
    fixed = {1: 0xD4, 2: 0xD5, 4: 0xD6, 8: 0xD7, 16: 0xD8}.get(size)
    return bytes([fixed, code]) if fixed else _long(size, 0xC7) + bytes([code])


def _long(size: int, tag8: int) -> bytes:
    if size < 2**8:
        return struct.pack(">BB", tag8, size)
    return struct.pack(">BH", tag8 + 1, size) if size < 2**16 else struct.pack(">BI", tag8 + 2, size)


# --------------------------------------------------------------------------------------------- reading

# Above this size a message's framing is checked in C before anything is built from it, so that a broken one
# is refused in milliseconds and without memory; below it, the reader itself is as quick and says more.
_CHECK_FRAMING_ABOVE = 2**16


def unpack(data: bytes | bytearray | memoryview) -> Any:
    """The tree in `data`. Arrays are views of it when it is immutable, and of a copy when it is not."""
    view = memoryview(data).cast("B")
    if not view.readonly:
        view = memoryview(bytes(view))
    if len(view) > _CHECK_FRAMING_ABOVE:
        _check_framing(view)
    return _Reader(view).message()


def _check_framing(view: memoryview) -> None:
    try:
        msgspec.msgpack.decode(view, type=msgspec.Raw)
    except RecursionError as error:
        raise FormatError("msgpack: nested too deeply") from error
    except msgspec.DecodeError as error:
        raise FormatError(f"msgpack of {len(view)} bytes: {error}") from error


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
        elif value is not None and type(value) not in (str, int, bool, float, bytes):
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

    def __init__(self, view: memoryview) -> None:
        self.view = view
        self.at = 0
        self.open: list[_List | _Map] = []

    def message(self) -> Any:
        try:
            value = self.tree()
        except (ValueError, struct.error, IndexError) as error:
            raise FormatError(f"msgpack, {self.where()}: {_reason(error)}") from error
        if self.at != len(self.view):
            raise FormatError(f"msgpack: {len(self.view) - self.at} bytes follow the end, at byte {self.at}")
        return value

    def where(self) -> str:
        path = "/".join(container.step[:80] for container in self.open)
        return f"at byte {self.at} of {len(self.view)}" + (f", in {path[:400]!r}" if path else "")

    def tree(self) -> Any:
        while True:
            value = self.value()
            if isinstance(value, (_List, _Map)):
                self.enter(value)
                if value.left:
                    continue
                value = self.open.pop().finish()
            elif isinstance(value, memoryview):
                value = bytes(value)
            while self.open:
                container = self.open[-1]
                container.add(value)
                if container.left:
                    break
                value = container.finish()
                self.open.pop()
            else:
                return value

    def enter(self, container: _List | _Map) -> None:
        # Each element takes a byte at least: a claim that cannot be true is refused before it is believed.
        if container.left > len(self.view) - self.at:
            raise FormatError(
                f"a container of {container.left} elements, and only {len(self.view) - self.at} bytes"
            )
        if len(self.open) == _MAX_MESSAGE_DEPTH:
            raise FormatError(f"nested more than {_MAX_MESSAGE_DEPTH} deep")
        self.open.append(container)

    def value(self) -> Any:
        """The next value; a container only begun."""
        tag = self.view[self.at]
        self.at += 1
        if tag < 0x80:
            return tag
        if tag >= 0xE0:
            return tag - 256
        if tag < 0x90:
            return _Map(tag & 15)
        if tag < 0xA0:
            return _List(tag & 15)
        if tag < 0xC0:
            return self.text(tag & 31)
        return _BY_TAG[tag - 0xC0](self)

    def number(self, form: struct.Struct) -> Any:
        (value,) = form.unpack_from(self.view, self.at)
        self.at += form.size
        return value

    def take(self, size: int) -> memoryview:
        if size > len(self.view) - self.at:
            raise FormatError(f"{size} bytes announced, and only {len(self.view) - self.at} left")
        self.at += size
        return self.view[self.at - size : self.at]

    def text(self, size: int) -> str:
        return str(self.take(size), "utf-8")

    def extension(self, size: int) -> Any:
        code = self.number(_I8)
        payload = _Reader(self.take(size))
        if code in (_ARRAY, _SCALAR):
            array = payload.array()
            return array if code == _ARRAY else _scalar(array)
        if code == _COMPLEX:
            return payload.complex()
        raise FormatError(f"unknown extension type {code}; 1 (array), 2 (complex) and 3 (scalar) are known")

    def array(self) -> Any:
        self.expect(_List, 3)
        axes = self.expect(_List).left
        if axes > _MAX_AXES:
            raise FormatError(f"an array of {axes} axes; numpy stops at {_MAX_AXES}")
        shape = [self.expect(int) for _ in range(axes)]
        name = self.expect(str)
        data = self.expect(memoryview)
        self.expect_end()
        if key := _PRNG_KEY.fullmatch(name):
            return _prng_key(from_raw(data, "uint32", shape), key[1])
        return from_raw(data, name, shape)

    def complex(self) -> complex:
        self.expect(_List, 2)
        value = complex(self.expect(float), self.expect(float))
        self.expect_end()
        return value

    def expect(self, kind: Any, size: int | None = None) -> Any:
        """The next value, of an extension's payload, which must be of this kind."""
        value = self.value()
        if type(value) is not kind:
            raise FormatError(f"wrong payload: {_name(kind)} expected, found {_name(type(value))}")
        if size is not None and value.left != size:
            raise FormatError(f"wrong payload: a list of {size} expected, found one of {value.left}")
        return value

    def expect_end(self) -> None:
        if self.at != len(self.view):
            raise FormatError(f"wrong payload: {len(self.view) - self.at} bytes too many")

    def invalid(self) -> Any:
        raise FormatError("0xc1, which msgpack never uses")


_I8, _U8 = struct.Struct(">b"), struct.Struct(">B")
_I16, _U16 = struct.Struct(">h"), struct.Struct(">H")
_I32, _U32 = struct.Struct(">i"), struct.Struct(">I")
_I64, _U64 = struct.Struct(">q"), struct.Struct(">Q")
_F32, _F64 = struct.Struct(">f"), struct.Struct(">d")

# What to do at each of the tags 0xc0 to 0xdf.
_BY_TAG: tuple[Callable[[_Reader], Any], ...] = (
    lambda r: None,
    _Reader.invalid,
    lambda r: False,
    lambda r: True,
    *(lambda r, size=size: r.take(r.number(size)) for size in (_U8, _U16, _U32)),
    *(lambda r, size=size: r.extension(r.number(size)) for size in (_U8, _U16, _U32)),
    *(
        lambda r, form=form: r.number(form)
        for form in (_F32, _F64, _U8, _U16, _U32, _U64, _I8, _I16, _I32, _I64)
    ),
    *(lambda r, size=size: r.extension(size) for size in (1, 2, 4, 8, 16)),
    *(lambda r, size=size: r.text(r.number(size)) for size in (_U8, _U16, _U32)),
    *(lambda r, size=size: _List(r.number(size)) for size in (_U16, _U32)),
    *(lambda r, size=size: _Map(r.number(size)) for size in (_U16, _U32)),
)


def _reason(error: Exception) -> str:
    return "the input ends too early" if isinstance(error, (IndexError, struct.error)) else str(error)


def _name(kind: Any) -> str:
    return {_List: "a list", _Map: "a map", memoryview: "bytes"}.get(kind) or str(kind.__name__)


def _scalar(array: Any) -> Any:
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
