"""A save takes the place of the one before, at once or later, as a whole or not at all."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from contracts.base import Contract
from eformer import checkpoint
from eformer.checkpoint import load, save, save_async
from support.meshes import layouts
from support.states import model
from support.trees import assert_same


class Replacing(Contract):
    """Saves to one path, one after the other."""

    # --------------------------------------------------------------------------------------- overwriting

    def test_a_save_replaces_the_one_before_whatever_its_shapes(self, path):
        for tree in (model(0), {"w": jnp.ones((7, 5))}, {"w": jnp.ones(3), "v": 1}, {}, model(1)):
            save(tree, path)
            assert_same(load(path), tree)
            assert checkpoint.verify(path).ok

    def test_a_failed_save_leaves_the_one_before(self, path, monkeypatch):
        save(model(0), path)
        files = self.listing(path)
        for names in self.steps:
            with monkeypatch.context() as patch:
                for name in names:
                    patch.setattr(self.upload, name, lambda *_, **__: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    save(model(1), path)
            assert_same(load(path), model(0))
            assert self.listing(path) == files

    # --------------------------------------------------------------------------------------------- async

    def test_after_save_async_returns_arrays_may_be_donated_deleted_and_changed(self, path):
        rows = layouts()["rows"]
        tree = {"donated": jnp.arange(5000.0), "deleted": jnp.arange(5000.0), "n": np.arange(5000.0), "list": [1, 2],
                "sharded": jax.device_put(jnp.arange(64.0), rows), "i4": jnp.ones(99, jnp.int4)}  # fmt: skip
        expected = jax.tree.map(lambda x: np.array(x) if hasattr(x, "dtype") else x, tree)
        pending = save_async(tree, path)
        jax.jit(lambda x: x * 0, donate_argnums=0)(tree["donated"])
        jax.jit(lambda x: x * 0, donate_argnums=0)(tree["sharded"])
        tree["deleted"].delete()
        tree["n"][:] = 0
        tree["list"].append(3)
        assert pending.result() == str(path)
        assert_same(jax.tree.map(lambda x: np.array(x) if hasattr(x, "dtype") else x, load(path)), expected)

    def test_saves_to_one_path_commit_in_the_order_they_were_called(self, path):
        pending = [save_async({"step": i, "w": np.full(100_000 if i % 2 else 3, i)}, path) for i in range(8)]
        assert pending[-1].result()
        assert load(path)["step"] == 7
        assert all(p.result() for p in pending)
