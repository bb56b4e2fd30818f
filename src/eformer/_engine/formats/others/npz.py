"""Files of `numpy.savez` and `numpy.savez_compressed`: zip archives with one array in each member."""

from __future__ import annotations

import struct
import zipfile
import zlib
from collections import Counter
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from eformer._engine.formats.nested_names import nested, parts_of_name
from eformer._engine.formats.others.npy import (
    NpyRecord,
    UnsupportedError,
    inflate_beginning,
    parse_npy_header,
)
from eformer._engine.formats.others.single_file import ArrayInFile, describe_file, open_single_file
from eformer._engine.record.pieces import PIECE_BYTES
from eformer._engine.record.text import few
from eformer._engine.record.values import value_to_json
from eformer.errors import CorruptionError, Damage, FormatError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from eformer._engine.formats.found import Found
    from eformer._engine.formats.others.npy import NpyHeader
    from eformer._engine.formats.others.single_file import SingleFile
    from eformer._engine.stores.base import Store

FORMAT = "npz"
BEGINNINGS = (b"PK\x03\x04", b"PK\x05\x06")  # of the first member, or of the end of an empty archive

PYTORCH_HINT = "write it with safetensors.torch.save_file instead"

_SUFFIX = ".npy"
_MEMBER_HEADER = struct.Struct("<4s22xHH")
_STORED, _DEFLATED = zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED
_IS_ENCRYPTED, _IS_UTF8 = 0x1, 0x800
_MAX_EXPANSION = 1040  # deflate encodes at most 258 bytes in two bits
_DEFLATE_OVERHEAD = 1024  # bytes that deflate may read before it returns the first
_MAX_TEXT = 2**24  # bytes

# The errors that the zipfile module raises for files that are not archives.
_MALFORMED_ZIP = (
    zipfile.BadZipFile, zipfile.LargeZipFile, NotImplementedError, EOFError, LookupError, OSError, OverflowError,
    RuntimeError, ValueError, struct.error,
)  # fmt: skip


def in_npz(file: SingleFile, first: bytes) -> Found | None:
    """Find the tree of an npz file: nested dicts, split at the dots in the members' names.

    A text without axes becomes a plain value.
    """
    if not first.startswith(BEGINNINGS):
        return None
    records, problems = {}, []
    members = _locate_members(file)
    if any(info.filename.endswith("/data.pkl") for info, _ in members):
        raise FormatError(
            f"{file.path} is a file of PyTorch with pickles, which eformer never runs; {PYTORCH_HINT}"
        )
    for info, offset in members:
        try:
            records[info.filename.removesuffix(_SUFFIX)] = _read_record(file, info, offset)
        except UnsupportedError as error:
            problems.append(f"member {info.filename[:200]!r}: {error}")
    if problems:
        raise FormatError(
            f"{file.path} has members that are neither arrays of numbers nor single texts; write it again without "
            f"them: {few(problems)}"
        )
    structure, names = nested({name: parts_of_name(name) for name in records})
    texts = {name: record for name, record in records.items() if record.header.is_text}
    undecoded = {names[name]: r for name, r in records.items() if r.header.is_native and not r.is_deflated}
    return describe_file(
        file,
        FORMAT,
        {names[name]: _to_array_in_file(record) for name, record in records.items() if name not in texts},
        structure,
        library="numpy",
        values={names[name]: value_to_json(_read_text(file, record)) for name, record in texts.items()},
        find_damages=partial(_find_damages, file.store, file.name, undecoded),
    )


def _locate_members(file: SingleFile) -> list[tuple[zipfile.ZipInfo, int]]:
    """List the members with the offsets of their bytes, in that order; refuse members that overlap."""
    members = sorted(_read_directory(file), key=lambda info: info.header_offset)
    (name, number), *_ = [*Counter(info.filename for info in members).most_common(1), ("", 0)]
    if number > 1:
        raise FormatError(f"{file.path} has two members of one name: {name[:200]!r}")
    located, end = [], 0
    for info in members:
        start = _find_start(file, info)
        if info.header_offset < end or start + info.compress_size > file.nbytes:
            raise FormatError(
                f"{file.path}: member {info.filename[:200]!r}, {info.compress_size} bytes at {start}, overlaps "
                f"another, or ends after the file, which has {file.nbytes} bytes"
            )
        end = start + info.compress_size
        located.append((info, start))
    return located


def _read_directory(file: SingleFile) -> list[zipfile.ZipInfo]:
    try:
        with file.as_binary_file() as raw, zipfile.ZipFile(raw) as archive:
            return archive.infolist()
    except _MALFORMED_ZIP as error:
        raise FormatError(
            f"{file.path} begins like an npz, but is damaged or cut short: {str(error)[:300]}"
        ) from error


def _find_start(file: SingleFile, info: zipfile.ZipInfo) -> int:
    """Find the offset of a member's bytes, after a header that repeats its name."""
    at = info.header_offset
    header = file.read(at, _MEMBER_HEADER.size) if 0 <= at < file.nbytes else b""
    if len(header) == _MEMBER_HEADER.size:
        magic, name_nbytes, extra_nbytes = _MEMBER_HEADER.unpack(header)
        name = file.read(at + _MEMBER_HEADER.size, name_nbytes)
        encoding = "utf-8" if info.flag_bits & _IS_UTF8 else "cp437"
        if magic == BEGINNINGS[0] and name.decode(encoding, "replace") == info.orig_filename:
            return int(at + _MEMBER_HEADER.size + name_nbytes + extra_nbytes)
    raise FormatError(
        f"{file.path} is damaged: the member {info.filename[:200]!r} does not begin at byte {at}"
    )


def _read_record(file: SingleFile, info: zipfile.ZipInfo, offset: int) -> NpyRecord:
    _require_supported(info)
    try:
        header = _read_header(file, info, offset)
        _require_possible(info, header)
    except UnsupportedError:
        raise
    except FormatError as error:
        raise FormatError(f"{file.path}: member {info.filename[:200]!r}: {error}") from error
    is_deflated = info.compress_type == _DEFLATED
    return NpyRecord(info.filename, offset, info.compress_size, header, is_deflated, info.CRC)


def _require_supported(info: zipfile.ZipInfo) -> None:
    if not info.filename.endswith(_SUFFIX):
        raise UnsupportedError(f"not a {_SUFFIX} file")
    if info.flag_bits & _IS_ENCRYPTED:
        raise UnsupportedError("encrypted")
    if info.compress_type not in (_STORED, _DEFLATED):
        raise UnsupportedError(
            f"compressed by method {info.compress_type}; only 0 (not compressed) and 8 (deflate) are supported"
        )


def _read_header(file: SingleFile, info: zipfile.ZipInfo, offset: int) -> NpyHeader:
    stored = info.compress_size
    if info.compress_type == _STORED:
        return parse_npy_header(lambda nbytes: file.read(offset, min(nbytes, stored)))
    return parse_npy_header(
        lambda nbytes: inflate_beginning(file.read(offset, min(nbytes + _DEFLATE_OVERHEAD, stored)), nbytes)
    )


def _require_possible(info: zipfile.ZipInfo, header: NpyHeader) -> None:
    """Refuse a member that cannot be as long as it claims, before memory is allocated for it."""
    expected = header.header_nbytes + header.nbytes
    stored, size = info.compress_size, info.file_size
    is_possible = size <= stored * _MAX_EXPANSION if info.compress_type == _DEFLATED else size == stored
    if size != expected or not is_possible:
        raise FormatError(
            f"{stored} bytes for a member of {size}, which should have {expected} by its header: the file is damaged"
        )
    if not header.is_text:
        header.require_supported()
    elif size > _MAX_TEXT:
        raise UnsupportedError(f"a text of {size} bytes; at most {_MAX_TEXT} are read")


def _to_array_in_file(record: NpyRecord) -> ArrayInFile:
    header = record.header
    if not header.nbytes:
        return ArrayInFile(header.dtype, header.shape, 0)
    if header.is_native and not record.is_deflated:
        return ArrayInFile(header.dtype, header.shape, header.nbytes, record.offset + header.header_nbytes)
    return ArrayInFile(header.dtype, header.shape, header.nbytes, virtual_file=record, is_encoded=True)


def _find_damages(store: Store, name: str, records: Mapping[str, NpyRecord]) -> Iterator[Damage]:
    """Check the members that are read without decoding; the others are checked whenever they are decoded."""
    with (
        suppress(FileNotFoundError),
        open_single_file(store, name) as file,
    ):  # a missing file is reported by its leaves
        for leaf, record in records.items():
            found = _read_crc(file, record.offset, record.stored_nbytes)
            if found != record.crc:
                problem = f"are damaged: their checksum is {found:08x}, expected {record.crc or 0:08x}"
                yield Damage(leaf, name, record.offset, record.offset + record.stored_nbytes, problem)


def _read_crc(file: SingleFile, offset: int, nbytes: int) -> int:
    crc = 0
    for start in range(offset, offset + nbytes, PIECE_BYTES):
        crc = zlib.crc32(file.read(start, min(PIECE_BYTES, offset + nbytes - start)), crc)
    return crc


def _read_text(file: SingleFile, record: NpyRecord) -> str:
    where = f"{file.path}: member {record.name[:200]!r}"
    try:
        data = record.decode(file.read_into)[record.header.header_nbytes :]
        text = data.decode("utf-32-be" if record.header.is_swapped else "utf-32-le", "surrogatepass")
    except CorruptionError as error:
        raise CorruptionError(f"{where} is damaged: {error}") from error
    except UnicodeDecodeError as error:
        raise FormatError(f"{where} should be a text, but cannot be decoded: {error}") from error
    return text.rstrip("\0")  # numpy pads texts with these
