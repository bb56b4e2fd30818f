"""Name common formats that eformer does not read, by their first bytes or by their names, and say what to do."""

from __future__ import annotations

from pathlib import PurePath
from typing import TYPE_CHECKING

from eformer._engine.formats.others import tensorflow, torch

if TYPE_CHECKING:
    from eformer._engine.formats.others.single_file import SingleFile

_PICKLE = 0x80  # the first byte of protocol 2 and above; in msgpack, an empty dict
_IS_PICKLE = (
    "a pickle, which eformer never runs; of PyTorch, only what torch.save writes is read. Load it with the program "
    "that wrote it, and write its arrays with numpy.savez"
)
_UNPACK = "unpack it first"
_TABLE = "a table, not a tree of arrays"

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
    b"model_che": f"the list of the checkpoints of TensorFlow in its directory; {tensorflow.ADVICE}",
}
_SUFFIXES = {
    **dict.fromkeys((".pkl", ".pickle", ".joblib", ".pdparams", ".pdopt"), _IS_PICKLE),
    ".onnx": "a model of ONNX; read its weights with onnx.numpy_helper, and write them with numpy.savez",
    ".tflite": "a model of TensorFlow Lite; convert the model that it was made from",
    ".mlmodel": "a model of Core ML; convert the model that it was made from",
    ".tfrecord": "records of TensorFlow, which are data and not a model",
    ".tar": f"an archive; {_UNPACK}",
    ".ckpt": "a .ckpt file that is not of PyTorch; those of TensorFlow are not read",
    ".pb": f"a graph of TensorFlow; {tensorflow.ADVICE}",
}
_TFLITE = b"TFL3"  # from byte 4 on


def name_other_format(file: SingleFile, first: bytes) -> str | None:
    """Name a format that eformer does not read, which the first bytes tell; return None for other bytes."""
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
