"""Nothing outside of a checkpoint is removed, moved or written, whatever its indexes list."""

import json
import os
import shutil

import numpy as np
import pytest
import tensorstore as ts

from eformer import checkpoint
from eformer.checkpoint import SaveOptions, load, save
from eformer.errors import EformerError
from eformer.serialization.serialization import tree_serialize_leaves
from support.links import LAYOUTS, NEXT, TREE, contents, foreign_array
from support.trees import assert_same

# ---------------------------------------------------------------------------------------- behind links


@pytest.mark.parametrize("prefix", [None, "m"])
@pytest.mark.parametrize("path", ["x/w", "w/x/w"])
def test_an_index_that_lists_what_is_behind_a_link(tmp_path, unchanged, prefix, path):
    run = tmp_path / "run"
    link = run / path.rpartition("/")[0]
    link.parent.mkdir(parents=True)
    link.symlink_to(unchanged)
    listed = [{"path": path, "shape": [10], "dtype": "float32"}]
    index = {"prefixes": {"m": listed}} if prefix else {"arrays": listed}
    (run / "tensorstore_index.json").write_text(
        json.dumps({"format": "tensorstore", "version": "2.0", "prefixes": {}} | index)
    )
    save(TREE, run, format="tensorstore", prefix=prefix)
    assert_same(load(run, prefix=prefix), TREE)
    assert link.is_symlink()
    assert not list(run.glob(".eformer-*"))


def test_of_the_arrays_of_others_only_those_are_removed_that_the_index_lists(tmp_path):
    foreign_array(tmp_path / "x" / "w")
    foreign_array(tmp_path / "x" / "unlisted")
    (tmp_path / "x" / "w" / "17").write_text("mine")  # not one of its chunks
    index = {"format": "tensorstore", "version": "2.0", "prefixes": {"m": [{"path": "x/w", "shape": [10]}]}}
    (tmp_path / "tensorstore_index.json").write_text(json.dumps(index))
    save(TREE, tmp_path, format="tensorstore", prefix="m")
    assert sorted(os.listdir(tmp_path / "x" / "unlisted")) == [".zarray", "0", "1"]
    assert os.listdir(tmp_path / "x" / "w") == ["17"]


def test_chunks_whose_numbers_are_parted_by_slashes_go_with_their_array(tmp_path):
    spec = {"driver": "zarr", "kvstore": f"file://{tmp_path}/x/w", "metadata": {"shape": [4, 4], "chunks": [2, 2], "dtype": "<f4", "dimension_separator": "/"}}  # fmt: skip
    ts.open(spec, create=True).result().write(np.ones((4, 4), np.float32)).result()
    index = {"format": "tensorstore", "version": "2.0", "prefixes": {"m": [{"path": "x/w", "shape": [4, 4]}]}}
    (tmp_path / "tensorstore_index.json").write_text(json.dumps(index))
    save(TREE, tmp_path, format="tensorstore", prefix="m")
    assert not (tmp_path / "x").exists()


def test_a_structure_file_behind_a_link_stays(tmp_path, outside):
    (outside / "m_structure.json").write_text("mine")
    before = contents(outside)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "x").symlink_to(outside)
    index = {"format": "tensorstore", "version": "2.0", "prefixes": {"x/m": [{"path": "y/w"}]}}
    (tmp_path / "run" / "tensorstore_index.json").write_text(json.dumps(index))
    save(TREE, tmp_path / "run", format="tensorstore", prefix="x/m")
    assert contents(outside) == before


# --------------------------------------------------------------------------------------- anything else


def test_arrays_that_were_only_found_there_are_never_removed(tmp_path):
    """Nobody has said that they are a checkpoint, let alone this one."""
    foreign_array(tmp_path / "dataset" / "tokens")
    tree_serialize_leaves(tmp_path / "old_run", TREE, write_index=False)
    save(TREE, tmp_path / "orbax", format="tensorstore")  # as others below: not entered
    (tmp_path / "orbax" / "tensorstore_index.json").rename(tmp_path / "orbax" / "_METADATA")
    before = {name: contents(tmp_path / name) for name in ("dataset", "old_run", "orbax")}
    save(NEXT, tmp_path, format="tensorstore", prefix="m")
    save(NEXT, tmp_path, format="tensorstore")
    save(NEXT, tmp_path, format="tensorstore", prefix="m")
    assert {name: contents(tmp_path / name) for name in before} == before
    assert_same(load(tmp_path, prefix=""), NEXT)


def test_an_index_that_says_another_shape_removes_nothing(tmp_path):
    foreign_array(tmp_path / "mine" / "data")
    listed = [{"path": "mine/data", "shape": [], "dtype": "float32"}]
    index = {"format": "tensorstore", "version": "2.0", "prefixes": {"m": listed}}
    (tmp_path / "tensorstore_index.json").write_text(json.dumps(index))
    (tmp_path / "m_structure.json").write_text("MY PROTEIN")
    before = contents(tmp_path / "mine")
    save(TREE, tmp_path, format="tensorstore", prefix="m")
    assert contents(tmp_path / "mine") == before
    assert (tmp_path / "m_structure.json").read_text() == "MY PROTEIN"


def test_a_mark_that_was_put_into_another_checkpoint_removes_nothing_there(tmp_path):
    save(TREE, tmp_path, format="tensorstore", options=SaveOptions(ocdbt=True), prefix="m")
    root = checkpoint.inspect(tmp_path).trees["m"].root
    (tmp_path / root / "_METADATA").write_text("{}")
    before = contents(tmp_path / root)
    save(NEXT, tmp_path, format="tensorstore", prefix="m")
    assert contents(tmp_path / root) == before


@pytest.mark.parametrize("depth", [300, 1200])
def test_an_index_of_something_nested_absurdly_deep(tmp_path, depth):
    foreign_array(tmp_path / "z")
    descriptor = os.open(tmp_path, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("a", dir_fd=descriptor)
        outer, descriptor = descriptor, os.open("a", os.O_RDONLY, dir_fd=descriptor)
        os.close(outer)
    os.link(tmp_path / "z" / ".zarray", ".zarray", dst_dir_fd=descriptor)
    os.close(descriptor)
    shutil.rmtree(tmp_path / "z")
    listed = [{"path": "/".join("a" * depth), "shape": [10], "dtype": "float32"}]
    index = {"format": "tensorstore", "version": "2.0", "prefixes": {"m": listed}}
    (tmp_path / "tensorstore_index.json").write_text(json.dumps(index))
    for prefix in ("m", "m", "q"):
        save(TREE, tmp_path, format="tensorstore", prefix=prefix)
        assert_same(load(tmp_path, prefix=prefix), TREE)
    assert not list(tmp_path.glob(".eformer-*"))
    os.system(f"rm -rf {tmp_path / 'a'}")


def test_a_path_that_could_not_be_read_again_is_refused(tmp_path):
    path = tmp_path
    while len(str(path)) < 3700:
        path = path / ("x" * 200)
    path = path / ("y" * (3900 - len(str(path)) - 1))
    save({"w": np.ones(3)}, path, format="tensorstore", prefix="m")
    with pytest.raises(OSError, match="File name too long"):
        save({"k" * 150: {"j" * 150: np.ones(3)}}, path, format="tensorstore", prefix="m")
    assert_same(load(path, prefix="m"), {"w": np.ones(3)})
    assert sorted(os.listdir(path)) == ["m", "tensorstore_index.json"]


@pytest.mark.parametrize("layout", ["arrays, prefix", "database, prefix"])
def test_a_path_with_dots_is_as_good_as_any(tmp_path, layout):
    (tmp_path / "a").mkdir()
    how = dict(LAYOUTS[layout])
    for tree in (TREE, NEXT):
        save(tree, tmp_path / "a" / ".." / "run", **how)
        assert_same(load(tmp_path / "a" / ".." / "run"), tree)


def test_an_index_reaches_into_no_other_checkpoint(tmp_path):
    for name in ("sub/m/w", "other/m/w"):
        foreign_array(tmp_path / name)
    for name in ("sub/tensorstore_index.json", "other/_METADATA"):
        (tmp_path / name).write_text("{}")
    listed = [{"path": path, "shape": [10], "dtype": "float32"} for path in ("sub/m/w", "other/m/w")]
    index = {"format": "tensorstore", "version": "2.0", "prefixes": {"m": listed}}
    (tmp_path / "tensorstore_index.json").write_text(json.dumps(index))
    before = {name: contents(tmp_path / name) for name in ("sub", "other")}
    save(TREE, tmp_path, format="tensorstore", prefix="m")
    assert {name: contents(tmp_path / name) for name in before} == before


def test_a_name_that_is_no_text_is_refused_and_leaves_no_trace(tmp_path):
    name = os.fsdecode(b"x\xff")
    foreign_array(tmp_path / "x")
    (tmp_path / "x").rename(tmp_path / name)
    with pytest.raises(EformerError, match="is not UTF-8"):
        save(TREE, tmp_path, format="tensorstore", prefix="m")
    assert os.listdir(tmp_path) == [name]
    with pytest.raises(ValueError, match="is not UTF-8"):
        save(TREE, tmp_path / name / "db", format="tensorstore", options=SaveOptions(ocdbt=True))


def test_a_file_of_ours_that_was_copied_there_alone_stays(tmp_path):
    save(TREE, tmp_path / "run")
    (tmp_path / "work").mkdir()
    shutil.copy(tmp_path / "run" / "model.safetensors", tmp_path / "work")
    save(NEXT, tmp_path / "work", prefix="tuned")
    found = load(tmp_path / "work" / "model.safetensors")
    np.testing.assert_array_equal(found["a"]["w"], TREE["a"]["w"])


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_an_index_for_other_readers_that_is_not_ours_stays(tmp_path, caplog, kind):
    save(TREE, tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"mine": 1}') if kind == "file" else index.mkdir()
    for tree in (NEXT, TREE, NEXT):
        save(tree, tmp_path)
        assert_same(load(tmp_path), tree)
    assert index.is_dir() or index.read_text() == '{"mine": 1}'
    assert "was not written by eformer; it is left as it is" in caplog.text
    assert len(list(tmp_path.glob("*.safetensors"))) == 1


def test_an_index_of_others_that_only_mentions_us_is_not_ours(tmp_path):
    index = tmp_path / "model.safetensors.index.json"
    text = json.dumps({"metadata": {"library": "eformer"}, "weight_map": {"x": "other.safetensors"}})
    index.write_text(text)
    with pytest.raises(FileExistsError, match="was not written by eformer"):
        save(TREE, tmp_path)
    assert index.read_text() == text


def test_another_database_in_that_of_a_save_stays(tmp_path):
    how = {"format": "tensorstore", "prefix": "m", "options": SaveOptions(ocdbt=True)}
    save(TREE, tmp_path, **how)
    inner = tmp_path / checkpoint.inspect(tmp_path).trees["m"].root / "process-1"
    ts.KvStore.open({"driver": "ocdbt", "base": f"file://{inner}/"}).result().write(
        "mine", b"x" * 2000
    ).result()
    before = contents(inner)
    save(NEXT, tmp_path, **how)
    assert contents(inner) == before


@pytest.mark.parametrize("what", ["checkpoint", "array"])
def test_what_lies_among_the_chunks_of_an_array_stays(tmp_path, what):
    metadata = {"shape": [10, 10, 10], "chunks": [1, 1, 1], "dtype": "<f4", "compressor": None, "dimension_separator": "/"}  # fmt: skip
    spec = {"driver": "zarr", "kvstore": f"file://{tmp_path}/w", "metadata": metadata}
    ts.open(spec, create=True).result()[0, 0, 0].write(np.float32(1)).result()
    listed = [{"path": "w", "shape": [10, 10, 10], "dtype": "float32"}]
    (tmp_path / "tensorstore_index.json").write_text(json.dumps({"format": "tensorstore", "arrays": listed}))
    if what == "checkpoint":
        save([np.ones(3), np.zeros(3)], tmp_path / "w" / "7", format="tensorstore")
    else:
        foreign_array(tmp_path / "w" / "7")
    before = contents(tmp_path / "w" / "7")
    save(NEXT, tmp_path, format="tensorstore")
    assert contents(tmp_path / "w" / "7") == before
    assert not (tmp_path / "w" / "0").exists()


def test_a_save_beside_an_index_of_arrays_is_refused(tmp_path):
    save(TREE, tmp_path)
    (tmp_path / "tensorstore_index.json").write_text("{}")
    with pytest.raises(FileExistsError, match="another format"):
        save(NEXT, tmp_path)
