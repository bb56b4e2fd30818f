"""Name common formats that eformer does not read, by their first bytes or by their names, and say what to do."""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import TYPE_CHECKING

from eformer._engine.formats.others import torch
from eformer.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Collection

    from eformer._engine.formats.found import Place
    from eformer._engine.formats.others.single_file import SingleFile

_PICKLE = 0x80  # the first byte of protocol 2 and above; in msgpack, an empty dict
_IS_PICKLE = (
    "a pickle, which eformer never runs; of PyTorch, only what torch.save writes is read. Load it with the program "
    "that wrote it, and write its arrays with numpy.savez"
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
    b"version h": "a pointer of Git LFS, without the file itself: fetch it with git lfs pull",
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
    ".ckpt": "a .ckpt file that is not of PyTorch; those of TensorFlow are not read",
    ".pb": f"a graph of TensorFlow; {_TENSORFLOW}",
}
_TFLITE = b"TFL3"  # from byte 4 on

# Files of TensorFlow.
_DATA = re.compile(r"(.*)\.data-\d{5}-of-\d{5}")
_MODELS = ("saved_model.pb", "saved_model.pbtxt")


def name_other_format(file: SingleFile, name: str, first: bytes) -> str | None:
    """Name a format that eformer does not read, by the caller's `name` of a file of TensorFlow or by the first bytes;
    return None for others."""
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
    return next((what for start, what in _BEGINNINGS.items() if first.startswith(start)), None)


def name_by_suffix(name: str) -> str | None:
    """Name the format of a file that no reader knows by its suffix."""
    return _SUFFIXES.get(PurePath(name).suffix.lower())


def name_tensorflow(name: str, there: Collection[str]) -> str | None:
    """Name the TensorFlow checkpoint whose files begin with a name that is not a file itself."""
    if f"{name}.index" not in there:
        return None
    return f"the files {name}.* are a TensorFlow checkpoint, which eformer does not read; {_TENSORFLOW}"


def refuse_tensorflow(place: Place) -> None:
    """Refuse a directory that TensorFlow wrote."""
    names = set(place.names)
    data = [match[1] for name in names if (match := _DATA.fullmatch(name))]
    if any(f"{prefix}.index" in names for prefix in data):
        what = "a TensorFlow checkpoint"
    elif names & set(_MODELS):
        what = "a SavedModel of TensorFlow"
    else:
        return
    raise FormatError(f"{place.store.url} holds {what}, which eformer does not read; {_TENSORFLOW}")
