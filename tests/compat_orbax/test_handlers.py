"""Handlers of the caller save beside trees, in the same step; objects of Orbax are taken as ours."""

import dataclasses
import pickle

import jax
import numpy as np
import pytest

from eformer import checkpoint
from eformer.compat import orbax as ocp
from eformer.compat.orbax.args import as_ours


class Position(ocp.CheckpointHandler):
    def save(self, directory, args):
        (directory / "position.txt").write_text(str(args.item))

    def restore(self, directory, args=None):
        return int((directory / "position.txt").read_text())


@ocp.args.register_with_handler(Position, for_save=True)
@dataclasses.dataclass
class PositionSave(ocp.args.CheckpointArgs):
    item: int


@ocp.args.register_with_handler(Position, for_restore=True)
@dataclasses.dataclass
class PositionRestore(ocp.args.CheckpointArgs):
    item: int = 0


class Later(ocp.AsyncCheckpointHandler):
    async def async_save(self, directory, item):
        async def write():
            (directory / "text").write_text(item)

        return [ocp.future.CommitFutureAwaitingContractedSignals(write())]

    def restore(self, directory):
        return (directory / "text").read_text()


def test_files_of_a_handler_are_part_of_the_step(tmp_path):
    args = ocp.args
    with ocp.CheckpointManager(tmp_path) as it:
        it.save(0, args=args.Composite(data=PositionSave(7), state=args.StandardSave({"a": np.arange(2)})))
        it.wait_until_finished()
        assert it.restore(0, args=args.Composite(data=PositionRestore())).data == 7
    found = checkpoint.verify(tmp_path / "0")
    assert found.ok
    assert found.not_checked == ("data/",)


def test_a_handler_without_arguments_of_its_own(tmp_path):
    with ocp.Checkpointer(Later()) as it:
        it.save(tmp_path / "it", "hello")
        assert it.restore(tmp_path / "it") == "hello"


def test_an_item_keeps_its_kind(tmp_path):
    args = ocp.args
    with ocp.CheckpointManager(tmp_path) as it:
        it.save(0, args=args.Composite(a=args.StandardSave({"x": np.arange(2)})))
        with pytest.raises(ValueError, match="does not match with any registered handler"):
            it.save(1, args=args.Composite(a=args.JsonSave({})))


@pytest.mark.parametrize(
    ("save", "restore", "item"),
    [
        ("ArraySave", "ArrayRestore", np.arange(3)),
        ("ArraySave", "ArrayRestore", 5),
        ("JaxRandomKeySave", "JaxRandomKeyRestore", jax.random.key(3)),
        ("JaxRandomKeySave", "JaxRandomKeyRestore", jax.random.PRNGKey(3)),
        ("NumpyRandomKeySave", "NumpyRandomKeyRestore", np.random.RandomState(1).get_state()),
        ("NumpyRandomKeySave", "NumpyRandomKeyRestore", np.random.RandomState(1).get_state(legacy=False)),
    ],
)
def test_single_values(tmp_path, save, restore, item):
    args = ocp.args
    with ocp.CheckpointManager(tmp_path) as it:
        it.save(0, args=args.Composite(it=getattr(args, save)(item)))
        it.wait_until_finished()
        found = it.restore(0, args=args.Composite(it=getattr(args, restore)())).it
    assert str(found) == str(item)
    assert type(found) is type(item) or isinstance(item, jax.Array)


def test_a_composite_is_a_mapping_with_attributes():
    it = ocp.args.Composite(a=1, keys=2)
    assert (it.a, it["keys"], "a" in it, dict(it)) == (1, 2, True, {"a": 1, "keys": 2})
    with pytest.raises(KeyError, match="Unknown key: b"):
        _ = it.b
    with pytest.raises(ValueError, match="immutable"):
        it.a = 2
    with pytest.raises(ValueError, match="__"):
        ocp.args.Composite(__x=1)
    assert pickle.loads(pickle.dumps(it)) == it


def test_objects_of_orbax_are_taken_as_ours(tmp_path):
    theirs = pytest.importorskip("orbax.checkpoint")
    found = as_ours(theirs.args.PyTreeSave({"a": 1}, save_args={"a": theirs.SaveArgs()}))
    assert isinstance(found, ocp.args.PyTreeSave)
    assert isinstance(theirs.args.StandardSave({"a": 1}), ocp.args.CheckpointArgs)
    assert isinstance(theirs.StandardCheckpointHandler(), ocp.CheckpointHandler)
    with ocp.CheckpointManager(tmp_path) as it:
        it.save(0, args=theirs.args.Composite(state=theirs.args.StandardSave({"a": np.arange(2)})))
        it.wait_until_finished()
        found = it.restore(
            0, args=theirs.args.Composite(state=theirs.args.StandardRestore({"a": np.zeros(2)}))
        )
    assert found.state["a"].dtype == np.float64


def test_protocol_buffers_are_refused_with_the_way_around():
    with pytest.raises(NotImplementedError, match="JsonSave"):
        ocp.args.ProtoSave(object())
