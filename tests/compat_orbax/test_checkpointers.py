"""Checkpointers save to a path at once and whole, and Orbax's errors are raised where Orbax raises them."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eformer import checkpoint
from eformer.compat import orbax as ocp

TREE = {"a": jnp.arange(4.0), "n": 3}


def both():
    return [
        ocp.PyTreeCheckpointer(),
        ocp.StandardCheckpointer(),
        ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler()),
    ]


@pytest.mark.parametrize("it", both(), ids=["pytree", "standard", "async"])
def test_a_tree_comes_back(it, tmp_path):
    with it:
        it.save(tmp_path / "it", TREE)
        found = it.restore(tmp_path / "it")
    assert found["a"].tolist() == [0, 1, 2, 3]
    assert found["n"] == 3


def test_a_path_that_exists_is_refused_or_replaced_whole(tmp_path):
    it = ocp.PyTreeCheckpointer()
    it.save(tmp_path / "it", TREE)
    (tmp_path / "it" / "notes.txt").write_text("old")
    with pytest.raises(ValueError, match="already exists"):
        it.save(tmp_path / "it", TREE)
    it.save(tmp_path / "it", {"b": 1}, force=True)
    assert it.restore(tmp_path / "it") == {"b": 1}
    assert not (tmp_path / "it" / "notes.txt").exists()


def test_a_failed_replacement_leaves_the_old_tree(tmp_path):
    it = ocp.Checkpointer(ocp.StandardCheckpointHandler())
    it.save(tmp_path / "it", args=ocp.args.StandardSave(TREE))
    with pytest.raises(ValueError, match="Unsupported type"):
        it.save(tmp_path / "it", args=ocp.args.StandardSave({"a": "text"}), force=True)
    assert it.restore(tmp_path / "it")["n"] == 3
    assert [path.name for path in tmp_path.iterdir()] == ["it"]


def test_absent_and_unfinished_paths(tmp_path):
    it = ocp.PyTreeCheckpointer()
    with pytest.raises(FileNotFoundError, match="not found"):
        it.restore(tmp_path / "none")
    (tmp_path / "a.orbax-checkpoint-tmp").mkdir()
    with pytest.raises(ValueError, match="incomplete"):
        it.restore(tmp_path / "a.orbax-checkpoint-tmp")


def test_the_checkpoint_is_one_of_eformer_with_the_frame_of_orbax(tmp_path):
    ocp.PyTreeCheckpointer().save(tmp_path / "it", TREE, custom_metadata={"x": 1})
    assert checkpoint.verify(tmp_path / "it").ok
    assert checkpoint.load(tmp_path / "it")["n"] == 3
    found = json.loads((tmp_path / "it" / "_CHECKPOINT_METADATA").read_text())
    assert found["item_handlers"] == "eformer.compat.orbax.PyTreeCheckpointHandler"
    assert found["custom_metadata"] == {"x": 1}


def test_mixed_forms_of_a_call(tmp_path):
    it = ocp.PyTreeCheckpointer()
    it.save(tmp_path / "it", TREE, ocp.args.PyTreeSave(TREE))
    found = it.restore(tmp_path / "it", ocp.args.PyTreeRestore(), item=None)
    assert found["n"] == 3
    assert (
        it.restore(
            tmp_path / "it",
            restore_args=jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), TREE),
        )["n"]
        == 3
    )


def test_donated_arrays_are_safe_after_an_asynchronous_save(tmp_path):
    host = np.arange(3)
    with ocp.StandardCheckpointer() as it:
        it.save(tmp_path / "it", {"host": host})
        host[:] = 9
        it.wait_until_finished()
        assert it.restore(tmp_path / "it")["host"].tolist() == [0, 1, 2]


def test_an_error_in_the_background_is_raised_once(tmp_path):
    it = ocp.AsyncCheckpointer(ocp.JsonCheckpointHandler())
    it.save(tmp_path / "it", args=ocp.args.JsonSave({"a": object()}))
    with pytest.raises(TypeError, match="JSON"):
        it.wait_until_finished()
    it.wait_until_finished()
    assert not (tmp_path / "it").exists()


def test_several_items_at_a_path(tmp_path):
    it = ocp.Checkpointer(ocp.CompositeCheckpointHandler())
    args = ocp.args
    it.save(
        tmp_path / "it",
        args=args.Composite(state=args.StandardSave(TREE), config=args.JsonSave({"lr": (1, 2)})),
    )
    found = it.restore(tmp_path / "it")
    assert found.config == {"lr": [1, 2]}
    assert found["state"]["n"] == 3
    assert checkpoint.verify(tmp_path / "it").ok


def test_a_bucket_is_refused_with_the_way_around():
    with pytest.raises(NotImplementedError, match=r"checkpoint\.save"):
        ocp.PyTreeCheckpointer().save("gs://bucket/it", TREE)
