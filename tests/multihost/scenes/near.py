"""Processes of a run with a near tier."""

from __future__ import annotations

import time
from contextlib import contextmanager
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from eformer._engine.processes import hosts as hosts_module
from eformer._engine.processes.coordination import Together
from eformer._engine.runs.copies import Shelf
from eformer.checkpoint import Near, Run
from multihost.scenes.runs import Data
from multihost.scenes.state import bits, check, mesh, put, tree

_SPECS = {"rows": P("x"), "cells": P("x", "y"), "inner": P(None, "y"), "everywhere": P(), "keys": P("x")}


@jax.jit
def _train(state, batch):
    keys = jax.vmap(lambda key: jax.random.split(key, 2)[0])(state["keys"])
    noise = jax.random.normal(state["keys"][0], (8, 4))
    new = {name: state[name] * 0.9 + batch + noise for name in ("rows", "cells", "inner")}
    return {**new, "everywhere": state["everywhere"] + 1, "keys": keys}


def near_state(specs=None, turned=False):
    """Arrays that lie across the processes in every way, and keys that do."""
    over = Mesh(mesh().devices.T, ("x", "y")) if turned else mesh()
    places = {name: NamedSharding(over, spec) for name, spec in (specs or _SPECS).items()}
    state = {name: put(np.zeros((8, 4), np.float32), places[name]) for name in ("rows", "cells", "inner")}
    numbers = np.arange(16, dtype=np.uint32).reshape(8, 2)
    keys = jax.jit(jax.random.wrap_key_data, out_shardings=places["keys"])
    return {
        **state,
        "everywhere": put(np.zeros((), np.int32), places["everywhere"]),
        "keys": keys(put(numbers, places["keys"])),
    }


def near_digest(state):
    """The bits of every array, wherever it lies."""
    data = {**state, "keys": jax.random.key_data(state["keys"])}
    everywhere = jax.jit(lambda tree: tree, out_shardings=NamedSharding(state["rows"].sharding.mesh, P()))(
        data
    )
    return {name: bits(np.asarray(leaf.addressable_data(0))).hex() for name, leaf in everywhere.items()}


def near_loop(far, near, until, every=10, near_every=3, sleep=0.0):
    """Trains; returns where it began, the bits of the state, the position in the data, and what was skipped."""
    state, data, skipped = near_state(), Data(), {}
    with Run(far, every=every, near=Near(near, every=near_every), signals=()) as run:
        if found := run.resume(like=state, data=data):
            state, skipped = found.tree, found.skipped
        began = run.step
        with Path(f"{far}-began-{jax.process_index()}").open("a") as noted:
            noted.write(f"{began}\n")
        for step in range(run.step, until):
            state = _train(state, next(data) % 100)
            run.after(step + 1, state, data=data)
            time.sleep(sleep)
    return began, near_digest(state), data.position, list(skipped)


def near_resumed(far, near, how="as before"):
    """The step that the processes resume from, without data: with arrays that lie as before, or elsewhere."""
    elsewhere = {"rows": P("y"), "cells": P("y", "x"), "inner": P(), "everywhere": P(), "keys": P(("x", "y"))}
    like = near_state(elsewhere if how == "elsewhere" else None, turned=how == "turned")
    with Run(far, near=Near(near, every=3), signals=()) as run:
        found = run.resume(like=like)
    for leaf, wanted in zip(jax.tree.leaves(found.tree), jax.tree.leaves(like), strict=True):
        assert leaf.sharding.is_equivalent_to(wanted.sharding, leaf.ndim)
    return run.step, list(found.skipped), near_digest(found.tree)


def near_continued(far, near, until):
    """Goes on, without data."""
    state = near_state()
    with Run(far, every=10, near=Near(near, every=3), signals=()) as run:
        state = run.resume(like=state).tree
        for step in range(run.step, until):
            run.after(step + 1, _train(state, 1))


def near_messages(far, near, steps):
    """How often the processes meet in steps with near saves."""
    met, meet, state = [], Together.meet, near_state()

    def counted(self, *arguments):
        met.append(1)
        return meet(self, *arguments)

    with Run(far, every=1000, near=Near(near, every=5), signals=()) as run:
        run.resume(like=state)
        Together.meet = counted
        try:
            for step in range(1, steps + 1):
                run.after(step, state)
            run.wait()
        finally:
            Together.meet = meet
    return len(met)


def near_all_leaves(far, near):
    """Every kind of leaf, and what each process has for itself, comes back in each as it was there."""
    state, me = tree(7), jax.process_index()
    with Run(far, near=Near(near, every=1), signals=()) as run:
        run.resume(like=state)
        run.after(1, state)
        loaded = run.resume(like=state).tree
    np.testing.assert_array_equal(loaded["numpy"], np.arange(5) + 700 + 1000 * me)
    np.testing.assert_array_equal(np.asarray(loaded["local"]), np.arange(3.0) + 700 + 1000 * me)
    firsts = {"numpy": np.arange(5) + 700, "local": np.arange(3.0) + 700}
    check({**loaded, **firsts}, 7)
    return run.step


# ------------------------------------------------------------------------------------------- hosts apart


@contextmanager
def on_host(near, hosts):
    """Let this process be on a host of its own, with a near directory of its own. `hosts` has the host of each."""
    host, host_id = hosts[jax.process_index()], hosts_module.host_id
    hosts_module.host_id = lambda: f"host-{host}"
    try:
        yield Path(near) / f"host-{host}"
    finally:
        hosts_module.host_id = host_id


def near_apart(far, near, hosts, until, sleep=0.0, copies=1, every=10, hangs=None):
    """Trains with near steps, whose parts are copied to other hosts. Returns where it began, the bits, and the data."""
    state, data, serve = near_state(), Data(), Shelf.serve
    if hangs == jax.process_index():
        Shelf.serve = lambda *_: time.sleep(10_000)
    try:
        with (
            on_host(near, hosts) as own,
            Run(far, every=every, near=Near(own, every=3, copies=copies), signals=()) as run,
        ):
            if found := run.resume(like=state, data=data):
                state = found.tree
            began = run.step
            for step in range(run.step, until):
                state = _train(state, next(data) % 100)
                run.after(step + 1, state, data=data)
                time.sleep(sleep)
            run.wait()
            if copies and hangs is None and until > began:
                _wait_for_copies(own, until)
    finally:
        Shelf.serve = serve
    return began, near_digest(state), data.position


def _wait_for_copies(own, until):
    """Wait until this process has copied the newest near step of each process that it copies from."""
    newest = max(step for step in range(3, until + 1, 3) if step % 10)  # others are due for the run itself
    folder, deadline = own / f"process-{jax.process_index()}", time.monotonic() + 30

    def are_there():
        found = list(folder.glob("of-process-*"))
        return found and all(any(one.glob(f"*/step-{newest}/manifest.json")) for one in found)

    while not are_there():
        assert time.monotonic() < deadline, f"no copy of step {newest}: {sorted(folder.glob('*/*/*'))}"
        time.sleep(0.01)
    with hosts_module.meeting("tests", 60) as met:  # a process that leaves the run gives no copies any more
        met.meet(b"", lambda _: b"")


def near_apart_resumed(far, near, hosts, copies=1, how="as before"):
    """The step that the processes resume from, the steps that they skip, and the bits."""
    with on_host(near, hosts) as own, Run(far, near=Near(own, every=3, copies=copies), signals=()) as run:
        found = run.resume(like=near_state(turned=how == "turned"))
    return run.step, list(found.skipped), near_digest(found.tree)
