"""Processes of one training run."""

from __future__ import annotations

import os
import signal
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from eformer._engine.loading import load as load_module
from eformer._engine.processes.coordination import Together
from eformer.checkpoint import Every, Run
from eformer.errors import CorruptionError
from multihost.scenes.state import mesh, put

_train = jax.jit(lambda state, batch: {"w": state["w"] * 0.9 + batch, "n": state["n"] + 1})


class Data:
    """Another position in every process."""

    def __init__(self):
        self.position = 100 * jax.process_index()

    def __next__(self):
        self.position += 1
        return self.position % 100

    def get_state(self):
        return {"position": self.position}

    def set_state(self, state):
        self.position = state["position"]


def fresh():
    everywhere = NamedSharding(mesh(), P())
    rows = NamedSharding(mesh(), P("x"))
    return {"w": put(np.zeros((8, 4), np.float32), rows), "n": put(np.zeros((), np.int32), everywhere)}


def run_loop(path, until, every=10, keep=None, sleep=0.0, signals=None):
    """Trains; returns where it began, where it ended, a digest of the state, the position in the data and `skipped`."""
    state, data, skipped = fresh(), Data(), {}
    with Run(path, every=every, keep=keep, signals=signals) as run:
        if found := run.resume(like=state, data=data):
            state, skipped = found.tree, found.skipped
        began = run.step
        for step in range(run.step, until):
            state = _train(state, next(data))
            run.after(step + 1, state, data=data, metrics={"n": state["n"]})
            if run.stopping:
                break
            time.sleep(sleep)
    value = float(sum(np.asarray(shard.data).sum() for shard in state["w"].addressable_shards))
    return began, run.step, value, data.position, list(skipped)


def run_with_damage_seen_by(path, rank, number):
    """One process alone cannot read a step."""
    read = load_module.read

    def failing(found, *arguments, **more):
        if jax.process_index() == rank and found.path.endswith(f"step-{number}"):
            raise CorruptionError("only this process sees it")
        return read(found, *arguments, **more)

    load_module.read = failing
    try:
        return run_loop(path, number)
    finally:
        load_module.read = read


def run_with_another_listing(path, rank):
    """One process sees a directory as it was before the last step."""
    agreed = Run.steps

    def stale(self):
        return agreed.fget(self)[:-1] if jax.process_index() == rank else agreed.fget(self)

    Run.steps = property(stale)
    try:
        state = fresh()
        with Run(path) as run:
            return run.resume(like=state).step
    finally:
        Run.steps = agreed


def count_messages(path, steps):
    """How often the processes meet in steps without a save."""
    met = []
    meet = Together.meet

    def counted(self, *arguments):
        met.append(1)
        return meet(self, *arguments)

    state = fresh()
    with Run(path, every=1000) as run:
        run.resume(like=state)
        Together.meet = counted
        try:
            for step in range(1, steps + 1):
                run.after(step, state)
        finally:
            Together.meet = meet
    return len(met)


def run_by_the_clock(path, minutes, per_step, offset):
    """The clocks of the processes differ by `offset`; returns how often they met."""
    now, met = [offset * jax.process_index()], []
    meet = Together.meet

    def counted(self, *arguments):
        met.append(1)
        return meet(self, *arguments)

    state = {"w": jnp.ones(2)}
    with Run(path, every=Every(minutes=minutes), clock=lambda: now[0]) as run:
        run.resume()
        Together.meet = counted
        try:
            for step in range(1, 201):
                now[0] += per_step
                run.after(step, state)
        finally:
            Together.meet = meet
    return len(met)


def tell_to_end(rank):
    """SIGTERM in one process."""
    if jax.process_index() == rank:
        os.kill(os.getpid(), signal.SIGTERM)
