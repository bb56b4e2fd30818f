"""Files of `equinox.tree_serialise_leaves`: numpy arrays one after the other, without names.

Many programs put a line of JSON first, with the hyperparameters of the model. A single .npy file has the same form.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from eformer._engine.formats.found import Foreign, Found
from eformer._engine.formats.others.npy import MAGIC, NpyRecord, UnsupportedError, parse_npy_header
from eformer._engine.formats.others.single_file import SingleFile, describe_file
from eformer._engine.record.manifest import UNREADABLE
from eformer._engine.record.text import few
from eformer._engine.record.values import locating, parse_lenient, value_to_json
from eformer.errors import FormatError

FORMAT = "equinox"

_MAX_LINE = 2**20  # bytes


def in_equinox(file: SingleFile, _: bytes) -> Found | None:
    """Find the arrays of an equinox file, named by their numbers.

    Return None if the file does not begin with an array, or with a line of JSON and an array.
    """
    line = _read_first_line(file)
    if line is None:
        return None
    records = _read_records(file, len(line))
    arrays = {str(number): record.in_file() for number, record in enumerate(records)}
    return describe_file(
        file,
        FORMAT,
        arrays,
        "0" if len(arrays) == 1 else {UNREADABLE: _why_no_structure(file, len(arrays))},
        metadata=_parse_metadata(file, line),
        foreign=Foreign(has_names=False),
    )


def _why_no_structure(file: SingleFile, count: int) -> str:
    return (
        f"{file.path} holds {count} arrays without names, one after the other, as equinox writes them: pass like= with "
        "the tree that was saved, or one of its structure; or keys=, of '0', '1', ..., for arrays by number"
    )


def _read_first_line(file: SingleFile) -> bytes | None:
    """Read the line before the arrays, with its newline; return None if no array follows."""
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
    """Read the headers of all arrays; list all arrays that are not supported in one error."""
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
