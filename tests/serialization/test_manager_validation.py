"""Checksums of arrays: what they are, when they are recorded, and who compares them."""

import hashlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xxhash

from eformer.serialization.async_manager import AsyncCheckpointManager
from support.backends import Backend, Compressed, OneFile, Safetensors, TensorStore
from support.meshes import grid, line, on
from support.states import arrays_of, state
from support.trees import assert_same

Manager = AsyncCheckpointManager


def forge(file, old, new):
    """Changes a sealed record so that nobody can tell it from the one that was written."""
    data = file.read_bytes()
    length = 8 + int.from_bytes(data[:8], "little") if file.suffix == ".safetensors" else len(data)
    record = data[:length].replace(old.encode(), new.encode())
    at = record.index(b'"digest":"') + len(b'"digest":"')
    blank = record[:at] + b"0" * 32 + record[at + 32 :]
    digest = xxhash.xxh3_128_hexdigest(blank).encode()
    file.write_bytes(blank[:at] + digest + blank[at + 32 :] + data[length:])
    assert record != data[:length]


class Validation(Backend):
    """What is damaged is not loaded, unless somebody says that it does not matter."""

    def test_validation_records_the_checksum_of_every_array(self, path):
        tree = state() | {
            "sharded": jax.device_put(jnp.arange(64.0).reshape(8, 8), on(grid(), "data", "model")),
            "strided": np.arange(20.0)[::3],
            "big": np.arange(3, dtype=">i4"),
            "four bits": jnp.ones(5, jnp.int4),
            "empty": jnp.zeros((0, 3)),
        }
        manager = self.make(enable_validation=True)
        manager.save(tree, path)
        loaded, metadata = manager.load(path, line())
        assert metadata["checksum"] == {k: Manager.compute_checksum(x) for k, x in arrays_of(tree).items()}
        assert metadata["checksum"] == {k: Manager.compute_checksum(x) for k, x in arrays_of(loaded).items()}

    def test_without_validation_there_are_no_checksums(self, manager, path):
        manager.save(state(), path)
        assert manager.load(path, line())[1]["checksum"] == {}
        assert_same(manager.load(path, line(), validate=True)[0], state())

    def test_a_checksum_is_that_of_what_is_stored(self, path):
        self.make(enable_validation=True, float_dtype="bf16").save({"w": jnp.linspace(0, 1, 9)}, path)
        loaded, metadata = self.make().load(path, line(), validate=True)
        assert metadata["checksum"] == {"w": Manager.compute_checksum(loaded["w"])}

    @pytest.fixture
    def forged(self, path):
        """A checkpoint in which only the SHA-256 of one array is wrong."""
        self.make(enable_validation=True).save(
            {"a": {"w": jnp.arange(5.0)}, "v": jnp.arange(3)}, path, prefix="m"
        )
        right = Manager.compute_checksum(jnp.arange(5.0))
        forge(self.record_of(path), right, "0" * 64)
        return path

    def test_a_wrong_checksum_is_an_error_that_names_leaf_and_path(self, forged):
        validating, plain = self.make(enable_validation=True), self.make()
        for call in (
            lambda: validating.load(forged, line()),
            lambda: validating.load_tree_parallel(forged),
            lambda: validating.load_pytree(forged, line(), prefix="m"),
            lambda: plain.load(forged, line(), validate=True),
            lambda: plain.load_tree_parallel(forged, validate=True),
        ):
            with pytest.raises(
                ValueError,
                match=rf"{re.escape(str(forged))}: validation failed: leaf 'a\.w' in \S+ has SHA-256",
            ):
                call()

    def test_a_wrong_checksum_matters_only_to_who_validates(self, forged):
        for tree, _ in (
            self.make().load(forged, line()),
            self.make().load_pytree(forged, line(), prefix="m"),
            self.make(enable_validation=True).load(forged, line(), validate=False),
            self.make(enable_validation=True).load_tree_parallel(forged, validate=False),
        ):
            np.testing.assert_array_equal(tree["a"]["w"], np.arange(5.0))

    @pytest.mark.parametrize("enable_validation", [False, True])
    @pytest.mark.parametrize("validate", [None, True])
    def test_a_flipped_bit_is_an_error_that_names_leaf_and_file(self, path, validate, enable_validation):
        tree = {"good": jnp.ones(50), "bad": jnp.linspace(1, 2, 100)}
        self.make(enable_validation=enable_validation).save(tree, path)
        file = self.damage(path, "bad", tree["bad"][40:60])
        for manager in (self.make(), self.make(enable_validation=True)):
            with pytest.raises(ValueError, match=rf"'bad': .*{re.escape(file.name)}"):
                manager.load(path, line(), validate=validate)

    def test_validate_false_skips_the_digests(self, path):
        tree = {"w": jnp.linspace(1, 2, 100)}
        self.make(enable_validation=True).save(tree, path)
        self.damage(path, "w", tree["w"])
        loaded, _ = self.make(enable_validation=True).load(path, line(), validate=False)
        assert int(np.sum(np.asarray(loaded["w"]) != np.asarray(tree["w"]))) == 1


class TestTensorStore(TensorStore, Validation):
    pass


@pytest.mark.sample(5)
class TestCompressed(Compressed, Validation):
    test_validate_false_skips_the_digests = None  # what a flipped bit then becomes is anybody's guess


@pytest.mark.sample(3)
class TestSafetensors(Safetensors, Validation):
    pass


@pytest.mark.sample(5)
class TestOneFile(OneFile, Validation):
    pass


# ------------------------------------------------------------------------------------------- checksums


@pytest.mark.parametrize(
    ("array", "content"),
    [
        (jnp.arange(3, dtype=jnp.int32), np.arange(3, dtype="<i4").tobytes()),
        (np.arange(3, dtype=">i4"), np.arange(3, dtype="<i4").tobytes()),
        (np.arange(6, dtype="<f4").reshape(2, 3).T, np.arange(6, dtype="<f4").reshape(2, 3).T.tobytes("C")),
        (jnp.zeros((0, 3)), b""),
        (jnp.bfloat16(1), b"\x80\x3f"),
        (3, np.int64(3).tobytes()),
        (0.5, np.float64(0.5).tobytes()),
        ([1, 2], np.array([1, 2]).tobytes()),
        (jax.random.key(7), np.array([0, 7], "<u4").tobytes()),
    ],
    ids=str,
)
def test_a_checksum_is_the_sha256_of_the_elements_in_their_order(array, content):
    assert Manager.compute_checksum(array) == hashlib.sha256(content).hexdigest()


def test_a_checksum_has_a_known_value():
    known = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"  # of nothing
    assert Manager.compute_checksum(jnp.zeros(0)) == known
    assert AsyncCheckpointManager().compute_checksum(jnp.zeros((0, 2))) == known


def test_a_checksum_does_not_depend_on_where_the_array_lies():
    array = jnp.arange(64.0).reshape(8, 8)
    sharded = jax.device_put(array, on(grid(), "data", "model"))
    assert Manager.compute_checksum(sharded) == Manager.compute_checksum(array)
    assert Manager.compute_checksum(np.asarray(array)) == Manager.compute_checksum(array)
    assert Manager.compute_checksum(array.at[7, 7].add(1)) != Manager.compute_checksum(array)


@pytest.mark.parametrize("use_tensorstore", [True, False])
def test_keys_that_read_alike_have_checksums_of_their_own(tmp_path, use_tensorstore):
    manager = AsyncCheckpointManager(enable_validation=True, use_tensorstore=use_tensorstore)
    tree = {"a.b": np.zeros(2), "a": {"b": np.ones(3)}, "c": np.ones(1)}
    manager.save(tree, tmp_path / "x")
    loaded, metadata = manager.load(tmp_path / "x", None)
    assert_same(loaded, tree)
    assert set(metadata["checksum"]) == set(metadata["array_metadata"]) == {"a%2Eb", "a.b", "c"}
