"""What a manager saves: every argument of save, every kind of tree, and what takes the place of what."""

import os
import time
from datetime import datetime
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from eformer import checkpoint
from eformer.paths import LocalPath, ePath
from eformer.serialization.async_manager import AsyncCheckpointManager, CheckpointMetadata
from support.backends import Backend, Compressed, OneFile, Safetensors, TensorStore
from support.meshes import grid, line, on
from support.states import arrays_of, flat, state
from support.trees import HOSTILE, Layer, Moments, Pair, Unregistered, assert_same

Manager = AsyncCheckpointManager


# What cannot be stored, and what JAX cannot have under a mesh.
NOTHING_TO_STORE = object()


# Made when they are needed: JAX compiles programs for them.
ROUND_TRIPS = {
    "dict": lambda: {"b": jnp.ones(3), "a": {"c": jnp.zeros((2, 2), jnp.int8)}},
    "list": lambda: [jnp.ones(2), [jnp.zeros(1), []], ()],
    "more than ten": lambda: [jnp.full(1, i) for i in range(12)],
    "tuple": lambda: (jnp.ones(2), (1, "text", None)),
    "namedtuple": lambda: Moments(jnp.ones(2), {"x": Moments(1, 2)}),
    "dataclass": lambda: Layer(jnp.ones(3), None, "static"),
    "custom node": lambda: Pair(jnp.ones(2), 3, "tag"),
    "optimizer": lambda: optax.adam(1e-3).init({"w": jnp.ones(3)}),
    "int keys": lambda: {1: jnp.ones(1), 2: {10: jnp.zeros(2)}},
    "empty": dict,
    "empty inside": lambda: {"a": {}, "b": [], "c": (), "d": None, "e": {"f": {}}},
    "no arrays": lambda: {
        "step": 3,
        "lr": 0.5,
        "on": True,
        "who": "é",
        "raw": b"\0x",
        "c": 1 + 2j,
        "none": None,
    },
    "bare array": lambda: jnp.arange(6).reshape(2, 3),
    "bare number": lambda: 3,
    "bare text": lambda: "text",
    "nothing": lambda: None,
    "zero size": lambda: {"a": jnp.zeros((0, 3)), "b": np.zeros((2, 0), np.int16)},
    "zero axes": lambda: {"a": jnp.float32(3), "b": np.array(2, np.int8)},
    "numpy": lambda: {"a": np.arange(5), "b": np.ones((2, 3), np.float16), "c": np.float32(2)},
    "keys": lambda: {"k": jax.random.split(jax.random.key(1), (2, 2)), "rbg": jax.random.key(3, impl="rbg")},
    "narrow": lambda: {
        "i4": jnp.ones(5, jnp.int4),
        "u4": jnp.ones(3, jnp.uint4),
        "f8": jnp.ones(3, jnp.float8_e4m3fn),
    },
}


class Saves(Backend):
    """What is there once a save has returned."""

    # ----------------------------------------------------------------------------------------- arguments

    def test_save_and_save_tree_are_one(self, manager, path):
        assert Manager.save is Manager.save_tree
        assert manager.save_tree(state(), path) == str(path)
        assert_same(manager.load(path, line())[0], state())

    @pytest.mark.parametrize("kind", [str, Path, LocalPath, ePath], ids=lambda kind: kind.__class__.__name__)
    def test_paths_are_of_every_kind(self, manager, path, kind):
        assert manager.save(state(), kind(path) if kind is not str else str(path)) == str(path)
        assert_same(manager.load(kind(path) if kind is not str else str(path), line())[0], state())
        assert_same(manager.load_tree_parallel(kind(str(path)))[0], state())

    def test_a_path_is_what_its_fspath_says(self, manager, path, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)

        class Where:
            def __fspath__(self):
                return str(path)

        assert manager.save(state(), Where()) == str(path)
        (entry,) = os.scandir(path.parent)
        assert_same(manager.load(entry, line())[0], state())

    @pytest.mark.parametrize("path", [None, 3])
    def test_what_is_no_path_is_refused(self, manager, path, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        for call in (lambda: manager.save(state(), path), lambda: manager.load(path, line())):
            with pytest.raises(TypeError, match=r"path|PathLike"):
                call()
        assert os.listdir(tmp_path) == []

    def test_a_relative_path_is_counted_from_where_we_are(self, manager, path, monkeypatch):
        path.parent.mkdir()
        monkeypatch.chdir(path.parent)
        assert manager.save(state(), self.name) == self.name
        assert_same(manager.load(path, line())[0], state())
        assert_same(manager.load(self.name, line())[0], state())

    def test_the_mesh_of_a_save_does_not_matter_to_what_is_saved(self, manager, path, recwarn):
        for mesh in (None, line(), grid()):
            manager.save(state(), path, mesh)
            assert_same(manager.load(path, line())[0], state())
        assert not recwarn.list

    @pytest.mark.parametrize("nested", [False, True])
    def test_gather_functions_are_called_by_key(self, manager, path, nested):
        double = {"block": {"kernel": lambda x: x * 2}} if nested else {"block.kernel": lambda x: x * 2}
        manager.save(state(), path, gather_fns=double)
        loaded = manager.load(path, line())[0]
        np.testing.assert_array_equal(loaded["block"]["kernel"], state()["block"]["kernel"] * 2)
        loaded["block"]["kernel"] = state()["block"]["kernel"]
        assert_same(loaded, state())

    @pytest.mark.parametrize("gather", [True, False, None])
    def test_gathering_all_or_nothing_changes_no_value(self, manager, path, gather):
        tree = state() | {"sharded": jax.device_put(jnp.arange(8.0), on(line(), "model")), "n": np.arange(3)}
        manager.save(tree, path, gather_fns=gather)
        loaded = manager.load(path, line())[0]
        assert jax.tree.structure(loaded) == jax.tree.structure(tree)
        for key, leaf in arrays_of(tree).items():
            assert Manager.compute_checksum(flat(loaded)[key]) == Manager.compute_checksum(leaf)

    def test_an_error_of_a_gather_function_is_the_callers_and_nothing_is_written(self, manager, path):
        with pytest.raises(ZeroDivisionError):
            manager.save(state(), path, gather_fns={"step": lambda x: 1 / 0})
        assert not path.exists()

    @pytest.mark.parametrize("offload", [False, True])
    @pytest.mark.parametrize("mesh", [None, line, grid])
    def test_a_gathered_tree_is_the_same_tree(self, manager, path, offload, mesh):
        tree = {
            "four bits": jnp.ones(8, jnp.int4),
            "numpy": np.arange(3),
            "sharded": jax.device_put(jnp.arange(64.0).reshape(8, 8), on(grid(), "data", "model")),
            "state": state(),
        }
        where = mesh() if mesh else None
        manager.save(tree, path, where, do_all_gather=True, cpu_offload=offload)
        assert_same(manager.load(path, line())[0], tree)
        manager.save_pytree(
            tree,
            path.with_name("other" + path.suffix),
            where,
            prefix="m",
            do_all_gather=True,
            cpu_offload=offload,
        )
        loaded = manager.load_pytree(path.with_name("other" + path.suffix), line(), prefix="m")[0]
        assert_same(loaded, tree)

    @pytest.mark.parametrize("offload", [False, True])
    def test_offloading_alone_changes_nothing(self, manager, path, offload):
        manager.save(state(), path, cpu_offload=offload)
        assert_same(manager.load(path, line())[0], state())

    def test_metadata_comes_back_under_its_name(self, manager, path):
        custom = {"step": "3", "config": {"lr": 1e-3, "layers": [1, 2]}, "note": "é", "none": None}
        manager.save(state(), path, metadata=custom)
        assert manager.load(path, line())[1]["custom_metadata"] == custom
        assert manager.load_tree_parallel(path)[1]["custom_metadata"] == custom

    def test_metadata_has_one_shape(self, manager, path):
        manager.save(
            {"a": {"w": jnp.ones((2, 3), jnp.bfloat16)}, "k": jax.random.key(0), "n": 3}, path, prefix="m"
        )
        for _, metadata in (
            manager.load(path, line()),
            manager.load_tree_parallel(path),
            manager.load_pytree(path, line(), prefix="m"),
        ):
            assert metadata == CheckpointMetadata.from_dict(metadata).to_dict()
            assert metadata["array_metadata"]["a.w"] == {"dtype": "bfloat16", "shape": [2, 3]}
            assert set(metadata["array_metadata"]) == {"a.w", "k"}
            assert (metadata["version"], metadata["framework_version"]) == ("0.0.90", jax.__version__)
            assert metadata["custom_metadata"] == {}
            assert abs(time.time() - datetime.fromisoformat(metadata["timestamp"]).timestamp()) < 3600

    @pytest.mark.parametrize("value", [object(), lambda: 0, jnp.ones(2)], ids=lambda v: type(v).__name__)
    def test_metadata_that_cannot_be_stored_is_named_before_anything_is_written(self, manager, path, value):
        manager.save(state(), path)
        for call in (
            lambda: manager.save(state(1), path, metadata={"what": value}),
            lambda: manager.save_async(state(1), path, metadata={"what": value}),
            lambda: manager.save_pytree(state(1), path, prefix="m", extras={"what": value}),
        ):
            with pytest.raises((TypeError, ValueError), match="metadata 'what'"):
                call()
        assert_same(manager.load(path, line())[0], state())

    def test_the_callback_gets_the_path_once_all_is_there(self, manager, path):
        seen = []
        manager.save(state(), path, callback=lambda p: seen.append((p, manager.load(p, line())[0]["name"])))
        assert seen == [(str(path), "run 0")]

    def test_an_error_of_the_callback_is_the_callers_and_the_checkpoint_is_there(self, manager, path):
        with pytest.raises(ZeroDivisionError):
            manager.save(state(), path, callback=lambda _: 1 / 0)
        assert_same(manager.load(path, line())[0], state())

    # ---------------------------------------------------------------------------------------- structures

    @pytest.fixture(params=ROUND_TRIPS)
    def tree(self, request):
        return ROUND_TRIPS[request.param]()

    def test_every_tree_comes_back_as_it_was(self, manager, path, tree):
        manager.save(tree, path)
        for loaded in (manager.load(path, None)[0], manager.load_tree_parallel(path)[0]):
            assert_same(loaded, tree)

    def test_every_tree_comes_back_under_a_prefix(self, manager, path, tree):
        assert manager.save_pytree(tree, path, prefix="model") == str(path)
        assert_same(manager.load_pytree(path, None, prefix="model")[0], tree)

    def test_numpy_arrays_of_every_layout_come_back(self, manager, path):
        a = np.arange(600, dtype=np.float32).reshape(20, 30)
        views = {
            "strided": a[::3],
            "fortran": np.asfortranarray(a),
            "transposed": a.T,
            "reversed": a[::-1],
            "broadcast": np.broadcast_to(a[0], (4, 30)),
            "block": a[3:5, 7:9],
            "big endian": a.astype(">f4"),
        }
        manager.save(views, path)
        loaded, _ = manager.load(path, line())
        for name, view in views.items():
            np.testing.assert_array_equal(loaded[name], view, err_msg=name)
            assert loaded[name].dtype == np.float32

    def test_keys_that_read_alike_are_told_apart(self, manager, path):
        tree = {
            "a.b": jnp.ones(2),
            "a": {"b": jnp.zeros(3), "0": jnp.ones(1)},
            "a.0": jnp.zeros(1),
            "c": {1: jnp.ones(2)},
            "c.1": jnp.zeros(2),
        }
        manager.save(tree, path)
        assert_same(manager.load(path, line())[0], tree)

    def test_hostile_keys_stay_inside(self, manager, path):
        tree = {key: jnp.full(2, i) for i, key in enumerate(HOSTILE)} | {"x": {"..": {"..": jnp.ones(1)}}}
        manager.save(tree, path)
        assert_same(manager.load(path, line())[0], tree)
        outside = [p for p in path.parent.parent.rglob("*") if path not in (p, *p.parents)]
        assert outside == [path.parent]

    def test_64_bit_leaves_never_narrow(self, manager, path, caplog):
        with jax.enable_x64(True):
            manager.save({"i": jnp.array([2**40 + 5]), "f": jnp.array([1e300])}, path)
            loaded = manager.load(path, line())[0]
            assert (loaded["i"].dtype, loaded["f"].dtype) == (jnp.int64, jnp.float64)
        loaded, _ = manager.load(path, None)
        assert (loaded["i"][0], loaded["f"][0]) == (2**40 + 5, 1e300)
        assert "2 leaves are returned as numpy arrays" in caplog.text
        with pytest.raises(
            ValueError, match=r"(?s)'f' is float64.*'i' is int64|'i' is int64.*'f' is float64"
        ):
            manager.load(path, line())

    @pytest.mark.parametrize("offload", [False, True])
    def test_64_bit_leaves_do_not_narrow_when_they_are_gathered(self, manager, path, offload):
        with jax.enable_x64(True):
            wide = jax.device_put(jnp.arange(2**40, 2**40 + 8), on(line(), "model"))
        manager.save({"w": wide}, path, do_all_gather=True, cpu_offload=offload)
        np.testing.assert_array_equal(manager.load(path, None)[0]["w"], np.arange(2**40, 2**40 + 8))

    def test_64_bit_numpy_leaves_stay_numpy(self, manager, path):
        tree = {"ids": np.array([2**40 + 5]), "w": jnp.ones(8)}
        manager.save(tree, path)
        assert_same(manager.load(path, line())[0], tree)

    def test_64_bit_numpy_leaves_stay_numpy_if_the_rules_are_about_others(self, manager, path):
        manager.save({"ids": np.array([2**40 + 5]), "kernel": jnp.ones((8, 2))}, path)
        loaded, _ = manager.load(path, grid(), partition_rules=[(".*kernel", P("model", None))])
        assert_same(loaded["ids"], np.array([2**40 + 5]))
        assert loaded["kernel"].sharding == on(grid(), "model", None)

    def test_a_64_bit_float_may_be_cast_to_what_jax_holds(self, manager, path):
        manager.save({"w": np.linspace(0, 1, 8)}, path)
        loaded, _ = manager.load(path, grid(), partition_rules=[("w", P("model"))], dtype="fp32")
        assert loaded["w"].sharding == on(grid(), "model")
        np.testing.assert_array_equal(loaded["w"], np.linspace(0, 1, 8).astype(np.float32))

    def test_a_class_that_was_not_registered_is_named_and_a_template_builds_it(self, manager, path):
        manager.save_pytree(Unregistered(jnp.ones(3)), path, prefix="m")
        with pytest.raises(ValueError, match=r"Unregistered.*register_node"):
            manager.load(path, line())
        template = Unregistered(jax.ShapeDtypeStruct((3,), jnp.float32))
        loaded, _ = manager.load_pytree(path, line(), prefix="m", template=template)
        assert_same(loaded, Unregistered(jnp.ones(3)))

    # ----------------------------------------------------------------------------------- saved once more

    def test_a_save_replaces_the_one_before_whatever_it_was(self, manager, path):
        rows, columns = on(line(), "model"), on(line(), None, "model")
        for tree in (
            {"w": jnp.ones((8, 8)), "v": jnp.zeros(3)},
            {"w": jnp.ones((4, 16))},
            {"w": jnp.ones((8, 8), jnp.bfloat16)},
            {"w": jax.device_put(jnp.ones((8, 8)), rows)},
            {"w": jax.device_put(jnp.ones((8, 8)), columns)},
            {"w": {"deeper": jnp.ones(2)}, "n": 3},
            {},
            [jnp.ones(1)],
        ):
            manager.save(tree, path)
            assert_same(manager.load(path, line())[0], tree)
            assert checkpoint.verify(path).ok

    def test_nothing_is_left_of_what_was_replaced(self, manager, path):
        manager.save({f"w{i}": jnp.ones(100) for i in range(5)}, path)
        manager.save({"w0": jnp.ones(100)}, path)
        once = sorted(p for p in path.parent.rglob("*") if p.is_file())
        manager.save({"w0": jnp.ones(100)}, path)
        again = sorted(p for p in path.parent.rglob("*") if p.is_file())
        assert len(again) == len(once) <= 4

    def test_a_failed_save_keeps_the_one_before_and_spoils_none_after(self, manager, path):
        manager.save(state(), path)
        for call in (
            lambda: manager.save({"fine": jnp.ones(3), "bad": NOTHING_TO_STORE}, path),
            lambda: manager.save_async({"bad": np.array(["text"])}, path),
            lambda: manager.save_pytree({"bad": NOTHING_TO_STORE}, path, prefix="m"),
        ):
            with pytest.raises((TypeError, ValueError), match="'bad'"):
                call()
            assert_same(manager.load(path, line())[0], state())
        manager.save(state(1), path)
        assert_same(manager.load(path, line())[0], state(1))

    def test_a_save_that_cannot_be_made_spoils_none_after(self, manager, path):
        path.parent.mkdir()
        (path.parent / "file").write_text("in the way")
        with pytest.raises(OSError, match="file"):
            manager.save(state(), path.parent / "file" / self.name)
        manager.save(state(1), path)
        manager.wait_until_finished()
        assert_same(manager.load(path, line())[0], state(1))


class TestTensorStore(TensorStore, Saves):
    pass


@pytest.mark.sample(5)
class TestCompressed(Compressed, Saves):
    pass


@pytest.mark.sample(3)
class TestSafetensors(Safetensors, Saves):
    pass


@pytest.mark.sample(5)
class TestOneFile(OneFile, Saves):
    pass
