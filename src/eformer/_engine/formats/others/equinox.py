"""Files of `equinox.tree_serialise_leaves`: one array of numpy's behind the other, without names.

People put a line of JSON before them, which tells how to make the model. A single .npy file looks alike.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from eformer._engine.formats.others.npy import MAGIC, Record, UnsupportedError, parse_npy
from eformer._engine.formats.others.single_file import StoredArray, describe
from eformer._engine.record.manifest import UNREADABLE
from eformer._engine.record.text import few
from eformer._engine.record.values import value_to_json
from eformer.errors import FormatError

if TYPE_CHECKING:
    from eformer._engine.formats.found import Found
    from eformer._engine.formats.others.npy import Npy
    from eformer._engine.formats.others.single_file import SingleFile

FORMAT = "equinox"

_MOST_LINE = 2**20


def in_equinox(file: SingleFile) -> Found | None:
    """Leaves that are called by their numbers; None if the file does not begin with an array, or a line of JSON and an
    array."""
    line = _line(file)
    if line is None:
        return None
    records = _records(file, len(line))
    arrays = {str(number): _stored(record) for number, record in enumerate(records)}
    return describe(
        file,
        FORMAT,
        arrays,
        "0" if len(arrays) == 1 else {UNREADABLE: _no_names(file, len(arrays))},
        metadata=_metadata(file, line),
        has_names=False,
    )


def _no_names(file: SingleFile, count: int) -> str:
    return (
        f"{file.path} holds {count} arrays without names, one after the other, as equinox writes them: pass like= with "
        "the tree that was saved, or one of its structure; or keys=, of '0', '1', ..., for arrays by number"
    )


def _line(file: SingleFile) -> bytes | None:
    """What stands before the arrays, with its end of line; None if no arrays come."""
    first = file.read(0, len(MAGIC))
    if first == MAGIC:
        return b""
    if first[:1] not in (b"{", b"["):
        return None
    line, newline, _ = file.read(0, _MOST_LINE).partition(b"\n" + MAGIC)
    return line + b"\n" if newline else None


def _metadata(file: SingleFile, line: bytes) -> dict[str, Any]:
    try:
        said = json.loads(line or b"{}")
        return {name: value_to_json(value) for name, value in _as_dict(said).items()}
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{file.path}: what stands before its arrays is no JSON: {error}") from error


def _as_dict(said: Any) -> dict[str, Any]:
    return said if isinstance(said, dict) else {"hyperparameters": said}


def _records(file: SingleFile, offset: int) -> list[Record]:
    records: list[Record] = []
    problems = []
    while offset < file.nbytes:
        where = f"array {len(records)}, at byte {offset}"
        npy = _header(file, offset, where)
        nbytes = npy.header_nbytes + npy.nbytes
        if nbytes > file.nbytes - offset:
            raise FormatError(
                f"{file.path}: {where}, takes {nbytes} bytes, and the file has {file.nbytes - offset} left: it was "
                "cut short, or is damaged"
            )
        try:
            npy.dtype  # noqa: B018  refuses what is none of ours
        except UnsupportedError as error:
            problems.append(f"{where}: {error}")
        records.append(Record(str(len(records)), offset, nbytes, npy))
        offset += nbytes
    if problems:
        raise FormatError(f"{file.path} cannot be read: {few(problems)}")
    return records


def _header(file: SingleFile, offset: int, where: str) -> Npy:
    try:
        return parse_npy(lambda nbytes: file.read(offset, nbytes))
    except FormatError as error:
        raise FormatError(f"{file.path}: {where}: {error}") from error


def _stored(record: Record) -> StoredArray:
    npy = record.npy
    if npy.is_straight:
        return StoredArray(npy.dtype, npy.shape, npy.nbytes, record.offset + npy.header_nbytes)
    return StoredArray(npy.dtype, npy.shape, npy.nbytes, part=record, is_coded=True)
