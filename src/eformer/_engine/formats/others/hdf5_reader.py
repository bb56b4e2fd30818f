"""Locate the datasets of an HDF5 file. Run in a process of its own, which `keras_files.py` starts and feeds.

The library of HDF5 is written in C. A damaged file can keep it busy endlessly, or crash its process.

Tests: tests/compat/test_keras_files.py.
"""

from __future__ import annotations

import io
import json
import re
import resource
import struct
import sys
from functools import partial
from importlib import import_module
from typing import IO, TYPE_CHECKING, Any

from eformer._engine.record.dtypes import DTYPES
from eformer._engine.record.text import few
from eformer._engine.record.values import value_to_json
from eformer._engine.stores.virtual_files import BinaryFile

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

REQUEST = struct.Struct("<QQ")  # offset and length of the requested bytes
ANSWER = struct.Struct("<Q")  # the length of the bytes that follow
RESULT = 2**64 - 1  # in place of the offset: a result of this length follows

_ATTRIBUTES = ("backend", "keras_version", "model_config", "training_config")  # of the whole file
# Attributes of groups and datasets that need no listing: names, which the tree has, versions, and marks of bfloat16.
_KNOWN = re.compile(r"(layer_names|weight_names)\d*|name|backend|keras_version|dtype")
_MAX_DEPTH = 100

StoredArray = tuple[str, tuple[int, ...], int, int]
"""A dataset: its dtype, its shape, its length in bytes and its offset."""


def main(file_nbytes: int, seconds: int, memory: int) -> None:
    """Read the file that the parent has open, and send it the result."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    inside, outside = sys.stdin.buffer, sys.stdout.buffer
    try:
        result = _read(BinaryFile(partial(_asked, inside, outside), file_nbytes))
    except _NotPlainError as error:
        result = {"refused": str(error)}
    except Exception as error:  # noqa: BLE001  for damaged files, HDF5 raises errors of many kinds
        result = {"damaged": str(error)[:300]}
    data = json.dumps(result).encode()
    outside.write(REQUEST.pack(RESULT, len(data)) + data)
    outside.flush()


def _asked(inside: IO[bytes], outside: IO[bytes], memory: memoryview, offset: int) -> int:
    """Fill `memory` with bytes of the file, which the parent sends on request."""
    outside.write(REQUEST.pack(offset, len(memory)))
    outside.flush()
    (nbytes,) = ANSWER.unpack(inside.read(ANSWER.size))
    memory[:nbytes] = inside.read(nbytes)
    return int(nbytes)


def _read(raw: io.RawIOBase) -> dict[str, Any]:
    """Locate the datasets by path; read the attributes of the file, and the names of unknown attributes."""
    h5py: Any = import_module("h5py")
    with h5py.File(io.BufferedReader(raw, 2**16), "r") as opened:
        found = dict(_walk(h5py, opened))
        datasets = {path: item for path, item in found.items() if isinstance(item, h5py.Dataset)}
        return {
            "places": {path: _place(h5py, path, dataset) for path, dataset in datasets.items()},
            "attributes": _attributes(h5py, opened),
            "unknown": list(_unknown_attributes(opened, found)),
        }


class _NotPlainError(Exception):
    """An object in an HDF5 file is not a plain array of this file."""


def _walk(h5py: Any, root: Any) -> Iterator[tuple[str, Any]]:
    """List the groups and datasets by path. Follow only hard links, and enter each object once."""
    todo, seen = [("", root, 0)], {h5py.h5o.get_info(root.id).addr}
    while todo:
        above, group, depth = todo.pop()
        for name in sorted(group):
            path = f"{above}/{name}" if above else name
            if not isinstance(group.get(name, getlink=True), h5py.HardLink):
                raise _NotPlainError(f"{path[:200]!r} is a link to another place or file")
            found = group[name]
            address = h5py.h5o.get_info(found.id).addr
            if address in seen or depth == _MAX_DEPTH:
                raise _NotPlainError(f"{path[:200]!r} is linked twice, or more than {_MAX_DEPTH} groups deep")
            seen.add(address)
            if isinstance(found, h5py.Group):
                todo.append((path, found, depth + 1))
            elif not isinstance(found, h5py.Dataset):
                raise _NotPlainError(f"{path[:200]!r} is neither a group nor a dataset")
            yield path, found


def _place(h5py: Any, path: str, dataset: Any) -> StoredArray:
    """Describe a dataset whose bytes lie one after the other in the file."""
    problem = _problem_of(h5py, dataset)
    dtype = None if problem else _dtype_of(dataset)
    if problem or dtype is None:
        found = problem or f"of the type {str(dataset.dtype)[:40]}"
        raise _NotPlainError(f"leaf {path[:200]!r} is {found}")
    nbytes = dataset.size * DTYPES[dtype].itemsize
    return dtype, tuple(dataset.shape), nbytes, dataset.id.get_offset() if nbytes else 0


def _problem_of(h5py: Any, dataset: Any) -> str | None:
    plist = dataset.id.get_create_plist()
    if dataset.shape is None:
        return "empty, without a shape"
    if plist.get_external_count():
        return "stored in another file"
    if plist.get_layout() != h5py.h5d.CONTIGUOUS:
        filters = [str(plist.get_filter(number)[3])[:40] for number in range(plist.get_nfilters())]
        described = f" ({few(filters)})" if filters else ""
        return f"stored in chunks{described}, in its header, or as a view of other datasets"
    if dataset.size and dataset.id.get_offset() is None:
        return "declared, but was never written"
    return None


def _dtype_of(dataset: Any) -> str | None:
    """Return the name of a dtype that eformer stores; None for other dtypes and for big-endian numbers."""
    dtype = dataset.dtype
    if dtype.kind == "V" and dtype.itemsize == 2 and dtype.names is None:
        is_marked = "dtype" in dataset.attrs and dataset.attrs["dtype"] == "bfloat16"
        return "bfloat16" if is_marked else None
    is_plain = dtype.kind in "fiubc" and dtype.isnative
    return dtype.name if is_plain and DTYPES.get(dtype.name) == dtype else None


def _unknown_attributes(opened: Any, found: Mapping[str, Any]) -> Iterator[str]:
    """Name the attributes that Keras does not write: they may hold data that is not read."""
    for name in opened.attrs:
        if name not in _ATTRIBUTES and not _KNOWN.fullmatch(name):
            yield f"attribute {name} of the file"
    for path, item in found.items():
        yield from (f"attribute {name} of {path}" for name in item.attrs if not _KNOWN.fullmatch(name))


def _attributes(h5py: Any, opened: Any) -> dict[str, Any]:
    """Read the texts that Keras attaches to the whole file."""
    found = {}
    for name in _ATTRIBUTES:
        if name in opened.attrs:
            stored = h5py.h5a.open(opened.id, name.encode())
            if not stored.shape and h5py.check_string_dtype(stored.dtype) is not None:
                found[name] = value_to_json(opened.attrs[name])
    return found
