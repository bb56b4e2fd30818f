"""The layouts of zarr arrays: the contract, what other readers see, and what other writers wrote."""

import os

import jax.numpy as jnp
import numpy as np
import pytest

from contracts.checkpoint import CheckpointContract, model
from eformer import checkpoint
from eformer.checkpoint import SaveOptions, load, save
from eformer.errors import CorruptionError


class TestArrays(CheckpointContract):
    format = "tensorstore"
    steps = ("_formats._writing.xxh3_128", "_formats.tensorstore.ArraysWriter._write_index")

    def place(self, folder):
        return folder / "checkpoint"

    @pytest.fixture
    def path(self, tmp_path):
        return self.place(tmp_path / "inner")

    def data_file(self, path):
        return max((p for p in path.rglob("*") if p.is_file() and p.parent != path), key=os.path.getsize)


class TestArraysInChunks(TestArrays):
    """The same, with many chunks to a leaf."""

    options = SaveOptions(max_chunk_bytes=1000)

    def test_there_really_are_many_chunks(self, path):
        save(model(), path)
        assert len(list((path / "params" / "embed").iterdir())) == 4

    def data_file(self, path):
        """The chunk whose bytes the contract goes looking for."""
        wanted = np.arange(700.0, 740.0, dtype=np.float32).tobytes()
        files = [p for p in path.rglob("*") if p.is_file() and p.parent != path]
        return next((p for p in files if wanted in p.read_bytes()), max(files, key=lambda p: p.name))


class TestDatabase(TestArrays):
    """The same, in an OCDBT database."""

    options = SaveOptions(ocdbt=True)
    steps = ("_formats.tensorstore.xxh3_128", "_formats.tensorstore.ArraysWriter._write_index")

    def name_in_errors(self, file):
        return "tree.ocdbt/bad/0"

    def position_in_errors(self, at):
        return 700 * 4


class TestCompressedArrays(TestArrays):
    options = SaveOptions(compression="zstd")

    def test_a_flipped_bit_in_the_data_is_found_and_named(self, path):
        save({"good": jnp.ones(96), "bad": jnp.arange(1000.0)}, path)
        data = bytearray((path / "bad" / "0").read_bytes())
        data[len(data) // 2] ^= 1
        (path / "bad" / "0").write_bytes(data)
        for call in (lambda: load(path), lambda: checkpoint.open(path)["bad"][699:701]):
            with pytest.raises(CorruptionError, match=r"'bad': bytes 0 to \d+ of bad/0 are damaged"):
                call()
        np.testing.assert_array_equal(load(path, keys="good")["good"], np.ones(96))
        assert [damage.leaf for damage in checkpoint.verify(path).damages] == ["bad"]
