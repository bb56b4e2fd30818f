"""Files of Keras: `.weights.h5`, the older `.h5`, and `.keras`, a zip archive with such a file in it.

h5py reads where the datasets are, through the file that is open here. Their bytes are then read like those of any
other file. Nothing is read that lies elsewhere: links and storage outside are refused.
"""

from __future__ import annotations

import zipfile
from functools import partial
from typing import TYPE_CHECKING, Any

from eformer._engine.formats.nested_names import nested
from eformer._engine.formats.others.single_file import ArrayInFile, FilePart, describe_file
from eformer._engine.formats.others.zip_members import Checked, find_damages, has_member, locate_members
from eformer._engine.record.dtypes import DTYPES
from eformer._engine.record.names import escape
from eformer._engine.record.text import few
from eformer._engine.record.values import parse_json, value_to_json
from eformer._engine.tasks.extras import import_extra
from eformer.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from eformer._engine.formats.found import Found
    from eformer._engine.formats.others.single_file import SingleFile

FORMAT = "HDF5, of Keras"
MAGIC = b"\x89HDF\r\n\x1a\n"

_WEIGHTS = "model.weights.h5"
_DOCUMENTS = ("config.json", "metadata.json")
_ATTRIBUTES = ("backend", "keras_version", "model_config", "training_config")  # of the whole file
_MAX_DOCUMENT = 2**26  # bytes
_MAX_DEPTH = 100
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
    datasets, attributes = _read_hdf5(hdf5)
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
        left_out=left_out,
    )


# --------------------------------------------------------------------------------------------- HDF5


def _library() -> Any:
    return import_extra("h5py", "h5", "files of Keras need")


def _read_hdf5(file: SingleFile | FilePart) -> tuple[dict[str, ArrayInFile], dict[str, Any]]:
    """Read where the datasets are, by path, and what the file says of itself."""
    h5py = _library()
    try:
        with file.as_binary_file() as raw, h5py.File(raw, "r") as opened:
            found = dict(_walk(h5py, opened))
            return {path: _array(h5py, path, each) for path, each in found.items()}, _attributes(h5py, opened)
    except _NotPlainError as error:
        raise FormatError(
            f"{file.path} has something that Keras does not write and eformer does not read: {error}"
        ) from error
    except Exception as error:  # damaged files make HDF5 raise anything
        raise FormatError(f"{file.path} is an HDF5 file that cannot be read: {str(error)[:300]}") from error


class _NotPlainError(Exception):
    """Something in an HDF5 file that is not a plain array of this file."""


def _walk(h5py: Any, root: Any) -> Iterator[tuple[str, Any]]:
    """List the datasets by path. Only hard links are followed, and to each object once."""
    todo, seen = [("", root, 0)], {h5py.h5o.get_info(root.id).addr}
    while todo:
        above, group, depth = todo.pop()
        for name in sorted(group):
            path = f"{above}/{name}" if above else name
            if not isinstance(group.get(name, getlink=True), h5py.HardLink):
                raise _NotPlainError(f"{path[:200]!r} is a link to somewhere else")
            found = group[name]
            address = h5py.h5o.get_info(found.id).addr
            if address in seen or depth == _MAX_DEPTH:
                raise _NotPlainError(f"{path[:200]!r} is linked twice, or more than {_MAX_DEPTH} groups deep")
            seen.add(address)
            if isinstance(found, h5py.Group):
                todo.append((path, found, depth + 1))
            elif isinstance(found, h5py.Dataset):
                yield path, found
            else:
                raise _NotPlainError(f"{path[:200]!r} is neither a group nor a dataset")


def _array(h5py: Any, path: str, dataset: Any) -> ArrayInFile:
    """Describe a dataset whose bytes lie one after the other in the file."""
    problem = _problem_of(h5py, dataset)
    dtype = None if problem else _dtype_of(dataset)
    if problem or dtype is None:
        what = problem or f"of the type {str(dataset.dtype)[:40]}"
        raise _NotPlainError(f"leaf {path[:200]!r} is {what}")
    nbytes = dataset.size * DTYPES[dtype].itemsize
    return ArrayInFile(dtype, tuple(dataset.shape), nbytes, dataset.id.get_offset() if nbytes else 0)


def _problem_of(h5py: Any, dataset: Any) -> str | None:
    plist = dataset.id.get_create_plist()
    if dataset.shape is None:
        return "empty, without a shape"
    if plist.get_external_count():
        return "stored in another file"
    if plist.get_layout() != h5py.h5d.CONTIGUOUS:
        filters = [str(plist.get_filter(number)[3])[:40] for number in range(plist.get_nfilters())]
        return f"stored in chunks{f' ({few(filters)})' if filters else ''}, in its header, or as a view of others"
    if dataset.size and dataset.id.get_offset() is None:
        return "declared, and was never written"
    return None


def _dtype_of(dataset: Any) -> str | None:
    """Return the name of a dtype that eformer stores; None for others, and for big-endian numbers."""
    dtype = dataset.dtype
    if dtype.kind == "V" and dtype.itemsize == 2 and dtype.names is None:
        is_marked = "dtype" in dataset.attrs and dataset.attrs["dtype"] == "bfloat16"
        return "bfloat16" if is_marked else None
    is_plain = dtype.kind in "fiubc" and dtype.isnative
    return dtype.name if is_plain and DTYPES.get(dtype.name) == dtype else None


def _attributes(h5py: Any, opened: Any) -> dict[str, Any]:
    """Read the texts that Keras attaches to the whole file."""
    found = {}
    for name in _ATTRIBUTES:
        if name in opened.attrs:
            stored = h5py.h5a.open(opened.id, name.encode())
            if not stored.shape and h5py.check_string_dtype(stored.dtype) is not None:
                found[name] = value_to_json(opened.attrs[name])
    return found
