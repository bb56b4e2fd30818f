"""Single files of other programs, recognised by their first bytes and not by their names.

Common formats that eformer does not read are recognised by their first bytes or their names; the error says how to
convert them.

Tests: tests/compat/test_unsupported.py, tests/compat/test_files.py.
"""

from __future__ import annotations

import re
import struct
from dataclasses import replace
from functools import partial
from pathlib import PurePath
from typing import TYPE_CHECKING

from eformer._engine.formats.others import flax, gguf, keras_files, npy, torch
from eformer._engine.formats.others.single_file import FIRST_BYTES, SingleFile, open_single_file
from eformer._engine.formats.quantized import quantization_of
from eformer._engine.formats.safetensors.names import INDEX_SUFFIX, SUFFIX
from eformer._engine.record.indexes import MANIFEST
from eformer._engine.stores.local import resolved
from eformer.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Collection

    from eformer._engine.formats.found import FileReader, Found, Place
    from eformer._engine.stores.base import Store

FILE_READERS: tuple[FileReader, ...] = (
    torch.in_archive,
    torch.in_stream,
    keras_files.in_keras,
    keras_files.in_hdf5,
    npy.in_npz,
    npy.in_equinox,
    gguf.in_gguf,
    flax.in_msgpack,
)
FORMATS = (flax.FORMAT, npy.FORMAT, npy.EQUINOX, torch.FORMAT, gguf.FORMAT, keras_files.FORMAT)
# The usual suffixes, for hints.
SUFFIXES = (".msgpack", ".npz", ".eqx", ".pt", ".pth", ".bin", ".gguf", ".h5", ".keras")

_PICKLE = 0x80  # the first byte of protocol 2 and above; in msgpack, an empty dict
_IS_PICKLE = (
    "a pickle, which eformer never runs; of pickles by PyTorch, only files of torch.save are read. Load it with the "
    "program that wrote it, and write its arrays with numpy.savez"
)
_UNPACK = "unpack it first"
_TABLE = "a table, not a tree of arrays"
_TENSORFLOW = (
    "read its variables with tf.train.load_checkpoint and write them with numpy.savez, or save the model of Keras as "
    ".weights.h5"
)

_BEGINNINGS = {
    b"\x89PNG": "a picture",
    b"\x1f\x8b": f"compressed by gzip; {_UNPACK}",
    b"\x28\xb5\x2f\xfd": f"compressed by zstd; {_UNPACK}",
    b"\xfd7zXZ": f"compressed by xz; {_UNPACK}",
    b"BZh": f"compressed by bzip2; {_UNPACK}",
    b"version h": "a pointer of Git LFS, not the file itself: fetch the file with git lfs pull",
    b"<!DOCTYPE": "a web page: the download went wrong",
    b"<!doctype": "a web page: the download went wrong",
    b"<html": "a web page: the download went wrong",
    b"PAR1": f"a file of Parquet: {_TABLE}",
    b"ARROW1": f"a file of Arrow: {_TABLE}",
    b"FEA1": f"a file of Feather: {_TABLE}",
    b"SQLite": "a database of SQLite",
    b"MATLAB": "a file of MATLAB; load it with scipy.io.loadmat, and write its arrays with numpy.savez",
    **dict.fromkeys(
        (b"lmgg", b"fmgg", b"tjgg"), "a file of ggml from before GGUF; convert it to GGUF with llama.cpp"
    ),
    b"model_che": f"the list of the checkpoints of TensorFlow in its directory; {_TENSORFLOW}",
}
_SUFFIXES = {
    **dict.fromkeys((".pkl", ".pickle", ".joblib", ".pdparams", ".pdopt"), _IS_PICKLE),
    ".onnx": "a model of ONNX; read its weights with onnx.numpy_helper, and write them with numpy.savez",
    ".tflite": "a model of TensorFlow Lite; convert the model that it was made from",
    ".mlmodel": "a model of Core ML; convert the model that it was made from",
    ".tfrecord": "records of TensorFlow, which are data and not a model",
    ".tar": f"an archive; {_UNPACK}",
    ".ckpt": f"a .ckpt file that is not by PyTorch; if it is by TensorFlow, {_TENSORFLOW}",
    ".pb": f"a graph of TensorFlow; {_TENSORFLOW}",
}
_TFLITE = b"TFL3"  # from byte 4 on

# Files of TensorFlow.
_DATA = re.compile(r"(.*)\.data-\d{5}-of-\d{5}")
_MODELS = ("saved_model.pb", "saved_model.pbtxt")


def in_other_file(store: Store, name: str) -> Found | None:
    """Find the checkpoint in a file. Return None for safetensors, recognised by its name or its first bytes."""
    if name == MANIFEST or name.endswith((SUFFIX, INDEX_SUFFIX)):
        return None
    with open_single_file(*resolved(store, name)) as file:  # the caller's path may be a link
        first = file.read(0, FIRST_BYTES)
        if _is_safetensors(first, file.nbytes):
            return None
        if other := _name_other_format(file, name, first):
            raise _is_other(file, other)
        for read in FILE_READERS:
            if found := read(file, first):
                return _with_configuration(found, store)
        if other := _SUFFIXES.get(PurePath(name).suffix.lower()):
            raise _is_other(file, other)
        raise FormatError(
            f"{file.path} is not a checkpoint: it is not called *{SUFFIX}, and begins with {first!r}, unlike "
            "safetensors, npz, GGUF, HDF5, files of PyTorch, arrays of numpy or equinox, and trees in msgpack"
        )


def _with_configuration(found: Found, store: Store) -> Found:
    """Let the configuration beside a model of PyTorch declare it as quantised. Look in `store`, the directory of the
    caller's path, and beside the file: in a cache of Hugging Face the configuration lies beside the link. Files of
    other formats need none, and may be by eformer."""
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


# ------------------------------------------------------------------------- formats that are not read


def _name_other_format(file: SingleFile, name: str, first: bytes) -> str | None:
    """Name a format that eformer does not read, by the first bytes or by the file names of TensorFlow. Return None for
    other files. `name` is the caller's name of the file."""
    if _DATA.fullmatch(name) or name.endswith(".index"):
        return f"a part of a TensorFlow checkpoint; {_TENSORFLOW}"
    if name in _MODELS:
        return f"the graph of a TensorFlow SavedModel; {_TENSORFLOW}"
    if not first:
        return "an empty file"
    if first[0] == _PICKLE and file.nbytes > 1 and not torch.is_stream(file):
        return _IS_PICKLE
    if first[4:8] == _TFLITE:
        return _SUFFIXES[".tflite"]
    return next((kind for start, kind in _BEGINNINGS.items() if first.startswith(start)), None)


def name_tensorflow(name: str, there: Collection[str]) -> str | None:
    """Describe the TensorFlow checkpoint whose file names begin with `name`; None if `name` stands for none."""
    if f"{name}.index" not in there:
        return None
    return f"the files {name}.* are a TensorFlow checkpoint, which eformer does not read; {_TENSORFLOW}"


def refuse_tensorflow(place: Place) -> None:
    """Refuse a directory that TensorFlow wrote."""
    names = set(place.names)
    data = [match[1] for name in names if (match := _DATA.fullmatch(name))]
    if any(f"{prefix}.index" in names for prefix in data):
        kind = "a TensorFlow checkpoint"
    elif names & set(_MODELS):
        kind = "a SavedModel of TensorFlow"
    else:
        return
    raise FormatError(f"{place.store.url} holds {kind}, which eformer does not read; {_TENSORFLOW}")
