"""Conversions to Orbax: what Orbax restores is the tree bit for bit, and eformer reads it, too."""

from collections import OrderedDict

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest

from eformer import checkpoint
from eformer._engine.tools import orbax_writer
from eformer.errors import MismatchError
from support.commands import run

DTYPES = [
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32"),
    *("float64", "complex64", "complex128", "bfloat16", "int4", "float8_e4m3fn", "float8_e5m2"),
    *("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e4m3b11fnuz"),
]


def restored(path, *target):
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path, *target)


def bits(tree):
    """The structure with dtype, shape and bytes of each array."""
    return jax.tree.map(lambda leaf: (str(leaf.dtype), leaf.shape, np.asarray(leaf).tobytes()), tree)


def converted(tree, folder, **options):
    checkpoint.save(tree, folder / "ours")
    checkpoint.convert(folder / "ours", folder / "orbax", to="orbax", **options)
    return folder / "orbax"


def array(dtype, shape):
    dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
    return np.random.default_rng(0).integers(0, 2, shape).astype(dtype)


@pytest.mark.sample(3)
@pytest.mark.parametrize("dtype", DTYPES)
def test_orbax_restores_every_dtype_bit_for_bit(tmp_path, dtype):
    tree = {"a": array(dtype, (3, 4)), "b": {"c": array(dtype, ()), "d": array(dtype, (0, 2))}}
    path = converted(tree, tmp_path)
    assert bits(restored(path)) == bits(tree)
    assert bits(restored(path, tree)) == bits(tree)
    assert bits(checkpoint.load(path)) == bits(tree)


def test_containers_plain_values_and_keys_come_back(tmp_path):
    tree = {
        "list": [jnp.arange(3), {"x/y": np.ones(2)}],
        "tuple": (5, 2.5, True, "text", None),
        "empty": {"dict": {}, "list": []},
        "key": jax.random.key(3),
        "number": {1: jnp.float32(2)},
    }
    path = converted(tree, tmp_path)
    found = restored(path)
    assert found["tuple"] == [5, 2.5, True, "text", None]
    assert found["empty"] == {"dict": {}, "list": []}
    np.testing.assert_array_equal(found["list"][0], [0, 1, 2])
    np.testing.assert_array_equal(found["list"][1]["x/y"], np.ones(2))
    np.testing.assert_array_equal(found["key"], jax.random.key_data(jax.random.key(3)))
    ours = checkpoint.load(path)
    assert ours["key"] == jax.random.key(3)
    assert ours["tuple"] == [5, 2.5, True, "text", None]
    assert checkpoint.inspect(path).left_out == ()
    run("verify", path)


def test_a_target_restores_jax_arrays_keys_and_tuples(tmp_path):
    tree = {"w": (jnp.arange(6, dtype=jnp.bfloat16).reshape(2, 3), jnp.ones(4)), "key": jax.random.key(3)}
    path = converted(tree, tmp_path)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    target = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree)
    found = restored(path, target)
    assert isinstance(found["w"], tuple)
    assert isinstance(found["w"][0], jax.Array)
    assert bits(found["w"]) == bits(tree["w"])
    assert found["key"] == tree["key"]


def test_other_doors_of_orbax_read_it(tmp_path):
    tree = {"a": np.arange(6.0), "b": [np.ones(2, np.float32)]}
    path = converted(tree, tmp_path)
    with ocp.PyTreeCheckpointer() as checkpointer:
        assert bits(checkpointer.restore(path)) == bits(tree)


def test_the_manager_of_orbax_reads_a_step_with_its_default_item(tmp_path):
    tree = {"a": np.arange(6.0), "b": [np.ones(2, np.float32)]}
    checkpoint.save(tree, tmp_path / "ours", prefix="default")
    checkpoint.convert(tmp_path / "ours", tmp_path / "run" / "7", to="orbax")
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        assert manager.latest_step() == 7
        assert bits(manager.restore(7, args=ocp.args.StandardRestore())) == bits(tree)
    assert bits(checkpoint.load(tmp_path / "run")) == bits(tree)


def test_large_arrays_are_cut_into_chunks_of_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(orbax_writer, "_CHUNK_BYTES", 64)
    tree = {
        "a": np.arange(7 * 5, dtype=np.float32).reshape(7, 5),
        "b": np.arange(3 * 4 * 9.0).reshape(3, 4, 9),
    }
    path = converted(tree, tmp_path)
    assert len(list((path / "a").iterdir())) > 3
    assert bits(restored(path)) == bits(tree)
    assert bits(checkpoint.load(path)) == bits(tree)


def test_prefixes_become_items(tmp_path):
    checkpoint.save({"w": np.ones(3)}, tmp_path / "ours", prefix="model")
    checkpoint.save({"m": np.zeros(2)}, tmp_path / "ours", prefix="state")
    checkpoint.convert(tmp_path / "ours", tmp_path / "orbax", to="orbax")
    handlers = {name: ocp.StandardCheckpointHandler() for name in ("model", "state")}
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler(**handlers)) as checkpointer:
        asked = ocp.args.Composite(model=ocp.args.StandardRestore(), state=ocp.args.StandardRestore())
        found = checkpointer.restore(tmp_path / "orbax", args=asked)
    np.testing.assert_array_equal(found["model"]["w"], np.ones(3))
    np.testing.assert_array_equal(found["state"]["m"], np.zeros(2))
    np.testing.assert_array_equal(checkpoint.load(tmp_path / "orbax", prefix="state")["m"], np.zeros(2))


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (
            {"a.b": np.ones(1), "a": {"b": np.ones(1)}},
            "2 leaves would have the name 'a.b': Orbax joins keys by dots",
        ),
        ({"a.b": "x", "a": {"b": "y"}}, "2 leaves would have the name 'a.b'"),
        (OrderedDict([(1, None), ("1", np.ones(1))]), r"2 leaves have the keys \('1',\), such as 1 and '1'"),
        ({"a": np.ones(1), "a/b": np.ones(1)}, "leaf 'a/b' would lie inside of the leaf 'a'"),
        ({"/x": np.ones(1)}, "leaf '/x' cannot be the name of a directory"),
        ({"../x": np.ones(1)}, r"leaf '\.\./x' cannot be the name of a directory"),
        ({"n" * 300: np.ones(1)}, "cannot be the name of a directory"),
        ({"_METADATA": np.ones(1)}, "leaf '_METADATA' has the name of a file of Orbax"),
        ({"a": b"bytes"}, "leaf 'a' is a plain bytes"),
        ({"a": 2**70}, "leaf 'a' is a plain int"),
        (np.ones(3), "the tree is a single leaf, or empty"),
        ({}, "the tree is a single leaf, or empty"),
    ],
)
def test_whatever_orbax_cannot_store_is_named_before_anything_is_written(tmp_path, tree, message):
    with pytest.raises(MismatchError, match=message):
        converted(tree, tmp_path)
    assert not (tmp_path / "orbax").exists()


def test_the_command_line_converts_to_orbax_and_back(tmp_path):
    checkpoint.save({"a": np.arange(3.0)}, tmp_path / "ours")
    shown = run("convert", tmp_path / "ours", tmp_path / "orbax", "--to", "orbax").stdout
    assert "have no digests" in shown
    run("convert", tmp_path / "orbax", tmp_path / "back.safetensors")
    run("diff", tmp_path / "ours", tmp_path / "back.safetensors")
