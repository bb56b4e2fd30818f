"""Single files of other programs, recognised by their first bytes and not by their names."""

from __future__ import annotations

import struct
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from eformer._engine.formats.others import equinox, flax, gguf, keras_files, npy, torch
from eformer._engine.formats.others.single_file import open_single_file
from eformer._engine.formats.others.unsupported import name_by_suffix, name_other_format
from eformer._engine.formats.quantized import quantization_of
from eformer._engine.formats.safetensors.names import INDEX_SUFFIX, SUFFIX
from eformer._engine.record.indexes import MANIFEST
from eformer._engine.stores.on_disk import resolved
from eformer.errors import FormatError

if TYPE_CHECKING:
    from eformer._engine.formats.found import FileReader, Found
    from eformer._engine.formats.others.single_file import SingleFile
    from eformer._engine.stores.base import Store

FILE_READERS: tuple[FileReader, ...] = (
    torch.in_archive,
    torch.in_stream,
    keras_files.in_keras,
    keras_files.in_hdf5,
    npy.in_npz,
    equinox.in_equinox,
    gguf.in_gguf,
    flax.in_msgpack,
)
FORMATS = (flax.FORMAT, npy.FORMAT, equinox.FORMAT, torch.FORMAT, gguf.FORMAT, keras_files.FORMAT)
SUFFIXES = (
    ".msgpack",
    ".npz",
    ".eqx",
    ".pt",
    ".pth",
    ".bin",
    ".gguf",
    ".h5",
    ".keras",
)  # the usual ones, for hints


def in_file(store: Store, name: str) -> Found | None:
    """Find the checkpoint that a file is; return None for safetensors, known by name or by the first bytes."""
    if name == MANIFEST or name.endswith((SUFFIX, INDEX_SUFFIX)):
        return None
    with open_single_file(*resolved(store, name)) as file:  # the caller's path may be a link
        first = file.read(0, 9)
        if _is_safetensors(first, file.nbytes):
            return None
        if other := name_other_format(file, name, first):
            raise _is_other(file, other)
        for read in FILE_READERS:
            if found := read(file, first):
                return _with_configuration(found, store)
        if other := name_by_suffix(name):
            raise _is_other(file, other)
        raise FormatError(
            f"{file.path} is not a checkpoint: it is not called *{SUFFIX}, and begins with {first!r}, unlike "
            "safetensors, npz, GGUF, HDF5, files of PyTorch, arrays of numpy or equinox, and trees in msgpack"
        )


def _with_configuration(found: Found, store: Store) -> Found:
    """Let a model of PyTorch be quantised by the configuration in `store`, where the caller's path is, or beside the
    file. In a cache of Hugging Face it is beside the link. Files of other formats may be by eformer, as stored."""
    if found.manifest.format != torch.FORMAT:
        return found
    quantized = partial(quantization_of, store, also=[found.store])
    return replace(found, foreign=replace(found.foreign, find_quantized=quantized))


def _is_other(file: SingleFile, other: str) -> FormatError:
    return FormatError(f"{file.path} is not a checkpoint that eformer can read, but {other}")


def _is_safetensors(first: bytes, file_nbytes: int) -> bool:
    if len(first) < 9:
        return False
    (length,) = struct.unpack("<Q", first[:8])
    return first[8:] == b"{" and length <= file_nbytes - 8
