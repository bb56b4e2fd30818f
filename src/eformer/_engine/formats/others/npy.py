"""Arrays in numpy's .npy format: a header, then the elements, in any byte order, by rows or by columns."""

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

_USUAL_HEADER = 256  # bytes
_MAX_HEADER = 2**16
_MAX_AXES = 64
_PIECE = 2**20  # bytes that are decompressed at once

# Only dtypes of this form are passed to numpy: other texts can end the process (SIGFPE).
_DESCR = re.compile(r"([<>|=]?)([a-zA-Z?])([0-9]{0,9})(\[[0-9a-zA-Z]{1,12}\])?")
_NAMES = {dtype.str[1:]: name for name, dtype in DTYPES.items() if dtype.kind in "biufc"}
_NAMES["V2"] = "bfloat16"  # numpy has no name for it
_TIMES = {"M8": "datetime64", "m8": "timedelta64"}


class UnsupportedError(FormatError):
    """An array that is in order, but of a kind that eformer does not store."""


class NpyHeader(Struct, frozen=True):
    """The header of an array. `code` is numpy's code of the dtype without the byte order, `unit` that of a time."""

    code: str
    unit: str
    is_swapped: bool
    is_fortran: bool
    shape: tuple[int, ...]
    header_nbytes: int

    @property
    def is_text(self) -> bool:
        """Tell whether the array is a single text."""
        return self.code[0] == "U" and not self.shape

    @property
    def dtype(self) -> str:
        """Return the name of the dtype; raise UnsupportedError if eformer does not store it."""
        if self.code in _TIMES:
            return _TIMES[self.code] + self.unit
        if self.code in _NAMES and not (self.code == "V2" and self.is_swapped):
            return _NAMES[self.code]
        raise UnsupportedError(
            f"an array of numpy's {self.code + self.unit!r}{list(self.shape)}, {_why_unsupported(self.code)}"
        )

    def require_supported(self) -> None:
        """Raise UnsupportedError unless eformer stores arrays of this dtype."""
        _ = self.dtype

    @property
    def nbytes(self) -> int:
        return int(self.code[1:]) * (4 if self.code[0] == "U" else 1) * math.prod(self.shape)

    @property
    def is_native(self) -> bool:
        """Tell whether the elements are little-endian and by rows, as eformer stores them."""
        by_rows = not self.is_fortran or len(self.shape) < 2
        return not self.nbytes or (by_rows and not self.is_swapped)

    def to_native(self, data: bytes | bytearray) -> memoryview:
        """Convert the elements of a whole record, header included, to little-endian bytes by rows."""
        dtype = dtype_from_name(self.dtype)
        stored = dtype.newbyteorder(">") if self.is_swapped else dtype
        array: np.ndarray[Any, Any] = np.ndarray(
            self.shape, stored, data, self.header_nbytes, order="F" if self.is_fortran else "C"
        )
        return np.ascontiguousarray(array, dtype).reshape(-1).view(np.uint8).data


def _why_unsupported(code: str) -> str:
    if code[0] == "V":
        return "whose dtype numpy did not record: write it as integers of that size, or as bfloat16"
    return "which is not an array of numbers"


def parse_npy_header(read: Callable[[int], bytes]) -> NpyHeader:
    """Parse the header of a record. `read(nbytes)` returns so many bytes of its beginning, or all there are."""
    start = read(_USUAL_HEADER)
    if not start.startswith(MAGIC):
        raise FormatError(f"not an array of numpy: it does not begin with {MAGIC!r}")
    try:
        form = struct.Struct("<H" if start[6] == 1 else "<I")
        (length,) = form.unpack_from(start, 8)
    except (IndexError, struct.error):
        raise FormatError("the file ends in the header of an array") from None
    stop = 8 + form.size + length
    if start[6] not in (1, 2, 3) or length > _MAX_HEADER:
        raise FormatError(f"a header of version {start[6]} and {length} bytes is not supported")
    if stop > len(start):
        start = read(stop)
    if stop > len(start):
        raise FormatError("the file ends in the header of an array")
    return _parse_text(start[8 + form.size : stop], stop)


def _parse_text(text: bytes, header_nbytes: int) -> NpyHeader:
    try:
        fields = ast.literal_eval(text.decode("latin-1").strip())
        descr, is_fortran, shape = fields["descr"], fields["fortran_order"], fields["shape"]
    except (SyntaxError, ValueError, TypeError, KeyError, RecursionError, MemoryError) as error:
        raise FormatError(f"the header of an array makes no sense: {text[:100]!r}") from error
    is_shape = isinstance(shape, tuple) and len(shape) <= _MAX_AXES
    if (
        not is_shape
        or not all(type(n) is int and 0 <= n < 2**62 for n in shape)
        or type(is_fortran) is not bool
    ):
        raise FormatError(f"the header of an array makes no sense: {text[:100]!r}")
    if isinstance(descr, list):
        raise UnsupportedError(f"records of several fields, {str(descr)[:60]}")
    found = _DESCR.fullmatch(descr) if isinstance(descr, str) else None
    if not found or not (found[3] or found[2] == "O"):
        raise FormatError(f"the header of an array has an unknown dtype: {text[:100]!r}")
    order, kind, digits, unit = found.groups()
    if kind == "O":  # a pickle, whose end is not known
        raise UnsupportedError("objects of Python, which could run any code while they are read")
    is_swapped = order == ">" and digits != "1"
    return NpyHeader(f"{kind}{int(digits)}", unit or "", is_swapped, is_fortran, shape, header_nbytes)


class NpyRecord(Struct, frozen=True):
    """An array with its header, in a file. As a virtual file it has the elements as eformer stores them.

    It is decoded as a whole with each read. `crc` is the checksum of header and elements.
    """

    name: str
    offset: int
    stored_nbytes: int
    header: NpyHeader
    is_deflated: bool = False
    crc: int | None = None

    @property
    def nbytes(self) -> int:
        return self.header.nbytes

    def read_into(self, read: ReadInto, memory: memoryview, offset: int) -> int:
        data = self.header.to_native(self.decode(read))[offset : offset + len(memory)]
        memory[: len(data)] = data
        return len(data)

    def decode(self, read: ReadInto) -> bytearray:
        """Read and decompress the whole record, with its header, and check its checksum."""
        size = self.header.header_nbytes + self.header.nbytes
        data = _inflate(read, self.offset, self.stored_nbytes, size) if self.is_deflated else bytearray(size)
        if not self.is_deflated and read(memoryview(data), self.offset) < size:
            raise CorruptionError(f"{self.name!r} was cut short")
        if self.crc is not None and zlib.crc32(data) != self.crc:
            raise CorruptionError(
                f"{self.name!r} has the checksum {zlib.crc32(data):08x}, expected {self.crc:08x}"
            )
        return data


def _inflate(read: ReadInto, offset: int, stored_nbytes: int, size: int) -> bytearray:
    inflater, data = zlib.decompressobj(-zlib.MAX_WBITS), bytearray()
    buffer = memoryview(bytearray(min(_PIECE, stored_nbytes)))
    stop = offset + stored_nbytes
    while offset < stop and len(data) <= size:
        count = read(buffer[: stop - offset], offset)
        try:
            data += inflater.decompress(buffer[:count], size + 1 - len(data))
        except zlib.error as error:
            raise CorruptionError(f"cannot be decompressed: {error}") from error
        if not count:
            break
        offset += count
    if len(data) != size or not inflater.eof:
        raise CorruptionError(f"does not decompress to {size} bytes")
    return data


def inflate_beginning(data: bytes, nbytes: int) -> bytes:
    """Decompress the first `nbytes` of a record from its first bytes in the file."""
    try:
        return zlib.decompressobj(-zlib.MAX_WBITS).decompress(data, nbytes)
    except zlib.error as error:
        raise FormatError(f"cannot be decompressed: {error}") from error
