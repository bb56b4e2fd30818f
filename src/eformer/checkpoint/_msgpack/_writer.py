"""A tree to a msgpack message, in pieces, without copying large arrays."""

from __future__ import annotations

import struct
import sys
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from eformer.checkpoint._msgpack._wire import (
    ARRAY,
    CHUNKED,
    COMPLEX,
    KEY_TYPES,
    MAX_LENGTH,
    MAX_TREE_DEPTH,
    SCALAR,
    TUPLE,
)
from eformer.checkpoint._ndarray import name_of_dtype, raw_pieces
from eformer.errors import LeafError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    # A value to write, where it stands (None: the root, else the place of its parent and the last step),
    # and whether a list stands above it.
    Place = tuple["Place", Any] | None
    Item = tuple[Any, Place, bool]

_encode = msgspec.msgpack.Encoder().encode


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
        if len(unfinished) > MAX_TREE_DEPTH + 1:
            raise LeafError(f"the tree is nested more than {MAX_TREE_DEPTH} deep, or contains itself")


def can_pack(leaf: Any) -> bool:
    """Whether `pack` takes this leaf; an array is judged by its dtype, its data is not touched."""
    if _is_jax_array(leaf) and not isinstance(leaf.dtype, np.dtype):
        return True  # an extended dtype: a typed PRNG key
    try:
        sample = np.empty(0, leaf.dtype) if isinstance(leaf, np.ndarray) or _is_jax_array(leaf) else leaf
        pack(sample, lambda piece: None, max_chunk=MAX_LENGTH, sort_keys=False)
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
        for reserved in (CHUNKED, TUPLE):
            if reserved in value:
                raise LeafError(
                    f"{_where(place)}: the key {reserved!r} has a meaning of its own in this format"
                )
        self.write(_head(len(value), 0x80, 0xDE))
        return self.map_items(value, place, below_list)

    def map_items(self, value: Any, place: Place, below_list: bool) -> Iterator[Item]:
        for key in self.ordered(value):
            here = (place, key)
            if type(key) not in KEY_TYPES:
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
        self.write(_head(1, 0x80, 0xDE) + _encode(TUPLE) + _head(len(value), 0x90, 0xDC))
        return ((child, (place, index), below_list) for index, child in enumerate(value))

    def plain(self, value: Any, place: Place, below_list: bool) -> None:
        try:
            self.write(_encode(value))
        except (OverflowError, UnicodeEncodeError) as error:
            raise LeafError(f"{_where(place)}: {repr(value)[:40]} cannot be stored ({error})") from error

    def bytes(self, value: Any, place: Place, below_list: bool) -> None:
        size = memoryview(value).nbytes
        if size > MAX_LENGTH:
            raise LeafError(f"{_where(place)}: {size} bytes in one piece; msgpack holds at most {MAX_LENGTH}")
        self.write(_long_head(size, 0xC4))
        self.write(value)

    def other(self, value: Any, place: Place, below_list: bool) -> None:
        if isinstance(value, np.ma.MaskedArray):
            raise LeafError(f"{_where(place)}: the mask of a masked array cannot be stored")
        if isinstance(value, np.ndarray):
            self.array(value, place, below_list)
        elif isinstance(value, np.generic):
            self.extension(SCALAR, np.asarray(value), place)
        elif isinstance(value, complex):
            pair = b"\x92" + _encode(value.real) + _encode(value.imag)
            self.write(_extension_head(COMPLEX, len(pair)) + pair)
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
        self.extension(ARRAY, data, place, name=f"key<{jax.random.key_impl(value)}>")

    def array(self, array: np.ndarray[Any, Any], place: Place, below_list: bool) -> None:
        limit = MAX_LENGTH - 2**12 if below_list else self.max_chunk
        if array.nbytes > limit:
            self.chunked(array, place)
        else:
            self.extension(ARRAY, array, place)

    def chunked(self, array: np.ndarray[Any, Any], place: Place) -> None:
        name = self.dtype_name(array, place)
        step = max(1, int(self.max_chunk / array.dtype.itemsize))
        starts = range(0, array.size, step)
        shape = {str(axis): size for axis, size in enumerate(array.shape)}
        self.write(_head(3, 0x80, 0xDE) + _encode(CHUNKED) + _encode(True))
        self.write(_encode("shape") + _encode(shape) + _encode("chunks") + _head(len(starts), 0x80, 0xDE))
        rest = memoryview(b"")
        pieces = raw_pieces(array)
        for index, start in enumerate(starts):
            size = min(step, array.size - start)
            left = size * array.dtype.itemsize
            self.write(_encode(str(index)) + _array_head(ARRAY, (size,), name, left))
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
