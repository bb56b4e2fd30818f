"""What every tool and every documented function does with checkpoints in a bucket.

A server inherits these classes and has a fixture `url`: a directory in a bucket that nobody else uses.
"""

from __future__ import annotations

import gc
import json
import secrets
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

from eformer import checkpoint
from eformer.checkpoint import SaveOptions, load, save
from eformer.errors import CorruptionError, NotFoundError
from eformer.serialization import AsyncCheckpointManager
from eformer.serialization.serialization import tree_deserialize_leaves, tree_serialize_leaves
from support.buckets import around, objects, overwrite, upload
from support.commands import run
from support.faults import STRIDE
from support.trees import assert_same

FORMATS = ["safetensors", "tensorstore"]
DATA = Path(__file__).parent.parent / "compat" / "orbax"
ORBAX = (
    sorted(path.name for path in DATA.iterdir() if path.is_dir())
    if STRIDE == 1
    else ["manager", "v0_zarr3", "v1"]
)


def tree():
    return {"layers": [np.arange(6.0).reshape(2, 3), np.ones(3, np.int8)], "step": 7}


def damage(url, key):
    """Change the last byte of an object."""

    def flip(data):
        data[-1] ^= 1

    overwrite(url, key, flip)


def data_key(url):
    """Return the largest object of a checkpoint that holds elements."""
    found = {key: data for key, data in objects(url).items() if not key.endswith((".json", ".zarray"))}
    return max(found, key=lambda key: (len(found[key]), key))


def tops(url):
    """Return the names directly below a directory."""
    return {key.removeprefix(around(f"{url}/x")[1]).partition("/")[0] for key in objects(f"{url}/x")}


class BucketTools:
    """Of one process."""

    @pytest.fixture
    def copies(self, tmp_path, monkeypatch):
        """Return a function that lists the copies on this machine."""
        (tmp_path / "copies").mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "copies"))

        def there():
            gc.collect()
            return list((tmp_path / "copies").iterdir())

        return there

    @pytest.mark.parametrize("kind", FORMATS)
    def test_a_save_in_the_background_is_there_when_it_is_done(self, url, kind):
        pending = checkpoint.save_async(tree(), url, format=kind)
        assert_same(load(url), tree())  # waits for it
        pending.result()
        assert checkpoint.verify(url).ok

    @pytest.mark.parametrize("kind", FORMATS)
    def test_a_view_reads_what_it_is_asked_for(self, url, kind):
        big = np.arange(600_000, dtype=np.float32).reshape(6000, 100)
        save({"big": big, "n": 3}, url, format=kind)
        with checkpoint.open(url) as view:
            assert (view["big"][4000:4002] == big[4000:4002]).all()
            assert view["n"] == 3

    @pytest.mark.parametrize("kind", FORMATS)
    def test_a_damaged_object_is_found_and_named(self, url, kind):
        save(tree(), url, format=kind)
        assert checkpoint.verify(url).ok
        damage(url, data_key(url))
        report = checkpoint.verify(url)
        assert not report.ok
        assert url in str(report)
        with pytest.raises(CorruptionError, match=r"layers"):
            load(url)

    def test_what_is_missing_is_named_with_its_url(self, url):
        with pytest.raises(NotFoundError, match=url):
            load(url)
        with pytest.raises(NotFoundError, match=url):
            checkpoint.inspect(url)

    def test_a_local_checkpoint_is_compared_with_one_in_a_bucket(self, url, tmp_path):
        save(tree(), url)
        save({**tree(), "step": 8}, tmp_path / "x", format="tensorstore")
        assert [change.name for change in checkpoint.diff(url, tmp_path / "x").changed] == ["step"]
        assert checkpoint.diff(url, url).same

    @pytest.mark.parametrize("kind", FORMATS)
    def test_arrays_come_back_to_other_devices(self, url, kind):
        mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
        spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x", "y"))
        other = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("y"))
        array = jax.device_put(jnp.arange(64.0).reshape(8, 8), spread)
        save({"w": array}, url, format=kind)
        loaded = load(url, shardings={"w": other})["w"]
        assert loaded.sharding == other
        assert (np.asarray(loaded) == np.asarray(array)).all()

    def test_a_checkpoint_may_lie_at_the_top_of_a_bucket(self, url):
        top = f"{'/'.join(url.split('/')[:3])}-{secrets.token_hex(4)}" if "memory:" in url else None
        top = top or f"{'/'.join(url.split('/')[:3])}/{secrets.token_hex(4)}"
        for path in (top, f"{top}.safetensors", f"{top}.arrays"):
            kind = "tensorstore" if path.endswith("arrays") else "safetensors"
            save(tree(), path, format=kind)
            save(tree(), path, format=kind)
            assert_same(load(path), tree())
            assert checkpoint.verify(path).ok
        found, _ = around(url)
        name = top.rpartition("/")[2]
        keys = [entry.key for entry in found.list("") if entry.key.startswith(name)]
        assert keys
        found.delete(keys)

    # ----------------------------------------------------------------------------------------- convert

    @pytest.mark.parametrize("kind", FORMATS)
    def test_a_local_checkpoint_is_converted_into_a_bucket(self, url, kind, tmp_path):
        save(tree(), tmp_path / "x", metadata={"run": "a1"})
        checkpoint.convert(tmp_path / "x", url, to=kind)
        assert_same(load(url), tree())
        assert checkpoint.inspect(url).trees[""].metadata == {"run": "a1"}
        assert checkpoint.verify(url).ok

    @pytest.mark.parametrize("kind", FORMATS)
    def test_a_checkpoint_in_a_bucket_is_converted_to_a_local_one(self, url, kind, tmp_path):
        save(tree(), url, format=kind)
        checkpoint.convert(url, tmp_path / "x.safetensors")
        assert_same(load(tmp_path / "x.safetensors"), tree())

    @pytest.mark.parametrize("kind", FORMATS)
    def test_a_checkpoint_is_converted_from_bucket_to_bucket(self, url, kind):
        for prefix in ("a", "b"):
            save(tree(), url, prefix=prefix, format=kind)
        other = next(name for name in FORMATS if name != kind)
        checkpoint.convert(url, f"{url}-new", to=other)
        for prefix in ("a", "b"):
            assert_same(load(f"{url}-new", prefix=prefix), tree())

    @pytest.mark.parametrize("suffix", [".safetensors", ".npz", ".msgpack"])
    def test_single_files_are_converted_into_a_bucket_and_read_there(self, url, suffix, tmp_path):
        save({"a": np.arange(6.0), "b": {"c": np.ones(3, np.int8)}}, tmp_path / "x")
        checkpoint.convert(tmp_path / "x", url + suffix)
        assert len(objects(url)) == 1
        loaded = load(url + suffix)
        assert_same(jax.tree.map(np.asarray, loaded), {"a": np.arange(6.0), "b": {"c": np.ones(3, np.int8)}})
        checkpoint.convert(url + suffix, f"{url}-back", to="safetensors")
        assert (load(f"{url}-back")["a"] == np.arange(6.0)).all()

    def test_an_adapter_is_converted_into_a_bucket(self, url, tmp_path):
        weights = {
            "q": {
                "lora_a": {"kernel": np.ones((4, 2), np.float32)},
                "lora_b": {"kernel": np.ones((2, 4), np.float32)},
            }
        }
        save(weights, tmp_path / "x")
        rules = {
            r"q\.lora_a\.kernel": "base_model.model.q.lora_A.weight | transpose",
            r"q\.lora_b\.kernel": "base_model.model.q.lora_B.weight | transpose",
        }
        checkpoint.convert(tmp_path / "x", url, to="peft", rename=rules, config={"lora_alpha": 4})
        config = next(data for key, data in objects(url).items() if key.endswith("adapter_config.json"))
        assert msgspec.json.decode(config)["lora_alpha"] == 4

    @pytest.mark.parametrize("suffix", ["", ".safetensors", ".npz"])
    def test_a_conversion_does_not_replace_what_is_there(self, url, suffix, tmp_path):
        save({"a": np.zeros(3)}, tmp_path / "x")
        for _ in range(2):
            checkpoint.convert(
                tmp_path / "x", url + suffix, to=None if suffix else "safetensors", dry_run=True
            )
        checkpoint.convert(tmp_path / "x", url + suffix, to=None if suffix else "safetensors")
        before = objects(url)
        with pytest.raises(FileExistsError, match=f"{url}{suffix} already exists"):
            checkpoint.convert(tmp_path / "x", url + suffix, to=None if suffix else "safetensors")
        assert objects(url) == before

    def test_a_conversion_of_damaged_bytes_leaves_nothing(self, url):
        save({"w": np.arange(9.0)}, url)
        damage(url, data_key(url))
        before = objects(url)
        for destination in (f"{url}-new", f"{url}-new.npz"):
            with pytest.raises(CorruptionError):
                checkpoint.convert(url, destination, to=None if "npz" in destination else "tensorstore")
        assert objects(url) == before

    # ---------------------------------------------------------------------------- the documented functions

    @pytest.mark.parametrize("use_tensorstore", [True, False])
    def test_the_manager_saves_and_loads(self, url, use_tensorstore):
        manager = AsyncCheckpointManager(use_tensorstore=use_tensorstore)
        manager.save({"w": jnp.arange(4.0)}, url, prefix="model", metadata={"step": 1})
        with manager:
            manager.save_async({"w": jnp.arange(4.0) + 1}, url, prefix="tx")
        for prefix, first in (("model", 0), ("tx", 1)):
            loaded, metadata = manager.load(url, None, prefix=prefix)
            assert loaded["w"][0] == first
            assert metadata["custom_metadata"] == ({"step": 1} if prefix == "model" else {})
        assert manager.is_tensorstore(url) is use_tensorstore

    def test_leaves_are_serialized_and_deserialized(self, url):
        called = []
        tree_serialize_leaves(
            url, {"w": jnp.arange(4.0)}, prefix="m", commit_callback=lambda: called.append(1)
        )
        tree_serialize_leaves(url, {"v": jnp.ones(2)}, prefix="n")
        assert called == [1]
        assert tree_deserialize_leaves(url, None, prefix="m")["w"][3] == 3
        assert tree_deserialize_leaves(url, None, prefix="n")["v"].tolist() == [1, 1]

    def test_leaves_without_an_index_are_found(self, url):
        tree_serialize_leaves(url, {"w": jnp.arange(4.0)}, prefix="m", write_index=False)
        assert AsyncCheckpointManager.is_tensorstore(url)
        assert load(url)["m"]["w"].tolist() == [0, 1, 2, 3]
        for prefix in ("m", None):
            with pytest.raises(FileExistsError, match="without an index"):
                tree_serialize_leaves(url, {"m": jnp.ones(2)}, prefix=prefix, write_index=False)
        tree_serialize_leaves(f"{url}-other", {"w": jnp.arange(4.0)}, write_index=False)
        assert load(f"{url}-other")["w"].tolist() == [0, 1, 2, 3]

    def test_the_manager_of_jax_commits_saves(self, url):
        manager = AsyncCheckpointManager().global_manager
        for first in (0, 1):
            tree_serialize_leaves(url, {"w": jnp.arange(4.0) + first}, manager, prefix="m")
        assert tree_deserialize_leaves(url, None, manager, prefix="m")["w"].tolist() == [1, 2, 3, 4]
        assert checkpoint.verify(url).ok

    # ------------------------------------------------------------------------------------------ refusals

    def test_a_map_of_an_object_is_refused(self, url):
        save(tree(), url)
        with pytest.raises(ValueError, match=rf"{url}/.* is not a file of this machine.*pass options="):
            load(url, mmap=True)

    def test_a_database_is_refused(self, url):
        with pytest.raises(ValueError, match=rf"{url}: SaveOptions.ocdbt needs a local directory"):
            save(tree(), url, format="tensorstore", options=SaveOptions(ocdbt=True))
        assert not objects(url)

    # ----------------------------------------------------------------------------- read by way of this machine

    @pytest.mark.parametrize("layout", ORBAX)
    def test_a_checkpoint_of_orbax_is_read(self, url, layout, tmp_path, copies):
        upload(DATA / layout, url)
        here = DATA / layout
        assert_same(load(url), load(here))
        assert checkpoint.diff(url, here).same
        assert checkpoint.inspect(url).left_out == checkpoint.inspect(here).left_out
        report = checkpoint.verify(url)
        assert report.ok
        assert report.path.startswith(url)
        checkpoint.convert(url, tmp_path / "x", to="tensorstore")
        assert checkpoint.diff(here, tmp_path / "x").same
        with checkpoint.open(url) as view:
            name = next(iter(view))
            gc.collect()
            assert (np.asarray(view[name]) == np.asarray(checkpoint.open(here)[name])).all()
        del view
        assert not copies()

    def test_a_database_of_ours_is_read(self, url, tmp_path, copies):
        for prefix in ("a", "b"):
            save(tree(), tmp_path / "x", prefix=prefix, format="tensorstore", options=SaveOptions(ocdbt=True))
        upload(tmp_path / "x", url)
        assert checkpoint.inspect(url).trees["a"].is_database
        assert not copies()
        for prefix in ("a", "b"):
            assert_same(load(url, prefix=prefix), tree())
        assert checkpoint.verify(url).ok
        assert checkpoint.diff(url, tmp_path / "x").same
        with checkpoint.open(url, prefix="a") as view:
            gc.collect()
            assert view["layers.0"][1, 2] == 5
            assert len(copies()) == 1
        del view
        assert not copies()
        checkpoint.convert(url, f"{url}-new", to="safetensors")
        assert_same(load(f"{url}-new", prefix="b"), tree())

    def test_a_damaged_database_is_found_and_named(self, url, tmp_path):
        save({"w": np.arange(9000.0)}, tmp_path / "x", format="tensorstore", options=SaveOptions(ocdbt=True))
        upload(tmp_path / "x", url)
        damage(url, data_key(url))
        report = checkpoint.verify(url)
        assert not report.ok
        assert url in str(report)

    def test_steps_of_orbax_are_listed_and_removed_without_copying_them(self, url, monkeypatch):
        for step in (1, 2, 3):
            upload(DATA / "v0_standard", f"{url}/{step}")
        monkeypatch.setattr("eformer._engine.formats.others.orbax.copy_of", None)
        assert [step.number for step in checkpoint.steps(url)] == [1, 2, 3]
        assert checkpoint.latest(url) == f"{url}/3"
        with pytest.raises(NotFoundError, match="another program wrote it"):
            checkpoint.prune(url, keep=1)
        save(tree(), f"{url}/4")
        done = checkpoint.prune(url, keep=1, foreign=True)
        assert done.removed == ("1", "2", "3"), done
        assert tops(url) == {"4"}

    def test_a_step_of_orbax_that_nobody_has_looked_at_is_not_the_only_one_that_stays(self, url, caplog):
        for step in (1, 2, 3):
            upload(DATA / "v0_standard", f"{url}/{step}")
        assert checkpoint.prune(url, keep=1, foreign=True).removed == ()
        assert (
            "all of 1; 2; 3 stay: eformer would have to copy them to read them, as check=True" in caplog.text
        )
        save(tree(), f"{url}/0")
        assert checkpoint.prune(url, keep=1, foreign=True).kept == ("0", "3")
        upload(DATA / "v0_standard", f"{url}/2")
        damage(f"{url}/3", around(f"{url}/3/x")[1] + "manifest.ocdbt")
        with pytest.raises(CorruptionError, match="a checkpoint to keep"):
            checkpoint.prune(url, keep=1, foreign=True, check=True)
        assert tops(url) == {"0", "2", "3"}
        upload(DATA / "v0_standard", f"{url}/3")
        assert checkpoint.prune(url, keep=1, foreign=True, check=True).removed == ("0", "2")

    def test_a_full_disk_is_named(self, url, monkeypatch):
        upload(DATA / "v0_standard", url)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
        with pytest.raises(OSError, match=f"{url} has to be copied .* Set TMPDIR"):
            load(url)


class BucketCommands:
    """The command line, in a process of its own: not for buckets in memory."""

    def test_commands_read_checkpoints_in_a_bucket(self, url, tmp_path):
        save(tree(), url, metadata={"run": "a1"})
        assert "run = 'a1'" in run("inspect", url).stdout
        facts = json.loads(run("inspect", url, "--json").stdout)
        assert facts["path"] == url
        assert len(run("ls", url).stdout.splitlines()) == 3
        assert "every digest matches" in run("verify", url).stdout
        save(tree(), tmp_path / "x")
        run("diff", url, tmp_path / "x")
        damage(url, data_key(url))
        assert url in run("verify", url, code=1).stdout

    def test_commands_convert_to_and_from_a_bucket(self, url, tmp_path):
        save(tree(), tmp_path / "x")
        run("convert", tmp_path / "x", url, "--to", "tensorstore")
        run("convert", url, f"{url}-new.safetensors")
        run("convert", f"{url}-new.safetensors", tmp_path / "y", "--to", "tensorstore")
        for path in (url, f"{url}-new.safetensors", tmp_path / "y"):
            assert_same(load(path), tree())

    def test_commands_say_what_is_missing(self, url):
        assert f"no checkpoint at {url}" in run("inspect", url, code=1).stderr

    def test_commands_say_that_the_bucket_is_missing(self, url):
        bucket = f"{url.partition('//')[0]}//eformer-missing"
        done = run("inspect", f"{bucket}/x", code=1)
        assert done.stderr.startswith(f"error: {bucket}: bucket eformer-missing does not exist")

    def test_commands_list_and_prune_the_steps_of_a_run(self, url):
        for step in (1, 2, 3):
            save(tree(), f"{url}/step-{step}")
        found = json.loads(run("steps", url, "--json").stdout)["steps"]
        kept = {key: data for key, data in objects(f"{url}/x").items() if "/step-2/" in key}
        assert found[1]["nbytes"] == sum(map(len, kept.values()))
        assert "would be removed" in run("steps", url, "--keep", 1).stdout
        assert "removed 1 checkpoint" in run("prune", url, "--keep", 2, "--check", "--yes").stdout
        assert not [key for key in objects(f"{url}/x") if "/step-1/" in key]
        done = json.loads(run("prune", url, "--keep", 1, "--yes", "--json").stdout)
        assert (done["removed"], done["kept"]) == (["step-2"], ["step-3"])
        assert_same(load(url), tree())
