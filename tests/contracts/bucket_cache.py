"""What a cache does for every bucket. A server inherits the class, imports the fixtures, and has one called
`url`, see `bucket`.
"""

from __future__ import annotations

import os
import pickle

import numpy as np
import pytest

from eformer import checkpoint
from eformer._engine.stores.bucket import BucketFiles
from eformer._engine.stores.cache import BLOCK
from eformer.checkpoint import load, save
from support.trees import assert_same

MIB = 2**20


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def tree():
    return {"w": np.arange(3 * MIB, dtype=np.float32), "b": np.arange(1000.0), "step": 3}


@pytest.fixture
def fetched(monkeypatch):
    """The ranges of data objects that are asked for: (offset, nbytes)."""
    asked, fetch = [], BucketFiles.fetch

    def counted(self, number, offset, nbytes):
        asked.append((offset, nbytes))
        return fetch(self, number, offset, nbytes)

    monkeypatch.setattr(BucketFiles, "fetch", counted)
    return asked


def files(cache):
    return sorted(cache.glob("*.block"))


def used(cache):
    return sum(path.stat().st_blocks * 512 for path in files(cache))


def one_block(cache):
    """Return a block of the object with the large leaf, within one read of it."""
    return next(path for path in files(cache) if path.name.endswith(".5.block"))


def change(path, offset, data):
    with path.open("r+b") as file:
        file.seek(offset, os.SEEK_SET if offset >= 0 else os.SEEK_END)
        file.write(data)


class BucketCache:
    """Of loads and views through a cache."""

    @pytest.mark.parametrize("kind", ["safetensors", "tensorstore"])
    def test_the_second_load_reads_no_data_from_the_bucket(self, url, cache, tree, fetched, kind):
        save(tree, url, format=kind)
        assert_same(load(url, options={"cache": cache}), tree)
        assert fetched
        fetched.clear()
        assert_same(load(url, options={"cache": cache}), tree)
        assert not fetched
        assert_same(load(url), tree)
        assert fetched

    def test_a_few_rows_fetch_a_few_blocks(self, url, cache, fetched):
        table = np.arange(16 * MIB // 4, dtype=np.float32).reshape(-1, 256)
        save({"w": table}, url)
        with checkpoint.open(url, cache=cache) as view:
            np.testing.assert_array_equal(view["w"][5000:5010], table[5000:5010])
            assert sum(nbytes for _, nbytes in fetched) <= 3 * BLOCK
            assert used(cache) <= 3 * BLOCK + 2**16
            fetched.clear()
            np.testing.assert_array_equal(view["w"][5001:5009], table[5001:5009])
            np.testing.assert_array_equal(pickle.loads(pickle.dumps(view))["w"][5002], table[5002])
            assert not fetched

    def test_a_damaged_block_is_fetched_again(self, url, cache, tree, fetched):
        save(tree, url)
        load(url, options={"cache": cache})
        change(one_block(cache), -1, b"\xa5")
        fetched.clear()
        assert_same(load(url, options={"cache": cache}, verify=False), tree)
        assert fetched == [(5 * BLOCK, BLOCK)]

    def test_objects_are_mapped_from_the_cache(self, url, cache, tree, fetched):
        save(tree, url)
        assert_same(load(url, options={"cache": cache}, mmap=True), tree)
        fetched.clear()
        loaded = load(url, options={"cache": cache}, mmap=True)
        assert_same(loaded, tree)
        assert not loaded["w"].flags.writeable
        assert not fetched
