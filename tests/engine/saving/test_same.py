"""`same` compares a tree in memory with the record of a checkpoint, and reads no leaf."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from eformer.checkpoint import same, save, verify
from eformer.errors import NotFoundError
from support.meshes import layouts

FORMATS = {
    "safetensors": {},
    "zarr": {"format": "zarr"},
    "zstd": {"format": "zarr", "options": {"compression": "zstd", "checksums": True}},
    "ocdbt": {"format": "zarr", "options": {"ocdbt": True}},
}


def tree():
    array = np.arange(600 * 800, dtype=np.float32).reshape(600, 800)
    return {"w": jax.device_put(array, layouts()["columns"]), "b": np.arange(5), "step": 3}


@pytest.fixture(params=FORMATS)
def path(request, tmp_path):
    save(tree(), tmp_path / "a", **FORMATS[request.param])
    return tmp_path / "a"


@pytest.mark.sample(4)
@pytest.mark.parametrize("layout", layouts(), ids=str)
def test_a_saved_tree_is_the_same_under_any_sharding(path, layout):
    found = same({**tree(), "w": jax.device_put(tree()["w"], layouts()[layout])}, path)
    assert found
    assert found.equal == 3
    assert "the tree is the same, 3 leaves equal" in str(found)


def test_leaves_that_differ_are_missing_or_are_extra_are_named(path):
    found = same({"w": tree()["w"].at[599, 0].add(1), "b": np.arange(5), "more": 1}, path)
    assert not found
    assert list(found.differing) == ["w"]
    assert found.differing["w"].startswith("float32[600, 800]: elements differ")
    assert (found.missing, found.extra, found.equal) == (("step",), ("more",), 1)
    assert "~ w: float32" in str(found)
    assert "- step: only in the checkpoint\n+ more: only in the tree" in str(found)


def test_the_rows_that_differ_are_named(tmp_path):
    save(tree(), tmp_path)
    found = same({**tree(), "w": tree()["w"].at[599, 0].add(1)}, tmp_path)
    assert found.differing == {"w": "float32[600, 800]: elements differ in [327:600, 0:800]"}


@pytest.mark.parametrize(
    ("leaf", "text"),
    [
        (np.arange(5.0), "float64[5] in the tree, int64[5] in the checkpoint"),
        (np.arange(6), "int64[6] in the tree, int64[5] in the checkpoint"),
        (7, "7 in the tree, int64[5] in the checkpoint"),
    ],
)
def test_other_dtypes_shapes_and_kinds_of_leaves_differ(tmp_path, leaf, text):
    save(tree(), tmp_path)
    assert same({**tree(), "b": leaf}, tmp_path).differing == {"b": text}


def test_a_plain_value_that_differs_is_shown(tmp_path):
    save(tree(), tmp_path)
    assert same({**tree(), "step": 4}, tmp_path).differing == {"step": "4 in the tree, 3 in the checkpoint"}


@pytest.mark.parametrize("kind", ["safetensors", "zstd"])
def test_no_leaf_is_read(tmp_path, kind):
    save(tree(), tmp_path, **FORMATS[kind])
    index = {"manifest.json", "tensorstore_index.json"}
    for file in tmp_path.rglob("*"):
        if file.is_file() and file.name not in index:
            file.write_bytes(b"\0" * file.stat().st_size)
    assert not verify(tmp_path).ok
    assert same(tree(), tmp_path)
    assert not same({**tree(), "b": np.arange(5) + 1}, tmp_path)


def test_not_a_number_is_the_same_if_its_bits_are(tmp_path):
    save({"w": np.array([np.nan, 0.0])}, tmp_path)
    assert same({"w": np.array([np.nan, 0.0])}, tmp_path)
    assert not same({"w": np.array([np.nan, -0.0])}, tmp_path)


def test_a_prefix_selects_one_of_several_trees(tmp_path):
    save({"w": jnp.ones(3)}, tmp_path, prefix="model")
    save({"w": jnp.zeros(3)}, tmp_path, prefix="ema")
    assert same({"w": jnp.zeros(3)}, tmp_path, prefix="ema")
    assert not same({"w": jnp.zeros(3)}, tmp_path, prefix="model")
    with pytest.raises(ValueError, match="holds several trees; pass prefix="):
        same({"w": jnp.zeros(3)}, tmp_path)


def test_a_checkpoint_of_another_program_has_no_digests_to_compare_with(tmp_path):
    save_file({"w": np.ones(3)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"the record has no digests of 1 leaf: w\. Compare with the data"):
        same({"w": np.ones(3)}, tmp_path / "model.safetensors")


def test_shards_that_were_compressed_need_checksums(tmp_path):
    save(tree(), tmp_path, format="zarr", options={"compression": "zstd"})
    with pytest.raises(
        ValueError, match=r"no digests of 1 leaf: w\..*SaveOptions\(checksums=True\) records them"
    ):
        same(tree(), tmp_path)


def test_a_checkpoint_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(NotFoundError):
        same({"w": np.ones(3)}, tmp_path / "none")
