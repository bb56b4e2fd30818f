"""Read HDF5 files by the library of HDF5, in a process of its own that may end or be ended without harm."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from eformer._engine.formats.others.hdf5_reader import ANSWER, REQUEST, RESULT
from eformer._engine.formats.others.single_file import ArrayInFile
from eformer.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import IO

    from eformer._engine.formats.others.single_file import FilePart, SingleFile

_SECONDS = 10  # of computing; a model of thousands of layers takes one
_MEMORY = 2**31  # bytes
_MOST_READ = 2**24  # bytes at once
_MOST_RESULT = 2**28

_CODE = "import sys; sys.path[:] = {path}; from {module} import main; main({nbytes}, {seconds}, {memory})"


def read_hdf5(file: SingleFile | FilePart) -> tuple[dict[str, ArrayInFile], dict[str, Any]]:
    """Read where the datasets are, by path, and what the file says of itself.

    Raise FormatError for a file that is damaged, or has something in it that Keras does not write.
    """
    if find_spec("h5py") is None:
        raise ImportError("files of Keras need the package h5py: pip install 'eformer[h5]'")
    with _started(file.nbytes) as process:
        result = _served(file, process)
    if odd := result.get("odd"):
        raise FormatError(
            f"{file.path} has something that Keras does not write and eformer does not read: {odd}"
        )
    if "damaged" in result:
        raise FormatError(f"{file.path} is an HDF5 file that cannot be read: {result['damaged']}")
    places = result["places"].items()
    arrays = {path: ArrayInFile(dtype, tuple(shape), *where) for path, (dtype, shape, *where) in places}
    return arrays, result["attributes"]


@contextmanager
def _started(nbytes: int) -> Iterator[subprocess.Popen[bytes]]:
    code = _CODE.format(
        path=sys.path,
        module="eformer._engine.formats.others.hdf5_reader",
        nbytes=nbytes,
        seconds=_SECONDS,
        memory=_MEMORY,
    )
    process = subprocess.Popen(  # noqa: S603  its arguments are all of eformer
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


def _served(file: SingleFile | FilePart, process: subprocess.Popen[bytes]) -> dict[str, Any]:
    """Send the bytes that the process asks for, and return its result."""
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
