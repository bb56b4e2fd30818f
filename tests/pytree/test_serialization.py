"""The documented msgpack door, compared live with flax."""

import contextlib
import gzip
import os

import flax.serialization
import jax
import jax.numpy as jnp
import msgpack
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from hypothesis import given, settings
from hypothesis import strategies as st

from eformer.errors import FormatError, LeafError, MismatchError
from eformer.pytree import _serialization as ours
from support.trees import Layer, Moments, arrays, assert_same, flax_trees, leaves, state_trees

STATE = {
    "params": {"w": jnp.arange(6.0).reshape(2, 3), "b": jnp.ones(3, jnp.bfloat16)},
    "opt": optax.adam(0.1).init({"w": jnp.ones((2, 3))}),
    "layers": [np.float32(1.5), (1, 2.5, "x", None, b"z", 1 + 2j)],
    "step": 7,
}


def like(tree):
    return jax.tree.map(lambda x: jnp.zeros_like(x) if isinstance(x, jax.Array) else x, tree)


# -------------------------------------------------------------------------------------------- flax's bytes


@contextlib.contextmanager
def chunks_of(limit):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flax.serialization, "MAX_CHUNK_SIZE", limit)
        patch.setattr(ours, "MAX_CHUNK_SIZE", limit)
        yield


@given(flax_trees, st.sampled_from([1, 16, 2**30]))
@settings(max_examples=300)
def test_msgpack_serialize_writes_flaxs_bytes(tree, limit):
    with chunks_of(limit):
        expected = flax.serialization.msgpack_serialize(tree)
        assert ours.msgpack_serialize(tree) == expected
        kept = ours.msgpack_serialize(tree, in_place=True)
        assert kept == flax.serialization.msgpack_serialize(tree, in_place=True)


@given(state_trees, st.sampled_from([1, 16, 2**30]))
@settings(max_examples=300)
def test_to_bytes_writes_flaxs_bytes_and_each_reads_the_others(tree, limit):
    with chunks_of(limit):
        message = ours.to_bytes(tree)
        assert message == flax.serialization.to_bytes(tree)
    assert_same(ours.from_bytes(tree, message), tree)
    assert_same(ours.from_bytes(None, message), ours.to_state_dict(tree))
    assert_same(flax.serialization.from_bytes(tree, message), tree)


@given(
    arrays(
        [jnp.dtype(name) for name in ("bool", "int8", "uint32", "bfloat16", "float32", "float8_e5m2", "int4")]
    )
)
def test_jax_arrays_are_written_as_flax_writes_them(array):
    leaf = jax.device_put(array)
    assert ours.to_bytes({"a": leaf}) == flax.serialization.to_bytes({"a": leaf})


def test_a_train_state_is_written_as_flax_writes_it_and_comes_back():
    state = TrainState.create(apply_fn=len, params={"b": jnp.ones(2), "a": jnp.ones(3)}, tx=optax.adamw(0.1))
    message = ours.to_bytes(state)
    assert message == flax.serialization.to_bytes(state)
    again = ours.from_bytes(state, message)
    assert jax.tree.structure(again) == jax.tree.structure(state)


def test_large_arrays_are_split_as_flax_splits_them(monkeypatch):
    monkeypatch.setattr(flax.serialization, "MAX_CHUNK_SIZE", 100)
    monkeypatch.setattr(ours, "MAX_CHUNK_SIZE", 100)
    tree = {"big": np.arange(300.0).reshape(3, 100), "edge": np.zeros(100, np.int8), "l": [np.arange(300)]}
    message = ours.msgpack_serialize(tree)
    assert message == flax.serialization.msgpack_serialize(tree)
    assert message.count(b"__msgpack_chunked_array__") == 1  # not the one at the limit, nor the one in a list
    assert_same(ours.msgpack_restore(message), tree)
    assert not ours.msgpack_restore(message)["big"].flags.writeable  # like every other array
    beyond_flax = {"t": (np.arange(300),)}  # a tuple is no list
    assert ours.msgpack_serialize(beyond_flax).count(b"__msgpack_chunked_array__") == 1
    assert_same(ours.msgpack_restore(ours.msgpack_serialize(beyond_flax)), beyond_flax)
    root = np.arange(300.0)
    assert ours.to_bytes(root) == flax.serialization.to_bytes(root)
    assert_same(ours.msgpack_restore(ours.to_bytes(root)), root)


def test_the_default_limit_is_flaxs():
    assert ours.MAX_CHUNK_SIZE == flax.serialization.MAX_CHUNK_SIZE == 2**30


# -------------------------------------------------------------------------------------------- beyond flax


@given(
    st.recursive(
        leaves,
        lambda c: st.lists(c, max_size=3).map(tuple) | st.dictionaries(st.integers(-9, 9), c, max_size=3),
        max_leaves=8,
    )
)
def test_tuples_and_int_keys_keep_their_types(tree):
    assert_same(ours.msgpack_restore(ours.msgpack_serialize(tree, in_place=True)), tree)


def test_a_large_list_of_small_values_is_read_as_flax_reads_it():
    message = flax.serialization.msgpack_serialize(
        {"l": [{"a": i, "b": [i / 2, str(i)]} for i in range(30_000)]}
    )
    assert ours.msgpack_restore(message) == flax.serialization.msgpack_restore(message)


def test_the_tree_is_sorted_only_on_request_and_never_modified():
    big = jnp.ones(4)
    tree = {"b": big, "a": [1, {"z": 1, "y": 2}]}
    assert list(ours.msgpack_restore(ours.msgpack_serialize(tree))) == ["a", "b"]
    assert list(ours.msgpack_restore(ours.msgpack_serialize(tree, in_place=True))) == ["b", "a"]
    assert tree["b"] is big
    assert list(tree) == ["b", "a"]


def test_typed_keys_go_through_state_and_file(tmp_path):
    state = {"rng": jax.random.key(3), "more": jax.random.split(jax.random.key(4), 2)}
    again = ours.from_bytes(state, ours.to_bytes(state))
    assert_same(again, state)
    ours.save_to_file(state, tmp_path / "s")
    assert jax.random.normal(ours.load_from_file(state, tmp_path / "s")["rng"]) == jax.random.normal(
        state["rng"]
    )


def test_a_real_state_comes_back_bit_for_bit():
    again = ours.from_bytes(like(STATE), ours.to_bytes(STATE))
    assert jax.tree.structure(again) == jax.tree.structure(STATE)
    assert_same(jax.tree.map(np.asarray, again), jax.tree.map(np.asarray, STATE))


def test_shapes_dtypes_and_keys_are_checked_against_the_target():
    message = ours.to_bytes({"a": np.ones((2, 3), np.float32), "b": 1})
    with pytest.raises(ValueError, match=r"\./a: expected float32\[3, 2\], found float32\[2, 3\]"):
        ours.from_bytes({"a": jnp.ones((3, 2)), "b": 1}, message)
    with pytest.raises(MismatchError) as caught:
        ours.from_bytes({"a": jnp.ones((2, 3), jnp.bfloat16), "c": 1}, message)
    assert len(caught.value.problems) == 3


def test_values_that_cannot_be_restored_are_refused_before_anything_is_written(tmp_path):
    path = tmp_path / "state"
    path.write_bytes(b"old")
    for bad in (np.array(["text"]), object(), {1, 2}, 2**70):
        with pytest.raises(LeafError):
            ours.save_to_file({"a": bad}, path)
        with pytest.raises(TypeError):
            ours.msgpack_serialize({"a": bad})
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["state"]


# ------------------------------------------------------------------------------------------------- gzip


def test_compression_is_gzip_deterministic_and_comes_back():
    packed = ours.to_compressed_bytes(STATE)
    assert packed == ours.to_compressed_bytes(STATE)
    assert gzip.decompress(packed) == ours.decompress_bytes(packed) == ours.to_bytes(STATE)
    assert_same(ours.from_compressed_bytes(STATE, packed), ours.from_bytes(STATE, ours.to_bytes(STATE)))
    assert ours.decompress_bytes(ours.compress_bytes(b"")) == b""


def test_damaged_gzip_is_a_value_error():
    with pytest.raises(ValueError, match="not gzip"):
        ours.from_compressed_bytes(None, ours.to_compressed_bytes(STATE)[:-3])


# ------------------------------------------------------------------------------------------------ files


def test_a_file_comes_back_from_str_and_path(tmp_path):
    for path in (
        str(tmp_path / "new" / "a.msgpack"),
        os.fsencode(tmp_path / "c.msgpack"),
        tmp_path / "b.msgpack",
    ):
        ours.save_to_file(STATE, path)
        again = ours.load_from_file(like(STATE), path)
        assert_same(jax.tree.map(np.asarray, again), jax.tree.map(np.asarray, STATE))
    assert (tmp_path / "b.msgpack").read_bytes() == flax.serialization.to_bytes(STATE)


def test_errors_of_a_file_name_the_file(tmp_path):
    path = tmp_path / "state.msgpack"
    with pytest.raises(FileNotFoundError, match=r"state\.msgpack"):
        ours.load_from_file(None, path)
    path.write_bytes(b"\xc1")
    with pytest.raises(FormatError, match=r"state\.msgpack: msgpack, at byte 1"):
        ours.load_from_file(None, path)
    ours.save_to_file({"a": 1}, path)
    with pytest.raises(MismatchError, match=r"state\.msgpack: the state does not fit the target: ") as caught:
        ours.load_from_file({"b": 1}, path)
    assert caught.value.problems == (".: missing key 'b'", ".: unexpected key 'a'")


def test_a_path_of_another_kind_is_refused_and_not_taken_for_a_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for call in (ours.save_to_file, ours.load_from_file):
        for path in ("gs://bucket/x", "s3://bucket/x"):
            with pytest.raises(ValueError, match=f"{path} is not a local path"):
                call({"a": 1}, path)
    assert os.listdir(tmp_path) == []


def test_a_loaded_file_stays_valid_when_it_is_replaced(tmp_path):
    path = tmp_path / "state"
    ours.save_to_file({"w": np.arange(1000)}, path)
    first = ours.load_from_file(None, path)
    ours.save_to_file({"w": np.zeros(5)}, path)
    path.write_bytes(b"")
    assert first["w"].tolist() == list(range(1000))


# ------------------------------------------------------------------------------------------------- info


def test_info_counts_any_leaf():
    tree = {
        "w": np.ones((2, 3), np.float32), "b": jnp.ones(4, jnp.bfloat16), "n": 3, "x": 1.5, "s": "text", "z": None,
        "k": jax.random.key(0), "abstract": jax.ShapeDtypeStruct((5,), jnp.int8), "l": Layer(np.int64(1), ()),
    }  # fmt: skip
    info = ours.get_serialization_info(tree)
    assert info == {
        "num_leaves": 8,
        "tree_structure": str(jax.tree.structure(tree)),
        "total_elements": 6 + 4 + 1 + 1 + 1 + 1 + 5 + 1,
        "memory_bytes": 24 + 8 + 8 + 8 + 4 + 8 + 5 + 8,
        "is_serializable": False,  # an abstract leaf has no bytes
        "dtypes": ["bfloat16", "float", "float32", "int", "int64", "int8", "key<fry>", "str"],
    }
    del tree["abstract"]
    assert ours.get_serialization_info(tree)["is_serializable"]
    ours.to_bytes(tree)
    for leaf in (object(), jnp.float32, np.float32, np.ma.masked_array([1, 2], [True, False]), len, {1, 2}):
        info = ours.get_serialization_info({"a": leaf})
        assert info["num_leaves"] == 1
        assert not info["is_serializable"]
        with pytest.raises(LeafError):
            ours.to_bytes({"a": leaf})
    assert ours.get_serialization_info({})["num_leaves"] == 0


def test_restoring_needs_nothing_but_the_bytes_that_msgpack_itself_writes():
    assert ours.msgpack_restore(msgpack.packb({"a": [1, {"b": None}], "c": 1.5})) == {
        "a": [1, {"b": None}],
        "c": 1.5,
    }


def test_namedtuples_need_a_state_dict_first():
    with pytest.raises(TypeError, match="to_bytes takes registered objects apart"):
        ours.msgpack_serialize(Moments(1, 2))
    assert ours.from_bytes(Moments(0, 0), ours.to_bytes(Moments(1, 2))) == Moments(1, 2)
