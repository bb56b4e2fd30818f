"""Locate the members of zip archives, and check their checksums.

Tests: tests/compat/test_files_npz.py, tests/compat/test_torch_hostile.py.
"""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING

from msgspec import Struct

from eformer._engine.formats.others.single_file import SingleFile, open_single_file
from eformer._engine.record.pieces import PIECE_BYTES
from eformer._engine.stores.virtual_files import BinaryFile
from eformer.errors import Damage, FormatError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from eformer._engine.stores.base import Store

BEGINNINGS = (b"PK\x03\x04", b"PK\x05\x06")  # of the first member, or of the end of an empty archive

_MEMBER_HEADER = struct.Struct("<4s22xHH")
IS_ENCRYPTED, _IS_UTF8 = 0x1, 0x800
_MAX_DESCRIPTOR = 24  # bytes that may follow a member, with its checksum and lengths

# The errors that the zipfile module raises for files that are not archives.
_MALFORMED_ZIP = (
    zipfile.BadZipFile, zipfile.LargeZipFile, NotImplementedError, EOFError, LookupError, OSError, OverflowError,
    RuntimeError, ValueError, struct.error,
)  # fmt: skip


def locate_members(file: SingleFile) -> list[tuple[zipfile.ZipInfo, int]]:
    """List the members in the order of their bytes, with the offsets of these.

    Refuse members that overlap, and bytes that belong to no member: a second archive, or a member that the archive's
    directory does not list, may hold leaves.
    """
    listed, directory_at = _read_directory(file)
    members = sorted(listed, key=lambda info: info.header_offset)
    (name, number), *_ = [*Counter(info.filename for info in members).most_common(1), ("", 0)]
    if number > 1:
        raise FormatError(f"{file.path} has two members of one name: {name[:200]!r}")
    located, end = [], 0
    for info in members:
        start = _find_start(file, info)
        if info.header_offset < end or start + info.compress_size > file.nbytes:
            raise FormatError(
                f"{file.path}: member {info.filename[:200]!r}, {info.compress_size} bytes at {start}, overlaps "
                f"another member, or ends after the file, which has {file.nbytes} bytes"
            )
        _require_no_gap(file, end, info.header_offset)
        end = start + info.compress_size
        located.append((info, start))
    _require_no_gap(file, end, directory_at)
    return located


def _require_no_gap(file: SingleFile, end: int, start: int) -> None:
    if start - end > _MAX_DESCRIPTOR:
        raise FormatError(
            f"{file.path}: bytes {end} to {start} belong to no member of this archive; are there several in one file?"
        )


def has_member(file: SingleFile, name: str) -> bool:
    """Tell whether the archive's directory lists a member of this name."""
    return any(info.filename == name for info in _read_directory(file)[0])


def _read_directory(file: SingleFile) -> tuple[list[zipfile.ZipInfo], int]:
    """Read the directory of an archive: the members, and the offset of the directory itself."""
    try:
        raw = io.BufferedReader(BinaryFile(file.read_into, file.nbytes))
        with zipfile.ZipFile(raw) as archive:
            return archive.infolist(), archive.start_dir
    except _MALFORMED_ZIP as error:
        raise FormatError(
            f"{file.path} begins like a zip archive, but is damaged or cut short: {str(error)[:300]}"
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


class Span(Struct, frozen=True):
    """Bytes of a file, and their checksum if it is known."""

    offset: int
    nbytes: int
    crc: int | None = None


def find_damages(store: Store, name: str, leaves: Mapping[str, Span]) -> Iterator[Damage]:
    """Check the bytes of leaves that are read without decoding. Decoding checks the bytes of all other leaves."""
    # If the file is missing, each of its leaves is reported already.
    with suppress(FileNotFoundError), open_single_file(store, name) as file:
        for leaf, checked in leaves.items():
            found = _read_crc(file, checked.offset, checked.nbytes)
            if checked.crc is not None and found != checked.crc:
                problem = f"are damaged: their checksum is {found:08x}, expected {checked.crc:08x}"
                yield Damage(leaf, name, checked.offset, checked.offset + checked.nbytes, problem)


def _read_crc(file: SingleFile, offset: int, nbytes: int) -> int:
    crc = 0
    for start in range(offset, offset + nbytes, PIECE_BYTES):
        crc = zlib.crc32(file.read(start, min(PIECE_BYTES, offset + nbytes - start)), crc)
    return crc
