"""Checkpoints in memory, which behaves like a bucket: the store's promises, and all of a checkpoint's on top of it."""

import itertools
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from contracts.checkpoint import CheckpointContract, DirectoryContract
from contracts.store import StoreContract
from eformer import checkpoint
from eformer._engine.stores.base import SwapError
from eformer._engine.stores.memory import MemoryStore, MemoryUpload
from eformer.checkpoint import SaveOptions, load, save
from support.memory import forget, objects, overwrite
from support.trees import HOSTILE, assert_same

numbers = itertools.count()


@pytest.fixture
def url():
    found = f"memory://test-{os.getpid()}-{next(numbers)}/x"
    yield found
    forget(found)


class TestStore(StoreContract):
    @pytest.fixture
    def store(self, url):
        return MemoryStore(url)

    def test_an_index_that_another_save_has_swapped_is_not_overwritten(self, store):
        self.swap(store, "index", b"one")
        before = self.version(store, "index")
        self.swap(store, "index", b"two", before)
        for expected in (before, None):
            with pytest.raises(SwapError):
                self.swap(store, "index", b"three", expected)
        assert store.read("index")[0] == b"two"


class InMemory:
    """Where a layout is saved, and how its contract looks at it."""

    upload = MemoryUpload
    suffix = ""

    @pytest.fixture
    def path(self, url):
        return url + self.suffix

    def place(self, folder):
        return f"memory://{folder}/x{self.suffix}"

    def make_surroundings(self, path):
        pass

    def exists(self, path):
        return bool(objects(path))

    def listing(self, path):
        return sorted(objects(path))

    def data_file(self, path):
        found = {key: data for key, data in objects(path).items() if not key.endswith(".json")}
        return max(found, key=lambda key: len(found[key]))

    def damage(self, file, how):
        overwrite(file, how)

    def name_in_errors(self, file):
        return file.rpartition("/")[2]

    def test_hostile_names_come_back(self, path):
        tree = {key: np.full(3, i) for i, key in enumerate(HOSTILE)}
        save(tree, path)
        assert_same(load(path), tree)


class TestDirectory(InMemory, DirectoryContract):
    """Safetensors files in a bucket."""


class TestOneFile(InMemory, CheckpointContract):
    """One object that carries its own manifest."""

    suffix = ".safetensors"


class TestArrays(InMemory, DirectoryContract):
    """Zarr arrays in a bucket."""

    format = "tensorstore"

    def name_in_errors(self, file):
        return "bad/0"


# ------------------------------------------------------------------------------------------- commits


@pytest.mark.parametrize("kind", ["safetensors", "tensorstore"])
def test_saves_that_commit_at_once_keep_each_others_trees(url, kind):
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: save({"w": np.full(9, n)}, url, prefix=f"p{n}", format=kind), range(24)))
    for number in range(24):
        assert load(url, prefix=f"p{number}")["w"][0] == number
    assert checkpoint.verify(url).ok


@pytest.mark.parametrize("kind", ["safetensors", "tensorstore"])
def test_a_name_is_never_used_twice(url, kind):
    seen = set()
    for number in range(5):
        save({"w": np.full(9, number)}, url, format=kind)
        data = {key for key in objects(url) if not key.endswith(".json")}
        assert not seen & data
        seen |= data


@pytest.mark.parametrize("kind", ["safetensors", "tensorstore"])
def test_unchanged_leaves_are_used_again(url, kind):
    tree = {"base": {"w": np.arange(5000.0)}, "head": {"v": np.zeros(3)}}
    save(tree, url, format=kind, options=SaveOptions(reuse=True))
    tree["head"]["v"] += 1
    save(tree, url, format=kind, options=SaveOptions(reuse=True))
    assert_same(load(url), tree)
    assert checkpoint.verify(url).ok


@pytest.mark.parametrize(
    ("kind", "options"),
    [("safetensors", {"max_shard_bytes": 1000}), ("tensorstore", {"compression": "zstd"})],
    ids=str,
)
def test_shards_and_compressed_chunks_come_back(url, kind, options):
    for number in range(2):
        tree = {"layers": [np.arange(300.0) + number for _ in range(5)], "n": number}
        save(tree, url, format=kind, options=SaveOptions(**options))
        assert_same(load(url), tree)
        assert checkpoint.verify(url).ok


def test_a_database_needs_a_disk(url):
    with pytest.raises(ValueError, match="ocdbt needs a local directory"):
        save({"w": np.ones(3)}, url, format="tensorstore", options=SaveOptions(ocdbt=True))
    assert not objects(url)


def test_tools_read_what_is_in_memory(url):
    save({"w": np.arange(6.0), "n": 3}, url, metadata={"step": 1})
    save({"w": np.arange(6.0) + 1, "n": 3}, f"{url}-other")
    with checkpoint.open(url) as view:
        assert view["w"][2:4].tolist() == [2.0, 3.0]
    assert checkpoint.inspect(url).trees[""].metadata == {"step": 1}
    assert [change.name for change in checkpoint.diff(url, f"{url}-other").changed] == ["w"]
