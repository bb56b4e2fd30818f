"""Small leaves are copied when a save begins; larger ones are held. Nobody can tell the difference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eformer._engine.saving import snapshot
from eformer.checkpoint import SaveOptions, inspect, load, save, save_async
from support.trees import assert_same

DTYPES = [
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "int4",
    "uint4",
    "int2",
    "bool",
    "uint8",
    "int8",
    "int32",
    "float16",
    "float32",
    "complex64",
]


def leaves_of(dtype: str) -> dict[str, jax.Array]:
    numbers = np.arange(12) % 4
    shapes = {"scalar": (), "empty": (0, 3), "row": (12,), "box": (3, 2, 2)}
    return {
        name: jax.device_put(np.resize(numbers, shape).astype(jnp.dtype(dtype)))
        for name, shape in shapes.items()
    }


@pytest.fixture(params=["safetensors", "tensorstore"])
def kind(request):
    return request.param


@pytest.mark.parametrize("limit", [0, snapshot._COPIED_BYTES], ids=["held", "copied"])
def test_small_leaves_of_every_dtype_come_back(tmp_path, kind, monkeypatch, limit):
    monkeypatch.setattr(snapshot, "_COPIED_BYTES", limit)
    tree = {dtype: leaves_of(dtype) for dtype in DTYPES}
    tree["keys"] = {"one": jax.random.key(3), "many": jax.random.split(jax.random.key(4), 3)}
    tree["weak"] = {"number": jnp.asarray(1.5), "count": jnp.asarray(2)}
    tree["numpy"] = {
        "reversed": np.arange(6)[::-1],
        "big": np.arange(6, dtype=">i4"),
        "turned": np.ones((2, 3)).T,
    }
    save(tree, tmp_path / "x", format=kind)
    assert_same(load(tmp_path / "x"), tree)


def test_a_copied_leaf_is_recorded_as_a_held_one(tmp_path, monkeypatch):
    tree = {dtype: leaves_of(dtype) for dtype in DTYPES} | {"n": np.arange(5)[::2]}
    save(tree, tmp_path / "copied")
    monkeypatch.setattr(snapshot, "_COPIED_BYTES", 0)
    save(tree, tmp_path / "held")
    copied, held = (inspect(tmp_path / name).trees[""] for name in ("copied", "held"))
    assert dict(copied.leaves) == dict(held.leaves)


def test_small_leaves_are_cast(tmp_path):
    tree = {
        "a": jnp.arange(4, dtype=jnp.bfloat16),
        "b": jnp.arange(4.0),
        "c": np.arange(4.0),
        "i": jnp.arange(4),
    }
    save(tree, tmp_path / "x", options=SaveOptions(dtype="float16"))
    found = load(tmp_path / "x")
    assert [leaf.dtype.name for leaf in found.values()] == ["float16", "float16", "float16", "int32"]
    assert [leaf.tolist() for leaf in found.values()] == [[0, 1, 2, 3]] * 4


@pytest.mark.sample(4)
@pytest.mark.parametrize("size", [8, 2**15], ids=["small", "large"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_array_may_be_donated_right_after_save_async(tmp_path, kind, dtype, size):
    tree = {str(i): jnp.full((8, size), i, dtype) for i in range(40)}
    expected = jax.tree.map(np.array, tree)
    pending = save_async(tree, tmp_path / "x", format=kind)
    after = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0 - 1, tree), donate_argnums=0)(tree)
    jax.block_until_ready(after)
    pending.result()
    assert_same(jax.tree.map(np.asarray, load(tmp_path / "x")), expected)


@pytest.mark.parametrize("size", [8, 2**15], ids=["small", "large"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_array_may_be_deleted_or_changed_right_after_save_async(tmp_path, dtype, size):
    tree = {"jax": jnp.full((8, size), 3, dtype), "numpy": np.full((8, size), 3, jnp.dtype(dtype))}
    pending = save_async(tree, tmp_path / "x")
    tree["jax"].delete()
    tree["numpy"][...] = 7
    pending.result()
    assert all((np.asarray(leaf) == 3).all() for leaf in load(tmp_path / "x").values())
