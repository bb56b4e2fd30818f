"""The arguments of a save, as people write them."""

import os

import jax.numpy as jnp
import numpy as np
import pytest

from eformer import checkpoint
from eformer.checkpoint import inspect, load, save, save_async
from eformer.errors import LeafError
from eformer.serialization.async_manager import AsyncCheckpointManager
from eformer.serialization.serialization import tree_serialize_leaves

TREE = {"w": np.arange(4.0)}


def test_swapped_arguments_are_named(tmp_path):
    manager = AsyncCheckpointManager()
    calls = {
        "save(tree, path)": lambda: save(tmp_path / "x", TREE),
        "save_async(tree, path)": lambda: save_async(str(tmp_path / "x"), TREE),
        "save(tree, path) ": lambda: manager.save(tmp_path / "x", TREE),
        "save_async(tree, path) ": lambda: manager.save_async(tmp_path / "x", TREE),
        "save_pytree(pytree, path)": lambda: manager.save_pytree("x", TREE, prefix="p"),
        "tree_serialize_leaves(checkpoint_dir, pytree)": lambda: tree_serialize_leaves(TREE, tmp_path / "x"),
    }
    for name, call in calls.items():
        with pytest.raises(TypeError) as error:
            call()
        assert f"{name.strip()}: the arguments are swapped" in str(error.value)
    assert not os.listdir(tmp_path)


def test_a_tree_may_be_text(tmp_path):
    save("a tree", tmp_path / "x")
    assert load(tmp_path / "x") == "a tree"


def test_options_may_be_a_dict(tmp_path):
    save(TREE, tmp_path / "x", options={"dtype": "bf16", "checksums": True})
    assert inspect(tmp_path / "x").trees[""].leaves["w"].dtype == "bfloat16"
    save_async(TREE, tmp_path / "x", options={"dtype": "fp16"}).result()
    assert inspect(tmp_path / "x").trees[""].leaves["w"].dtype == "float16"


def test_an_unknown_option_is_refused_with_the_nearest(tmp_path):
    with pytest.raises(TypeError, match=r"'checksum' \(nearest is 'checksums'\), 'zzz'"):
        save(TREE, tmp_path / "x", options={"checksum": True, "zzz": 1})
    with pytest.raises(TypeError, match="must be SaveOptions or a dict of its fields, not 'fast'"):
        save(TREE, tmp_path / "x", options="fast")
    with pytest.raises(ValueError, match=r"SaveOptions.threads must be positive"):
        save(TREE, tmp_path / "x", options={"threads": 0})


@pytest.mark.parametrize("name", ["x.npz", "x.npy", "x.msgpack", "x.eqx", "x.pt", "x.bin", "x.h5", "x.json"])
def test_a_checkpoint_is_not_given_the_name_of_a_file_of_another_kind(tmp_path, name):
    save(TREE, tmp_path / "there")
    calls = [
        lambda: save(TREE, tmp_path / name),
        lambda: save_async(TREE, tmp_path / name),
        lambda: save(TREE, tmp_path / name, format="tensorstore"),
        lambda: AsyncCheckpointManager().save(TREE, tmp_path / name),
        lambda: tree_serialize_leaves(tmp_path / name, TREE),
        lambda: checkpoint.convert(tmp_path / "there", tmp_path / name, to="tensorstore"),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=rf"'{name}'"):
            call()
    assert os.listdir(tmp_path) == ["there"]


def test_the_refusal_says_what_to_do(tmp_path):
    with pytest.raises(ValueError, match=r"save to 'x' or 'x.safetensors'; .* convert"):
        save(TREE, tmp_path / "x.npz")
    with pytest.raises(ValueError, match="save_to_file"):
        save(TREE, tmp_path / "x.msgpack")
    with pytest.raises(ValueError, match="name of a safetensors file, but the format is 'zarr'"):
        save(TREE, tmp_path / "x.safetensors", format="tensorstore")


def test_a_directory_of_such_a_name_that_is_there_already_is_saved_to(tmp_path):
    (tmp_path / "run.bin").mkdir()
    save(TREE, tmp_path / "run.bin")
    assert checkpoint.verify(tmp_path / "run.bin").ok


def test_arrays_without_axes_become_plain_numbers_in_the_metadata(tmp_path):
    metadata = {
        "loss": jnp.float32(0.5),
        "step": np.int64(7),
        "done": np.array(True),
        "inner": {"lr": [jnp.bfloat16(0.25), (np.float32(2),)]},
    }
    save(TREE, tmp_path, metadata=metadata)
    found = inspect(tmp_path).metadata
    assert found == {"loss": 0.5, "step": 7, "done": True, "inner": {"lr": [0.25, (2.0,)]}}
    assert [type(found[name]) for name in ("loss", "step", "done")] == [float, int, bool]


def test_metadata_that_cannot_be_stored_is_named_all_at_once(tmp_path):
    with pytest.raises(LeafError) as error:
        save(TREE, tmp_path, metadata={"a": jnp.ones(3), "b": object(), "c": {"d": np.ones((2, 2))}, "e": 1})
    assert "metadata 'a': an array float32[3] is not a number; save it as a leaf" in str(error.value)
    assert "metadata 'b': a object cannot be stored" in str(error.value)
    assert "metadata 'c': an array float64[2, 2]" in str(error.value)
    with pytest.raises(LeafError, match=r"metadata 1: a key is text"):
        save(TREE, tmp_path, metadata={1: 2})
    assert not os.listdir(tmp_path)
