"""Directories of zarr-python load equal to its own arrays, or are refused with the name of the unsupported feature."""

import json
import shutil
import zipfile
from pathlib import Path

import jax
import numpy as np
import pytest

from eformer import checkpoint
from eformer.errors import CorruptionError, EformerError, FormatError
from support.commands import run

SAMPLES = Path(__file__).parent / "zarr" / "samples.zip"
with zipfile.ZipFile(SAMPLES) as archive:
    READ = [name.removesuffix(".npz") for name in archive.namelist() if name.endswith(".npz")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("zarr")
    with zipfile.ZipFile(SAMPLES) as archive:
        archive.extractall(folder)
    return folder


def leaves_of(tree):
    found = {}
    for path, leaf in jax.tree.leaves_with_path(tree):
        array = np.asarray(leaf)
        found[f"{':'.join(key.key for key in path)}|{array.dtype.name}|{list(array.shape)}"] = array.tobytes()
    return found


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", READ)
def test_groups_equal_the_arrays_of_zarr_python(folder, name, tmp_path):
    with np.load(folder / f"{name}.npz") as npz:
        expected = {key: data.tobytes() for key, data in npz.items()}
    assert leaves_of(checkpoint.load(folder / name)) == expected
    assert checkpoint.inspect(folder / name).left_out == ()
    run("verify", folder / name)
    run("convert", folder / name, tmp_path / "x.safetensors")
    assert leaves_of(checkpoint.load(tmp_path / "x.safetensors")) == expected


@pytest.mark.parametrize("name", ["v2-one", "v3-one"])
def test_a_directory_may_be_one_array(folder, name):
    np.testing.assert_array_equal(checkpoint.load(folder / name), np.arange(60.0).reshape(6, 10) + 1)
    assert checkpoint.inspect(folder / name).left_out == ()


def test_attributes_of_the_group_are_metadata_and_parts_are_read(folder):
    path = folder / "v3-default"
    assert checkpoint.inspect(path).trees[""].metadata == {"note": "x", "step": 3}
    assert checkpoint.load(path, keys="sub.b").keys() == {"sub.b"}
    with checkpoint.open(folder / "v3-shards") as view:
        np.testing.assert_array_equal(view["w"][3:5, 4:7], np.arange(60.0).reshape(6, 10)[3:5, 4:7] + 1)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v3-text", r"leaf 'w' is of the type \{'name': 'fixed_length_utf32'"),
        ("v3-zeros", r"2 of 2 chunks are missing; they are not read as zeros. \(zarr-python leaves out"),
        ("v3-shards-blosc", "blosc inside sharding_indexed is not supported"),
        ("v2-lz4", "compressed by 'lz4', which eformer does not decode. It is not damaged"),
        ("v2-lzma", "compressed by 'lzma'"),
        ("v2-delta", r"changed by the filters \['delta'\], which eformer does not decode"),
        ("v2-shuffle", r"changed by the filters \['shuffle'\]"),
        ("v2-zeros", "2 of 2 chunks are missing.* unless write_empty_chunks is set"),
    ],
)
def test_unsupported_arrays_are_named(folder, name, message):
    with pytest.raises(FormatError, match=message):
        checkpoint.load(folder / name)


def changed(folder, tmp_path, change):
    """A copy of the sample whose array is described in another way."""
    with zipfile.ZipFile(SAMPLES) as archive:
        archive.extractall(tmp_path, [name for name in archive.namelist() if name.startswith("v3-shards/")])
    path = tmp_path / "v3-shards" / "w" / "zarr.json"
    described = json.loads(path.read_text())
    change(described)
    path.write_text(json.dumps(described))
    return tmp_path / "v3-shards"


def lz4_inside(described):
    described["codecs"][0]["configuration"]["codecs"][1] = {"name": "numcodecs.lz4"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lz4_inside,
            "leaf 'w' is encoded by 'numcodecs.lz4', which eformer does not decode. It is not damaged",
        ),
        (lambda d: d.update(storage_transformers=[{"name": "x"}]), "encoded by a storage transformer"),
        (lambda d: d.update(zarr_format=4), "is of format 4"),
        (lambda d: d.update(node_type="link"), "kind 'link'"),
        (lambda d: d.update(data_type="float99"), "leaf 'w' is of the type float99"),
        (lambda d: d.update(data_type=[]), r"leaf 'w' is of the type \[\]"),
        (lambda d: d.update(codecs=7), "does not describe a group or an array of zarr 3"),
        (
            lambda d: d["codecs"][0]["configuration"].update(codecs=[7]),
            "does not describe a group or an array of zarr 3",
        ),
        (lambda d: d.update(shape=[2**40, 2**20]), "cannot hold its arrays, of 4611686018427387904 bytes"),
        (lambda d: d.update(shape=[-1, 10]), "no such array, or it is damaged: .*shape"),
        (
            lambda d: d["chunk_grid"]["configuration"].update(chunk_shape=[2**40, 2**20]),
            "sharding_indexed sub-chunk shape",
        ),
    ],
)
def test_hostile_descriptions_are_refused(folder, tmp_path, change, message):
    with pytest.raises(EformerError, match=message):
        checkpoint.load(changed(folder, tmp_path, change))


def test_a_missing_chunk_is_an_error_and_further_files_are_left_out(folder, tmp_path):
    path = changed(folder, tmp_path, lambda described: None)
    (path / "more.bin").write_bytes(b"x")
    assert checkpoint.inspect(path).left_out == ("more.bin",)
    (path / "w" / "c" / "1" / "0").unlink()
    with pytest.raises(CorruptionError, match="1 of 2 chunks are missing"):
        checkpoint.load(path)


# Files in the directory of an array that are not its own, by a name in the array's directory.
STRAYS = ["notes.bin", "c/9/0", "c/0/0/0", "7.7", "inner/zarr.json", "c.0.0"]


@pytest.mark.parametrize("stray", STRAYS)
def test_files_in_the_directory_of_an_array_that_are_not_its_own_are_left_out(folder, tmp_path, stray):
    path = changed(folder, tmp_path, lambda described: None)
    if stray == "c/0/0/0":
        (path / "w" / "c" / "0" / "0").rename(path / "w" / "c" / "0" / "x")
        stray = "c/0/x"
    else:
        (path / "w" / stray).parent.mkdir(parents=True, exist_ok=True)
        (path / "w" / stray).write_bytes(b"x")
    listed = "w/inner/" if stray.startswith("inner") else f"w/{stray}"
    assert checkpoint.inspect(path).left_out == (listed,)
    run("verify", path, code=1)


@pytest.mark.parametrize(
    ("name", "stray"),
    [
        ("v2-zstd/w", "notes.bin"),
        ("v2-zstd/w", "9.9"),
        ("v2-zstd/w", "inner/"),
        ("v2-one", "notes.bin"),
        ("v2-one", "9.9"),
    ],
)
def test_the_same_holds_for_arrays_of_zarr_2(folder, tmp_path, name, stray):
    top = name.partition("/")[0]
    shutil.copytree(folder / top, tmp_path / top)
    if stray.endswith("/"):
        shutil.copytree(folder / name, tmp_path / name / stray)
    else:
        (tmp_path / name / stray).write_bytes(b"x")
    assert checkpoint.inspect(tmp_path / top).left_out == (f"{name}/{stray}".removeprefix(f"{top}/"),)


def test_attributes_of_groups_and_arrays_below_are_metadata_by_path(folder, tmp_path):
    path = changed(folder, tmp_path, lambda described: described.update(attributes={"unit": "m"}))
    assert checkpoint.inspect(path).trees[""].metadata == {"w/": {"unit": "m"}}
    shutil.copytree(folder / "v2-zstd", tmp_path / "v2")
    (tmp_path / "v2" / ".zattrs").write_text('{"step": 3, "loss": NaN}')
    (tmp_path / "v2" / "w" / ".zattrs").write_text('{"unit": "m"}')
    metadata = checkpoint.inspect(tmp_path / "v2").trees[""].metadata
    assert metadata.pop("loss") != metadata.get("loss")
    assert metadata == {"step": 3, "w/": {"unit": "m"}}


def test_attributes_may_be_nan_in_groups_and_are_said_to_be_the_problem_in_arrays(folder, tmp_path):
    path = changed(folder, tmp_path, lambda described: None)
    (path / "zarr.json").write_text('{"zarr_format": 3, "node_type": "group", "attributes": {"x": NaN}}')
    assert set(checkpoint.load(path)) == {"w"}
    path = changed(folder, tmp_path, lambda described: described.update(attributes={"x": float("inf")}))
    with pytest.raises(FormatError, match=r"NaN or Infinity among its attributes.* It is not damaged"):
        checkpoint.load(path)


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000])
def test_attributes_that_are_damaged_are_refused(folder, tmp_path, text):
    shutil.copytree(folder / "v2-zstd", tmp_path / "v2")
    (tmp_path / "v2" / ".zattrs").write_text(text)
    with pytest.raises(FormatError, match=r"\.zattrs does not hold attributes"):
        checkpoint.load(tmp_path / "v2")


def test_a_link_out_of_the_group_is_not_followed(folder, tmp_path):
    path = changed(folder, tmp_path, lambda described: None)
    chunk = path / "w" / "c" / "1" / "0"
    chunk.rename(tmp_path / "outside")
    chunk.symlink_to(tmp_path / "outside")
    with pytest.raises(EformerError):
        checkpoint.load(path)
