"""Files of Keras: `.weights.h5`, the older `.h5`, and `.keras`, a zip archive with such a file in it.

h5py locates the datasets, in a process of its own. eformer then reads their bytes itself. Links and storage outside the
file are refused.

Tests: tests/compat/test_keras_files.py.
"""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import IO, TYPE_CHECKING, Any

from eformer._engine.formats.found import Foreign, Found
from eformer._engine.formats.nested_names import components_of, nest
from eformer._engine.formats.others.hdf5_reader import ANSWER, REQUEST, RESULT
from eformer._engine.formats.others.single_file import ArrayInFile, SingleFile, describe_file
from eformer._engine.formats.others.zip_members import (
    IS_ENCRYPTED,
    Span,
    find_damages,
    has_member,
    locate_members,
)
from eformer._engine.record.values import parse_json, value_to_json
from eformer._engine.tasks.extras import require_extra
from eformer.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

FORMAT = "HDF5, of Keras"
MAGIC = b"\x89HDF\r\n\x1a\n"

_WEIGHTS = "model.weights.h5"
_DOCUMENTS = ("config.json", "metadata.json")
_MAX_DOCUMENT = 2**26  # bytes

# Limits of the process that reads one file.
_SECONDS = 10  # of computing; a model of thousands of layers takes a second
_MEMORY = 2**31  # bytes
_MOST_READ = 2**24  # bytes of one read
_MOST_RESULT = 2**28

_CODE = "import sys; sys.path[:] = {path}; from {module} import main; main({nbytes}, {seconds}, {memory})"


def in_hdf5(file: SingleFile, first: bytes) -> Found | None:
    """Find the tree of an HDF5 file: nested dicts, by the paths of its datasets."""
    if not first.startswith(MAGIC):
        return None
    return _describe(file, file)


def in_keras(file: SingleFile, first: bytes) -> Found | None:
    """Find the weights of a `.keras` archive. The configuration of the model becomes metadata."""
    if not first.startswith(b"PK\x03\x04") or not has_member(file, _WEIGHTS):
        return None
    members = {info.filename: (info, offset) for info, offset in locate_members(file)}
    for info, _ in members.values():
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & IS_ENCRYPTED:
            raise FormatError(
                f"{file.path}: member {info.filename[:200]!r} is compressed or encrypted, which Keras does not do"
            )
    info, offset = members[_WEIGHTS]
    return _describe(
        file,
        file.part(offset, info.compress_size),
        documents={name: _read_document(file, *members[name]) for name in _DOCUMENTS if name in members},
        left_out=tuple(name for name in members if name not in (_WEIGHTS, *_DOCUMENTS) and name[-1:] != "/"),
        find_damages=partial(
            find_damages, file.store, file.name, {"": Span(offset, info.compress_size, info.CRC)}
        ),
    )


def _read_document(file: SingleFile, info: zipfile.ZipInfo, offset: int) -> Any:
    where = f"{file.path}: member {info.filename!r}"
    if info.compress_size > _MAX_DOCUMENT:
        raise FormatError(f"{where} has {info.compress_size} bytes, more than {_MAX_DOCUMENT}")
    data = file.read(offset, info.compress_size)
    return value_to_json(parse_json(data, dict[str, Any], f"{where} is not JSON"))


def _describe(
    file: SingleFile,
    hdf5: SingleFile,
    *,
    documents: Mapping[str, Any] | None = None,
    left_out: tuple[str, ...] = (),
    find_damages: Callable[[], Any] | None = None,
) -> Found:
    datasets, attributes, unknown = read_hdf5(hdf5)
    for path, array in datasets.items():
        if array.offset + array.nbytes > hdf5.nbytes:
            raise FormatError(
                f"{hdf5.path}: leaf {path[:200]!r}, {array.nbytes} bytes at {array.offset}, ends after the file, "
                f"which has {hdf5.nbytes} bytes"
            )
        if array.nbytes:
            datasets[path] = replace(array, offset=(hdf5.start or 0) + array.offset)
    structure, arrays = nest(datasets, components_of)
    return describe_file(
        file,
        FORMAT,
        arrays,
        structure,
        metadata={**attributes, **(documents or {})},
        foreign=Foreign(find_damages=find_damages, find_left_out=lambda: (*left_out, *unknown)),
    )


# ------------------- the library of HDF5, in a process of its own, which may crash or be killed safely


def read_hdf5(file: SingleFile) -> tuple[dict[str, ArrayInFile], dict[str, Any], list[str]]:
    """Locate the datasets by path; read the attributes of the file, and the names of unknown attributes.

    Raise FormatError for a file that is damaged, or contains objects that Keras does not write.
    """
    require_extra("h5py", "h5", "files of Keras need")
    with _started(file.nbytes) as process:
        result = _served(file, process)
    if refused := result.get("refused"):
        raise FormatError(f"{file.path} has an object that eformer does not read: {refused}")
    if "damaged" in result:
        raise FormatError(f"{file.path} is an HDF5 file that cannot be read: {result['damaged']}")
    places = result["places"].items()
    arrays = {path: ArrayInFile(dtype, tuple(shape), *where) for path, (dtype, shape, *where) in places}
    return arrays, result["attributes"], result["unknown"]


@contextmanager
def _started(nbytes: int) -> Iterator[subprocess.Popen[bytes]]:
    code = _CODE.format(
        path=sys.path,
        module="eformer._engine.formats.others.hdf5_reader",
        nbytes=nbytes,
        seconds=_SECONDS,
        memory=_MEMORY,
    )
    process = subprocess.Popen(  # noqa: S603  our own interpreter, and our own code
        [sys.executable, "-I", "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _served(file: SingleFile, process: subprocess.Popen[bytes]) -> dict[str, Any]:
    """Answer the process's requests for bytes of the file, and return its result."""
    assert process.stdin
    assert process.stdout
    try:
        while True:
            offset, nbytes = REQUEST.unpack(_taken(process.stdout, REQUEST.size))
            if offset == RESULT:
                return dict(json.loads(_taken(process.stdout, min(nbytes, _MOST_RESULT))))
            data = file.read(offset, min(nbytes, _MOST_READ))
            process.stdin.write(ANSWER.pack(len(data)) + data)
            process.stdin.flush()
    except (EOFError, BrokenPipeError, ValueError) as error:
        raise FormatError(
            f"{file.path} is an HDF5 file that cannot be read: the library of HDF5 failed, or needed more than "
            f"{_SECONDS} s or {_MEMORY} bytes"
        ) from error


def _taken(stream: IO[bytes], nbytes: int) -> bytes:
    data = stream.read(nbytes)
    if len(data) < nbytes:
        raise EOFError
    return data
