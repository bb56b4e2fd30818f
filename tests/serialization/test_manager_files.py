"""What a manager writes: the files of each backend, what leads to them, and who else can read them."""

import hashlib
import json
import os
import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from eformer import checkpoint
from eformer.checkpoint import SaveOptions
from eformer.paths import GCSPath, LocalPath, ePath
from eformer.serialization.async_manager import AsyncCheckpointManager, CheckpointMetadata
from support.arrays import opened
from support.backends import Backend, Compressed, OneFile, Safetensors, TensorStore
from support.meshes import line
from support.states import state
from support.trees import assert_same

Manager = AsyncCheckpointManager


class Directories(Backend):
    """What all directories have in common."""

    def test_a_missing_file_is_an_error_and_not_zeros(self, manager, path):
        manager.save({"good": jnp.ones(50), "bad": jnp.linspace(1, 2, 100)}, path)
        file = self.data_of(path, "bad")
        file.unlink()
        with pytest.raises(ValueError, match=re.escape(file.name)):
            manager.load(path, line())


class TestTensorStore(TensorStore, Directories):
    """One directory for each array, and an index."""

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
        with pytest.raises(ValueError, match=r"tensorstore_index.json exists"):
            manager.save_pytree({"w": jnp.ones(2)}, path, prefix="m", write_index=False)
        assert_same(manager.load_pytree(path, line(), prefix="m")[0], {"w": jnp.zeros(2)})

    def test_a_checkpoint_of_the_other_format_is_not_saved_over(self, manager, path):
        AsyncCheckpointManager(use_tensorstore=False).save(state(), path)
        with pytest.raises(FileExistsError, match="another format"):
            manager.save(state(1), path)
        assert_same(manager.load(path, line())[0], state())


class TestCompressed(Compressed, TestTensorStore):
    """The same, made smaller."""

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
        found = opened(path / "m" / "w")
        assert found.spec().to_json()["metadata"]["compressor"] == {"id": "zstd", "level": 1}
        np.testing.assert_array_equal(found.read().result(), np.arange(100.0))

    def test_one_file_cannot_be_compressed(self, manager, tmp_path):
        with pytest.raises(ValueError, match="safetensors"):
            manager.save(state(), tmp_path / "x.safetensors")
        assert not (tmp_path / "x.safetensors").exists()


class TestSafetensors(Safetensors, Directories):
    """Data files with a manifest."""

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
        with pytest.raises(ValueError, match=r"write_index=False is for the format zarr"):
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
        for name in ("", "x", "x.safetensors.index.json", *files):
            assert_same(manager.load(path / name, line())[0], expected)
            assert_same(manager.load_tree_parallel(path / name)[0], expected)

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


class TestOneFile(OneFile):
    """A path that ends in .safetensors is one file, also to a manager that would use TensorStore."""

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


# ----------------------------------------------------------------------------------------------- paths


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
