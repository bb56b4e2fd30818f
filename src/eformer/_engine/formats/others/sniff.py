"""Single files of others, known by how they begin and not by what they are called."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import TYPE_CHECKING

from eformer._engine.formats.others import equinox, npz
from eformer._engine.formats.others import flax as msgpack
from eformer._engine.formats.others.single_file import opened
from eformer._engine.formats.safetensors.names import INDEX_SUFFIX, MANIFEST, SUFFIX
from eformer.errors import FormatError

if TYPE_CHECKING:
    from eformer._engine.formats.found import Found
    from eformer._engine.formats.others.single_file import SingleFile

FORMATS = (msgpack.FORMAT, npz.FORMAT, equinox.FORMAT)
SUFFIXES = (".msgpack", ".npz", ".eqx")  # the usual ones, for hints


def in_file(path: Path) -> Found | None:
    """The checkpoint that a file is; None for what is safetensors', by its name or by how it begins."""
    if path.name == MANIFEST or path.name.endswith((SUFFIX, INDEX_SUFFIX)):
        return None
    with opened(Path(os.path.realpath(path))) as file:  # a link that the caller names may lead anywhere
        first = file.read(0, 9)
        if _is_safetensors(first, file.nbytes):
            return None
        if other := _something_else(file, first):
            raise FormatError(f"{file.path} is no checkpoint that can be read here, but {other}")
        if first.startswith(npz.BEGINNINGS):
            return npz.in_npz(file)
        if found := equinox.in_equinox(file):
            return found
        if first and first[0] in msgpack.BEGINNINGS:
            return msgpack.in_msgpack(file)
        return _none_of_these(file, first)


_OTHERS = {
    b"": "an empty file",
    b"\x89PNG": "a picture",
    b"\x89HDF": "an HDF5 file; where it was written, numpy.savez or safetensors write what can",
    b"GGUF": "a GGUF file; safetensors of the same model can be read",
    b"\x1f\x8b": "compressed by gzip; unpack it first",
    b"\x28\xb5\x2f\xfd": "compressed by zstd; unpack it first",
}
_PICKLE = 0x80  # of protocol 2 and above; as msgpack it would be an empty dict


def _something_else(file: SingleFile, first: bytes) -> str | None:
    """What people have that begins like nothing of ours, and what to do with it."""
    if first[:1] == bytes([_PICKLE]) and file.nbytes > 1:
        return f"a pickle, which is not run, perhaps of PyTorch; {npz.PYTORCH}"
    return next((what for start, what in _OTHERS.items() if first[: len(start) or 1] == start), None)


def _is_safetensors(first: bytes, file_nbytes: int) -> bool:
    if len(first) < 9:
        return False
    (length,) = struct.unpack("<Q", first[:8])
    return first[8:] == b"{" and length <= file_nbytes - 8


def _none_of_these(file: SingleFile, first: bytes) -> Found:
    raise FormatError(
        f"{file.path} is no checkpoint: it is not called *{SUFFIX}, and begins with {first!r}, which is how neither "
        "safetensors do, nor npz, arrays of numpy or equinox, or a tree in msgpack"
    )
