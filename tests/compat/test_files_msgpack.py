"""A state that flax wrote to a file loads like any checkpoint: whole, in parts and onto meshes."""

import struct
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eformer import checkpoint
from eformer.errors import FormatError, MismatchError
from eformer.pytree._serialization import msgpack_restore, msgpack_serialize, save_to_file
from support.samples import FILES, write
from support.trees import assert_same


def same_numbers(found, expected):
    """Of trees whose arrays may be numpy's or JAX's."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert getattr(a, "dtype", type(a)) == getattr(b, "dtype", type(b))
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_a_state_of_flax_comes_back():
    loaded = checkpoint.load(FILES / "flax.msgpack")
    same_numbers(loaded, write.state())
    assert loaded["plain"]["list"] == [1, 2.5, "text", b"bytes", True]
    assert type(loaded["plain"]["scalar"]) is np.float32
    assert isinstance(loaded["params"]["bfloat16"], jax.Array)


def test_chunks_of_flax_are_one_array():
    w = checkpoint.load(FILES / "flax_chunked.msgpack")["params"]["w"]
    np.testing.assert_array_equal(w, np.arange(100.0).reshape(4, 25))
    with checkpoint.open(FILES / "flax_chunked.msgpack") as view:
        np.testing.assert_array_equal(view["params.w"][1:3, 20:], np.asarray(w)[1:3, 20:])
        assert view["params.w"].nbytes == 400


def test_chunks_of_flax_are_cut_anew_for_a_mesh():
    mesh = jax.make_mesh((4,), ("x",), devices=jax.devices()[:4])
    spec = jax.sharding.PartitionSpec("x")
    loaded = checkpoint.load(FILES / "flax_chunked.msgpack", mesh=mesh, shardings={"params": {"w": spec}})
    w = loaded["params"]["w"]
    assert w.addressable_shards[0].data.shape == (1, 25)
    np.testing.assert_array_equal(w, np.arange(100.0).reshape(4, 25))


def test_our_extensions_of_msgpack_come_back(tmp_path):
    tree = {
        "tuple": (1, (jnp.ones(2), "x")),
        "key": jax.random.key(3),
        5: {None: 1.5, 2.0: b""},
        "many": jax.random.split(jax.random.key(1), 3),
    }
    (tmp_path / "x").write_bytes(msgpack_serialize(tree, in_place=True))
    assert_same(checkpoint.load(tmp_path / "x"), tree)


@pytest.mark.parametrize(
    "tree", [np.arange(3.0, dtype=np.float32), [np.ones(2, np.float32), 3], (np.int32(3),), {}]
)
def test_a_msgpack_tree_need_not_be_a_dict(tmp_path, tree):
    (tmp_path / "x").write_bytes(msgpack_serialize(tree))
    same_numbers(checkpoint.load(tmp_path / "x"), tree)


def test_a_msgpack_tree_has_the_names_of_the_same_tree_saved_by_us(tmp_path):
    tree = {
        "a.b": jnp.ones(2),
        "a": {"b": jnp.ones(3), "": 1},
        "../x": [jnp.ones(1), {"%": 2.0}],
        "m": {1: 1, 2: 2},
    }
    (tmp_path / "x.msgpack").write_bytes(msgpack_serialize(tree, in_place=True))
    checkpoint.save(tree, tmp_path / "ours")
    with checkpoint.open(tmp_path / "x.msgpack") as found, checkpoint.open(tmp_path / "ours") as ours:
        assert set(found) == set(ours)
    assert_same(checkpoint.load(tmp_path / "x.msgpack"), tree)


def test_of_a_large_message_only_the_names_are_read(tmp_path):
    path, nbytes = tmp_path / "large.msgpack", 2**32 - 2**10
    inner = b"\x93\x91\xce" + struct.pack(">I", nbytes // 4) + b"\xa7float32\xc6" + struct.pack(">I", nbytes)
    with path.open("wb") as file:
        file.write(b"\x81\xa1w\xc9" + struct.pack(">I", len(inner) + nbytes) + b"\x01" + inner)
        file.truncate(file.tell() + nbytes)  # a hole, which takes no room on the disk
    code = (
        f"from eformer import checkpoint; m = checkpoint.inspect({str(path)!r});"
        f"assert m.trees[''].leaves['w'].nbytes == {nbytes};"
        "(peak,) = [int(s.split()[1]) for s in open('/proc/self/status') if s.startswith('VmHWM')];"
        "assert peak < 2**19, 'kilobytes'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_state_of_ours_from_a_file_fits_like(tmp_path):
    save_to_file({"w": jnp.ones((2, 2))}, tmp_path / "x.msgpack")
    like = {"w": jax.ShapeDtypeStruct((2, 2), jnp.bfloat16)}
    assert checkpoint.load(tmp_path / "x.msgpack", like=like, dtype="bfloat16")["w"].dtype == jnp.bfloat16
    with pytest.raises(MismatchError, match=r"leaf 'w': expected bfloat16\[2, 2\], found float32\[2, 2\]"):
        checkpoint.load(tmp_path / "x.msgpack", like=like)


def test_restoring_by_flax_and_by_load_are_the_same():
    data = (FILES / "flax.msgpack").read_bytes()
    same_numbers(checkpoint.load(FILES / "flax.msgpack"), msgpack_restore(data))


def test_very_many_values_are_refused_soon(tmp_path):
    (tmp_path / "many.msgpack").write_bytes(b"\xdd" + struct.pack(">I", 2**21) + bytes(2**21))
    with pytest.raises(FormatError, match="more than 1,048,576 values"):
        checkpoint.inspect(tmp_path / "many.msgpack")


@pytest.mark.parametrize("code", [1, 2, 3])
def test_an_array_as_the_shape_of_an_array_is_refused(tmp_path, code):
    def extension(code, payload):
        return bytes([0xC7, len(payload), code]) + payload

    inner = extension(code, b"\x93\x91\x01\xa5uint8\xc4\x01\x05")
    message = b"\x81\xa1w" + extension(1, b"\x93" + inner + b"\xa5uint8\xc4\x01\x05")
    (tmp_path / "x.msgpack").write_bytes(message)
    for call in (checkpoint.load, checkpoint.verify, checkpoint.inspect):
        with pytest.raises(FormatError, match="wrong payload of an extension"):
            call(tmp_path / "x.msgpack")
