"""Write a tree as a msgpack message, in pieces, without copying large arrays.

Tests: tests/engine/formats/test_msgpack.py, tests/engine/tools/test_convert.py.
"""

from __future__ import annotations

import math
import struct
import sys
from collections.abc import Iterator  # noqa: TC003  msgspec evaluates it
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from eformer._engine.formats.msgpack.reader import (
    ARRAY,
    CHUNKED,
    COMPLEX,
    MAX_DEPTH,
    MAX_LENGTH,
    SCALAR,
    TUPLE,
    can_be_key,
)
from eformer._engine.record.dtypes import name_of_dtype, raw_pieces
from eformer._engine.record.names import Place, steps_to
from eformer._engine.trees.devices import on_host
from eformer.errors import LeafError

if TYPE_CHECKING:
    from collections.abc import Callable

    # A value to write, its place in the tree, and whether it is below a list.
    Item = tuple[Any, Place, bool]

# The extension of an array holds its shape and the name of its dtype beside the bytes.
_MAX_ARRAY = MAX_LENGTH - 2**12

_encode = msgspec.msgpack.Encoder().encode


class Streamed(msgspec.Struct, frozen=True):
    """An array whose bytes are produced piece by piece while they are written."""

    dtype: str
    shape: tuple[int, ...]
    itemsize: int
    pieces: Iterator[bytes | memoryview]

    @property
    def nbytes(self) -> int:
        return self.itemsize * math.prod(self.shape)


def pack_tree(tree: Any, write: Callable[[Any], Any], *, max_chunk: int, sort_keys: bool) -> None:
    """Pass the message to `write` piece by piece. Large arrays are passed as views of their memory, not copied.

    Arrays of more than `max_chunk` bytes are split. `sort_keys` writes every dict in the order of its keys. A leaf
    that msgpack cannot hold raises a LeafError with its place in the tree.
    """
    packer = _Packer(write, max_chunk, sort_keys)
    unfinished: list[tuple[Iterator[Item], int]] = [(iter([(tree, None, False)]), 0)]
    while unfinished:
        siblings, depth = unfinished[-1]
        for value, place, below_list in siblings:
            children = packer.begin(value, place, below_list)
            if children is not None:
                unfinished.append((children, depth + (2 if type(value) is tuple else 1)))
                break
        else:
            unfinished.pop()
        if depth > MAX_DEPTH:
            raise LeafError(f"the tree is nested more than {MAX_DEPTH} deep, or contains itself")


def can_pack(leaf: Any) -> bool:
    """Tell whether msgpack can hold a leaf. An array is judged by its dtype; its data is not read."""
    if _is_jax_array(leaf) and not isinstance(leaf.dtype, np.dtype):
        return True  # an extended dtype: a typed PRNG key
    try:
        sample = np.empty(0, leaf.dtype) if type(leaf) is np.ndarray or _is_jax_array(leaf) else leaf
        pack_tree(sample, lambda piece: None, max_chunk=MAX_LENGTH, sort_keys=False)
    except LeafError:
        return False
    return True


def _where(place: Place) -> str:
    return "/".join(steps_to(place)) or "the root"


class _Packer:
    """A writer of values by type. A leaf is written whole; of a container, the head is written and the children are
    returned."""

    def __init__(self, write: Callable[[Any], Any], max_chunk: int, sort_keys: bool) -> None:
        self.write = write
        self.max_chunk = min(max_chunk, _MAX_ARRAY)
        self.sort_keys = sort_keys
        self.writers: dict[type, Callable[[Any, Place, bool], Iterator[Item] | None]] = {
            **dict.fromkeys((type(None), bool, int, float, str), self.write_plain),
            **dict.fromkeys((bytes, bytearray, memoryview), self.write_bytes),
            np.ndarray: self.write_array,
            Streamed: self.write_streamed,
            dict: self.begin_dict,
            list: self.begin_list,
            tuple: self.begin_tuple,
        }

    def begin(self, value: Any, place: Place, below_list: bool) -> Iterator[Item] | None:
        writer = self.writers.get(type(value)) or self.write_other
        return writer(value, place, below_list)

    def begin_dict(self, value: dict[Any, Any], place: Place, below_list: bool) -> Iterator[Item]:
        for reserved in (CHUNKED, TUPLE):
            if reserved in value:
                raise LeafError(
                    f"{_where(place)}: the key {reserved!r} is reserved in msgpack files; rename it"
                )
        self.write(_head(len(value), 0x80, 0xDE))
        return self.dict_items(value, place, below_list)

    def dict_items(self, value: dict[Any, Any], place: Place, below_list: bool) -> Iterator[Item]:
        for key in self.ordered(value):
            here = (place, key)
            if not can_be_key(key):
                raise LeafError(f"{_where(here)}: a key of type {type(key).__name__} cannot be stored")
            self.begin(key, here, below_list)
            yield value[key], here, below_list

    def ordered(self, value: dict[Any, Any]) -> list[Any]:
        try:
            return sorted(value) if self.sort_keys else list(value)
        except TypeError:  # keys of several types have no order
            return list(value)

    def begin_list(self, value: list[Any], place: Place, below_list: bool) -> Iterator[Item]:
        # Flax splits large arrays in dicts, never below a list, and the bytes have to be the same as flax's.
        self.write(_head(len(value), 0x90, 0xDC))
        return ((child, (place, index), True) for index, child in enumerate(value))

    def begin_tuple(self, value: tuple[Any, ...], place: Place, below_list: bool) -> Iterator[Item]:
        self.write(_head(1, 0x80, 0xDE) + _encode(TUPLE) + _head(len(value), 0x90, 0xDC))
        return ((child, (place, index), below_list) for index, child in enumerate(value))

    def write_plain(self, value: Any, place: Place, below_list: bool) -> None:
        try:
            self.write(_encode(value))
        except (OverflowError, UnicodeEncodeError) as error:
            raise LeafError(f"{_where(place)}: {repr(value)[:40]} cannot be stored ({error})") from error

    def write_bytes(self, value: Any, place: Place, below_list: bool) -> None:
        size = memoryview(value).nbytes
        if size > MAX_LENGTH:
            raise LeafError(f"{_where(place)}: {size} bytes in one value; msgpack holds at most {MAX_LENGTH}")
        self.write(_long_head(size, 0xC4))
        self.write(value)

    def write_other(self, value: Any, place: Place, below_list: bool) -> None:
        if np.ma.is_masked(value):
            raise LeafError(f"{_where(place)}: the mask of a masked array cannot be stored")
        if isinstance(value, np.ndarray):
            self.write_array(np.asarray(value), place, below_list)
        elif isinstance(value, np.generic):
            self.write_extension(SCALAR, np.asarray(value), place)
        elif isinstance(value, complex):
            pair = b"\x92" + _encode(value.real) + _encode(value.imag)
            self.write(_extension_head(COMPLEX, len(pair)) + pair)
        elif _is_jax_array(value):
            self.write_jax_array(value, place, below_list)
        else:
            kind = type(value)
            raise LeafError(
                f"{_where(place)}: can not serialize {kind.__module__}.{kind.__qualname__}; msgpack holds "
                "arrays, plain values, dict, list and tuple; to_bytes takes registered objects apart"
            )

    def write_jax_array(self, value: Any, place: Place, below_list: bool) -> None:
        import jax  # late: numpy trees are read and written without it

        try:
            if isinstance(value.dtype, np.dtype):
                self.write_array(on_host(value), place, below_list)
            else:
                name = f"key<{jax.random.key_impl(value)}>"
                self.write_extension(ARRAY, on_host(jax.random.key_data(value)), place, name)
        except (RuntimeError, jax.errors.JAXTypeError) as error:
            # The array was deleted by donation, is partly on other hosts, or is traced.
            error.add_note(f"while serializing the leaf {_where(place)}")
            raise

    def write_array(self, array: np.ndarray[Any, Any], place: Place, below_list: bool) -> None:
        limit = _MAX_ARRAY if below_list else self.max_chunk
        if array.nbytes > limit:
            name = self.dtype_name(array, place)
            self.write_chunks(Streamed(name, array.shape, array.dtype.itemsize, raw_pieces(array)))
        else:
            self.write_extension(ARRAY, array, place)

    def write_streamed(self, array: Streamed, place: Place, below_list: bool) -> None:
        if array.nbytes > (_MAX_ARRAY if below_list else self.max_chunk):
            self.write_chunks(array)
            return
        self.write(_array_head(ARRAY, array.shape, array.dtype, array.nbytes))
        for piece in array.pieces:
            self.write(piece)

    def write_chunks(self, array: Streamed) -> None:
        size = math.prod(array.shape)
        step = max(1, int(self.max_chunk / array.itemsize))
        sizes = [min(step, size - start) for start in range(0, size, step)]
        shape = {str(axis): length for axis, length in enumerate(array.shape)}
        self.write(_head(3, 0x80, 0xDE) + _encode(CHUNKED) + _encode(True))
        self.write(_encode("shape") + _encode(shape) + _encode("chunks") + _head(len(sizes), 0x80, 0xDE))
        pieces = _Pieces(array.pieces)
        for index, count in enumerate(sizes):
            nbytes = count * array.itemsize
            self.write(_encode(str(index)) + _array_head(ARRAY, (count,), array.dtype, nbytes))
            pieces.copy(nbytes, self.write)

    def write_extension(self, code: int, array: np.ndarray[Any, Any], place: Place, name: str = "") -> None:
        name = name or self.dtype_name(array, place)
        self.write(_array_head(code, array.shape, name, array.nbytes))
        for piece in raw_pieces(array):
            self.write(piece)

    def dtype_name(self, array: np.ndarray[Any, Any], place: Place) -> str:
        try:
            return name_of_dtype(array.dtype)
        except LeafError as error:
            raise LeafError(f"{_where(place)}: {error}") from None


class _Pieces:
    """Pieces of bytes, to be written in portions of other sizes."""

    def __init__(self, pieces: Iterator[bytes | memoryview]) -> None:
        self.pieces = pieces
        self.rest = memoryview(b"")

    def copy(self, nbytes: int, write: Callable[[Any], Any]) -> None:
        """Write the next `nbytes`."""
        while nbytes:
            if not self.rest:
                self.rest = memoryview(next(self.pieces))
            portion, self.rest = self.rest[:nbytes], self.rest[nbytes:]
            write(portion)
            nbytes -= len(portion)


def _is_jax_array(value: Any) -> bool:
    jax = sys.modules.get("jax")  # without jax imported, there are no jax arrays
    return jax is not None and isinstance(value, jax.Array)


@lru_cache(4096)  # a model has few shapes and many arrays
def _array_head(code: int, shape: tuple[int, ...], name: str, nbytes: int) -> bytes:
    payload = b"\x93" + _encode(shape) + _encode(name) + _long_head(nbytes, 0xC4)
    return _extension_head(code, len(payload) + nbytes) + payload


def _extension_head(code: int, size: int) -> bytes:
    # msgpack has short forms for 1, 2, 4 and 8 bytes as well, but no payload here is that small.
    return bytes([0xD8, code]) if size == 16 else _long_head(size, 0xC7) + bytes([code])


def _head(size: int, short: int, long: int) -> bytes:
    """Encode the head of a map or a list."""
    if size < 16:
        return bytes([short | size])
    return struct.pack(">BH", long, size) if size < 2**16 else struct.pack(">BI", long + 1, size)


def _long_head(size: int, tag: int) -> bytes:
    """Encode the head of bytes or of an extension, with a length of one, two or four bytes."""
    if size < 2**8:
        return struct.pack(">BB", tag, size)
    return struct.pack(">BH", tag + 1, size) if size < 2**16 else struct.pack(">BI", tag + 2, size)
