"""The documented manager: every argument on every backend, and what it does beyond them."""

import asyncio
import dataclasses
import gc
import hashlib
import inspect
import json
import logging
import os
import re
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
import safetensors
import safetensors.numpy
import tensorstore
import xxhash
from jax.experimental.array_serialization.serialization import GlobalAsyncCheckpointManager
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from eformer import checkpoint
from eformer.checkpoint import SaveOptions
from eformer.paths import GCSPath, LocalPath, ePath
from eformer.serialization.async_manager import AsyncCheckpointManager, CheckpointMetadata
from support.trees import HOSTILE, Layer, Moments, Pair, Unregistered, assert_same

Manager = AsyncCheckpointManager


@pytest.fixture(autouse=True, scope="module")
def _trusted():
    checkpoint.register_node(Moments)


def line():
    return Mesh(np.array(jax.devices()), ("model",))


def grid():
    return Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))


def tall():
    return Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))


def on(mesh, *spec):
    return NamedSharding(mesh, P(*spec))


def state(seed=0):
    """Floats of two widths, integers, booleans, a key and plain values; sorted, as JAX sorts dicts."""
    rng = np.random.default_rng(seed)
    return {
        "block": {
            "bias": jnp.arange(8, dtype=jnp.bfloat16),
            "kernel": jnp.asarray(rng.normal(size=(16, 8)), jnp.float32),
        },
        "lr": 0.1,
        "mask": jnp.asarray([True, False]),
        "name": f"run {seed}",
        "rng": jax.random.key(seed),
        "step": jnp.int32(100_001 + seed),
    }


# What cannot be stored, and what JAX cannot have under a mesh.
NOTHING_TO_STORE = object()

ROUND_TRIPS = {
    "dict": {"b": jnp.ones(3), "a": {"c": jnp.zeros((2, 2), jnp.int8)}},
    "list": [jnp.ones(2), [jnp.zeros(1), []], ()],
    "more than ten": [jnp.full(1, i) for i in range(12)],
    "tuple": (jnp.ones(2), (1, "text", None)),
    "namedtuple": Moments(jnp.ones(2), {"x": Moments(1, 2)}),
    "dataclass": Layer(jnp.ones(3), None, "static"),
    "custom node": Pair(jnp.ones(2), 3, "tag"),
    "optimizer": optax.adam(1e-3).init({"w": jnp.ones(3)}),
    "int keys": {1: jnp.ones(1), 2: {10: jnp.zeros(2)}},
    "empty": {},
    "empty inside": {"a": {}, "b": [], "c": (), "d": None, "e": {"f": {}}},
    "no arrays": {"step": 3, "lr": 0.5, "on": True, "who": "é", "raw": b"\0x", "c": 1 + 2j, "none": None},
    "bare array": jnp.arange(6).reshape(2, 3),
    "bare number": 3,
    "bare text": "text",
    "nothing": None,
    "zero size": {"a": jnp.zeros((0, 3)), "b": np.zeros((2, 0), np.int16)},
    "zero axes": {"a": jnp.float32(3), "b": np.array(2, np.int8)},
    "numpy": {"a": np.arange(5), "b": np.ones((2, 3), np.float16), "c": np.float32(2)},
    "keys": {"k": jax.random.split(jax.random.key(1), (2, 2)), "rbg": jax.random.key(3, impl="rbg")},
    "narrow": {
        "i4": jnp.ones(5, jnp.int4),
        "u4": jnp.ones(3, jnp.uint4),
        "f8": jnp.ones(3, jnp.float8_e4m3fn),
    },
}


def flat(tree):
    """The leaves by the keys of the documents."""
    keys = jax.tree_util.tree_leaves_with_path(tree)
    return {
        ".".join(jax.tree_util.keystr((entry,), simple=True) for entry in path): leaf for path, leaf in keys
    }


def arrays_of(tree):
    return {key: leaf for key, leaf in flat(tree).items() if hasattr(leaf, "dtype")}


def is_floating(leaf):
    return jnp.issubdtype(leaf.dtype, jnp.floating)


def forge(file, old, new):
    """Changes a sealed record so that nobody can tell it from the one that was written."""
    data = file.read_bytes()
    length = 8 + int.from_bytes(data[:8], "little") if file.suffix == ".safetensors" else len(data)
    record = data[:length].replace(old.encode(), new.encode())
    at = record.index(b'"digest":"') + len(b'"digest":"')
    blank = record[:at] + b"0" * 32 + record[at + 32 :]
    digest = xxhash.xxh3_128_hexdigest(blank).encode()
    file.write_bytes(blank[:at] + digest + blank[at + 32 :] + data[length:])
    assert record != data[:length]


class ManagerContract:
    """What the manager does wherever it saves to. A backend says how it is made and where it saves."""

    arguments: dict = {}
    name = "checkpoint"
    is_compressed = False

    @pytest.fixture
    def path(self, tmp_path):
        return tmp_path / "inner" / self.name

    def make(self, **arguments):
        return AsyncCheckpointManager(**{**self.arguments, **arguments})

    @pytest.fixture
    def manager(self):
        return self.make()

    def record_of(self, path):
        """The file that says what is in the checkpoint."""
        raise NotImplementedError

    def data_of(self, path, key):
        """The file that the bytes of an array without prefix are in."""
        raise NotImplementedError

    def damage(self, path, key, value):
        """Flips a bit of an array; returns the file."""
        file = self.data_of(path, key)
        data = bytearray(file.read_bytes())
        at = data.find(np.asarray(value).tobytes()) if not self.is_compressed else len(data) // 2
        assert at >= 0
        data[at] ^= 1
        file.write_bytes(data)
        return file

    # ------------------------------------------------------------------------------ what it is made of

    @pytest.mark.parametrize("enable", [None, True])
    def test_saving_is_on_unless_it_is_turned_off(self, path, enable):
        self.make(enable=enable).save(state(), path)
        assert_same(self.make().load(path, line())[0], state())

    def test_saving_that_is_turned_off_says_so_and_writes_nothing(self, path, caplog):
        manager = self.make(enable=False)
        assert manager.save(state(), path) == str(path)
        assert manager.save_pytree(state(), path, prefix="model") == str(path)
        assert manager.save_async(state(), path).result() == str(path)
        assert caplog.text.count("saving is turned off") == 3
        assert not path.parent.exists()

    def test_a_manager_that_does_not_save_still_loads(self, manager, path):
        manager.save(state(), path)
        assert_same(self.make(enable=False).load(path, line())[0], state())

    def test_without_a_dtype_every_bit_is_kept(self, manager, path):
        tree = {"d": np.array(np.pi), "f": jnp.float32(1.123456), "h": jnp.float16(1.123)}
        assert manager.float_dtype is None
        manager.save(tree, path, do_all_gather=True)
        assert_same(manager.load(path, line())[0], tree)

    @pytest.mark.parametrize(
        ("dtype", "kind"),
        [
            ("bf16", jnp.bfloat16),
            ("fp16", jnp.float16),
            ("fp32", jnp.float32),
            ("float8_e4m3fn", jnp.float8_e4m3fn),
            (jnp.bfloat16, jnp.bfloat16),
            (np.dtype("float16"), jnp.float16),
        ],
        ids=str,
    )
    def test_a_dtype_casts_floats_alone_wherever_it_is_given(self, manager, path, dtype, kind):
        expected = jax.tree.map(
            lambda x: x.astype(kind) if hasattr(x, "dtype") and is_floating(x) else x, state()
        )
        self.make(float_dtype=dtype).save(state(), path, mesh=line())
        assert_same(manager.load(path, line())[0], expected)
        manager.save(state(), path, float_dtype=dtype)
        assert_same(manager.load(path, line())[0], expected)
        manager.save_pytree(state(), path.with_name("other" + path.suffix), prefix="m", dtype=dtype)
        assert_same(
            manager.load_pytree(path.with_name("other" + path.suffix), line(), prefix="m")[0], expected
        )

    def test_the_dtype_of_the_call_wins(self, manager, path):
        self.make(float_dtype="bf16").save({"w": jnp.ones(3)}, path, float_dtype="fp16")
        assert manager.load(path, line())[0]["w"].dtype == jnp.float16

    def test_a_float_of_numpy_is_cast_and_other_numbers_are_not(self, path):
        tree = {
            "f": np.linspace(0, 1, 5),
            "i": np.array([2**60 + 1]),
            "c": jnp.ones(2, jnp.complex64),
            "x": 0.1,
        }
        self.make(float_dtype="bf16").save(tree, path)
        expected = tree | {"f": tree["f"].astype(ml_dtypes.bfloat16)}
        assert_same(self.make().load(path, None)[0], expected)

    @pytest.mark.parametrize("dtype", ["bfloat", "int8", "", jnp.int32, 3], ids=repr)
    def test_an_unknown_dtype_is_refused_with_the_known(self, manager, path, dtype):
        manager.save(state(), path, prefix="m")
        for call in (
            lambda: self.make(float_dtype=dtype),
            lambda: manager.save(state(1), path, float_dtype=dtype, prefix="m"),
            lambda: manager.save_async(state(1), path, float_dtype=dtype, prefix="m"),
            lambda: manager.save_pytree(state(1), path, prefix="m", dtype=dtype),
            lambda: manager.load(path, line(), dtype=dtype),
            lambda: manager.load_tree_parallel(path, dtype=dtype),
            lambda: manager.load_pytree(path, line(), prefix="m", dtype=dtype),
        ):
            with pytest.raises(ValueError, match=r"not a floating dtype; known dtypes: .*bfloat16.*bf16"):
                call()
        assert_same(manager.load(path, line())[0], state())

    def test_a_verbose_manager_tells_what_it_does(self, path, caplog):
        with caplog.at_level(logging.INFO, "eformer"):
            self.make().save(state(), path)
            self.make().load(path, line())
            assert caplog.text == ""
            self.make(verbose=True).save(state(), path)
            self.make(verbose=True).load(path, line())
        assert f"saving to {path}" in caplog.text
        assert f"loading from {path}" in caplog.text

    def test_with_a_bucket_relative_paths_lead_into_it_and_others_do_not(self, path):
        manager = self.make(gcs_bucket="bucket")
        where = f"runs/{self.name}"
        for call in (
            lambda: manager.save({}, where),
            lambda: manager.save({}, Path(where)),
            lambda: manager.save_async({}, where),
            lambda: manager.save_pytree({}, where, prefix="m"),
            lambda: manager.load(where, line()),
            lambda: manager.load_pytree(where, line(), prefix="m"),
            lambda: manager.load_tree_parallel(where),
        ):
            with pytest.raises(ValueError, match=f"gs://bucket/{where} is no path of this machine"):
                call()
        manager.save(state(), path)
        assert_same(manager.load(path, line())[0], state())

    def test_an_address_is_not_taken_for_a_path(self, manager):
        for where in ("gs://bucket/x", GCSPath("gs://bucket/x"), "s3://bucket/x"):
            for call in (lambda w: manager.save({}, w), lambda w: manager.load(w, line())):
                with pytest.raises(ValueError, match=r"//bucket/x is no path of this machine"):
                    call(where)

    def test_credentials_have_to_be_a_file(self, tmp_path):
        with pytest.raises(FileNotFoundError, match=r"gcs_credentials_path='/no/such\.json'"):
            self.make(gcs_bucket="bucket", gcs_credentials_path="/no/such.json")
        (tmp_path / "key.json").write_text("{}")
        manager = self.make(gcs_bucket="bucket", gcs_credentials_path=str(tmp_path / "key.json"))
        assert manager.gcs_credentials_path == str(tmp_path / "key.json")

    # ------------------------------------------------------------------------------------- validation

    def test_validation_records_the_checksum_of_every_array(self, path):
        tree = state() | {
            "sharded": jax.device_put(jnp.arange(64.0).reshape(8, 8), on(grid(), "data", "model")),
            "strided": np.arange(20.0)[::3],
            "big": np.arange(3, dtype=">i4"),
            "four bits": jnp.ones(5, jnp.int4),
            "empty": jnp.zeros((0, 3)),
        }
        manager = self.make(enable_validation=True)
        manager.save(tree, path)
        loaded, metadata = manager.load(path, line())
        assert metadata["checksum"] == {k: Manager.compute_checksum(x) for k, x in arrays_of(tree).items()}
        assert metadata["checksum"] == {k: Manager.compute_checksum(x) for k, x in arrays_of(loaded).items()}

    def test_without_validation_there_are_no_checksums(self, manager, path):
        manager.save(state(), path)
        assert manager.load(path, line())[1]["checksum"] == {}
        assert_same(manager.load(path, line(), validate=True)[0], state())

    def test_a_checksum_is_that_of_what_is_stored(self, path):
        self.make(enable_validation=True, float_dtype="bf16").save({"w": jnp.linspace(0, 1, 9)}, path)
        loaded, metadata = self.make().load(path, line(), validate=True)
        assert metadata["checksum"] == {"w": Manager.compute_checksum(loaded["w"])}

    @pytest.fixture
    def forged(self, path):
        """A checkpoint in which only the SHA-256 of one array is wrong."""
        self.make(enable_validation=True).save(
            {"a": {"w": jnp.arange(5.0)}, "v": jnp.arange(3)}, path, prefix="m"
        )
        right = Manager.compute_checksum(jnp.arange(5.0))
        forge(self.record_of(path), right, "0" * 64)
        return path

    def test_a_wrong_checksum_is_an_error_that_names_leaf_and_path(self, forged):
        validating, plain = self.make(enable_validation=True), self.make()
        for call in (
            lambda: validating.load(forged, line()),
            lambda: validating.load_tree_parallel(forged),
            lambda: validating.load_pytree(forged, line(), prefix="m"),
            lambda: plain.load(forged, line(), validate=True),
            lambda: plain.load_tree_parallel(forged, validate=True),
        ):
            with pytest.raises(
                ValueError,
                match=rf"{re.escape(str(forged))}: validation failed: leaf 'a\.w' in \S+ has SHA-256",
            ):
                call()

    def test_a_wrong_checksum_matters_only_to_who_validates(self, forged):
        for tree, _ in (
            self.make().load(forged, line()),
            self.make().load_pytree(forged, line(), prefix="m"),
            self.make(enable_validation=True).load(forged, line(), validate=False),
            self.make(enable_validation=True).load_tree_parallel(forged, validate=False),
        ):
            np.testing.assert_array_equal(tree["a"]["w"], np.arange(5.0))

    @pytest.mark.parametrize("enable_validation", [False, True])
    @pytest.mark.parametrize("validate", [None, True])
    def test_a_flipped_bit_is_an_error_that_names_leaf_and_file(self, path, validate, enable_validation):
        tree = {"good": jnp.ones(50), "bad": jnp.linspace(1, 2, 100)}
        self.make(enable_validation=enable_validation).save(tree, path)
        file = self.damage(path, "bad", tree["bad"][40:60])
        for manager in (self.make(), self.make(enable_validation=True)):
            with pytest.raises(ValueError, match=rf"'bad': .*{re.escape(file.name)}"):
                manager.load(path, line(), validate=validate)

    def test_validate_false_skips_the_digests(self, path):
        tree = {"w": jnp.linspace(1, 2, 100)}
        self.make(enable_validation=True).save(tree, path)
        self.damage(path, "w", tree["w"])
        loaded, _ = self.make(enable_validation=True).load(path, line(), validate=False)
        assert int(np.sum(np.asarray(loaded["w"]) != np.asarray(tree["w"]))) == 1

    # ------------------------------------------------------------------------------------------- save

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

    # ------------------------------------------------------------------------------------- structures

    @pytest.mark.parametrize("tree", ROUND_TRIPS.values(), ids=ROUND_TRIPS)
    def test_every_tree_comes_back_as_it_was(self, manager, path, tree):
        manager.save(tree, path)
        for loaded in (manager.load(path, line())[0], manager.load_tree_parallel(path)[0]):
            assert_same(loaded, tree)

    @pytest.mark.parametrize("tree", ROUND_TRIPS.values(), ids=ROUND_TRIPS)
    def test_every_tree_comes_back_under_a_prefix(self, manager, path, tree):
        assert manager.save_pytree(tree, path, prefix="model") == str(path)
        assert_same(manager.load_pytree(path, grid(), prefix="model")[0], tree)

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

    # ------------------------------------------------------------------------------------------- load

    def test_nothing_there_is_file_not_found(self, manager, path):
        def refused(where):
            for call in (
                lambda: manager.load(where, line()),
                lambda: manager.load_pytree(where, line(), prefix="m"),
                lambda: manager.load_tree_parallel(where),
            ):
                with pytest.raises(FileNotFoundError, match=re.escape(str(where))):
                    call()

        refused(path)
        path.mkdir(parents=True)
        refused(path)
        (path / "notes.txt").write_text("nothing to see")
        (path / "more").mkdir()
        refused(path)

    def test_a_directory_of_checkpoints_is_no_checkpoint(self, manager, path):
        for name in ("1", "2"):
            manager.save({"w": jnp.ones(2)}, path.parent / name / self.name)
        for mesh in (None, line()):
            with pytest.raises(FileNotFoundError, match="holds no checkpoint"):
                manager.load(path.parent, mesh)
        assert not Manager.is_tensorstore(path.parent)

    def test_loaded_arrays_are_on_the_mesh(self, manager, path):
        manager.save({"w": jnp.ones((8, 4)), "n": jnp.int32(3)}, path)
        loaded, _ = manager.load(path, line())
        assert loaded["w"].sharding == loaded["n"].sharding == on(line())

    def test_without_a_mesh_arrays_are_on_the_default_device(self, manager, path):
        manager.save({"w": jnp.ones((8, 4))}, path)
        for loaded in (manager.load(path, None)[0], manager.load_tree_parallel(path)[0]):
            assert loaded["w"].devices() == {jax.devices()[0]}

    def test_arrays_lie_as_they_were_saved_if_the_mesh_has_their_axes(self, manager, path):
        manager.save({"w": jax.device_put(jnp.ones((8, 8)), on(grid(), "data", "model"))}, path)
        for mesh in (grid(), tall()):
            assert manager.load(path, mesh)[0]["w"].sharding == on(mesh, "data", "model")
        assert manager.load(path, line())[0]["w"].sharding == on(line())

    def test_on_a_mesh_of_several_axes_somebody_has_to_say(self, manager, path):
        manager.save({"a": {"w": jnp.ones((8, 8))}, "s": jnp.float32(1), "n": np.ones(3)}, path, prefix="m")
        with pytest.raises(ValueError, match=r"'a\.w'.*partition_rules.*shardings"):
            manager.load(path, grid())
        loaded, _ = manager.load_pytree(path, grid(), prefix="m")
        assert loaded["a"]["w"].sharding == on(grid())

    @pytest.mark.parametrize("nested", [False, True])
    def test_shardings_are_flat_or_nested_and_of_every_kind(self, manager, path, nested):
        manager.save(
            {"a": {"w": jnp.ones((8, 8)), "v": jnp.ones(8), "u": jnp.arange(8)}, "b": jnp.ones(8)}, path
        )
        said = {"w": on(line(), None, "model"), "v": P("model"), "u": partial(jnp.multiply, 2)}
        shardings = {"a": said} if nested else {f"a.{key}": value for key, value in said.items()}
        loaded, _ = manager.load(path, line(), shardings)
        assert loaded["a"]["w"].sharding == on(line(), None, "model")
        assert loaded["a"]["v"].sharding == on(line(), "model")
        np.testing.assert_array_equal(loaded["a"]["u"], 2 * np.arange(8))
        assert loaded["b"].sharding == on(line())

    def test_one_sharding_may_be_for_all(self, manager, path):
        manager.save({"a": jnp.ones(8), "b": {"c": jnp.ones((8, 2))}}, path)
        for sharding in (on(grid(), "model"), P("model")):
            loaded, _ = manager.load(path, grid(), sharding)
            assert loaded["a"].sharding == loaded["b"]["c"].sharding == on(grid(), "model")
        assert isinstance(manager.load(path, line(), np.asarray)[0]["b"]["c"], np.ndarray)

    def test_what_needs_a_mesh_says_so(self, manager, path):
        manager.save({"w": jnp.ones(8)}, path)
        for call in (
            lambda: manager.load(path, None, {"w": P("model")}),
            lambda: manager.load(path, None, partition_rules=[("w", P("model"))]),
            lambda: manager.load_tree_parallel(path, {"w": P("model")}),
        ):
            with pytest.raises(ValueError, match=r"need.* a mesh"):
                call()

    def test_lists_have_shardings_by_position(self, manager, path):
        manager.save([jnp.ones(8), (jnp.ones(8), jnp.ones(8))], path)
        rows = on(line(), "model")
        for shardings in ({"0": rows, "1.1": rows}, [rows, (None, rows)]):
            loaded, _ = manager.load(path, line(), shardings)
            assert loaded[0].sharding == loaded[1][1].sharding == rows
            assert loaded[1][0].sharding == on(line())

    def test_a_leaf_without_sharding_is_a_key_error_if_that_is_not_allowed(self, manager, path):
        manager.save({"a": jnp.ones(8), "b": {"c": jnp.ones(8)}, "n": 3}, path)
        rows = on(line(), "model")
        with pytest.raises(KeyError, match=r"'b\.c'"):
            manager.load(path, line(), {"a": rows}, mismatch_allowed=False)
        with pytest.raises(KeyError, match=r"'b\.c'"):
            manager.load_tree_parallel(path, {"a": np.asarray}, mismatch_allowed=False)
        loaded, _ = manager.load(path, line(), {"a": rows, "b": {"c": rows}}, mismatch_allowed=False)
        assert loaded["b"]["c"].sharding == rows
        assert manager.load(path, line(), {"a": rows})[0]["a"].sharding == rows

    def test_a_sharding_of_no_leaf_or_of_no_kind_is_named(self, manager, path):
        manager.save({"kernel": jnp.ones(8)}, path)
        with pytest.raises(ValueError, match=r"'kernels'.*nearest is 'kernel'"):
            manager.load(path, line(), {"kernels": P("model")})
        with pytest.raises(ValueError, match=r"'kernel': 3 is no Sharding, PartitionSpec or callable"):
            manager.load(path, line(), {"kernel": 3})

    def test_the_callback_replaces_arrays_by_key(self, manager, path):
        manager.save(
            {"a": {"w": jnp.ones(3)}, "b": [jnp.ones(2)], "a.c": jnp.zeros(1), "n": 3}, path, prefix="m"
        )
        loaded, _ = manager.load(path, line(), callback=lambda x, key: (key, x.shape))
        assert loaded == {"a": {"w": ("a.w", (3,))}, "b": [("b.0", (2,))], "a.c": ("a.c", (1,)), "n": 3}
        assert manager.load_tree_parallel(path, callback=lambda x, key: key)[0]["b"] == ["b.0"]
        assert manager.load_pytree(path, line(), prefix="m", callback=lambda x, key: key)[0]["b"] == ["b.0"]

    def test_the_callback_gets_the_array_as_it_will_be(self, manager, path):
        manager.save({"w": jnp.ones((8, 8))}, path)
        seen = []
        manager.load(
            path,
            line(),
            {"w": P("model")},
            dtype="bf16",
            callback=lambda x, _: seen.append((x.sharding, x.dtype)),
        )
        assert seen == [(on(line(), "model"), jnp.bfloat16)]

    def test_an_error_of_the_callers_function_is_the_callers(self, manager, path):
        manager.save({"w": jnp.ones(3)}, path)

        def broken(*_):
            raise FileNotFoundError("mine")

        for arguments in ({"callback": broken}, {"shardings": {"w": broken}}):
            with pytest.raises(FileNotFoundError, match=r"^mine$"):
                manager.load(path, line(), **arguments)

    def test_the_example_of_the_documents_works_on_any_tree(self, manager, path):
        manager.save(state() | {"n": np.ones(3, np.float32), "list": [jnp.ones((16, 4))]}, path)
        rules = [(".*kernel", P("model", None))]
        loaded, _ = manager.load(path, grid(), partition_rules=rules)
        assert loaded["block"]["kernel"].sharding == on(grid(), "model", None)
        for leaf in (
            loaded["block"]["bias"],
            loaded["mask"],
            loaded["step"],
            loaded["list"][0],
            loaded["rng"],
        ):
            assert leaf.sharding == on(grid())
        assert loaded["name"] == "run 0"

    def test_the_first_rule_that_is_found_in_the_path_wins(self, manager, path):
        tree = {
            "block": {"kernel": jnp.ones((8, 8)), "out": {"kernel": jnp.ones((8, 8))}},
            "kernel": jnp.ones((8, 8)),
        }
        manager.save(tree, path, prefix="m")
        rules = (("^block/kernel$", P("data")), ("block/.*kernel", P(None, "model")), ("m/|[.]", P("model")))
        for loaded, _ in (
            manager.load(path, grid(), partition_rules=rules),
            manager.load_pytree(path, grid(), prefix="m", partition_rules=list(rules)),
        ):
            assert loaded["block"]["kernel"].sharding == on(grid(), "data")
            assert loaded["block"]["out"]["kernel"].sharding == on(grid(), None, "model")
            assert loaded["kernel"].sharding == on(grid())

    def test_scalars_are_replicated_whatever_the_rule(self, manager, path):
        manager.save({"step": jnp.int32(3), "w": jnp.ones(8)}, path)
        loaded, _ = manager.load(path, grid(), partition_rules=[(".*", P("model"))])
        assert loaded["step"].sharding == on(grid())
        assert loaded["w"].sharding == on(grid(), "model")

    def test_shardings_win_over_rules(self, manager, path):
        manager.save({"a": jnp.ones(8), "b": jnp.ones(8)}, path)
        rules = [(".*", P("model"))]
        loaded, _ = manager.load(path, grid(), {"a": P("data")}, partition_rules=rules)
        assert loaded["a"].sharding == on(grid(), "data")
        assert loaded["b"].sharding == on(grid(), "model")

    def test_specs_that_do_not_fit_are_listed_at_once(self, manager, path):
        manager.save(
            {"odd": jnp.ones(7), "flat": jnp.ones(8), "x": {"axis": jnp.ones(8)}, "fine": jnp.ones(8)}, path
        )
        rules = [
            ("odd", P("model")),
            ("flat", P("data", "model")),
            ("axis", P("stage")),
            ("fine", P("model")),
        ]
        with pytest.raises(ValueError, match="3 mismatches") as error:
            manager.load(path, grid(), partition_rules=rules)
        for name in ("'odd'", "'flat'", "'x.axis'"):
            assert name in str(error.value)
        assert "'fine'" not in str(error.value)

    def test_a_rule_that_is_no_pattern_is_named(self, manager, path):
        manager.save({"w": jnp.ones(8)}, path)
        with pytest.raises(ValueError, match=r"'\(' is no regular expression"):
            manager.load(path, grid(), partition_rules=[("(", P())])

    @pytest.mark.parametrize("dtype", ["bf16", jnp.float16, "float8_e4m3fn"], ids=str)
    def test_a_dtype_casts_floats_alone_on_load(self, manager, path, dtype):
        manager.save(state(), path, prefix="m")
        kind = jnp.bfloat16 if dtype == "bf16" else jnp.dtype(dtype)
        expected = jax.tree.map(
            lambda x: x.astype(kind) if hasattr(x, "dtype") and is_floating(x) else x, state()
        )
        for loaded, _ in (
            manager.load(path, line(), dtype=dtype),
            manager.load_tree_parallel(path, dtype=dtype),
            manager.load_pytree(path, line(), prefix="m", dtype=dtype),
        ):
            assert_same(loaded, expected)

    def test_one_prefix_need_not_be_said(self, manager, path):
        manager.save(state(), path, prefix="model")
        for prefix in (None, "model"):
            assert_same(manager.load(path, line(), prefix=prefix)[0], state())

    def test_an_unknown_prefix_is_refused_with_the_available(self, manager, path):
        manager.save(state(), path, prefix="model")
        for call in (
            lambda: manager.load(path, line(), prefix="modle"),
            lambda: manager.load_pytree(path, line(), prefix="modle"),
        ):
            with pytest.raises(ValueError, match=r"no prefix 'modle'.*available are \['model'\]"):
                call()

    def test_the_old_name_of_the_prefix_warns(self, manager, path):
        manager.save(state(), path, prefix="model")
        with pytest.warns(DeprecationWarning, match="use prefix") as caught:
            assert_same(manager.load(path, line(), prefix_filter="model")[0], state())
        assert caught[0].filename == __file__
        with (
            pytest.warns(DeprecationWarning, match="use prefix"),
            pytest.raises(ValueError, match="no prefix 'opt'"),
        ):
            manager.load(path, line(), prefix_filter="opt")
        with (
            pytest.warns(DeprecationWarning, match="use prefix"),
            pytest.raises(ValueError, match="contradict"),
        ):
            manager.load(path, line(), prefix="model", prefix_filter="opt")

    def test_a_parallel_load_takes_the_prefix_by_its_old_name(self, manager, path):
        manager.save(state(), path, prefix="model")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            assert_same(manager.load_tree_parallel(path, prefix_filter="model")[0], state())
            with pytest.raises(ValueError, match="no prefix 'opt'"):
                manager.load_tree_parallel(path, prefix_filter="opt")

    @pytest.mark.parametrize("arguments", [{"use_async": False}, {"chunk_size": 1}, {"chunk_size": 3}])
    def test_what_is_read_at_a_time_is_bounded(self, manager, path, arguments):
        manager.save([jnp.full(100, i) for i in range(9)], path)
        gc.collect()  # arrays of earlier tests do not go meanwhile
        before, seen = len(jax.live_arrays()), []
        most = arguments.get("chunk_size", 1)
        loaded, _ = manager.load(
            path, line(), callback=lambda x, key: seen.append(len(jax.live_arrays()) - before), **arguments
        )
        assert loaded == [None] * 9
        assert max(seen) <= most
        seen.clear()
        manager.load(path, line(), callback=lambda x, key: seen.append(len(jax.live_arrays()) - before))
        assert max(seen) == 9

    def test_a_sequential_load_is_the_same(self, manager, path):
        manager.save(state(), path)
        assert_same(manager.load(path, line(), use_async=False)[0], state())

    def test_a_negative_chunk_size_is_refused(self, manager, path):
        manager.save(state(), path, prefix="m")
        for call in (
            lambda: manager.load(path, line(), chunk_size=-1),
            lambda: manager.load_pytree(path, line(), prefix="m", chunk_size=-1),
        ):
            with pytest.raises(ValueError, match="-1"):
                call()

    @pytest.mark.parametrize("after", [line, grid, tall])
    @pytest.mark.parametrize("before", ["rows", "columns", "2x4", "replicated", "one device"])
    def test_what_was_saved_on_one_mesh_loads_on_others(self, manager, path, before, after):
        saved = {
            "rows": on(line(), "model"),
            "columns": on(line(), None, "model"),
            "2x4": on(grid(), "data", "model"),
            "replicated": on(grid()),
            "one device": SingleDeviceSharding(jax.devices()[3]),
        }[before]
        array = np.arange(16 * 24, dtype=np.float32).reshape(16, 24)
        manager.save({"w": jax.device_put(array, saved)}, path)
        for spec in (P("model"), P(None, "model"), P()):
            loaded = manager.load(path, after(), partition_rules=[("w", spec)])[0]["w"]
            assert loaded.sharding == NamedSharding(after(), spec)
            for shard in loaded.addressable_shards:
                np.testing.assert_array_equal(shard.data, array[shard.index])

    def test_a_parallel_load_takes_functions_and_shardings(self, manager, path):
        manager.save({"a": jnp.ones(8), "b": {"c": jnp.ones(8)}, "d": jnp.arange(3)}, path)
        loaded, _ = manager.load_tree_parallel(path, {"a": np.asarray, "b": {"c": on(line(), "model")}})
        assert isinstance(loaded["a"], np.ndarray)
        assert loaded["b"]["c"].sharding == on(line(), "model")
        np.testing.assert_array_equal(loaded["d"], np.arange(3))

    # ---------------------------------------------------------------------------------------- pytrees

    @pytest.mark.parametrize("prefix", ["", None, 3, ["model"]], ids=repr)
    def test_a_pytree_needs_a_prefix(self, manager, path, prefix):
        with pytest.raises(ValueError, match="non-empty string prefix is required"):
            manager.save_pytree(state(), path, prefix=prefix)
        assert not path.exists()
        manager.save_pytree(state(), path, prefix="model")
        with pytest.raises(ValueError, match="non-empty string prefix is required"):
            manager.load_pytree(path, line(), prefix=prefix)

    def test_extras_come_back_as_metadata(self, manager, path):
        manager.save_pytree(state(), path, line(), prefix="model", extras={"step": 3, "who": ("me", None)})
        _, metadata = manager.load_pytree(path, line(), prefix="model")
        assert metadata["custom_metadata"] == {"step": 3, "who": ("me", None)}
        assert manager.load(path, line())[1] == metadata

    def test_offloading_is_what_a_pytree_does_unless_told(self, manager, path):
        for offload in ({}, {"cpu_offload": False}):
            manager.save_pytree(state(), path, prefix="model", **offload)
            assert_same(manager.load_pytree(path, line(), prefix="model")[0], state())

    def test_the_shardings_of_a_pytree_may_name_the_prefix(self, manager, path):
        manager.save_pytree({"a": {"w": jnp.ones(8)}, "b": jnp.ones(8)}, path, prefix="m")
        rows = on(line(), "model")
        for shardings in (
            {"a.w": rows, "b": np.asarray},
            {"m.a.w": rows, "m.b": np.asarray},
            {"m": {"a": {"w": rows}, "b": np.asarray}},
            {"a": {"w": rows}, "b": np.asarray},
        ):
            loaded, _ = manager.load_pytree(path, line(), prefix="m", shardings=shardings)
            assert loaded["a"]["w"].sharding == rows
            assert isinstance(loaded["b"], np.ndarray)

    def test_the_shardings_of_a_load_may_name_the_prefix(self, manager, path):
        manager.save({"a": {"w": jnp.ones(8)}}, path, prefix="m")
        rows = on(line(), "model")
        for shardings in ({"m.a.w": rows}, {"m": {"a": {"w": rows}}}):
            assert manager.load(path, line(), shardings, prefix="m")[0]["a"]["w"].sharding == rows

    def test_a_key_that_is_called_like_the_prefix_is_no_prefix(self, manager, path):
        manager.save_pytree({"model": {"w": jnp.ones(8)}}, path, prefix="model")
        rows = on(line(), "model")
        for shardings in ({"model": {"w": rows}}, {"model.w": rows}, {"model.model.w": rows}):
            loaded, _ = manager.load_pytree(path, line(), prefix="model", shardings=shardings)
            assert loaded["model"]["w"].sharding == rows

    def test_a_template_gives_the_structure_and_the_shardings(self, manager, path):
        manager.save_pytree({"a": jnp.arange(64.0).reshape(8, 8), "b": [jnp.ones(3), 5]}, path, prefix="m")
        template = {
            "a": jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=on(grid(), "data", "model")),
            "b": (jnp.zeros(3), 0),
        }
        loaded, _ = manager.load_pytree(path, grid(), prefix="m", template=template)
        assert loaded["a"].sharding == on(grid(), "data", "model")
        assert loaded["b"][0].sharding == on(grid())
        np.testing.assert_array_equal(loaded["a"], np.arange(64.0).reshape(8, 8))
        assert type(loaded["b"]) is tuple

    def test_values_come_from_the_checkpoint_and_never_from_the_template(self, manager, path):
        tree = {"key": jax.random.key(1), "n": np.arange(2), "name": "saved", "step": 5, "w": jnp.arange(3.0)}
        manager.save_pytree(tree, path, prefix="m")
        template = {
            "w": jnp.zeros(3),
            "n": np.zeros(2, int),
            "step": 7,
            "name": "other",
            "key": jax.random.key(9),
        }
        for strict in (True, False):
            loaded, _ = manager.load_pytree(path, None, prefix="m", template=template, strict_shapes=strict)
            assert_same(loaded, tree)

    def test_arguments_win_over_the_template(self, manager, path):
        manager.save_pytree({"a": jnp.ones(8), "b": jnp.ones(8)}, path, prefix="m")
        template = {
            name: jax.ShapeDtypeStruct((8,), jnp.float32, sharding=on(grid(), "data")) for name in ("a", "b")
        }
        loaded, _ = manager.load_pytree(
            path, grid(), prefix="m", template=template, shardings={"a": P("model")}
        )
        assert loaded["a"].sharding == on(grid(), "model")
        assert loaded["b"].sharding == on(grid(), "data")

    @pytest.mark.parametrize("strict", [True, False])
    def test_every_difference_to_the_template_is_in_one_error(self, manager, path, strict):
        tree = {
            "shape": jnp.ones((2, 3)),
            "dtype": jnp.ones(3),
            "kind": 3,
            "gone": jnp.ones(1),
            "same": jnp.ones(2),
        }
        manager.save_pytree(tree, path, prefix="m")
        template = {"shape": jnp.ones((3, 3)), "dtype": jnp.ones(3, jnp.int32), "kind": jnp.ones(1), "new": 1}
        with pytest.raises(ValueError, match="6 mismatches") as error:
            manager.load_pytree(
                path, line(), prefix="m", template=template | {"same": jnp.ones(2)} | {"more": jnp.ones(1)},
                strict_shapes=strict,
            )  # fmt: skip
        for name in ("shape", "dtype", "kind", "gone", "new", "more"):
            assert repr(name) in str(error.value)
        assert "'same'" not in str(error.value)

    def test_a_template_is_compared_with_what_the_dtype_makes(self, manager, path):
        manager.save_pytree({"w": jnp.ones(3), "i": jnp.arange(3)}, path, prefix="m")
        template = {"i": jnp.arange(3), "w": jnp.ones(3, jnp.bfloat16)}
        with pytest.raises(
            ValueError, match=r"'w': expected bfloat16\[3\], found float32\[3\]; dtype= casts"
        ):
            manager.load_pytree(path, line(), prefix="m", template=template)
        loaded, _ = manager.load_pytree(path, line(), prefix="m", template=template, dtype="bf16")
        assert_same(loaded, template)

    def test_a_leaf_of_as_many_elements_is_reshaped_if_shapes_are_not_strict(self, manager, path, caplog):
        tree = {
            "w": jnp.arange(16.0).reshape(2, 8),
            "n": np.arange(6),
            "one": jnp.ones((1, 3)),
            "s": jnp.float32(2),
        }
        manager.save_pytree(tree, path, prefix="m")
        template = {
            "w": jax.ShapeDtypeStruct((8, 2), jnp.float32, sharding=on(line(), "model")),
            "n": np.zeros((2, 3), int),
            "one": jnp.zeros(3),
            "s": jnp.zeros(1),
        }
        with pytest.raises(ValueError, match="4 mismatches"):
            manager.load_pytree(path, line(), prefix="m", template=template)
        loaded, _ = manager.load_pytree(path, line(), prefix="m", template=template, strict_shapes=False)
        for name, leaf in tree.items():
            np.testing.assert_array_equal(loaded[name], np.reshape(leaf, template[name].shape))
        assert loaded["w"].sharding == on(line(), "model")
        assert "leaf 'w' is reshaped from [2, 8] to [8, 2]" in caplog.text

    @pytest.mark.parametrize("shape", [(3,), (5, 6), (2, 1, 6), (6, 2)], ids=str)
    def test_a_leaf_of_another_size_is_an_error_also_if_shapes_are_not_strict(self, manager, path, shape):
        manager.save_pytree({"w": jnp.ones((2, 3))}, path, prefix="m")
        for template in ({"w": jnp.zeros(shape)}, {"w": jax.ShapeDtypeStruct(shape, jnp.float32)}):
            with pytest.raises(ValueError, match=rf"'w': expected float32{re.escape(str(list(shape)))}"):
                manager.load_pytree(path, line(), prefix="m", template=template, strict_shapes=False)

    # -------------------------------------------------------------------------------- saved once more

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

    # ------------------------------------------------------------------------------------------ async

    @pytest.fixture
    def blocked(self, tmp_path):
        """A path where nothing can be saved, which only the save itself finds out."""
        (tmp_path / "file").write_text("in the way")
        return tmp_path / "file" / self.name

    @pytest.mark.parametrize("offload", [False, True])
    def test_after_save_async_arrays_may_be_donated_and_changed(self, manager, path, offload):
        tree = {
            "donated": jnp.arange(5000.0),
            "deleted": jnp.arange(5000),
            "sharded": jax.device_put(jnp.arange(64.0), on(line(), "model")),
            "numpy": np.arange(5000.0),
            "list": [1, 2],
        }
        expected = jax.tree.map(np.array, tree)
        pending = manager.save_async(tree, path, cpu_offload=offload)
        for name in ("donated", "sharded"):
            jax.jit(lambda x: x * 0, donate_argnums=0)(tree[name])
        tree["deleted"].delete()
        tree["numpy"][:] = 0
        tree["list"].append(3)
        assert pending.result() == str(path)
        assert_same(jax.tree.map(np.array, manager.load(path, line())[0]), expected)

    def test_save_async_takes_what_save_takes(self, manager, path):
        seen = []
        pending = manager.save_async(
            state(),
            path,
            line(),
            gather_fns={"step": lambda x: x + 1},
            float_dtype="bf16",
            metadata={"a": 1},
            callback=seen.append,
            prefix="m",
            do_all_gather=True,
            cpu_offload=True,
        )
        pending.result()
        loaded, metadata = manager.load(path, line())
        assert (int(loaded["step"]), loaded["block"]["kernel"].dtype) == (100_002, jnp.bfloat16)
        assert (metadata["custom_metadata"], seen) == ({"a": 1}, [str(path)])

    def test_the_callback_of_save_async_runs_once_it_is_committed(self, manager, path):
        seen = []
        manager.save_async(
            state(), path, callback=lambda p: seen.append(manager.load(p, line())[0]["name"])
        ).result()
        assert seen == ["run 0"]

    def test_an_error_of_the_callback_belongs_to_its_save(self, manager, path):
        pending = manager.save_async(state(), path, callback=lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            pending.result()
        assert_same(manager.load(path, line())[0], state())

    def test_saves_to_one_path_are_committed_in_their_order(self, manager, path):
        pending = [manager.save_async({"i": i, "w": np.full(50_000 >> i, i)}, path) for i in range(6)]
        assert pending[-1].result()
        assert manager.load(path, None)[0]["i"] == 5
        manager.wait_until_finished()
        assert all(p.done() for p in pending)

    def test_an_error_belongs_to_its_own_save(self, manager, path, blocked):
        bad = manager.save_async(state(), blocked)
        good = manager.save_async(state(1), path)
        assert good.result() == str(path)
        manager.save(state(2), path.with_name("other" + path.suffix))
        with pytest.raises(NotADirectoryError):
            bad.result()
        assert_same(manager.load(path, line())[0], state(1))

    def test_waiting_raises_an_error_that_nobody_has_asked_for_and_only_once(self, manager, path, blocked):
        manager.save_async(state(), blocked)
        good = manager.save_async(state(), path)
        with pytest.raises(NotADirectoryError):
            manager.wait_until_finished()
        assert good.done()
        manager.wait_until_finished()

    def test_waiting_does_not_raise_what_was_asked_for(self, manager, blocked):
        pending = manager.save_async(state(), blocked)
        assert isinstance(pending.exception(), NotADirectoryError)
        manager.wait_until_finished()

    def test_of_several_errors_one_is_raised_and_the_others_are_logged(self, manager, blocked, caplog):
        for name in ("first", "second"):
            manager.save_async(state(), blocked.parent / name / self.name)
        with pytest.raises(NotADirectoryError, match="first"):
            manager.wait_until_finished()
        assert f"saving to {blocked.parent / 'second' / self.name} failed" in caplog.text

    def test_the_block_of_a_manager_waits_for_its_saves(self, path, blocked):
        with self.make() as manager:
            pending = manager.save_async(state(), path)
        assert pending.done()
        with pytest.raises(NotADirectoryError), self.make() as manager:
            manager.save_async(state(), blocked)

    def test_an_error_inside_of_the_block_is_the_one_that_is_raised(self, blocked, caplog):
        def block():
            with self.make() as manager:
                manager.save_async(state(), blocked)
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            block()
        assert "a save failed, too" in caplog.text

    def test_everything_works_in_a_running_event_loop(self, manager, path):
        async def notebook():
            manager.save_pytree(state(), path, prefix="m")
            assert_same(manager.load(path, line())[0], state())
            assert_same(manager.load_tree_parallel(path)[0], state())
            assert await manager.save_async(state(1), path, prefix="m") == str(path)
            manager.wait_until_finished()
            return manager.load_pytree(path, line(), prefix="m")[0]

        assert_same(asyncio.run(notebook()), state(1))

    def test_several_threads_may_save_to_one_path(self, manager, path):
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda i: manager.save({"w": jnp.full(2000, i), "i": i}, path), range(8)))
        loaded, _ = manager.load(path, line())
        np.testing.assert_array_equal(loaded["w"], np.full(2000, loaded["i"]))
        assert checkpoint.verify(path).ok

    def test_several_threads_may_load_at_once(self, manager, path):
        manager.save(state(), path)
        with ThreadPoolExecutor(4) as pool:
            for loaded, _ in pool.map(lambda _: manager.load(path, line()), range(8)):
                assert_same(loaded, state())


class DirectoryContract(ManagerContract):
    """What a directory can, and one file cannot: hold several trees."""

    def test_every_prefix_has_its_tree_and_its_metadata(self, manager, path):
        for i, prefix in enumerate(("model", "opt", None)):
            manager.save(state(i), path, prefix=prefix, metadata={"who": prefix})
        for i, prefix in enumerate(("model", "opt")):
            loaded, metadata = manager.load(path, line(), prefix=prefix)
            assert_same(loaded, state(i))
            assert metadata["custom_metadata"] == {"who": prefix}
        assert_same(manager.load(path, line())[0], state(2))

    def test_saving_one_prefix_leaves_the_others(self, manager, path):
        for prefix in ("model", "opt"):
            manager.save_pytree(state(), path, prefix=prefix, extras={"who": prefix})
        before = manager.load_pytree(path, line(), prefix="opt")[1]
        manager.save_pytree({"w": jnp.ones((3, 3))}, path, prefix="model", extras={"who": "again"})
        loaded, metadata = manager.load_pytree(path, line(), prefix="opt")
        assert_same(loaded, state())
        assert metadata == before
        assert manager.load_pytree(path, line(), prefix="model")[1]["custom_metadata"] == {"who": "again"}

    def test_several_prefixes_and_none_said_is_an_error_that_lists_them(self, manager, path):
        for prefix in ("model", "opt"):
            manager.save(state(), path, prefix=prefix)
        for call in (lambda: manager.load(path, line()), lambda: manager.load_tree_parallel(path)):
            with pytest.raises(ValueError, match=r"\['model', 'opt'\]"):
                call()
        with pytest.raises(ValueError, match=r"no prefix 'zzz'.*\['model', 'opt'\]"):
            manager.load(path, line(), prefix="zzz")

    def test_prefixes_that_begin_alike_do_not_meet(self, manager, path):
        prefixes = ("m", "m.b", "m/b", "m.b.c")
        for i, prefix in enumerate(prefixes):
            manager.save_pytree({"b": jnp.full(2, i), "w": {"b": jnp.full(3, i)}}, path, prefix=prefix)
        for i, prefix in enumerate(prefixes):
            loaded, _ = manager.load_pytree(path, line(), prefix=prefix)
            assert_same(loaded, {"b": jnp.full(2, i), "w": {"b": jnp.full(3, i)}})

    def test_hostile_prefixes_stay_inside(self, manager, path):
        prefixes = [
            "..",
            "../up",
            "../../escape",
            "/abs",
            ".",
            "a/b",
            ".hidden",
            "%",
            "é",
            "manifest",
            "model",
        ]
        for i, prefix in enumerate(prefixes):
            manager.save({"w": jnp.full(2, i)}, path, prefix=prefix)
        for i, prefix in enumerate(prefixes):
            assert_same(manager.load(path, line(), prefix=prefix)[0], {"w": jnp.full(2, i)})
        outside = [p for p in path.parent.parent.rglob("*") if path not in (p, *p.parents)]
        assert outside == [path.parent]

    def test_eight_threads_may_save_eight_prefixes_to_one_directory(self, manager, path):
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda i: manager.save(state(i), path, prefix=f"p{i}"), range(8)))
        for i in range(8):
            assert_same(manager.load(path, line(), prefix=f"p{i}")[0], state(i))

    def test_eight_managers_may_save_eight_pytrees_to_one_directory(self, path):
        with ThreadPoolExecutor(8) as pool:
            save = lambda i: self.make().save_pytree(state(i), path, prefix=f"p{i}", extras={"i": i})  # noqa: E731
            list(pool.map(save, range(8)))
        for i in range(8):
            loaded, metadata = self.make().load_pytree(path, line(), prefix=f"p{i}")
            assert_same(loaded, state(i))
            assert metadata["custom_metadata"] == {"i": i}

    def test_several_saves_may_be_under_way_at_once(self, manager, path):
        pending = [manager.save_async(state(i), path, prefix=f"p{i}") for i in range(6)]
        manager.wait_until_finished()
        assert all(p.done() and p.result() == str(path) for p in pending)
        for i in range(6):
            assert_same(manager.load(path, line(), prefix=f"p{i}")[0], state(i))

    def test_a_missing_file_is_an_error_and_not_zeros(self, manager, path):
        manager.save({"good": jnp.ones(50), "bad": jnp.linspace(1, 2, 100)}, path)
        file = self.data_of(path, "bad")
        file.unlink()
        with pytest.raises(ValueError, match=re.escape(file.name)):
            manager.load(path, line())


class TestTensorStore(DirectoryContract):
    def record_of(self, path):
        return path / "tensorstore_index.json"

    def data_of(self, path, key):
        return path / key / "0"

    def test_it_is_tensorstore(self, manager, path):
        manager.save(state(), path)
        assert Manager.is_tensorstore(path)

    def test_the_index_leads_to_the_checkpoint(self, manager, path):
        manager.save(state(), path)
        for where in (path / "tensorstore_index.json", str(path / "tensorstore_index.json")):
            assert_same(manager.load(where, line())[0], state())
            assert_same(manager.load_tree_parallel(where)[0], state())

    def test_without_an_index_arrays_can_be_read_all_the_same(self, manager, path):
        manager.save_pytree(
            {"a": {"w": jnp.arange(6.0)}, "b": jnp.ones(2)}, path, prefix="m", write_index=False
        )
        assert not (path / "tensorstore_index.json").exists()
        expected = {"a": {"w": jnp.arange(6.0)}, "b": jnp.ones(2)}
        assert_same(manager.load_pytree(path, line(), prefix="m")[0], expected)
        assert_same(manager.load(path, line(), prefix="m")[0], expected)

    def test_arrays_that_are_saved_again_without_an_index_are_never_the_old_ones(self, manager, path):
        manager.save_pytree({"w": jnp.zeros(2)}, path, prefix="m", write_index=False)
        try:
            manager.save_pytree({"w": jnp.ones(2)}, path, prefix="m", write_index=False)
        except (ValueError, FileExistsError):
            return
        assert_same(manager.load_pytree(path, line(), prefix="m")[0], {"w": jnp.ones(2)})

    def test_an_index_that_lists_a_prefix_is_not_left_behind(self, manager, path):
        manager.save_pytree({"w": jnp.zeros(2)}, path, prefix="m")
        with pytest.raises(ValueError, match=r"tensorstore_index.json is there"):
            manager.save_pytree({"w": jnp.ones(2)}, path, prefix="m", write_index=False)
        assert_same(manager.load_pytree(path, line(), prefix="m")[0], {"w": jnp.zeros(2)})

    def test_a_checkpoint_of_the_other_format_is_not_saved_over(self, manager, path):
        AsyncCheckpointManager(use_tensorstore=False).save(state(), path)
        with pytest.raises(FileExistsError, match="another format"):
            manager.save(state(1), path)
        assert_same(manager.load(path, line())[0], state())


class TestCompressed(TestTensorStore):
    arguments = {"enable_compression": True}
    is_compressed = True
    test_validate_false_skips_the_digests = None  # what a flipped bit then becomes is anybody's guess

    def test_compression_makes_it_smaller(self, path):
        tree = {"w": jnp.zeros((256, 256)), "n": np.arange(65536) // 1000}
        sizes = []
        for manager in (AsyncCheckpointManager(), self.make()):
            where = path / str(manager.enable_compression)
            manager.save(tree, where)
            sizes.append(sum(p.stat().st_size for p in where.rglob("*") if p.is_file()))
            assert_same(manager.load(where, line())[0], tree)
        assert sizes[1] < sizes[0] / 10

    def test_others_can_read_what_is_compressed(self, manager, path):
        manager.save({"w": jnp.arange(100.0)}, path, prefix="m")
        spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": str(path / "m" / "w")}}
        found = tensorstore.open(spec, read=True).result()
        assert found.spec().to_json()["metadata"]["compressor"] == {"id": "zstd", "level": 1}
        np.testing.assert_array_equal(found.read().result(), np.arange(100.0))

    def test_one_file_cannot_be_compressed(self, manager, tmp_path):
        with pytest.raises(ValueError, match="safetensors"):
            manager.save(state(), tmp_path / "x.safetensors")
        assert not (tmp_path / "x.safetensors").exists()


class TestSafetensors(DirectoryContract):
    arguments = {"use_tensorstore": False}

    def record_of(self, path):
        return path / "manifest.json"

    def data_of(self, path, key):
        return path / "model.safetensors"

    def test_it_cannot_be_compressed(self):
        with pytest.raises(ValueError, match=r"enable_compression=True needs use_tensorstore=True"):
            self.make(enable_compression=True)

    def test_it_is_not_tensorstore(self, manager, path):
        manager.save(state(), path)
        assert not Manager.is_tensorstore(path)

    def test_others_can_read_it(self, manager, path):
        manager.save({"a": {"w": jnp.arange(6.0)}, "b": jnp.ones(2, jnp.int8)}, path, prefix="m")
        found = safetensors.numpy.load_file(path / "m.safetensors")
        assert_same(found, {"a.w": np.arange(6, dtype=np.float32), "b": np.ones(2, np.int8)})

    def test_a_pytree_needs_its_index(self, manager, path):
        with pytest.raises(ValueError, match=r"write_index=False is for the format 'tensorstore'"):
            manager.save_pytree(state(), path, prefix="m", write_index=False)
        assert not path.exists()

    @pytest.fixture
    def sharded(self, path):
        tree = {name: {"w": jnp.full((100,), i, jnp.float32)} for i, name in enumerate("abc")}
        checkpoint.save(tree, path, options=SaveOptions(max_shard_bytes=500))
        assert len(list(path.glob("model-0000?-of-00003.safetensors"))) == 3
        return tree

    @pytest.mark.parametrize(
        "name",
        [
            "",
            "model",
            "model-00001-of-00003.safetensors",
            "model-00003-of-00003.safetensors",
            "model.safetensors.index.json",
            "manifest.json",
        ],
    )
    def test_every_file_of_a_sharded_checkpoint_leads_to_all_of_it(self, manager, path, sharded, name):
        for where in (path / name, str(path / name)):
            assert_same(manager.load(where, line())[0], sharded)
            assert_same(manager.load_tree_parallel(where)[0], sharded)

    def test_shards_that_others_wrote_load_by_every_name(self, manager, path):
        path.mkdir(parents=True)
        files = [f"x-0000{i}-of-00002.safetensors" for i in (1, 2)]
        for i, file in enumerate(files):
            safetensors.numpy.save_file({f"l{i}.w": np.full(3, i, np.float32)}, path / file)
        index = {"metadata": {}, "weight_map": {f"l{i}.w": file for i, file in enumerate(files)}}
        (path / "x.safetensors.index.json").write_text(json.dumps(index))
        expected = {f"l{i}": {"w": jnp.full(3, i, jnp.float32)} for i in range(2)}
        for name in ("", "x", "x.safetensors.index.json"):
            assert_same(manager.load(path / name, line())[0], expected)

    def test_a_missing_shard_is_an_error(self, manager, path, sharded):
        (path / "model-00002-of-00003.safetensors").unlink()
        with pytest.raises((FileNotFoundError, ValueError), match=r"model-00002-of-00003\.safetensors"):
            manager.load(path, line())

    def test_a_stale_index_does_not_shadow_a_newer_save(self, manager, path, sharded):
        manager.save({"new": jnp.ones(2)}, path)
        for where in (path, *path.glob("*.safetensors")):
            assert_same(manager.load(where, line())[0], {"new": jnp.ones(2)})

    def test_a_shard_name_that_leads_out_of_the_directory_is_refused(self, manager, path):
        path.mkdir(parents=True)
        safetensors.numpy.save_file({"w": np.ones(3, np.float32)}, path.parent / "secret.safetensors")
        for name in ("../secret.safetensors", str(path.parent / "secret.safetensors")):
            index = {"metadata": {}, "weight_map": {"w": name}}
            (path / "x.safetensors.index.json").write_text(json.dumps(index))
            with pytest.raises(ValueError, match="secret"):
                manager.load_tree_parallel(path / "x.safetensors.index.json")

    @pytest.mark.parametrize("text", ["{}", '{"weight_map": [1]}', '{"weight_map": {"w"'])
    def test_an_index_that_says_nothing_is_an_error_and_not_an_empty_tree(self, manager, path, text):
        path.mkdir(parents=True)
        (path / "x.safetensors.index.json").write_text(text)
        with pytest.raises(ValueError, match=r"x\.safetensors\.index\.json is not an index"):
            manager.load(path / "x.safetensors.index.json", line())

    def test_a_checkpoint_of_the_other_format_is_not_saved_over(self, manager, path):
        AsyncCheckpointManager().save(state(), path)
        with pytest.raises(FileExistsError, match="another format"):
            manager.save(state(1), path)
        assert_same(manager.load(path, line())[0], state())


class TestOneFile(ManagerContract):
    """A path that ends in .safetensors is one file, also to a manager that would use TensorStore."""

    name = "checkpoint.safetensors"

    def record_of(self, path):
        return path

    def data_of(self, path, key):
        return path

    def test_it_is_one_file_that_others_can_read(self, manager, path):
        manager.save({"a": {"w": jnp.arange(6.0)}}, path)
        assert_same(safetensors.numpy.load_file(path), {"a.w": np.arange(6, dtype=np.float32)})
        assert os.listdir(path.parent) == [path.name]
        assert not Manager.is_tensorstore(path)

    def test_its_base_name_leads_to_it(self, manager, path):
        manager.save(state(), path)
        for where in (path.with_suffix(""), str(path.with_suffix(""))):
            assert_same(manager.load(where, line())[0], state())
            assert_same(manager.load_tree_parallel(where)[0], state())

    def test_both_kinds_of_manager_write_the_same(self, path):
        for use_tensorstore in (True, False):
            AsyncCheckpointManager(use_tensorstore=use_tensorstore).save(state(), path)
            assert path.is_file()
            assert_same(self.make().load(path, line())[0], state())

    def test_it_holds_one_tree(self, manager, path):
        manager.save(state(), path, prefix="model")
        with pytest.raises(ValueError, match=r"holds the tree \['model'\], and one file holds one tree"):
            manager.save(state(), path, prefix="opt")
        assert_same(manager.load(path, line())[0], state())

    def test_a_file_of_others_has_metadata_too(self, manager, path):
        path.parent.mkdir()
        for written in (None, {"who": "me"}):
            safetensors.numpy.save_file({"w": np.ones(3, np.float32)}, path, written)
            loaded, metadata = manager.load(path, line())
            assert_same(loaded, {"w": jnp.ones(3)})
            assert metadata["custom_metadata"] == (written or {})
            assert metadata == CheckpointMetadata.from_dict(metadata).to_dict()

    @pytest.mark.parametrize("is_right", [True, False])
    def test_the_checksums_that_the_original_wrote_are_checked(self, path, is_right):
        path.parent.mkdir()
        array = np.linspace(0, 1, 9, dtype=np.float32)
        checksum = hashlib.sha256(array.tobytes() if is_right else b"").hexdigest()
        written = {"version": "0.0.101", "timestamp": "t", "checksum": json.dumps({"a.w": checksum})}
        written |= {"array_metadata": "{}", "framework_version": "null", "custom_metadata": '{"step": 3}'}
        safetensors.numpy.save_file({"a.w": array}, path, written)
        validating = self.make(enable_validation=True)
        assert self.make().load(path, line())[1]["checksum"] == {"a.w": checksum}
        if is_right:
            loaded, metadata = validating.load(path, line())
            assert_same(loaded, {"a": {"w": jnp.asarray(array)}})
            assert metadata["custom_metadata"] == {"step": 3}
        else:
            with pytest.raises(ValueError, match=r"checkpoint.safetensors: validation failed: leaf 'a\.w'"):
                validating.load_tree_parallel(path)


# ----------------------------------------------------------------------------------- without a backend


GATHERING = "prefix=None, do_all_gather=False, cpu_offload=False"
SAVE = f"self, tree, path, mesh=None, gather_fns=None, float_dtype=None, metadata=None, callback=None, {GATHERING}"
LOAD = "mismatch_allowed=True, callback=None"
SIGNATURES = {
    "__init__": "self, enable=None, float_dtype=None, verbose=False, gcs_bucket=None, gcs_credentials_path=None, "
    "enable_validation=False, enable_compression=False, use_tensorstore=True",
    "save": SAVE,
    "save_tree": SAVE,
    "save_async": SAVE,
    "save_pytree": "self, pytree, path, mesh=None, *, prefix, do_all_gather=False, cpu_offload=True, dtype=None, "
    "extras=None, write_index=True",
    "load": f"self, path, mesh, shardings=None, {LOAD}, partition_rules=None, dtype=None, validate=None, "
    "prefix_filter=None, prefix=None, use_async=True",
    "load_pytree": "self, path, mesh, *, prefix, shardings=None, partition_rules=None, dtype=None, template=None, "
    "strict_shapes=True",
    "load_tree_parallel": f"self, path, shardings=None, {LOAD}, dtype=None, validate=None, prefix_filter=None",
    "compute_checksum": "array",
    "is_tensorstore": "path",
    "safe_loadpath": "path",
}


@pytest.mark.parametrize(("name", "documented"), SIGNATURES.items(), ids=SIGNATURES)
def test_every_method_takes_what_is_documented_and_perhaps_more_behind(name, documented):
    expected = list(inspect.signature(eval(f"lambda {documented}: 0")).parameters.values())
    found = inspect.signature(getattr(Manager, name)).parameters.values()
    plain = [p.replace(annotation=inspect.Parameter.empty) for p in found]
    assert plain[: len(expected)] == expected
    assert all(p.default is not inspect.Parameter.empty for p in plain[len(expected) :])


def test_the_arguments_are_attributes():
    manager = AsyncCheckpointManager()
    assert (manager.enable, manager.float_dtype, manager.verbose, manager.gcs_bucket) == (
        None,
        None,
        False,
        None,
    )
    assert (manager.enable_validation, manager.enable_compression, manager.use_tensorstore) == (
        False,
        False,
        True,
    )
    manager = AsyncCheckpointManager(True, jnp.bfloat16, True, "bucket", None, True, True, True)
    assert (manager.enable, manager.float_dtype, manager.verbose) == (True, jnp.bfloat16, True)
    assert (manager.gcs_bucket, manager.gcs_credentials_path) == ("bucket", None)
    assert (manager.enable_validation, manager.enable_compression, manager.use_tensorstore) == (
        True,
        True,
        True,
    )


@pytest.mark.parametrize(
    ("array", "content"),
    [
        (jnp.arange(3, dtype=jnp.int32), np.arange(3, dtype="<i4").tobytes()),
        (np.arange(3, dtype=">i4"), np.arange(3, dtype="<i4").tobytes()),
        (np.arange(6, dtype="<f4").reshape(2, 3).T, np.arange(6, dtype="<f4").reshape(2, 3).T.tobytes("C")),
        (jnp.zeros((0, 3)), b""),
        (jnp.bfloat16(1), b"\x80\x3f"),
        (3, np.int64(3).tobytes()),
        (0.5, np.float64(0.5).tobytes()),
        ([1, 2], np.array([1, 2]).tobytes()),
        (jax.random.key(7), np.array([0, 7], "<u4").tobytes()),
    ],
    ids=str,
)
def test_a_checksum_is_the_sha256_of_the_elements_in_their_order(array, content):
    assert Manager.compute_checksum(array) == hashlib.sha256(content).hexdigest()


def test_a_checksum_has_a_known_value():
    known = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"  # of nothing
    assert Manager.compute_checksum(jnp.zeros(0)) == known
    assert AsyncCheckpointManager().compute_checksum(jnp.zeros((0, 2))) == known


def test_a_checksum_does_not_depend_on_where_the_array_lies():
    array = jnp.arange(64.0).reshape(8, 8)
    sharded = jax.device_put(array, on(grid(), "data", "model"))
    assert Manager.compute_checksum(sharded) == Manager.compute_checksum(array)
    assert Manager.compute_checksum(np.asarray(array)) == Manager.compute_checksum(array)
    assert Manager.compute_checksum(array.at[7, 7].add(1)) != Manager.compute_checksum(array)


def test_the_manager_of_jax_is_made_once_for_each_of_ours(monkeypatch):
    monkeypatch.delenv("GLOBAL_CHECKPOINT_TIMEOUT", raising=False)
    ours = AsyncCheckpointManager()
    assert isinstance(ours.global_manager, GlobalAsyncCheckpointManager)
    assert ours.global_manager is ours.global_manager
    assert AsyncCheckpointManager().global_manager is not ours.global_manager
    assert ours.global_manager._timeout_secs == 400


def test_the_environment_says_how_long_the_manager_of_jax_waits(monkeypatch):
    monkeypatch.setenv("GLOBAL_CHECKPOINT_TIMEOUT", "7")
    assert AsyncCheckpointManager().global_manager._timeout_secs == 7


def test_several_threads_get_the_same_manager_of_jax():
    ours, barrier = AsyncCheckpointManager(), threading.Barrier(4)

    def get(_):
        barrier.wait()
        return ours.global_manager

    with ThreadPoolExecutor(4) as pool:
        assert len(set(map(id, pool.map(get, range(4))))) == 1


@pytest.mark.parametrize("kind", [str, Path, LocalPath, ePath], ids=lambda kind: kind.__class__.__name__)
def test_tensorstore_is_told_by_its_index_or_its_arrays(tmp_path, kind):
    AsyncCheckpointManager().save({"w": jnp.ones(2)}, tmp_path / "ours")
    AsyncCheckpointManager().save_pytree(
        {"w": jnp.ones(2)}, tmp_path / "arrays", prefix="m", write_index=False
    )
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    for name, is_one in {
        "ours": True,
        "ours/tensorstore_index.json": True,
        "arrays": True,
        "empty": False,
        "file": False,
        "missing": False,
        "missing/tensorstore_index.json": False,
        "xtensorstore_index.json": False,
    }.items():
        assert Manager.is_tensorstore(kind(str(tmp_path / name))) is is_one, name


@pytest.mark.parametrize(
    ("path", "safe"),
    [
        ("/a/checkpoint", LocalPath("/a/checkpoint")),
        ("/a/checkpoint/tensorstore_index.json", LocalPath("/a/checkpoint")),
        (Path("/a/tensorstore_index.json"), LocalPath("/a")),
        ("tensorstore_index.json", LocalPath()),
        ("/a/xtensorstore_index.json", LocalPath("/a/xtensorstore_index.json")),
        ("/a/model.safetensors", LocalPath("/a/model.safetensors")),
        (LocalPath("/a"), LocalPath("/a")),
        ("gs://bucket/a/tensorstore_index.json", GCSPath("gs://bucket/a")),
        (GCSPath("gs://bucket/a"), GCSPath("gs://bucket/a")),
    ],
    ids=str,
)
def test_a_path_is_safe_without_the_name_of_the_index(path, safe):
    found = Manager.safe_loadpath(path)
    assert type(found) is type(safe)
    assert found == safe


# ------------------------------------------------------------------------------------------- metadata


FIELDS = ["version", "timestamp", "checksum", "array_metadata", "framework_version", "custom_metadata"]


def test_metadata_has_the_documented_fields_and_fills_them_in():
    metadata = CheckpointMetadata()
    assert [field.name for field in dataclasses.fields(metadata)] == FIELDS
    assert list(metadata.to_dict()) == FIELDS
    assert (metadata.version, metadata.framework_version) == ("0.0.90", jax.__version__)
    assert metadata.checksum == metadata.array_metadata == metadata.custom_metadata == {}
    assert datetime.fromisoformat(metadata.timestamp)


def test_the_defaults_of_one_are_not_those_of_another():
    CheckpointMetadata().custom_metadata["mine"] = 1
    assert CheckpointMetadata().custom_metadata == {}


@pytest.mark.parametrize(
    "metadata",
    [
        CheckpointMetadata(),
        CheckpointMetadata(
            "1", "2026-01-01T00:00:00", {"w": "ab"}, {"w": {"shape": [2]}}, "0.1", {"step": "3"}
        ),
        CheckpointMetadata(
            version="", timestamp="", framework_version="", custom_metadata={"a": {"b": None}}
        ),
    ],
    ids=["empty", "full", "blank"],
)
def test_metadata_survives_being_a_dict(metadata):
    assert CheckpointMetadata.from_dict(metadata.to_dict()) == metadata
    assert metadata.to_dict() == metadata.to_dict()
    assert CheckpointMetadata.from_dict(json.loads(json.dumps(metadata.to_dict()))) == metadata


def test_the_dict_of_metadata_is_a_copy():
    metadata = CheckpointMetadata(custom_metadata={"a": {"b": 1}})
    metadata.to_dict()["custom_metadata"]["a"]["b"] = 2
    assert metadata.custom_metadata == {"a": {"b": 1}}


def test_fields_that_there_are_none_of_are_left_out():
    metadata = CheckpointMetadata.from_dict({"version": "9", "colour": "red"})
    assert metadata.version == "9"
    assert not hasattr(metadata, "colour")
    assert list(metadata.to_dict()) == FIELDS


@pytest.mark.parametrize("use_tensorstore", [True, False])
def test_keys_that_read_alike_have_checksums_of_their_own(tmp_path, use_tensorstore):
    manager = AsyncCheckpointManager(enable_validation=True, use_tensorstore=use_tensorstore)
    tree = {"a.b": np.zeros(2), "a": {"b": np.ones(3)}, "c": np.ones(1)}
    manager.save(tree, tmp_path / "x")
    loaded, metadata = manager.load(tmp_path / "x", None)
    assert_same(loaded, tree)
    assert set(metadata["checksum"]) == set(metadata["array_metadata"]) == {"a%2Eb", "a.b", "c"}
