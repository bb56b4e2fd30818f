"""A directory holds a tree for each prefix."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from contracts.base import Contract
from eformer import checkpoint
from eformer.checkpoint import load, save
from eformer.errors import CorruptionError
from support.trees import assert_same


class Prefixes(Contract):
    """What a directory does beyond one file."""

    def test_several_prefixes_live_in_one_directory(self, path):
        trees = {
            None: {"a": np.ones(3)},
            "model": {"w": jnp.ones((2, 3)), "n": 3},
            "opt": optax.adam(1.0).init({"w": jnp.ones(2)}),
            "odd/../name.x": {"w": np.zeros(2)},
            "odd%2F": {},
        }
        for prefix, tree in trees.items():
            save(tree, path, prefix=prefix, metadata={"of": str(prefix)})
        trees["opt"] = {"w": np.arange(5)}
        save(trees["opt"], path, prefix="opt", metadata={"of": "opt"})
        for prefix, tree in trees.items():
            assert_same(load(path, prefix=prefix), tree)
            assert checkpoint.inspect(path).trees[prefix or ""].metadata == {"of": str(prefix)}
        assert checkpoint.verify(path).ok

    def test_an_unknown_prefix_lists_the_known(self, path):
        for prefix in ("model", "opt"):
            save({"w": np.ones(1)}, path, prefix=prefix)
        expected = r"no prefix 'optt' \(nearest is 'opt'\); available prefixes: \['model', 'opt'\]"
        with pytest.raises(ValueError, match=expected):
            load(path, prefix="optt")
        with pytest.raises(ValueError, match=r"several trees; pass prefix=, one of \['model', 'opt'\]"):
            load(path)

    def test_the_only_prefix_need_not_be_said(self, path):
        save({"w": 1}, path, prefix="only")
        assert load(path) == {"w": 1}

    def test_a_prefix_may_be_called_like_a_leaf_and_a_leaf_like_a_file_of_the_format(self, path):
        tree = {
            name: np.full(2, i)
            for i, name in enumerate(["model", "tree", "0", "0.0", ".zarray", "data", "d"])
        }
        for prefix in (None, "model", "tree", "0", ".zarray", "manifest.json", "tensorstore_index.json"):
            for number in (1, 2):
                save(tree | {"n": number}, path, prefix=prefix)
                assert_same(load(path, prefix=prefix or ""), tree | {"n": number})

    def test_a_damaged_prefix_harms_no_other(self, path):
        save({"w": np.arange(1000.0)}, path, prefix="bad")
        file = self.data_file(path)
        save({"w": np.ones(3)}, path, prefix="good")
        self.damage(file, lambda data: data[:-8])
        assert_same(load(path, prefix="good"), {"w": np.ones(3)})
        with pytest.raises(CorruptionError):
            load(path, prefix="bad")

    def test_concurrent_saves_of_different_prefixes_keep_all(self, path):
        def work(i):
            for n in range(5):
                save({"w": np.full(100, i + n)}, path, prefix=f"p{i}")

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(8)))
        for i in range(8):
            assert load(path, prefix=f"p{i}")["w"][0] == i + 4
        assert checkpoint.verify(path).ok

    def test_a_reader_always_sees_one_whole_checkpoint(self, path):
        save({f"w{i}": np.full(1000, 0) for i in range(6)}, path)

        def write():
            for n in range(1, 7):
                save({f"w{i}": np.full(1000, n) for i in range(6)}, path)

        with ThreadPoolExecutor(1) as pool:
            writer, seen = pool.submit(write), []
            while not writer.done():
                tree = load(path)
                values = {int(x) for leaf in tree.values() for x in (leaf.min(), leaf.max())}
                assert len(values) == 1
                seen += values
                assert checkpoint.verify(path).ok
        writer.result()
        assert seen == sorted(seen)
