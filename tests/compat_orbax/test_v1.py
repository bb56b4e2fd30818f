"""The newer generation: functions, contexts, objects that write their own files, and the training checkpointer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eformer import checkpoint
from eformer.compat import orbax as ocp

v1 = ocp.v1
TREE = {"a": jnp.arange(4.0), "h": np.arange(2), "n": 3, "s": "x"}


def test_a_tree_comes_back(tmp_path):
    v1.save(tmp_path / "it", TREE, custom_metadata={"x": 1})
    found = v1.load(tmp_path / "it")
    assert found["a"].tolist() == [0, 1, 2, 3]
    assert (found["n"], found["s"]) == (3, "x")
    with pytest.raises(ValueError, match="already exists"):
        v1.save(tmp_path / "it", TREE)
    v1.save(tmp_path / "it", {"b": 1}, overwrite=True)
    assert v1.load(tmp_path / "it") == {"b": 1}
    assert checkpoint.verify(tmp_path / "it").ok


def test_a_target_decides(tmp_path):
    v1.save(tmp_path / "it", TREE)
    target = {"a": jax.ShapeDtypeStruct((4,), jnp.bfloat16), "h": np.ndarray, "n": float, "s": ""}
    found = v1.load(tmp_path / "it", target)
    assert (found["a"].dtype, found["n"]) == (jnp.bfloat16, 3.0)
    assert isinstance(found["h"], np.ndarray)
    with pytest.raises(ValueError, match="do not match"):
        v1.load(tmp_path / "it", {"a": target["a"]})
    context = v1.Context()
    context.pytree.loading.partial_load = True
    with context:
        assert v1.load(tmp_path / "it", {"n": int}) == {"n": 3}


def test_nothing_to_load(tmp_path):
    with pytest.raises(v1.errors.InvalidLayoutError, match="does not exist"):
        v1.load(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(v1.errors.InvalidLayoutError, match="No valid PyTree"):
        v1.load(tmp_path / "empty")
    assert not v1.is_orbax_checkpoint(tmp_path / "empty")


def test_several_objects_by_name(tmp_path):
    given = {"pytree": {"w": np.ones(2)}, "model_config": {"config": "text"}}
    v1.save_checkpointables(tmp_path / "it", given)
    assert v1.load_checkpointables(tmp_path / "it")["model_config"] == {"config": "text"}
    assert v1.load_checkpointables(tmp_path / "it", {"model_config": None}).keys() == {"model_config"}
    with pytest.raises(KeyError, match="Available"):
        v1.load_checkpointables(tmp_path / "it", {"z": None})
    assert sorted(v1.checkpointables_metadata(tmp_path / "it").metadata) == ["model_config", "pytree"]
    assert v1.metadata(tmp_path / "it").metadata["w"].shape == (2,)
    assert (tmp_path / "it" / "orbax.checkpoint").exists()


class Position:
    def __init__(self, at=0):
        self.at = at

    async def save(self, directory):
        async def write():
            path = await directory.await_creation()
            (path / "position.txt").write_text(str(self.at))

        return write()

    async def load(self, directory):
        async def read():
            self.at = int((directory / "position.txt").read_text())

        return read()


def test_objects_write_their_own_files(tmp_path):
    v1.save_checkpointables(tmp_path / "it", {"data": Position(7), "state": TREE})
    other = Position()
    v1.load_checkpointables(tmp_path / "it", {"data": other})
    assert other.at == 7
    with pytest.raises(ValueError, match="must pass an instance"):
        v1.load_checkpointables(tmp_path / "it")
    assert isinstance(other, v1.StatefulCheckpointable)
    with pytest.raises(KeyError, match="valid handler"):
        v1.save_checkpointables(tmp_path / "b", {"data": object()})
    with pytest.raises(NotImplementedError, match="StatefulCheckpointable"):
        v1.handlers.register_handler(object)


def test_a_save_in_the_background(tmp_path):
    calls = []
    context = v1.Context()
    context.asynchronous.post_finalization_callback = lambda: calls.append(1)
    with context:
        response = v1.save_async(tmp_path / "it", TREE)
    assert response.result() is None
    assert calls == [1]
    assert v1.load_async(tmp_path / "it").result()["n"] == 3


def test_steps_of_a_training(tmp_path):
    known = v1.training
    with known.Checkpointer(
        tmp_path, preservation_policy=known.preservation_policies.LatestN(2), custom_metadata={"v": 1}
    ) as it:
        assert it.latest is None
        for step in range(4):
            assert it.save(step, {"a": jnp.int32(step)}, metrics={"loss": step})
        assert [each.step for each in it.checkpoints] == [2, 3]
        assert int(it.load()["a"]) == 3
        assert it.latest.metrics == {"loss": 3}
        assert it.root_metadata().custom_metadata == {"v": 1}
        assert it.metadata(3).metadata["a"].shape == ()
        with pytest.raises(known.errors.StepNotFoundError):
            it.load(0)
        with pytest.raises(known.errors.StepAlreadyExistsError):
            it.save(3, {"a": 0}, force=True)
        assert it.save(3, {"a": jnp.int32(9)}, overwrite=True)
        assert it.delete(2)
        assert not it.delete(2, missing_ok=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3", "metadata"]


def test_a_policy_declines(tmp_path):
    known = v1.training
    with known.Checkpointer(
        tmp_path, save_decision_policy=known.save_decision_policies.FixedIntervalPolicy(2)
    ) as it:
        assert it.save_async(1, {"a": 1}) is None
        assert it.save_async(2, {"a": 1}).result() is True
        assert not it.is_saving_in_progress()


def test_contexts_inherit_by_copy():
    one = v1.Context(async_options=v1.options.AsyncOptions(timeout_secs=9))
    two = v1.Context(one, checkpoint_layout="SAFETENSORS")
    two.asynchronous.timeout_secs = 5
    assert (one.asynchronous.timeout_secs, two.checkpoint_layout.name) == (9, "SAFETENSORS")
    with pytest.raises(TypeError, match="unexpected"):
        v1.Context(nonsense=1)


def test_trees_are_merged():
    assert v1.tree.merge({"a": 1, "b": {"c": 2}}, {"b": {"d": 3}}) == {"a": 1, "b": {"c": 2, "d": 3}}
    with pytest.raises(ValueError, match="common"):
        v1.tree.merge({"a": 1}, {"a": 2})
