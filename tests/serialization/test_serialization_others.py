"""Trees of arrays that other writers left, with every index they had or none."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore
from jax.sharding import PartitionSpec as P

from eformer.serialization.async_manager import AsyncCheckpointManager
from eformer.serialization.serialization import tree_deserialize_leaves, tree_serialize_leaves
from support.arrays import INDEX, index_of
from support.meshes import grid, line, on
from support.trees import assert_same


def write(root, arrays, index=None, compressor="zstd"):
    """Arrays as the original writes them: by TensorStore, one directory each."""
    for name, array in arrays.items():
        spec = {
            "driver": "zarr",
            "kvstore": {"driver": "file", "path": str(root / name)},
            "metadata": {"compressor": compressor and {"id": compressor, "level": 1}},
        }
        dtype = tensorstore.dtype(array.dtype.name)
        store = tensorstore.open(spec, create=True, dtype=dtype, shape=array.shape).result()
        store.write(array).result()
    if index is not None:
        (root / INDEX).write_text(json.dumps({"format": "tensorstore"} | index))


def listed(arrays):
    return [{"path": p, "shape": list(a.shape), "dtype": a.dtype.name} for p, a in arrays.items()]


ARRAYS = {
    "model/layers/0/w": np.arange(6, dtype=np.float32).reshape(2, 3),
    "model/b": np.ones(3, jnp.bfloat16),
    "model/n": np.array(7, np.int32),
}


NESTED = {
    "b": jnp.ones(3, jnp.bfloat16),
    "layers": {"0": {"w": jnp.arange(6, dtype=jnp.float32).reshape(2, 3)}},
    "n": jnp.int32(7),
}


@pytest.mark.parametrize("compressor", ["zstd", None])
def test_an_index_of_version_1_is_read(path, compressor):
    write(path, ARRAYS, {"version": "1.0", "arrays": listed(ARRAYS)}, compressor)
    assert_same(tree_deserialize_leaves(path, line()), {"model": NESTED})


def test_an_index_of_version_1_has_a_single_prefix(path):
    write(path, ARRAYS, {"version": "1.0", "arrays": listed(ARRAYS)})
    assert_same(tree_deserialize_leaves(path, line(), prefix="model"), NESTED)
    with pytest.raises(ValueError, match="no prefix 'opt'"):
        tree_deserialize_leaves(path, line(), prefix="opt")


@pytest.mark.parametrize("version", ["2.0", "0.0.101"])
def test_an_index_of_several_prefixes_is_read(path, version):
    more = {"opt/mu": np.zeros(2, np.float32)}
    prefixes = {"model": listed(ARRAYS), "opt": listed(more)}
    write(path, ARRAYS | more, {"version": version, "prefixes": prefixes})
    assert_same(tree_deserialize_leaves(path, line(), prefix="model"), NESTED)
    assert_same(tree_deserialize_leaves(path, line(), prefix="opt"), {"mu": jnp.zeros(2)})
    with pytest.raises(ValueError, match=r"\['model', 'opt'\]"):
        tree_deserialize_leaves(path, line())
    with pytest.raises(ValueError, match=r"no prefix 'zzz'.*\['model', 'opt'\]"):
        tree_deserialize_leaves(path, line(), prefix="zzz")


def test_one_prefix_of_others_need_not_be_said(path):
    write(path, ARRAYS, {"version": "2.0", "prefixes": {"model": listed(ARRAYS)}})
    assert_same(tree_deserialize_leaves(path, line()), NESTED)


def test_arrays_of_others_without_an_index_are_discovered(path):
    write(path, ARRAYS)
    assert_same(tree_deserialize_leaves(path, line()), {"model": NESTED})
    assert_same(tree_deserialize_leaves(path, line(), prefix="model"), NESTED)


def test_a_missing_chunk_of_others_is_not_taken_for_zeros(path):
    write(path, ARRAYS, {"version": "2.0", "prefixes": {"model": listed(ARRAYS)}})
    (path / "model" / "b" / "0").unlink()
    with pytest.raises(ValueError, match=r"'b'.*missing"):
        tree_deserialize_leaves(path, line())


def test_what_others_saved_stays_beside_what_we_save(path):
    raw = {"raw": np.ones(2, np.float32)}
    write(
        path, ARRAYS | raw, {"version": "1.0", "arrays": listed(raw), "prefixes": {"model": listed(ARRAYS)}}
    )
    tree_serialize_leaves(path, {"w": jnp.ones(2)}, prefix="ours")
    assert_same(tree_deserialize_leaves(path, line(), prefix="model"), NESTED)
    assert_same(tree_deserialize_leaves(path, line(), prefix="ours"), {"w": jnp.ones(2)})
    assert_same(tree_deserialize_leaves(path, line()), {"raw": jnp.ones(2)})
    assert index_of(path)["prefixes"]["model"] == listed(ARRAYS)


def test_what_others_saved_is_laid_out_as_it_is_asked_for(path):
    arrays = {"kernel": np.arange(64, dtype=np.float32).reshape(8, 8), "bias": np.ones(8, np.float32)}
    write(path, arrays, {"version": "1.0", "arrays": listed(arrays)})
    with pytest.raises(ValueError, match=r"'kernel'.*partition_rules.*shardings"):
        tree_deserialize_leaves(path, grid())
    loaded = tree_deserialize_leaves(path, grid(), partition_rules=((".*kernel", P("data", "model")),))
    assert loaded["kernel"].sharding == on(grid(), "data", "model")
    np.testing.assert_array_equal(loaded["kernel"], arrays["kernel"])


@pytest.mark.parametrize("is_right", [True, False])
def test_the_metadata_of_the_original_is_read_and_its_checksums_are_checked(path, is_right):
    write(path, ARRAYS, {"version": "0.0.101", "prefixes": {"model": listed(ARRAYS)}})
    manager = AsyncCheckpointManager(enable_validation=True)
    checksum = manager.compute_checksum(ARRAYS["model/b"]) if is_right else "0" * 64
    record = {"version": "0.0.101", "timestamp": "t", "checksum": {"b": checksum}, "array_metadata": {}}
    record |= {"framework_version": None, "custom_metadata": {"step": 3}}
    (path / "checkpoint_metadata.json").write_text(json.dumps(record))
    if is_right:
        loaded, metadata = manager.load(path, line())
        assert_same(loaded, NESTED)
        assert (metadata["checksum"], metadata["custom_metadata"]) == ({"b": checksum}, {"step": 3})
    else:
        with pytest.raises(ValueError, match="validation failed: leaf 'b'"):
            manager.load(path, line())
