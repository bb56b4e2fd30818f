"""Processes that digest and compare the state that they hold together."""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from eformer.checkpoint import Run, fingerprint, inspect, same, save
from multihost.scenes.state import SHAPES, format_of, mesh, put, tree, whole

__all__ = [
    "compare_with_a_checkpoint",
    "fingerprint_different_trees",
    "fingerprint_numpy",
    "fingerprint_recorded",
    "fingerprint_sharded",
    "train_until_copies_differ",
]


def fingerprint_sharded(spec):
    """Returns the fingerprints of arrays that are cut the same way where that is possible, else as SHAPES says."""
    return fingerprint(_cut(spec))


def _cut(spec):
    leaves = {}
    for name, (shape, _, own) in SHAPES.items():
        sharding = NamedSharding(mesh(), P(*spec[: len(shape)]))
        try:
            sharding.shard_shape(shape)
        except ValueError:
            sharding = NamedSharding(mesh(), own)
        leaves[name] = put(whole(name), sharding)
    return {**leaves, "numpy": np.arange(5) + jax.process_index(), "number": 7}


def fingerprint_numpy():
    return fingerprint({**{name: whole(name) for name in SHAPES}, "numpy": np.arange(5), "number": 7})


def fingerprint_recorded(path, options):
    """Saves; returns the fingerprints of the tree and of the record."""
    state = {"tree": tree(), "rows": put(_large(), NamedSharding(mesh(), P("x")))}
    save(state, path, options=options, **format_of(path))
    return fingerprint(state), inspect(path).trees[""].fingerprints


def _large():
    """4 MiB, whose halves begin where pieces begin."""
    return np.arange(2**20, dtype=np.float32).reshape(1024, 1024)


def fingerprint_different_trees():
    fingerprint({"w": np.zeros(2 + jax.process_index())})


def compare_with_a_checkpoint(path, options, spec):
    """Saves a tree and compares it, cut another way, changed in an element of each leaf, and with other leaves."""
    state = _cut(("x", "y"))
    save(state, path, options=options, **format_of(path))
    there = same(_cut(spec), path)
    changed = {**state, "rows": put(_changed("rows"), state["rows"].sharding), "more": 1}
    del changed["odd"]
    found = same(changed, path)
    return bool(there), there.equal, bool(found), list(found.differing), found.missing, found.extra


def _changed(name):
    array = whole(name).copy()
    array.reshape(-1).view(np.uint8)[-1] ^= 1
    return array


def train_until_copies_differ(path, rank, at):
    """The copies of one process are changed before a step. Returns the step that the error names, and the error."""
    everywhere = NamedSharding(mesh(), P())
    state = {"w": put(np.ones((8, 4), np.float32), everywhere), "v": put(np.ones(6), everywhere)}
    state["rows"] = put(whole("rows"), NamedSharding(mesh(), P("x")))
    with Run(path, every=2, check_replicas=2) as run:
        for step in range(1, 7):
            if step == at and jax.process_index() == rank:
                state["w"] = _damaged(state["w"])
            try:
                run.after(step, state)
            except RuntimeError as error:
                run.wait()
                return error.step, str(error), [one.number for one in run.steps]
    return None


def _damaged(array):
    shards = [jax.device_put(np.asarray(shard.data) * 2, shard.device) for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)
