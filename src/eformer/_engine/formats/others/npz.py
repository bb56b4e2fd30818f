"""Files of `numpy.savez` and `numpy.savez_compressed`: zip archives with an array in each member."""

from __future__ import annotations

import os
import struct
import zipfile
import zlib
from collections import Counter
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from eformer._engine.formats.nested_names import nested, parts_of_name
from eformer._engine.formats.others.npy import Record, UnsupportedError, beginning_of_deflated, parse_npy
from eformer._engine.formats.others.single_file import StoredArray, describe, opened
from eformer._engine.record.pieces import PIECE_BYTES
from eformer._engine.record.text import few
from eformer._engine.record.values import value_to_json
from eformer.errors import CorruptionError, Damage, FormatError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from eformer._engine.formats.found import Found
    from eformer._engine.formats.others.npy import Npy
    from eformer._engine.formats.others.single_file import SingleFile

FORMAT = "npz"
BEGINNINGS = (b"PK\x03\x04", b"PK\x05\x06")  # of the first member, or of the end of an archive without any

PYTORCH = "there, safetensors.torch.save_file writes what can be read here"

_SUFFIX = ".npy"
_LOCAL = struct.Struct("<4s22xHH")
_STORED, _DEFLATED = zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED
_IS_ENCRYPTED, _IS_UTF8 = 0x1, 0x800
_MOST_EXPANSION = 1040  # deflate says at most 258 bytes in two bits
_DEFLATE_OVERHEAD = 1024  # the bytes that deflate may take before it says the first
_MOST_TEXT = 2**24

# What the zipfile module raises for archives that are none.
_MALFORMED_ZIP = (
    zipfile.BadZipFile, zipfile.LargeZipFile, NotImplementedError, EOFError, LookupError, OSError, OverflowError,
    RuntimeError, ValueError, struct.error,
)  # fmt: skip


def in_npz(file: SingleFile) -> Found:
    """A tree of dicts, by the dots in the members' names. Text without axes is a plain value."""
    records, problems = {}, []
    located = _located(file)
    if any(info.filename.endswith("/data.pkl") for info, _ in located):
        raise FormatError(f"{file.path} is a file of PyTorch, of pickles, which are not run; {PYTORCH}")
    for info, offset in located:
        try:
            records[info.filename.removesuffix(_SUFFIX)] = _record(file, info, offset)
        except UnsupportedError as error:
            problems.append(f"member {info.filename[:200]!r}: {error}")
    if problems:
        raise FormatError(
            f"{file.path} holds what is no array of numbers and no single text; write it again without: "
            f"{few(problems)}"
        )
    structure, names = nested({name: parts_of_name(name) for name in records})
    texts = {name: record for name, record in records.items() if record.npy.is_text}
    plain = {names[name]: r for name, r in records.items() if r.npy.is_straight and not r.is_deflated}
    return describe(
        file,
        FORMAT,
        {names[name]: _stored(record) for name, record in records.items() if name not in texts},
        structure,
        home="numpy",
        values={names[name]: value_to_json(_text(file, record)) for name, record in texts.items()},
        find_damages=partial(_damages, file.path, plain),
    )


def _located(file: SingleFile) -> list[tuple[zipfile.ZipInfo, int]]:
    """The members in the order in which they lie, with where their bytes begin; refuses those that share any."""
    members = sorted(_directory(file), key=lambda info: info.header_offset)
    (name, number), *_ = [*Counter(info.filename for info in members).most_common(1), ("", 0)]
    if number > 1:
        raise FormatError(f"{file.path} has two members of one name: {name[:200]!r}")
    located, end = [], 0
    for info in members:
        start = _start(file, info)
        if info.header_offset < end or start + info.compress_size > file.nbytes:
            raise FormatError(
                f"{file.path}: member {info.filename[:200]!r}, {info.compress_size} bytes at {start}, lies in "
                f"another, or ends behind the file, which has {file.nbytes}"
            )
        end = start + info.compress_size
        located.append((info, start))
    return located


def _directory(file: SingleFile) -> list[zipfile.ZipInfo]:
    try:
        with os.fdopen(file.descriptor, "rb", closefd=False) as raw, zipfile.ZipFile(raw) as archive:
            return archive.infolist()
    except _MALFORMED_ZIP as error:
        raise FormatError(
            f"{file.path} begins like an npz, and is damaged or cut short: {str(error)[:300]}"
        ) from error


def _start(file: SingleFile, info: zipfile.ZipInfo) -> int:
    """Where the bytes of a member begin: behind a header that says its name once more."""
    at = info.header_offset
    header = file.read(at, _LOCAL.size) if 0 <= at < file.nbytes else b""
    if len(header) == _LOCAL.size:
        magic, name_nbytes, extra_nbytes = _LOCAL.unpack(header)
        name = file.read(at + _LOCAL.size, name_nbytes)
        encoding = "utf-8" if info.flag_bits & _IS_UTF8 else "cp437"
        if magic == BEGINNINGS[0] and name.decode(encoding, "replace") == info.orig_filename:
            return int(at + _LOCAL.size + name_nbytes + extra_nbytes)
    raise FormatError(
        f"{file.path} is damaged: the member {info.filename[:200]!r} does not begin at byte {at}"
    )


def _record(file: SingleFile, info: zipfile.ZipInfo, offset: int) -> Record:
    _require_supported(info)
    try:
        npy = _header(file, info, offset)
        _require_length(info, npy)
    except UnsupportedError:
        raise
    except FormatError as error:
        raise FormatError(f"{file.path}: member {info.filename[:200]!r}: {error}") from error
    is_deflated = info.compress_type == _DEFLATED
    return Record(info.filename, offset, info.compress_size, npy, is_deflated, info.CRC)


def _require_supported(info: zipfile.ZipInfo) -> None:
    if not info.filename.endswith(_SUFFIX):
        raise UnsupportedError(f"no {_SUFFIX}")
    if info.flag_bits & _IS_ENCRYPTED:
        raise UnsupportedError("encrypted")
    if info.compress_type not in (_STORED, _DEFLATED):
        raise UnsupportedError(
            f"compressed by method {info.compress_type}; 0 (not at all) and 8 (deflate) are known"
        )


def _header(file: SingleFile, info: zipfile.ZipInfo, offset: int) -> Npy:
    stored = info.compress_size
    if info.compress_type == _STORED:
        return parse_npy(lambda nbytes: file.read(offset, min(nbytes, stored)))
    return parse_npy(
        lambda nbytes: beginning_of_deflated(
            file.read(offset, min(nbytes + _DEFLATE_OVERHEAD, stored)), nbytes
        )
    )


def _require_length(info: zipfile.ZipInfo, npy: Npy) -> None:
    """Refuses a member that cannot be as long as it says, before memory is allocated for it."""
    expected = npy.header_nbytes + npy.nbytes
    stored, size = info.compress_size, info.file_size
    is_possible = size <= stored * _MOST_EXPANSION if info.compress_type == _DEFLATED else size == stored
    if size != expected or not is_possible:
        raise FormatError(
            f"{stored} bytes for a member of {size}, which should be {expected} by its header: the file is damaged"
        )
    if not npy.is_text:
        npy.dtype  # noqa: B018  refuses what is none of ours
    elif size > _MOST_TEXT:
        raise UnsupportedError(f"a text of {size} bytes")


def _stored(record: Record) -> StoredArray:
    npy = record.npy
    if not npy.nbytes:
        return StoredArray(npy.dtype, npy.shape, 0)
    if npy.is_straight and not record.is_deflated:
        return StoredArray(npy.dtype, npy.shape, npy.nbytes, record.offset + npy.header_nbytes)
    return StoredArray(npy.dtype, npy.shape, npy.nbytes, part=record, is_coded=True)


def _damages(path: Path, records: Mapping[str, Record]) -> Iterator[Damage]:
    """Of members that lie in the archive as they are. Others are checked whenever they are decoded."""
    with suppress(FileNotFoundError), opened(path) as file:  # that it is gone, its leaves say
        for name, record in records.items():
            found = _crc(file, record.offset, record.stored_nbytes)
            if found != record.crc:
                problem = f"are damaged: their checksum is {found:08x}, recorded is {record.crc or 0:08x}"
                yield Damage(name, path.name, record.offset, record.offset + record.stored_nbytes, problem)


def _crc(file: SingleFile, offset: int, nbytes: int) -> int:
    crc = 0
    for start in range(offset, offset + nbytes, PIECE_BYTES):
        crc = zlib.crc32(file.read(start, min(PIECE_BYTES, offset + nbytes - start)), crc)
    return crc


def _text(file: SingleFile, record: Record) -> str:
    where = f"{file.path}: member {record.name[:200]!r}"
    try:
        data = record.decoded(file.read_into)[record.npy.header_nbytes :]
        text = data.decode("utf-32-be" if record.npy.is_swapped else "utf-32-le", "surrogatepass")
    except CorruptionError as error:
        raise CorruptionError(f"{where} is damaged: {error}") from error
    except UnicodeDecodeError as error:
        raise FormatError(f"{where} is no text, but says so: {error}") from error
    return text.rstrip("\0")  # numpy cannot tell them from the end
