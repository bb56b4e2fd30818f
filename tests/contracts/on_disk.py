"""What only a disk has: a directory that one is in, and names that could lead out of another."""

from __future__ import annotations

import numpy as np

from contracts.base import Contract
from eformer.checkpoint import load, save, save_async
from support.trees import HOSTILE, assert_same


class OnDisk(Contract):
    """For layouts whose path is a directory or a file of this machine."""

    def test_hostile_names_come_back_and_stay_inside(self, path):
        tree = {key: np.full(3, i) for i, key in enumerate(HOSTILE)}
        before = sorted(path.parent.parent.rglob("*"))
        save(tree, path)
        assert_same(load(path), tree)
        outside = {p for p in path.parent.parent.rglob("*") if path not in (p, *p.parents)}
        assert outside <= {*before, path.parent}

    def test_a_relative_path_stays_where_it_was(self, path, monkeypatch):
        self.make_surroundings(path)
        monkeypatch.chdir(path.parent)
        pending = save_async({"w": np.ones(100_000)}, path.name)
        monkeypatch.chdir("/")
        assert pending.result() == path.name
        assert load(path)["w"].shape == (100_000,)
