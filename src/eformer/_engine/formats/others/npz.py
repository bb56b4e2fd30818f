"""Files of `numpy.savez` and `numpy.savez_compressed`: zip archives with one array in each member."""

from __future__ import annotations

import zipfile
from functools import partial
from typing import TYPE_CHECKING

from eformer._engine.formats.nested_names import nested, parts_of_name
from eformer._engine.formats.others.npy import (
    NpyRecord,
    UnsupportedError,
    inflate_beginning,
    parse_npy_header,
)
from eformer._engine.formats.others.single_file import ArrayInFile, describe_file
from eformer._engine.formats.others.zip_members import BEGINNINGS, Checked, find_damages, locate_members
from eformer._engine.record.text import few
from eformer._engine.record.values import value_to_json
from eformer.errors import CorruptionError, FormatError

if TYPE_CHECKING:
    from eformer._engine.formats.found import Found
    from eformer._engine.formats.others.npy import NpyHeader
    from eformer._engine.formats.others.single_file import SingleFile

FORMAT = "npz"

_SUFFIX = ".npy"
_STORED, _DEFLATED = zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED
_IS_ENCRYPTED = 0x1
_MAX_EXPANSION = 1040  # deflate encodes at most 258 bytes in two bits
_DEFLATE_OVERHEAD = 1024  # bytes that deflate may read before it returns the first
_MAX_TEXT = 2**24  # bytes


def in_npz(file: SingleFile, first: bytes) -> Found | None:
    """Find the tree of an npz file: nested dicts, split at the dots in the members' names.

    A text without axes becomes a plain value.
    """
    if not first.startswith(BEGINNINGS):
        return None
    records, problems = {}, []
    members = locate_members(file)
    for info, offset in members:
        try:
            records[info.filename.removesuffix(_SUFFIX)] = _read_record(file, info, offset)
        except UnsupportedError as error:
            problems.append(f"member {info.filename[:200]!r}: {error}")
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
    structure, names = nested({name: parts_of_name(name) for name in records})
    texts = {name: record for name, record in records.items() if record.header.is_text}
    undecoded = {
        names[name]: Checked(record.offset, record.stored_nbytes, record.crc or 0)
        for name, record in records.items()
        if record.header.is_native and not record.is_deflated
    }
    return describe_file(
        file,
        FORMAT,
        {names[name]: _to_array_in_file(record) for name, record in records.items() if name not in texts},
        structure,
        library="numpy",
        values={names[name]: value_to_json(_read_text(file, record)) for name, record in texts.items()},
        find_damages=partial(find_damages, file.store, file.name, undecoded),
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
