"""Files of Keras: `.weights.h5`, the older `.h5`, and `.keras`, a zip archive with such a file in it.

h5py reads where the datasets are, in a process of its own. Their bytes are then read like those of any other file.
Nothing is read that lies elsewhere: links and storage outside are refused.
"""

from __future__ import annotations

import zipfile
from functools import partial
from typing import TYPE_CHECKING, Any

from eformer._engine.formats.nested_names import nested
from eformer._engine.formats.others.hdf5 import read_hdf5
from eformer._engine.formats.others.single_file import ArrayInFile, FilePart, describe_file
from eformer._engine.formats.others.zip_members import Checked, find_damages, has_member, locate_members
from eformer._engine.record.names import escape
from eformer._engine.record.values import parse_json, value_to_json
from eformer.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from eformer._engine.formats.found import Found
    from eformer._engine.formats.others.single_file import SingleFile

FORMAT = "HDF5, of Keras"
MAGIC = b"\x89HDF\r\n\x1a\n"

_WEIGHTS = "model.weights.h5"
_DOCUMENTS = ("config.json", "metadata.json")
_MAX_DOCUMENT = 2**26  # bytes
_IS_ENCRYPTED = 0x1


def in_hdf5(file: SingleFile, first: bytes) -> Found | None:
    """Find the tree of an HDF5 file: nested dicts, by the paths of its datasets."""
    if not first.startswith(MAGIC):
        return None
    return _describe(file, file, 0)


def in_keras(file: SingleFile, first: bytes) -> Found | None:
    """Find the tree of a `.keras` archive: its weights. The configuration of the model is metadata."""
    if not first.startswith(b"PK\x03\x04") or not has_member(file, _WEIGHTS):
        return None
    members = {info.filename: (info, offset) for info, offset in locate_members(file)}
    for info, _ in members.values():
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & _IS_ENCRYPTED:
            raise FormatError(
                f"{file.path}: member {info.filename[:200]!r} is compressed or encrypted, which Keras does not do"
            )
    info, offset = members[_WEIGHTS]
    return _describe(
        file,
        FilePart(file, offset, info.compress_size),
        offset,
        documents={name: _read_document(file, *members[name]) for name in _DOCUMENTS if name in members},
        left_out=tuple(name for name in members if name not in (_WEIGHTS, *_DOCUMENTS) and name[-1:] != "/"),
        find_damages=partial(
            find_damages, file.store, file.name, {"": Checked(offset, info.compress_size, info.CRC)}
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
    hdf5: SingleFile | FilePart,
    start: int,
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
    structure, names = nested({path: tuple(map(escape, path.split("/"))) for path in datasets})
    return describe_file(
        file,
        FORMAT,
        {
            names[path]: ArrayInFile(
                array.dtype, array.shape, array.nbytes, start + array.offset if array.nbytes else 0
            )
            for path, array in datasets.items()
        },
        structure,
        metadata={**attributes, **(documents or {})},
        find_damages=find_damages,
        left_out=(*left_out, *unknown),
    )
