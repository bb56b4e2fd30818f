"""Other programs find tensors in safetensors files by the names that people write, and an index of the files."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st

from eformer import checkpoint
from eformer._engine.formats.safetensors.names import box_name, tensor_names
from eformer._engine.record.boxes import Box
from eformer._engine.record.names import escape, join_name
from eformer._engine.saving import save as saving
from eformer.checkpoint import SaveOptions, load, save
from support.safetensors_files import assert_equal, read_by_index, tensors_in
from support.trees import HOSTILE, assert_same, keys

NAMES = ["model.embed.weight", "model.layers.0.mlp.weight", "model.layers.1.mlp.weight", "lm_head.weight"]


def flat(step=0, **changed):
    """A model as Hugging Face has it: one dict, dots in its keys."""
    model = {name: np.full((40, 30), number, np.float32) for number, name in enumerate(NAMES)}
    return model | {"lm_head.weight": np.full((40, 30), 100 + step, np.float32)} | changed


def check(folder, expected):
    assert_equal(tensors_in(folder), expected)
    assert_same(load(folder), expected)
    assert checkpoint.verify(folder).ok


# -------------------------------------------------------------------------------------------- names


def test_a_dict_with_dots_in_its_keys_is_written_under_these_keys(tmp_path):
    save(flat(), tmp_path / "c")
    check(tmp_path / "c", flat())
    save(flat(), tmp_path / "model.safetensors")
    with safetensors.safe_open(tmp_path / "model.safetensors", "np") as opened:
        assert sorted(opened.keys()) == sorted(flat())
    assert_same(load(tmp_path / "model.safetensors"), flat())
    assert checkpoint.verify(tmp_path / "model.safetensors").ok


def test_shards_and_their_index_have_these_names_and_keep_modules_together(tmp_path):
    model = {f"h.{n}.{part}": np.full((50, 50), n, np.float32) for part in ("w", "v") for n in range(4)}
    save(model, tmp_path, options=SaveOptions(max_shard_bytes=25_000))
    check(tmp_path, model)
    assert_equal(read_by_index(tmp_path), model)
    weight_map = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert all(weight_map[f"h.{n}.w"] == weight_map[f"h.{n}.v"] for n in range(4))


def test_every_later_save_has_an_index_and_the_same_names(tmp_path):
    for step in range(3):
        save(flat(step), tmp_path)
        check(tmp_path, flat(step))
        if step:
            assert not (tmp_path / "model.safetensors").exists()  # other readers would prefer it to the index
            assert_equal(read_by_index(tmp_path), flat(step))


def test_names_that_read_the_same_keep_their_escapes(tmp_path):
    tree = {"a.b": np.ones(1), "a": {"b": np.ones(2), "c": np.ones(3)}, "x.y": np.ones(4)}
    save(tree, tmp_path)
    assert {name: len(array) for name, array in tensors_in(tmp_path).items()} == {
        "a%2Eb": 1,
        "a.b": 2,
        "a.c": 3,
        "x.y": 4,
    }
    assert_same(load(tmp_path), tree)


@pytest.mark.sample(3)
@pytest.mark.parametrize("key", HOSTILE, ids=repr)
def test_hostile_keys_come_back_and_no_reader_stumbles(tmp_path, key):
    tree = {key: np.ones(1), "w": np.ones(2), "__metadata__": np.ones(3), "w%[0:1]": np.ones(4)}
    save(tree, tmp_path)
    found = tensors_in(tmp_path)
    assert sorted(map(len, found.values())) == sorted(map(len, tree.values()))
    assert {"w", "%5F_metadata__", "w%25[0:1]"} <= found.keys()
    assert_same(load(tmp_path), tree)


@given(st.lists(st.lists(keys | st.sampled_from(["a", "b", "a.b", "a%[0:1]"]), max_size=3), max_size=8))
def test_no_two_tensors_have_one_name(paths):
    leaves = {join_name(map(escape, path)): None for path in paths}
    called = tensor_names(leaves)
    box = Box((0,), (1,))
    names = [box_name(name, part) for name in called.values() for part in (None, box)]
    assert list(called) == list(leaves)
    assert len({*names, "__metadata__"}) == 2 * len(leaves) + 1
    for path, name in zip(dict.fromkeys(map(tuple, paths)), called.values(), strict=True):
        assert "%" in name or name == ".".join(path)


# ---------------------------------------------------------------------------- checkpoints with escapes


@pytest.fixture
def escaped(monkeypatch, tmp_path):
    """A checkpoint of a version that called tensors by the escaped names of their leaves."""
    with monkeypatch.context() as patch:
        patch.setattr(saving, "tensor_names", lambda leaves: {leaf: leaf for leaf in leaves})
        save(flat(), tmp_path / "old", options=SaveOptions(max_shard_bytes=6_000))
    assert "model%2Eembed%2Eweight" in tensors_in(tmp_path / "old")
    return tmp_path / "old"


def test_checkpoints_with_escaped_tensors_load_and_verify(escaped):
    assert_same(load(escaped), flat())
    assert checkpoint.verify(escaped).ok
    with checkpoint.open(escaped) as view:
        np.testing.assert_array_equal(view["model.embed.weight"][:], flat()["model.embed.weight"])


def test_an_index_that_is_written_again_has_the_names_that_are_in_the_files(escaped):
    (escaped / "model.safetensors.index.json").unlink()
    save({"w": np.ones(3)}, escaped, prefix="other")
    found = read_by_index(escaped)
    assert {name.replace("%2E", ".") for name in found} == set(NAMES)


def test_files_with_other_names_are_not_used_again(escaped, caplog):
    save(flat(1), escaped, options=SaveOptions(reuse=True))
    assert "it has another name for the tensor 'model." in caplog.text
    check(escaped, flat(1))


# -------------------------------------------------------------------------------------------- reuse


def inodes(folder):
    return {file.stat().st_ino for file in folder.glob("*.safetensors")}


def test_a_checkpoint_that_uses_files_again_has_an_index_of_them_all(tmp_path):
    files = []
    for step in range(3):
        save(flat(step), tmp_path, options=SaveOptions(reuse=True))
        check(tmp_path, flat(step))
        assert_equal(read_by_index(tmp_path), flat(step))
        files.append(inodes(tmp_path))
    assert set.intersection(*files), "the file of model.* is still the first one"


def test_a_checkpoint_that_uses_files_of_another_has_an_index_of_them_all(tmp_path):
    save(flat(), tmp_path / "a")
    save(flat(), tmp_path / "b", options=SaveOptions(reuse=tmp_path / "a"))
    assert inodes(tmp_path / "a") == inodes(tmp_path / "b")
    check(tmp_path / "b", flat())
    assert_equal(read_by_index(tmp_path / "b"), flat())


def test_a_leaf_that_makes_a_name_ambiguous_ends_the_use_of_its_file(tmp_path):
    options = SaveOptions(reuse=True)
    tree = {"a.b": jnp.ones(1000), "c": jnp.ones(5)}
    for more in ({}, {"a": {"b": jnp.zeros(3)}}):
        save(tree | more, tmp_path, options=options)
        assert_same(load(tmp_path), tree | more)
        found = tensors_in(tmp_path)
        assert read_by_index(tmp_path).keys() == found.keys() if more else "a.b" in found
    assert {name: len(array) for name, array in found.items()} == {"a%2Eb": 1000, "a.b": 3, "c": 5}
