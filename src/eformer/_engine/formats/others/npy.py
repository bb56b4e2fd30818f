"""Arrays in numpy's .npy format: a header, then the elements, in any byte order, by rows or by columns.

`numpy.savez` and `numpy.savez_compressed` write zip archives with one array in each member.
`equinox.tree_serialise_leaves` writes arrays one after the other, without names. Many programs put a line of JSON with
the hyperparameters of the model before these arrays. A single .npy file has the same form.

Tests: tests/compat/test_files_npz.py, tests/compat/test_files_equinox.py.
"""

from __future__ import annotations

import ast
import math
import re
import struct
import zipfile
import zlib
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct

from eformer._engine.formats.found import Foreign, Found
from eformer._engine.formats.nested_names import nest, parts_of_name
from eformer._engine.formats.others.single_file import ArrayInFile, Library, SingleFile, describe_file
from eformer._engine.formats.others.zip_members import (
    BEGINNINGS,
    IS_ENCRYPTED,
    Span,
    find_damages,
    locate_members,
)
from eformer._engine.record.dtypes import DTYPES, MOST_AXES, dtype_from_name
from eformer._engine.record.manifest import UNREADABLE
from eformer._engine.record.text import few
from eformer._engine.record.values import locating, parse_lenient, value_to_json
from eformer.errors import CorruptionError, FormatError

if TYPE_CHECKING:
    from collections.abc import Callable

    from eformer._engine.stores.virtual_files import ReadInto

FORMAT = "npz"
EQUINOX = "equinox"
MAGIC = b"\x93NUMPY"

_USUAL_HEADER = 256  # bytes
_MAX_HEADER = 2**16
_MAX_LINE = 2**20  # bytes
_PIECE = 2**20  # bytes to decompress in one step

# Only texts of this form are passed to numpy: other texts can end the process (SIGFPE).
_DESCR = re.compile(r"([<>|=]?)([a-zA-Z?])([0-9]{0,9})(\[[0-9a-zA-Z]{1,12}\])?")
_NAMES = {dtype.str[1:]: name for name, dtype in DTYPES.items() if dtype.kind in "biufc"}
_NAMES["V2"] = "bfloat16"  # numpy has no name for it
_TIMES = {"M8": "datetime64", "m8": "timedelta64"}

_SUFFIX = ".npy"
_STORED, _DEFLATED = zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED
_MAX_EXPANSION = 1040  # deflate encodes at most 258 bytes in two bits
_DEFLATE_OVERHEAD = 1024  # bytes that deflate may read before it returns the first
_MAX_TEXT = 2**24  # bytes


class UnsupportedError(FormatError):
    """An array is sound, but of a kind that eformer does not store."""


class NpyHeader(Struct, frozen=True):
    """The header of an array. `code` is numpy's code of the dtype without the byte order, `unit` the unit of a time."""

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
    """Parse the header of a record. `read(nbytes)` returns its first bytes, fewer only if the record is shorter."""
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
        raise FormatError(f"the header of an array is invalid: {text[:100]!r}") from error
    is_shape = isinstance(shape, tuple) and len(shape) <= MOST_AXES
    if (
        not is_shape
        or not all(type(n) is int and 0 <= n < 2**62 for n in shape)
        or type(is_fortran) is not bool
    ):
        raise FormatError(f"the header of an array is invalid: {text[:100]!r}")
    if isinstance(descr, list):
        raise UnsupportedError(f"records of several fields, {str(descr)[:60]}")
    found = _DESCR.fullmatch(descr) if isinstance(descr, str) else None
    if not found or not (found[3] or found[2] == "O"):
        raise FormatError(f"the header of an array has an unknown dtype: {text[:100]!r}")
    order, kind, digits, unit = found.groups()
    if kind == "O":  # a pickle of unknown length
        raise UnsupportedError("objects of Python, which could run any code while they are read")
    is_swapped = order == ">" and digits != "1"
    return NpyHeader(f"{kind}{int(digits)}", unit or "", is_swapped, is_fortran, shape, header_nbytes)


class NpyRecord(Struct, frozen=True):
    """An array with its header, in a file. As a virtual file it has the elements as eformer stores them.

    Every read decodes the whole array. `crc` is the checksum of header and elements.
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

    @property
    def is_plain(self) -> bool:
        """Tell whether its elements lie in the file as eformer stores them."""
        return self.header.is_native and not self.is_deflated

    def in_file(self, library: Library = "jax") -> ArrayInFile:
        """Describe the array: its place in the file, or a virtual file if it has to be decoded."""
        header, is_encoded = self.header, bool(self.header.nbytes) and not self.is_plain
        offset = self.offset + header.header_nbytes if header.nbytes and not is_encoded else 0
        decoded = self if is_encoded else None
        return ArrayInFile(
            header.dtype, header.shape, header.nbytes, offset, decoded, is_encoded, library=library
        )

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


# ------------------------------------------------------------------------------------------ archives


def in_npz(file: SingleFile, first: bytes) -> Found | None:
    """Find the tree of an npz file: nested dicts, split at the dots in the members' names.

    A single text becomes a plain value.
    """
    if not first.startswith(BEGINNINGS):
        return None
    records, problems = {}, []
    members = locate_members(file)
    for info, offset in members:
        where = f"member {info.filename[:200]!r}"
        try:
            with locating(f"{file.path}: {where}"):
                records[info.filename.removesuffix(_SUFFIX)] = _read_record(file, info, offset)
        except UnsupportedError as error:
            problems.append(f"{where}: {error.__cause__}")
    if problems and not any(info.filename.endswith(_SUFFIX) for info, _ in members):
        raise FormatError(
            f"{file.path} is a zip archive without arrays of numpy; if it holds a checkpoint, unpack it first: "
            f"{few(sorted(info.filename[:200] for info, _ in members))}"
        )
    if problems:
        raise FormatError(
            f"{file.path} has members that are neither arrays of numbers nor single texts; write it again without "
            f"them: {few(problems)}"
        )
    structure, records = nest(records, parts_of_name)
    texts = {name: record for name, record in records.items() if record.header.is_text}
    undecoded = {
        name: Span(record.offset, record.stored_nbytes, record.crc)
        for name, record in records.items()
        if record.is_plain
    }
    return describe_file(
        file,
        FORMAT,
        {name: record.in_file("numpy") for name, record in records.items() if name not in texts},
        structure,
        values={name: value_to_json(_read_text(file, record)) for name, record in texts.items()},
        foreign=Foreign(find_damages=partial(find_damages, file.store, file.name, undecoded)),
    )


def _read_record(file: SingleFile, info: zipfile.ZipInfo, offset: int) -> NpyRecord:
    _require_supported(info)
    header = _read_header(file, info, offset)
    _require_possible(info, header)
    is_deflated = info.compress_type == _DEFLATED
    return NpyRecord(info.filename, offset, info.compress_size, header, is_deflated, info.CRC)


def _require_supported(info: zipfile.ZipInfo) -> None:
    if not info.filename.endswith(_SUFFIX):
        raise UnsupportedError(f"not a {_SUFFIX} file")
    if info.flag_bits & IS_ENCRYPTED:
        raise UnsupportedError("encrypted")
    if info.compress_type not in (_STORED, _DEFLATED):
        raise UnsupportedError(
            f"compressed by method {info.compress_type}; expected 0 (not compressed) or 8 (deflate)"
        )


def _read_header(file: SingleFile, info: zipfile.ZipInfo, offset: int) -> NpyHeader:
    stored, is_deflated = info.compress_size, info.compress_type == _DEFLATED

    def read(nbytes: int) -> bytes:
        more = nbytes + _DEFLATE_OVERHEAD if is_deflated else nbytes
        data = file.read(offset, min(more, stored))
        try:
            return zlib.decompressobj(-zlib.MAX_WBITS).decompress(data, nbytes) if is_deflated else data
        except zlib.error as error:
            raise FormatError(f"cannot be decompressed: {error}") from error

    return parse_npy_header(read)


def _require_possible(info: zipfile.ZipInfo, header: NpyHeader) -> None:
    """Refuse a member that cannot have the length it claims, before memory is allocated for it."""
    expected = header.header_nbytes + header.nbytes
    stored, size = info.compress_size, info.file_size
    is_possible = size <= stored * _MAX_EXPANSION if info.compress_type == _DEFLATED else size == stored
    if size != expected or not is_possible:
        raise FormatError(
            f"{stored} bytes are stored for {size} bytes, and the header needs {expected}: the file is damaged"
        )
    if not header.is_text:
        header.require_supported()
    elif size > _MAX_TEXT:
        raise UnsupportedError(f"a text of {size} bytes; at most {_MAX_TEXT} are read")


def _read_text(file: SingleFile, record: NpyRecord) -> str:
    where = f"{file.path}: member {record.name[:200]!r}"
    try:
        data = record.decode(file.read_into)[record.header.header_nbytes :]
        text = data.decode("utf-32-be" if record.header.is_swapped else "utf-32-le", "surrogatepass")
    except CorruptionError as error:
        raise CorruptionError(f"{where} is damaged: {error}") from error
    except UnicodeDecodeError as error:
        raise FormatError(f"{where} is a text that cannot be decoded: {error}") from error
    return text.rstrip("\0")  # numpy pads texts with zeros


# ------------------------------------------------------------------------------- files of equinox


def in_equinox(file: SingleFile, _: bytes) -> Found | None:
    """Find the arrays of an equinox file, named by their numbers.

    Return None unless the file begins with an array, or with a line of JSON and an array.
    """
    line = _read_first_line(file)
    if line is None:
        return None
    records = _read_records(file, len(line))
    arrays = {str(number): record.in_file() for number, record in enumerate(records)}
    return describe_file(
        file,
        EQUINOX,
        arrays,
        "0" if len(arrays) == 1 else {UNREADABLE: _why_no_structure(file, len(arrays))},
        metadata=_parse_metadata(file, line),
        foreign=Foreign(has_names=False),
    )


def _why_no_structure(file: SingleFile, count: int) -> str:
    return (
        f"{file.path} holds {count} arrays without names, one after the other, as equinox writes them: pass like= with "
        "the saved tree, or a tree of its structure; or keys=, of '0', '1', ..., for arrays by number"
    )


def _read_first_line(file: SingleFile) -> bytes | None:
    """Read the line before the arrays, with its newline. Return None if no array follows."""
    first = file.read(0, len(MAGIC))
    if first == MAGIC:
        return b""
    if first[:1] not in (b"{", b"["):
        return None
    line, newline, _ = file.read(0, _MAX_LINE).partition(b"\n" + MAGIC)
    return line + b"\n" if newline else None


def _parse_metadata(file: SingleFile, line: bytes) -> dict[str, Any]:
    parsed: Any = parse_lenient(line or b"{}", Any, f"{file.path}: the line before the arrays is not JSON")
    metadata = parsed if isinstance(parsed, dict) else {"hyperparameters": parsed}
    return {name: value_to_json(value) for name, value in metadata.items()}


def _read_records(file: SingleFile, offset: int) -> list[NpyRecord]:
    """Read the headers of all arrays. Name all unsupported arrays in one error."""
    records: list[NpyRecord] = []
    problems = []
    while offset < file.nbytes:
        where = f"array {len(records)}, at byte {offset}"
        with locating(f"{file.path}: {where}"):
            header = parse_npy_header(partial(file.read, offset))
        nbytes = header.header_nbytes + header.nbytes
        if nbytes > file.nbytes - offset:
            raise FormatError(
                f"{file.path}: {where}, takes {nbytes} bytes, but only {file.nbytes - offset} are left: the file was "
                "cut short or is damaged"
            )
        try:
            header.require_supported()
        except UnsupportedError as error:
            problems.append(f"{where}: {error}")
        records.append(NpyRecord(str(len(records)), offset, nbytes, header))
        offset += nbytes
    if problems:
        raise FormatError(f"{file.path} cannot be read: {few(problems)}")
    return records
