"""Kinds of Orbax checkpoints that few versions wrote like that: arrays, keys and JSON as items, and names with a slash.

`make_samples/compare.py` wrote the samples, and compares many more.
"""

import json
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest

from compat.make_samples.describe import described_leaves
from eformer import checkpoint
from eformer.errors import FormatError, NotFoundError

ARCHIVE = Path(__file__).parent / "orbax-old" / "kinds.tar.xz"


@pytest.fixture(scope="session")
def samples(tmp_path_factory):
    directory = tmp_path_factory.mktemp("orbax-kinds")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(directory, filter="data")
    return directory


def _expected():
    with tarfile.open(ARCHIVE) as archive:
        return json.load(archive.extractfile("expected.json"))


EXPECTED = _expected()


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", EXPECTED)
def test_a_sample_loads_equal_to_the_tree_that_orbax_restored(samples, name):
    for item, leaves in EXPECTED[name].items():
        assert described_leaves(checkpoint.load(samples / name, prefix=item or None)) == leaves


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", EXPECTED)
def test_nothing_of_a_sample_is_left_out(samples, name):
    report = checkpoint.verify(samples / name)
    assert report.ok, report
    assert report.left_out == ()


def test_json_is_not_listed_beside_trees_but_is_where_it_is_alone(samples):
    beside = checkpoint.inspect(samples / "orbax-0.9.1" / "item_json")
    assert set(beside.trees) == {"state"}
    assert beside.trees["state"].metadata == {"about": {"a": [1, {"b": None}]}, "empty": {}}
    assert set(checkpoint.inspect(samples / "orbax-0.9.1" / "item_only_json").trees) == {"about"}


def test_json_alone_is_converted(samples, tmp_path):
    checkpoint.convert(samples / "orbax-0.9.1" / "item_only_json", tmp_path / "new", to="safetensors")
    assert checkpoint.load(tmp_path / "new") == {"a": 1}


@pytest.fixture
def copy(samples, tmp_path):
    return lambda name: Path(shutil.copytree(samples / name, tmp_path / "copy"))


SLASHES = "orbax-0.4.1/standard-slashes"


def test_arrays_of_an_inner_database_that_no_leaf_names_are_left_out(copy):
    path = copy(SLASHES)
    document = json.loads((path / "_METADATA").read_text())
    document["tree_metadata"] = {
        name: leaf for name, leaf in document["tree_metadata"].items() if "'f'" in name or "'a/b'" in name
    }
    (path / "_METADATA").write_text(json.dumps(document))
    (path / "checkpoint").unlink()
    assert set(checkpoint.load(path)) == {"a/b", "f"}
    left = checkpoint.verify(path).left_out
    assert any(name.startswith("a.c/") for name in left), left


def test_an_inner_database_that_is_a_link_is_refused(copy, tmp_path):
    path = copy(SLASHES)
    shutil.move(path / "a", tmp_path / "elsewhere")
    (path / "a").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FormatError, match="not a regular file"):
        checkpoint.load(path)


def test_a_placeholder_of_an_inner_database_cannot_lead_out(copy):
    path = copy("orbax-0.4.1/pytree-slashes")
    shutil.copytree(path, path.parent / "outside")
    data = (path / "checkpoint").read_bytes().replace(b"PLACEHOLDER://a.c/d.e", b"PLACEHOLDER://../a/bb")
    (path / "checkpoint").write_bytes(data)
    with pytest.raises((FormatError, OSError), match="no such array"):
        checkpoint.load(path)


@pytest.mark.parametrize("version", ["0.2.7", "0.4.1"])
def test_a_file_beside_an_array_is_left_out(copy, version):
    path = copy(f"orbax-{version}/array_alone")
    (path / "stray.bin").write_bytes(b"x" * 100)
    assert "stray.bin" in checkpoint.inspect(path).left_out


def test_an_array_is_refused_if_something_unknown_is_beside_it(copy):
    path = copy("orbax-0.9.1/array_alone")
    (path / "stray.bin").write_bytes(b"x" * 100)
    with pytest.raises(NotFoundError, match="is an Orbax checkpoint, but no item"):
        checkpoint.load(path)


TREES = [
    name
    for name in EXPECTED
    if name.partition("/")[2].startswith(("pytree", "standard", "half", "version_1"))
]


@pytest.mark.parametrize("name", TREES)
def test_a_file_in_the_directory_of_a_tree_is_left_out(copy, name):
    path = copy(name)
    (path / "stray.bin").write_bytes(b"x" * 100)
    report = checkpoint.verify(path)
    assert report.left_out == ("stray.bin",)
    with pytest.raises(ValueError, match=r"stray\.bin"):
        checkpoint.convert(path, path.parent / "new", to="safetensors")


@pytest.mark.parametrize("name", [name for name in EXPECTED if "/item_" in name and "0.12.8" in name])
def test_a_file_beside_items_is_left_out(copy, name):
    path = copy(name)
    (path / "1" / "stray.bin").write_bytes(b"x" * 100)
    assert checkpoint.verify(path).left_out == ("1/stray.bin",)


def test_a_directory_of_zarr_arrays_is_not_an_item_because_of_its_name(samples, tmp_path):
    array = samples / "orbax-0.2.7" / "array_alone" / "checkpoint"
    for name in ("enc/checkpoint", "dec/kernel"):
        shutil.copytree(array, tmp_path / name)
    tree = checkpoint.load(tmp_path)
    assert {name: set(inner) for name, inner in tree.items()} == {"enc": {"checkpoint"}, "dec": {"kernel"}}


@pytest.mark.parametrize("text", ["", "{", "3", "[" * 100_000])
def test_json_that_is_damaged_is_not_a_tree(copy, text):
    path = copy("orbax-0.9.1/json_alone")
    (path / "metadata").write_text(text)
    with pytest.raises(FileNotFoundError):
        checkpoint.load(path)


@pytest.mark.parametrize("text", ["", "{", "3", '{"a": 1} and more'])
def test_an_item_of_json_that_is_damaged_is_left_out(copy, text):
    path = copy("orbax-0.9.1/item_json")
    (path / "1" / "about" / "metadata").write_text(text)
    assert set(checkpoint.load(path)) == {"w"}
    assert checkpoint.verify(path).left_out == ("1/about/",)


def test_placeholders_stand_for_empty_containers_alone(copy):
    path = copy("orbax-0.5.20/pytree-empties")
    data = (path / "checkpoint").read_bytes().replace(b"\xa4none", b"\xa4nine")
    (path / "checkpoint").write_bytes(data)
    with pytest.raises(FormatError, match="disagree about these leaves: nine"):
        checkpoint.load(path)


def test_an_array_equals_the_array_that_orbax_saved_in_every_version(samples):
    for version in ("0.2.7", "0.3.5", "0.4.1", "0.5.3", "0.5.20", "0.9.1", "0.12.8"):
        for kind in ("array_alone", "array_aggregated"):
            array = checkpoint.load(samples / f"orbax-{version}" / kind)
            np.testing.assert_array_equal(array, np.arange(6.0).reshape(2, 3))
