"""Files of Keras: the weights equal the arrays of h5py, and links out of the file are refused."""

import shutil
import sys
import zipfile
from pathlib import Path

import h5py
import jax
import numpy as np
import pytest

from eformer import checkpoint
from eformer._engine.formats.others import keras_files
from eformer.errors import EformerError, FormatError
from support.commands import run

HERE = Path(__file__).parent / "keras"


def leaves_of(tree):
    found = {}
    for path, leaf in jax.tree.leaves_with_path(tree):
        array = np.asarray(leaf)
        found[f"{':'.join(key.key for key in path)}|{array.dtype.name}|{list(array.shape)}"] = array.tobytes()
    return found


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", ["model.keras", "legacy.h5", "model.weights.h5"])
def test_weights_equal_the_arrays_of_h5py(name, tmp_path):
    with np.load(HERE / f"{name}.npz") as npz:
        expected = {key: data.tobytes() for key, data in npz.items()}
    assert leaves_of(checkpoint.load(HERE / name)) == expected
    run("verify", HERE / name)
    run("convert", HERE / name, tmp_path / "x.safetensors")
    assert leaves_of(checkpoint.load(tmp_path / "x.safetensors")) == expected


def test_one_leaf_is_read_alone_and_bfloat16_is_told_from_opaque_bytes():
    name = "layers.dense.vars.0"
    assert checkpoint.load(HERE / "model.weights.h5", keys=name)[name].dtype.name == "bfloat16"


def test_the_configuration_is_metadata():
    metadata = checkpoint.inspect(HERE / "model.keras").trees[""].metadata
    assert metadata["metadata.json"]["keras_version"] == "3.15.1"
    assert metadata["config.json"]["class_name"] == "Sequential"
    legacy = checkpoint.inspect(HERE / "legacy.h5").trees[""].metadata
    assert legacy["backend"] == "jax"
    assert '"class_name": "Sequential"' in legacy["model_config"]


def test_the_package_that_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(
        ImportError, match=r"files of Keras need the package h5py: pip install 'eformer-checkpoint\[h5\]'"
    ):
        checkpoint.load(HERE / "model.weights.h5")


def test_damage_in_an_archive_is_found_and_other_members_are_left_out(tmp_path):
    path = tmp_path / "m.keras"
    shutil.copy(HERE / "model.keras", path)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("assets/vocabulary.txt", "a")
    assert checkpoint.inspect(path).left_out == ("assets/vocabulary.txt",)
    data = bytearray(path.read_bytes())
    weight = np.asarray(checkpoint.load(path)["layers"]["dense"]["vars"]["0"]).tobytes()
    data[data.index(weight)] ^= 1
    path.write_bytes(data)
    assert "are damaged: their checksum is" in run("verify", path, code=1).stdout


@pytest.mark.thorough
def test_attributes_that_keras_does_not_write_are_left_out(tmp_path):
    path = tmp_path / "m.weights.h5"
    shutil.copy(HERE / "model.weights.h5", path)
    with h5py.File(path, "a") as file:
        file.attrs["more"] = np.ones(3)
        file["layers"].attrs["scale"] = 2.0
        file["layers/dense/vars/0"].attrs["zero"] = 1
    left = (
        "attribute more of the file",
        "attribute scale of layers",
        "attribute zero of layers/dense/vars/0",
    )
    assert checkpoint.inspect(path).left_out == left
    run("verify", path, code=1)
    run("convert", path, tmp_path / "m.safetensors", code=1)


def hostile(what, file, folder):
    data = np.ones(8, np.float32)
    if what == "soft":
        file["out"] = h5py.SoftLink("/a")
    elif what == "external link":
        file["out"] = h5py.ExternalLink(str(folder / "secret.h5"), "/a")
    elif what == "external storage":
        file.create_dataset("out", (8,), "f4", external=[(str(folder / "secret"), 0, 32)])
    elif what == "view":
        layout = h5py.VirtualLayout((8,), "f4")
        layout[:] = h5py.VirtualSource(str(folder / "secret.h5"), "a", (8,))
        file.create_virtual_dataset("out", layout)
    elif what == "reference":
        file.create_dataset("out", data=[file["a"].ref], dtype=h5py.ref_dtype)
    elif what == "bomb":
        file.create_dataset("out", (2**40,), "u1", chunks=(2**28,), compression="gzip")
    elif what == "cycle":
        file.create_group("g")["out"] = file["/"]
    elif what == "twice":
        file["out"] = file["a"]
    elif what == "big-endian":
        file.create_dataset("out", data=data.astype(">f4"))
    elif what == "text":
        file.create_dataset("out", data="x")
    elif what == "unwritten":
        file.create_dataset("out", (2**40,), "f4")
    elif what == "type":
        file["out"] = np.dtype("f4")
    elif what == "empty":
        file.create_dataset("out", dtype="f4", data=h5py.Empty("f4"))


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("soft", "'out' is a link to another place or file"),
        ("external link", "'out' is a link to another place or file"),
        ("external storage", "leaf 'out' is stored in another file"),
        ("view", "leaf 'out' is stored in chunks, in its header, or as a view of other datasets"),
        ("reference", "leaf 'out' is of the type object"),
        ("bomb", r"leaf 'out' is stored in chunks \(.*deflate"),
        ("cycle", "'g/out' is linked twice"),
        ("twice", "'out' is linked twice"),
        ("big-endian", "leaf 'out' is of the type >f4"),
        ("text", "leaf 'out' is of the type object"),
        ("unwritten", "leaf 'out' is declared, but was never written"),
        ("type", "'out' is neither a group nor a dataset"),
        ("empty", "leaf 'out' is empty, without a shape"),
    ],
)
def test_whatever_keras_does_not_write_is_refused_by_name(tmp_path, what, message):
    with h5py.File(tmp_path / "secret.h5", "w") as file:
        file["a"] = np.ones(8, np.float32)
    (tmp_path / "secret").write_bytes(b"s" * 32)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["a"] = np.ones(8, np.float32)
        hostile(what, file, tmp_path)
    with pytest.raises(FormatError, match=message):
        checkpoint.load(tmp_path / "x.h5")


@pytest.mark.thorough
def test_a_file_that_keeps_hdf5_busy_for_ever_is_refused(monkeypatch):
    """A damaged heap of texts, in which the library never comes to an end."""
    monkeypatch.setattr(keras_files, "_SECONDS", 1)
    with pytest.raises(
        FormatError, match=r"endless.h5 .* the library of HDF5 failed, or needed more than 1 s"
    ):
        checkpoint.load(HERE / "endless.h5")


@pytest.mark.thorough
def test_cut_files_are_refused(tmp_path):
    for name in ("model.weights.h5", "model.keras"):
        whole = (HERE / name).read_bytes()
        for length in range(0, len(whole), 4001):
            (tmp_path / "cut").write_bytes(whole[:length])
            with pytest.raises(EformerError):
                checkpoint.load(tmp_path / "cut")
