"""Formats that eformer does not read are named, for directories as for files, with advice."""

import bz2
import io
import lzma
import pickle
import tarfile
import zipfile
import zlib

import numpy as np
import pytest

from eformer import checkpoint
from eformer.errors import FormatError


def tar(mode):
    memory = io.BytesIO()
    with tarfile.open(fileobj=memory, mode=mode) as archive:
        archive.addfile(tarfile.TarInfo("x"))
    return memory.getvalue()


def zipped(name):
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w") as archive:
        archive.writestr(name, "x")
    return memory.getvalue()


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n"


CASES = [
    *((f"{n}.pkl", pickle.dumps({"a": 1}, n), "a pickle, which eformer never runs") for n in range(6)),
    ("x.pickle", pickle.dumps(np.ones(3)), "a pickle, which eformer never runs"),
    ("x.joblib", zlib.compress(pickle.dumps(np.ones(3))), "a pickle, which eformer never runs"),
    ("x.pt", pickle.dumps({"a": 1}), "only files of torch.save are read"),
    ("x.onnx", b"\x08\x07\x12\x07pytorch", "a model of ONNX; read its weights with onnx.numpy_helper"),
    ("x", b"\x1c\0\0\0TFL3", "a model of TensorFlow Lite"),
    ("x.parquet", b"PAR1\0\0", "a file of Parquet: a table"),
    ("x.arrow", b"ARROW1\0\0", "a file of Arrow: a table"),
    ("x.tar", tar("w"), "an archive; unpack it first"),
    ("x.tar.gz", tar("w:gz"), "compressed by gzip; unpack it first"),
    ("x.xz", lzma.compress(b"x"), "compressed by xz; unpack it first"),
    ("x.bz2", bz2.compress(b"x"), "compressed by bzip2; unpack it first"),
    (
        "x.zip",
        zipped("zarr.json"),
        "is a zip archive without arrays of numpy.* unpack it first: zarr.json",
    ),
    ("x.ckpt", bytes(20), "a .ckpt file that is not by PyTorch; if it is by TensorFlow, read its variables"),
    ("x.bin", b"lmgg\0\0", "a file of ggml from before GGUF"),
    ("x.bin", b"some text or other", "is not a checkpoint: it is not called .* begins with b'some text"),
    ("x.bin", b"<!DOCTYPE html>", "a web page: the download went wrong"),
    ("x.pt", POINTER, "a pointer of Git LFS.*: fetch the file with git lfs pull"),
    ("x.safetensors", POINTER, "a pointer of Git LFS.*: fetch the file with git lfs pull"),
    ("x.msgpack", b"\x81\xa1a\xd6\xff\0\0\0\0", "unknown extension type -1; known are 1"),
    ("x.db", b"SQLite format 3\0", "a database of SQLite"),
    ("x.mat", b"MATLAB 5.0 MAT-file", "a file of MATLAB; load it with scipy.io.loadmat"),
    ("x.pb", b"\x0a\x10", "a graph of TensorFlow; read its variables"),
    ("x.pt", b"", "an empty file"),
]


@pytest.mark.parametrize(("name", "data", "what"), CASES, ids=[f"{name} {what}" for name, _, what in CASES])
def test_files_of_other_formats_are_named(tmp_path, name, data, what):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(FormatError, match=what):
        checkpoint.load(tmp_path / name)


def test_checkpoints_of_tensorflow_are_named(tmp_path):
    (tmp_path / "checkpoint").write_text(
        'model_checkpoint_path: "ckpt-1"\nall_model_checkpoint_paths: "ckpt-1"\n'
    )
    (tmp_path / "ckpt-1.index").write_bytes(b"\x00\x00\x1a" + bytes(60))
    (tmp_path / "ckpt-1.data-00000-of-00001").write_bytes(bytes(60))
    with pytest.raises(
        FormatError, match=r"holds a TensorFlow checkpoint, which eformer does not read; read its"
    ):
        checkpoint.load(tmp_path)
    with pytest.raises(FormatError, match=r"but a part of a TensorFlow checkpoint; read its variables"):
        checkpoint.load(tmp_path / "ckpt-1.data-00000-of-00001")
    with pytest.raises(FormatError, match=r"but a part of a TensorFlow checkpoint; read its variables"):
        checkpoint.load(tmp_path / "ckpt-1.index")
    with pytest.raises(FormatError, match=r"the files ckpt-1\.\* are a TensorFlow checkpoint"):
        checkpoint.load(tmp_path / "ckpt-1")
    with pytest.raises(FormatError, match="but the list of the checkpoints of TensorFlow"):
        checkpoint.load(tmp_path / "checkpoint")


def test_a_saved_model_of_tensorflow_is_named(tmp_path):
    (tmp_path / "variables").mkdir()
    (tmp_path / "saved_model.pb").write_bytes(b"\x08\x01")
    with pytest.raises(FormatError, match="holds a SavedModel of TensorFlow, which eformer does not read"):
        checkpoint.load(tmp_path)
    with pytest.raises(FormatError, match="but the graph of a TensorFlow SavedModel"):
        checkpoint.load(tmp_path / "saved_model.pb")
