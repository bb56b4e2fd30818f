"""Processes that read the examples of one training run, each its own part."""

from __future__ import annotations

import time

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from eformer.checkpoint import Run
from multihost.scenes.state import mesh, put

BATCH, ROWS = 8, 1000


class Elastic:
    """A double of an elastic iterator: its position counts the examples of the whole job."""

    def __init__(self):
        self.taken = 0

    def __next__(self):
        batch = np.arange(self.taken + jax.process_index(), self.taken + BATCH, jax.process_count())
        self.taken += BATCH
        return batch

    def get_state(self):
        return {"global_next_index": self.taken}

    def set_state(self, state):
        self.taken = state["global_next_index"]


def grains():
    import grain

    return grain, grain.MapDataset.range(ROWS).seed(7).shuffle(), grain.ReadOptions(1, 2)


def elastic_of_grain():
    grain, rows, ahead = grains()
    shard = grain.sharding.ShardOptions(jax.process_index(), jax.process_count())
    return iter(grain.experimental.ElasticIterator(rows, BATCH, shard, read_options=ahead))


def sliced_by_grain():
    _, rows, ahead = grains()
    part = rows[jax.process_index() :: jax.process_count()]
    return iter(part.batch(BATCH // jax.process_count()).to_iter_dataset(ahead))


DATA = {"double": Elastic, "grain": elastic_of_grain, "sliced": sliced_by_grain}
add = jax.jit(lambda state, batch: {"sum": state["sum"] * 3 + batch.sum(), "n": state["n"] + 1})


def run_on_data(path, kind, until, sleep=0.0):
    """Trains on the rows of all processes; returns where it began, its own rows by step, and the state."""
    rows = NamedSharding(mesh(), P(("x", "y")))
    zero = put(np.zeros((), np.uint32), NamedSharding(mesh(), P()))
    state, data, seen = {"sum": zero, "n": zero}, DATA[kind](), {}
    with Run(path, every=5) as run:
        if found := run.resume(like=state, data=data):
            state = found.tree
        began = run.step
        for step in range(began + 1, until + 1):
            batch = np.asarray(next(data), np.uint32)
            seen[step] = batch.tolist()
            state = add(state, jax.make_array_from_process_local_data(rows, batch))
            run.after(step, state, data=data)
            time.sleep(sleep)
    return began, seen, [int(value.addressable_data(0)) for value in jax.tree.leaves(state)]
