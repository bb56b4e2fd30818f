"""A manager saves, lists, keeps and restores steps by the rules of Orbax, durably and with digests."""

import datetime as dt
import json
import threading

import jax.numpy as jnp
import numpy as np
import pytest

from eformer import checkpoint
from eformer.compat import orbax as ocp

args = ocp.args


def manager(root, **options):
    return ocp.CheckpointManager(root, options=ocp.CheckpointManagerOptions(**options))


def save(it, step, **options):
    return it.save(step, args=args.StandardSave({"a": jnp.full(2, step)}), **options)


def test_steps_come_back(tmp_path):
    with manager(tmp_path) as it:
        assert save(it, 0)
        assert it.all_steps() == [0]
        assert it.restore(0)["a"].tolist() == [0, 0]
        assert save(it, 1)
        assert it.latest_step() == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]
    assert checkpoint.verify(tmp_path).ok
    assert [step.number for step in checkpoint.steps(tmp_path)] == [0, 1]


def test_items_by_name_and_a_new_manager(tmp_path):
    with manager(tmp_path) as it:
        it.save(
            1, args=args.Composite(state=args.PyTreeSave({"a": (1, "x")}), config=args.JsonSave({"b": 2}))
        )
        it.wait_until_finished()
        assert it.restore(1).config == {"b": 2}
    with manager(tmp_path) as it:
        found = it.restore(1)
        assert found["state"] == {"a": [1, "x"]}
        assert it.restore(1, args=args.Composite(config=args.JsonRestore())).keys() == {"config"}
        with pytest.raises(KeyError, match=r'Item "z" was not found.*Available items'):
            it.restore(1, args=args.Composite(z=args.JsonRestore()))
        assert it.item_metadata(1).state["a"][0].shape == ()


def test_the_policy_decides_and_force_skips_it(tmp_path):
    with manager(tmp_path, save_interval_steps=5, save_on_steps=[7]) as it:
        saved = [step for step in range(3, 12) if save(it, step)]
        assert saved == [3, 5, 7, 10]
        assert not save(it, 2)
        assert save(it, 2, force=True)
        with pytest.raises(ocp.checkpoint_manager.StepAlreadyExistsError):
            save(it, 10, force=True)


def test_wrong_calls(tmp_path):
    with manager(tmp_path) as it:
        with pytest.raises(ValueError, match="Must provide `args`"):
            it.save(0)
        with pytest.raises(ValueError, match="args=args"):
            it.save(0, args.StandardSave({"a": 1}), args=args.StandardSave({"a": 1}))
        save(it, 0)
        with pytest.raises(ValueError, match="Composite"):
            it.save(1, args=args.Composite(a=args.JsonSave({})))
    for name in ("..", ".", "a/b"):
        with manager(tmp_path / "other") as it, pytest.raises(ValueError, match="directory of its step"):
            it.save(0, args=args.Composite(**{name: args.JsonSave({})}))


def test_nothing_to_restore(tmp_path):
    with manager(tmp_path / "none", create=False) as it:
        assert it.all_steps() == []
        assert it.latest_step() is None
        assert not (tmp_path / "none").exists()
        with pytest.raises(FileNotFoundError, match="No steps found"):
            it.restore(None)
        with pytest.raises(FileNotFoundError, match="not found"):
            it.restore(3, args=args.StandardRestore())


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0, 1, 2, 3, 4, 5]),
        ({"max_to_keep": 2}, [4, 5]),
        ({"max_to_keep": 0}, []),
        ({"max_to_keep": 1, "keep_period": 2}, [0, 2, 4, 5]),
        ({"max_to_keep": 1, "best_fn": lambda metrics: metrics["loss"], "best_mode": "min"}, [3]),
        ({"preservation_policy": ocp.checkpoint_managers.CustomSteps([1, 4])}, [1, 4]),
        ({"max_to_keep": 1, "keep_time_interval": dt.timedelta(hours=1)}, [0, 5]),
        ({"max_to_keep": 1, "enable_async_checkpointing": False}, [5]),
    ],
)
def test_old_steps_go_by_the_policy(tmp_path, options, expected):
    with manager(tmp_path, **options) as it:
        for step in range(6):
            save(it, step, metrics={"loss": abs(step - 3)})
        assert it.all_steps() == expected
    assert sorted(int(path.name) for path in tmp_path.iterdir()) == expected


def test_a_damaged_step_neither_counts_nor_is_deleted(tmp_path):
    with manager(tmp_path) as it:
        for step in range(3):
            save(it, step)
    (tmp_path / "1" / "default" / "model.safetensors").unlink()
    with manager(tmp_path, max_to_keep=2) as it:
        save(it, 3)
        assert it.all_steps() == [1, 2, 3]


def test_an_empty_directory_is_no_step_and_unfinished_saves_are_swept(tmp_path):
    (tmp_path / "5").mkdir()
    (tmp_path / "4.orbax-checkpoint-tmp").mkdir()
    with manager(tmp_path, cleanup_tmp_directories=True) as it:
        assert it.all_steps() == []
        assert not (tmp_path / "4.orbax-checkpoint-tmp").exists()
        assert save(it, 5)
    assert (tmp_path / "5" / "default" / "manifest.json").exists()


def test_metrics_and_metadata(tmp_path):
    options = ocp.CheckpointManagerOptions(best_fn=lambda metrics: metrics["acc"])
    with ocp.CheckpointManager(tmp_path, options=options, metadata={"version": 2}) as it:
        for step, acc in enumerate((0.1, 0.9, 0.5)):
            save(it, step, metrics={"acc": acc}, custom_metadata={"lr": step})
        it.wait_until_finished()
        assert it.best_step() == 1
        assert it.metrics(1) == {"acc": 0.9}
        found = it.metadata(1)
        assert (found.metrics, found.custom_metadata) == ({"acc": 0.9}, {"lr": 1})
        assert found.item_metadata["a"].shape == (2,)
        assert it.metadata().custom_metadata == {"version": 2}
        assert it.metadata()["version"] == 2
    assert json.loads((tmp_path / "1" / "metrics" / "metrics").read_text()) == {"acc": 0.9}
    with ocp.CheckpointManager(tmp_path, metadata={"version": 3}) as it:
        assert it.metadata().custom_metadata == {"version": 2}


def test_an_error_in_the_background_is_told_to_each_thread_once_and_the_step_is_forgotten(tmp_path):
    with manager(tmp_path) as it:
        it.save(0, args=args.Composite(a=args.JsonSave({"x": object()})))
        found = []

        def wait():
            try:
                it.wait_until_finished()
            except TypeError as error:
                found.append(error)

        threads = [threading.Thread(target=wait) for _ in range(3)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        assert len(found) == 3
        assert it.all_steps() == []
        with pytest.raises(TypeError):
            it.wait_until_finished()
        it.wait_until_finished()
        assert list(tmp_path.iterdir()) == []


def test_names_of_steps(tmp_path):
    with manager(tmp_path, step_prefix="ckpt", step_format_fixed_length=4) as it:
        save(it, 42)
    assert (tmp_path / "ckpt_0042").is_dir()
    with manager(tmp_path, step_prefix="ckpt", step_format_fixed_length=4) as it:
        assert it.all_steps() == [42]
    with manager(tmp_path) as it:
        assert it.all_steps() == []


def test_delete_and_read_only(tmp_path):
    with manager(tmp_path, todelete_subdir="old") as it:
        save(it, 0)
        save(it, 1)
        it.delete(0)
        assert it.all_steps() == [1]
        with pytest.raises(FileNotFoundError):
            it.delete(0)
    assert (tmp_path / "old" / "0" / "default").is_dir()
    with manager(tmp_path, read_only=True) as it:
        it.delete(1)
        assert not it.should_save(9)
        assert it.restore(1)["a"].tolist() == [1, 1]


def test_older_forms_of_the_constructor_and_of_calls(tmp_path):
    with ocp.CheckpointManager(tmp_path / "one", ocp.PyTreeCheckpointer()) as it:
        it.save(0, {"a": np.arange(2)}, save_kwargs={"save_args": {"a": ocp.SaveArgs(dtype=np.int8)}})
        assert it.restore(0, items={"a": 0})["a"].dtype == np.int8
    both = {
        "state": ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler()),
        "config": ocp.Checkpointer(ocp.JsonCheckpointHandler()),
    }
    with ocp.CheckpointManager(tmp_path / "two", both) as it:
        it.save(0, {"state": {"a": 1}, "config": {"b": 2}})
        assert it.restore(0, items={"state": None})["state"] == {"a": 1}


def test_invalid_mixtures(tmp_path):
    registry = ocp.DefaultCheckpointHandlerRegistry()
    handler = ocp.StandardCheckpointHandler()
    for options in (
        {"item_names": ("a",), "item_handlers": handler},
        {"item_names": ("a",), "handler_registry": registry},
        {"item_handlers": handler, "handler_registry": registry},
        {"checkpointers": ocp.PyTreeCheckpointer(), "item_names": ("a",)},
    ):
        with pytest.raises(ValueError, match=r"mutually exclusive|should not be provided"):
            ocp.CheckpointManager(tmp_path, **options)
    with pytest.raises(ValueError, match="mutually exclusive"):
        manager(tmp_path, max_to_keep=1, preservation_policy=ocp.checkpoint_managers.LatestN(1))
    with pytest.raises(NotImplementedError, match="todelete_subdir"):
        manager(tmp_path, todelete_full_path="x")


def test_a_subclass_is_asked(tmp_path):
    class Mine(ocp.CheckpointManager):
        def should_save(self, step):
            return step == 3

    with Mine(tmp_path) as it:
        assert [step for step in range(5) if save(it, step)] == [3]


def test_a_run_resumes_from_the_steps_of_a_manager(tmp_path):
    with manager(tmp_path) as it:
        it.save(7, args=args.StandardSave({"a": jnp.arange(2)}))
    with checkpoint.Run(tmp_path, keep=1) as run:
        resumed = run.resume(like={"a": jnp.zeros(2, jnp.int32)})
    assert resumed.step == 7
    assert (tmp_path / "7").exists()
