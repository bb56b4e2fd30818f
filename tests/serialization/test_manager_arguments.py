"""What a manager is made of: every argument of it and of its methods, and the metadata it keeps."""

import dataclasses
import gc
import inspect
import json
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental.array_serialization.serialization import GlobalAsyncCheckpointManager

from eformer._engine.stores.store_options import options_of
from eformer.paths import GCSPath
from eformer.serialization.async_manager import AsyncCheckpointManager, CheckpointMetadata
from support.backends import Backend, Compressed, OneFile, Safetensors, TensorStore
from support.meshes import line
from support.object_server import serving
from support.states import is_floating, state
from support.trees import assert_same

Manager = AsyncCheckpointManager


class Arguments(Backend):
    """What a manager is told when it is made."""

    @pytest.fixture
    def google(self, monkeypatch):
        with serving() as server:
            monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
            yield server

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

    def test_with_a_bucket_relative_paths_lead_into_it_and_others_do_not(self, path, google):
        manager, where = self.make(gcs_bucket="bucket"), f"runs/{self.name}"
        assert manager.save(state(), where, prefix="m") == f"gs://bucket/{where}"
        assert all(key.startswith("runs/") for key in google.objects)
        assert_same(manager.load(where, line(), prefix="m")[0], state())
        assert_same(manager.load_pytree(Path(where), line(), prefix="m")[0], state())
        manager.save_pytree(state(1), Path(where), prefix="m")
        assert manager.save_async(state(2), where, prefix="m").result() == f"gs://bucket/{where}"
        assert_same(manager.load_tree_parallel(where, prefix_filter="m")[0], state(2))
        before = dict(google.objects)
        manager.save(state(), path)
        assert_same(manager.load(path, line())[0], state())
        assert google.objects == before

    def test_urls_of_buckets_are_used_as_they_are(self, manager, google):
        own = f"{type(self).__name__}/{self.name}"
        for where in (f"gs://bucket/a/{own}", GCSPath(f"gs://bucket/b/{own}"), f"memory://manager/{own}"):
            assert self.make(gcs_bucket="other").save(state(), where) == str(where)
            assert_same(manager.load(where, line())[0], state())
            assert manager.is_tensorstore(where) == isinstance(self, TensorStore)
        assert {key[:2] for key in google.objects} == {"a/", "b/"}

    def test_credentials_are_used_for_google(self, tmp_path, google):
        key = tmp_path / "key.json"
        key.write_text("{}")
        manager = self.make(gcs_bucket="keys", gcs_credentials_path=str(key))
        with pytest.raises(ValueError, match="gs://keys: obstore does not accept the settings"):
            manager.load(self.name, None)
        assert options_of(f"gs://keys/{self.name}") == {"credentials_path": str(key)}
        assert options_of("gs://keys/other") == {}
        del manager
        gc.collect()
        assert options_of(f"gs://keys/{self.name}") == {}

    def test_credentials_have_to_be_a_file(self, tmp_path):
        with pytest.raises(FileNotFoundError, match=r"gcs_credentials_path='/no/such\.json'"):
            self.make(gcs_bucket="bucket", gcs_credentials_path="/no/such.json")
        (tmp_path / "key.json").write_text("{}")
        manager = self.make(gcs_bucket="bucket", gcs_credentials_path=str(tmp_path / "key.json"))
        assert manager.gcs_credentials_path == str(tmp_path / "key.json")


class TestTensorStore(TensorStore, Arguments):
    pass


@pytest.mark.sample(5)
class TestCompressed(Compressed, Arguments):
    pass


@pytest.mark.sample(3)
class TestSafetensors(Safetensors, Arguments):
    pass


@pytest.mark.sample(5)
class TestOneFile(OneFile, Arguments):
    pass


# ------------------------------------------------------------------------------------------ signatures


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


# ---------------------------------------------------------------------------------- the manager of JAX


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


# -------------------------------------------------------------------------------------------- metadata


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
