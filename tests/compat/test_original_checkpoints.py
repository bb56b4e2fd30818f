"""Checkpoints that the original package wrote (eformer 0.0.101) come back as its manifest says, and no pickle runs."""

import base64
import hashlib
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from eformer import checkpoint
from eformer._engine.trees.flatten import flatten
from eformer.errors import CorruptionError, FormatError, StructureError
from eformer.serialization.async_manager import AsyncCheckpointManager
from support.damage import flip
from support.original import DATA
from support.trees import assert_same

SAMPLES = {
    name: sample
    for name, sample in json.loads((DATA / "manifest.json").read_text("utf-8"))["samples"].items()
    if "msgpack" not in name
}


def place(name):
    return DATA / SAMPLES[name].get("dir", name)


def loaded(path):
    """The arrays of all prefixes by the keys of the original's manifest."""
    arrays = {}
    for prefix in checkpoint.inspect(path).trees:
        for key, leaf in flatten(checkpoint.load(path, prefix=prefix))[0].items():
            arrays[f"{prefix}.{key}" if prefix else key] = np.asarray(leaf)
    return arrays


def described(array):
    digest = hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()
    return {"shape": list(array.shape), "dtype": array.dtype.name, "sha256": digest}


@pytest.mark.parametrize("name", SAMPLES)
def test_arrays_are_as_the_manifest_says(name):
    arrays = {key: array for key, array in loaded(place(name)).items() if key in SAMPLES[name]["arrays"]}
    assert {key: described(array) for key, array in arrays.items()} == SAMPLES[name]["arrays"]


def test_every_sample_is_covered():
    top = {path.name for path in DATA.iterdir()} - {"manifest.json"}
    assert {name for name in top if "msgpack" not in name} == set(SAMPLES)


@pytest.mark.parametrize("name", SAMPLES)
def test_all_bytes_are_there_but_without_digests_nothing_more_is_known(name):
    report = checkpoint.verify(place(name))
    assert report.ok
    assert not report.has_digests


def test_a_structure_comes_back_without_running_its_pickle():
    tree = checkpoint.load(DATA / "pytree_basic")
    assert {key: tree[key] for key in ("flag", "lr", "n", "name")} == {
        "flag": True,
        "lr": 0.5,
        "n": 5,
        "name": "x",
    }
    assert isinstance(tree["seq"], tuple)
    assert isinstance(tree["seq"][1], list)
    assert tree["seq"][1][1] is None


def test_an_optimizer_state_comes_back_as_its_own_classes():
    state = checkpoint.load(DATA / "pytree_optax")
    like = optax.adamw(1e-3).init({"w": jnp.zeros((2, 2))})
    assert jax.tree.structure(state) == jax.tree.structure(like)


def test_steps_hold_one_checkpoint_each():
    tree, metadata = AsyncCheckpointManager().load_pytree(
        DATA / "checkpointer" / "run-5", None, prefix="model"
    )
    assert list(tree) == ["w"]
    assert metadata["version"] == "0.0.101"
    with pytest.raises(
        ValueError, match=r"run-5 holds several trees; pass prefix=, one of \['model', 'tx'\]"
    ):
        checkpoint.load(DATA / "checkpointer")
    assert list(checkpoint.load(DATA / "checkpointer", prefix="model")) == ["w"]  # of the last step


def test_metadata_has_one_shape_whatever_the_format():
    manager = AsyncCheckpointManager()
    found = {
        name: manager.load(place(name), None)[1]
        for name in ("single.safetensors", "pytree_basic", "ts_noprefix")
    }
    fields = ["version", "timestamp", "checksum", "array_metadata", "framework_version", "custom_metadata"]
    assert all(list(metadata) == fields for metadata in found.values())
    assert found["pytree_basic"]["custom_metadata"] == {"step": 3}
    assert found["single.safetensors"]["custom_metadata"] == {"step": 3, "note": "hi"}


def test_checksums_of_the_original_are_checked(tmp_path):
    manager = AsyncCheckpointManager(enable_validation=True)
    path = shutil.copy(DATA / "validated.safetensors", tmp_path)
    _, metadata = manager.load(path, None)
    assert metadata["checksum"]
    flip(Path(path), -1)
    with pytest.raises(
        ValueError, match=r"validation failed: leaf '.*' in validated.safetensors has SHA-256"
    ):
        manager.load(path, None)


@pytest.mark.parametrize(
    "path", ["model-00001-of-00002.safetensors", "model.safetensors.index.json", "model", ""]
)
def test_shards_are_found_by_any_of_their_names(path):
    tree = checkpoint.load(DATA / "sharded" / path)
    keys = flatten(tree)[0].keys()
    assert keys <= SAMPLES["sharded"]["arrays"].keys()
    if "-of-" not in path:
        assert keys == SAMPLES["sharded"]["arrays"].keys()


# ------------------------------------------------------------------------------------------ bad copies


@pytest.fixture
def copied(tmp_path):
    def copy(name):
        shutil.copytree(DATA / name, tmp_path / name)
        return tmp_path / name

    return copy


def test_a_missing_chunk_is_an_error_and_never_zeros(copied):
    path = copied("ts_sharded")
    (path / "w" / "1.2").unlink()
    with pytest.raises(CorruptionError, match=r"'w'.*1 of 8 chunks are missing, the first is '1.2'"):
        checkpoint.load(path)


@pytest.mark.parametrize("file", ["tensorstore_index.json", "w/.zarray", "w/0.0"])
def test_a_truncated_file_is_an_error(copied, file):
    path = copied("ts_sharded")
    data = (path / file).read_bytes()
    for length in range(len(data)):
        (path / file).write_bytes(data[:length])
        with pytest.raises(FormatError):
            checkpoint.load(path)


def test_a_chunk_that_is_no_zstd_is_named(copied):
    path = copied("ts_sharded")
    (path / "w" / "0.0").write_bytes(b"nonsense" * 5)
    with pytest.raises(CorruptionError, match=r"'w': bytes 0 to 40 of w/0.0 cannot be decoded: not zstd"):
        checkpoint.load(path)
    assert [damage.file for damage in checkpoint.verify(path).damages] == ["w/0.0"]


def hostile(path, prefix, code):
    file = path / f"{prefix}_structure.json"
    structure = json.loads(file.read_text())
    structure["treedef_b64"] = base64.b64encode(code).decode()
    file.write_text(json.dumps(structure))


def test_a_pickle_that_wants_code_is_refused_but_a_template_needs_no_pickle(copied, tmp_path):
    path = copied("pytree_optax")
    expected = checkpoint.load(path)
    hostile(path, "tx", b"cos\nsystem\n(S'touch %s'\ntR." % str(tmp_path / "ran").encode())
    manager = AsyncCheckpointManager()
    with pytest.raises(StructureError, match=r"tx_structure.json.*template="):
        manager.load_pytree(path, None, prefix="tx")
    assert_same(manager.load_pytree(path, None, prefix="tx", template=expected)[0], expected)
    assert not (tmp_path / "ran").exists()


def test_a_structure_of_another_prefix_is_refused(copied):
    path = copied("pytree_optax")
    file = path / "tx_structure.json"
    file.write_text(file.read_text().replace('"tx', '"rx'))
    with pytest.raises(StructureError, match="is for the prefix 'rx', expected 'tx'"):
        checkpoint.load(path)


def test_saving_into_a_directory_of_the_original_replaces_one_prefix_and_keeps_the_rest(copied):
    path = copied("ts_multiprefix")
    before = checkpoint.load(path, prefix="optimizer")
    tree = {"w": np.arange(3), "new": [1, "x"]}
    checkpoint.save(tree, path, prefix="model", format="tensorstore")
    assert_same(checkpoint.load(path, prefix="model"), tree)
    assert_same(checkpoint.load(path, prefix="optimizer"), before)
    assert not (path / "model").exists()
    index = json.loads((path / "tensorstore_index.json").read_text())
    assert [array["path"] for array in index["prefixes"]["optimizer"]] == [
        "optimizer/count",
        "optimizer/mu/w",
    ]


def test_saving_over_a_structure_of_the_original_removes_the_stale_file(copied):
    path = copied("pytree_basic")
    checkpoint.save({"w": np.ones(3)}, path, prefix="state", format="tensorstore")
    assert not (path / "state_structure.json").exists()
    assert_same(checkpoint.load(path), {"w": np.ones(3)})
