"""Arrays as numpy writes them: a header, then numbers, of any byte order and by rows or by columns."""

from __future__ import annotations

import ast
import math
import re
import struct
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct

from eformer._engine.record.dtypes import DTYPES, dtype_from_name
from eformer.errors import CorruptionError, FormatError

if TYPE_CHECKING:
    from collections.abc import Callable

    from eformer._engine.stores.virtual_files import ReadInto

MAGIC = b"\x93NUMPY"

_USUAL_HEADER = 256
_MOST_HEADER = 2**16
_MOST_AXES = 64
_CHUNK = 2**20

# What numpy may be asked to make of a text is decided here: some texts take the process down (SIGFPE).
_DESCR = re.compile(r"([<>|=]?)([a-zA-Z?])([0-9]{0,9})(\[[0-9a-zA-Z]{1,12}\])?")
_NAMES = {dtype.str[1:]: name for name, dtype in DTYPES.items() if dtype.kind in "biufc"}
_NAMES["V2"] = "bfloat16"  # which numpy has no name for
_TIMES = {"M8": "datetime64", "m8": "timedelta64"}


class UnsupportedError(FormatError):
    """An array in order, of a kind that is none of ours."""


class Npy(Struct, frozen=True):
    """What the header of an array says. `code` is numpy's for the dtype, without the byte order."""

    code: str
    unit: str
    is_swapped: bool
    is_fortran: bool
    shape: tuple[int, ...]
    header_nbytes: int

    @property
    def is_text(self) -> bool:
        """Whether it is a single text."""
        return self.code[0] == "U" and not self.shape

    @property
    def dtype(self) -> str:
        if self.code in _TIMES:
            return _TIMES[self.code] + self.unit
        if self.code in _NAMES and not (self.code == "V2" and self.is_swapped):
            return _NAMES[self.code]
        raise UnsupportedError(
            f"an array of numpy's {self.code + self.unit!r}{list(self.shape)}, {_why(self.code)}"
        )

    @property
    def nbytes(self) -> int:
        return int(self.code[1:]) * (4 if self.code[0] == "U" else 1) * math.prod(self.shape)

    @property
    def is_straight(self) -> bool:
        """Whether the numbers lie as ours do."""
        by_rows = not self.is_fortran or len(self.shape) < 2
        return not self.nbytes or (by_rows and not self.is_swapped)

    def straightened(self, data: bytes | bytearray) -> memoryview:
        """The numbers of a whole record, as ours lie."""
        dtype = dtype_from_name(self.dtype)
        stored = dtype.newbyteorder(">") if self.is_swapped else dtype
        array: np.ndarray[Any, Any] = np.ndarray(
            self.shape, stored, data, self.header_nbytes, order="F" if self.is_fortran else "C"
        )
        return np.ascontiguousarray(array, dtype).reshape(-1).view(np.uint8).data


def _why(code: str) -> str:
    if code[0] == "V":
        return "whose dtype numpy did not record: write it as integers of that size, or as bfloat16"
    return "which is no array of numbers"


def parse_npy(read: Callable[[int], bytes]) -> Npy:
    """The header of a record. `read` gives so many bytes of its beginning, or all there are."""
    start = read(_USUAL_HEADER)
    if not start.startswith(MAGIC):
        raise FormatError("no array begins there")
    try:
        form = struct.Struct("<H" if start[6] == 1 else "<I")
        (length,) = form.unpack_from(start, 8)
    except (IndexError, struct.error):
        raise FormatError("it ends in the header of an array") from None
    stop = 8 + form.size + length
    if start[6] not in (1, 2, 3) or length > _MOST_HEADER:
        raise FormatError(f"a header of version {start[6]}, {length} bytes long")
    if stop > len(start):
        start = read(stop)
    if stop > len(start):
        raise FormatError("it ends in the header of an array")
    return _parsed(start[8 + form.size : stop], stop)


def _parsed(text: bytes, header_nbytes: int) -> Npy:
    try:
        said = ast.literal_eval(text.decode("latin-1").strip())
        descr, fortran, shape = said["descr"], said["fortran_order"], said["shape"]
    except (SyntaxError, ValueError, TypeError, KeyError, RecursionError, MemoryError) as error:
        raise FormatError(f"the header of an array that makes no sense: {text[:100]!r}") from error
    is_shape = isinstance(shape, tuple) and len(shape) <= _MOST_AXES
    if not is_shape or not all(type(n) is int and 0 <= n < 2**62 for n in shape) or type(fortran) is not bool:
        raise FormatError(f"the header of an array that makes no sense: {text[:100]!r}")
    if isinstance(descr, list):
        raise UnsupportedError(f"records of several fields, {str(descr)[:60]}")
    found = _DESCR.fullmatch(descr) if isinstance(descr, str) else None
    if not found or not (found[3] or found[2] == "O"):
        raise FormatError(f"the header of an array of unknown dtype: {text[:100]!r}")
    order, kind, digits, unit = found.groups()
    if kind == "O":  # nobody knows where it ends
        raise UnsupportedError("objects of Python, which could run any code while they are read")
    is_swapped = order == ">" and digits != "1"
    return Npy(f"{kind}{int(digits)}", unit or "", is_swapped, fortran, shape, header_nbytes)


class Record(Struct, frozen=True):
    """A record that has to be decoded as a whole: compressed, or with its numbers in another order."""

    name: str
    offset: int
    stored_nbytes: int
    npy: Npy
    is_deflated: bool = False
    crc: int | None = None

    @property
    def nbytes(self) -> int:
        return self.npy.nbytes

    def read_into(self, read: ReadInto, memory: memoryview, offset: int) -> int:
        data = self.npy.straightened(self.decoded(read))[offset : offset + len(memory)]
        memory[: len(data)] = data
        return len(data)

    def decoded(self, read: ReadInto) -> bytearray:
        """The whole record, with its header; refuses one that is not what its checksum says."""
        size = self.npy.header_nbytes + self.npy.nbytes
        data = _inflated(read, self.offset, self.stored_nbytes, size) if self.is_deflated else bytearray(size)
        if not self.is_deflated and read(memoryview(data), self.offset) < size:
            raise CorruptionError(f"{self.name!r} was cut short")
        if self.crc is not None and zlib.crc32(data) != self.crc:
            raise CorruptionError(
                f"{self.name!r} has the checksum {zlib.crc32(data):08x}, recorded is {self.crc:08x}"
            )
        return data


def _inflated(read: ReadInto, offset: int, stored_nbytes: int, size: int) -> bytearray:
    inflater, data = zlib.decompressobj(-zlib.MAX_WBITS), bytearray()
    buffer = memoryview(bytearray(min(_CHUNK, stored_nbytes)))
    stop = offset + stored_nbytes
    while offset < stop and len(data) <= size:
        found = read(buffer[: stop - offset], offset)
        try:
            data += inflater.decompress(buffer[:found], size + 1 - len(data))
        except zlib.error as error:
            raise CorruptionError(f"cannot be decompressed: {error}") from error
        if not found:
            break
        offset += found
    if len(data) != size or not inflater.eof:
        raise CorruptionError(f"decompressed it is of another length than {size} bytes")
    return data


def beginning_of_deflated(data: bytes, nbytes: int) -> bytes:
    try:
        return zlib.decompressobj(-zlib.MAX_WBITS).decompress(data, nbytes)
    except zlib.error as error:
        raise FormatError(f"it cannot be decompressed: {error}") from error
