"""Processes of one training run."""

from __future__ import annotations

import errno
import logging
import os
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from eformer._engine.loading import load as load_module
from eformer._engine.processes.coordination import Together
from eformer._engine.runs import requests, resume, retention
from eformer.checkpoint import Every, Run, SaveOptions
from eformer.errors import CorruptionError, NotFoundError, ProcessError
from multihost.scenes.state import mesh, put

train = jax.jit(lambda state, batch: {"w": state["w"] * 0.9 + batch, "n": state["n"] + 1})


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
            state = train(state, next(data))
            run.after(step + 1, state, data=data, metrics={"n": state["n"]})
            if run.stopping:
                break
            time.sleep(sleep)
    value = float(sum(np.asarray(shard.data).sum() for shard in state["w"].addressable_shards))
    return began, run.step, value, data.position, list(skipped)


FAULTS = {
    "damage": CorruptionError("only this process sees it"),
    "EIO": OSError(errno.EIO, "only this process sees it"),
    "gone": NotFoundError("only this process sees it"),
    "refused": PermissionError(errno.EACCES, "only this process sees it"),
}


def run_with_fault_seen_by(path, rank, number, fault, times=100):
    """One process alone cannot read a step, so many times."""
    read, left = load_module.read_targets, [times]

    def failing(found, *arguments, **more):
        if jax.process_index() == rank and found.path.endswith(f"step-{number}") and left[0]:
            left[0] -= 1
            raise FAULTS[fault]
        return read(found, *arguments, **more)

    load_module.read_targets = failing
    try:
        return run_loop(path, number)
    finally:
        load_module.read_targets = read


def run_with_another_listing(path, rank):
    """One process sees a directory as it was before the last step."""
    listed = resume.steps_if_there

    def stale(path):
        return listed(path)[:-1] if jax.process_index() == rank else listed(path)

    resume.steps_if_there = stale
    try:
        state = fresh()
        with Run(path) as run:
            return run.resume(like=state).step
    finally:
        resume.steps_if_there = listed


def run_without_resume(path, step):
    """Saves a step, without a resume; returns the error."""
    try:
        with Run(path, every=1) as run:
            run.after(step, fresh())
    except FileExistsError as error:
        return str(error)
    return ""


def run_fresh_in(path, rank):
    """Saves a step, with fresh=True in one process only."""
    with Run(path, every=1, fresh=jax.process_index() == rank) as run:
        run.after(1, fresh())


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


def run_by_the_clock(path, minutes, per_step, clocks, first=1, steps=200):
    """Every process has a clock of its own: seconds by step. Returns when it saved, by steps, and how often they met."""
    now, met, saved = [0], [], []
    meet, tell = Together.meet, CLOCKS[clocks[jax.process_index()]]

    def counted(self, *arguments):
        met.append(1)
        return meet(self, *arguments)

    state = {"w": jnp.ones(2)}

    class Timed(Run):
        _seconds = staticmethod(lambda: tell(now[0] * per_step))

    with Timed(path, every=Every(minutes=minutes)) as run:
        if first == 1:
            run.resume()
        Together.meet = counted
        try:
            for step in range(first, first + steps):
                now[0] += 1
                if run.after(step, state):
                    saved.append(step)
        finally:
            Together.meet = meet
    return saved, len(met)


CLOCKS = {
    "right": lambda seconds: seconds,
    "an hour behind": lambda seconds: seconds - 3600,
    "an hour ahead": lambda seconds: seconds + 3600,
    "set back": lambda seconds: seconds - (30 if seconds > 75 else 0),
    "set back an hour": lambda seconds: seconds - (3600 if seconds > 75 else 0),
    "stopped": lambda _: 0,
    "stopped for a minute": lambda seconds: min(seconds, max(75, seconds - 60)),
}


# ------------------------------------------------------------------------------------------- failures


def run_slowly_answered(path, timeout):
    """Resumes, and does not wait for ever."""
    with Run(path, every=1, options=SaveOptions(timeout=timeout)) as run:
        run.resume(like=fresh())


def run_out_of_room(disk, tolerate):
    """The disk is full at every second save. Returns at which step which error was raised."""
    ballast, raised, state = Path(disk) / "ballast", [], fresh()
    run = Run(Path(disk) / "run", every=1, keep=1, tolerate=tolerate)
    for step in range(1, 7):
        run._upkeep.wait()  # or the deletion of an old step makes room
        if step % 2 == 0 and jax.process_index() == 0:
            free = os.statvfs(disk)
            ballast.write_bytes(bytes(free.f_bavail * free.f_frsize))
        multihost_utils.sync_global_devices(f"full {disk} {step}")
        try:
            if pending := run.after(step, state):
                pending.exception()
        except (OSError, ProcessError) as error:
            raised.append((step, "No space left" in str(error)))
        multihost_utils.sync_global_devices(f"room {disk} {step}")
        if jax.process_index() == 0:
            ballast.unlink(missing_ok=True)
    try:
        run.wait()
    except (OSError, ProcessError) as error:
        raised.append(("wait", "No space left" in str(error)))
    return raised


# -------------------------------------------------------------------------------------------- signals


def run_until_told(folder, kind, signals=None):
    """Loops until the job is told to end, and notes in a file when it is where the signal shall come."""
    path, state = Path(folder) / "run", fresh()
    ready = Path(folder) / f"ready-{jax.process_index()}"
    if kind == "resumed":
        with Run(path) as run:
            run.save(5000, state)
    if kind == "deletion":
        _slow(retention, "remove_checkpoint", ready)
    if kind in ("save", "deletion") and jax.process_index():  # the first process commits and removes
        ready.touch()
    every = 5 if kind in ("save", "deletion") else 1_000_000
    with Run(path, every=every, keep=1, signals=signals) as run:
        run.resume(like=state)
        if kind == "resumed":
            ready.touch()
            _wait_for(Path(folder) / "sent")
            time.sleep(2.5)  # JAX looks once a second
        for step in range(run.step, run.step + 4000):
            if step == 8:
                _be_there(kind, run, ready)
            run.after(step + 1, state, metrics={"slow": Slow(ready)} if kind == "save" else None)
            if run.stopping:
                return run.step
            time.sleep(0.01)
    return -1


class Slow:
    """A metric that takes long to fetch, and notes that this has begun: a save is not committed before."""

    def __init__(self, ready):
        self._ready = ready

    def __float__(self):
        self._ready.touch()
        time.sleep(1.5)
        return 1.0


def _be_there(kind, run, ready):
    if kind not in ("resumed", "save", "deletion"):
        ready.touch()
    if kind == "compile":
        jax.jit(_long).lower(jnp.ones(4)).compile()
    if kind == "tick":
        while not run.should_stop():
            time.sleep(0.01)


def _long(x):
    for _ in range(80):
        x = jnp.sin(x) * jnp.roll(x, 1)
    return x


def _slow(module, name, ready):
    """Let a function take long, and note that it has begun."""
    quick = getattr(module, name)

    def slow(*arguments, **more):
        ready.touch()
        time.sleep(1.5)
        return quick(*arguments, **more)

    setattr(module, name, slow)


def _wait_for(file):
    while not file.exists():
        time.sleep(0.01)


def make_run(folder, signals):
    """Makes a run; returns the warnings that were logged."""
    seen = []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())
    logging.getLogger("eformer").addHandler(handler)
    try:
        Run(folder, signals=signals)
    finally:
        logging.getLogger("eformer").removeHandler(handler)
    return seen


def run_until_stopped(path, stop):
    """Takes quick steps, each with a sum over all processes, until a file appears; returns the saved steps."""
    requests._ON_DISK, saved, step = 0.05, [], 1
    total = jax.jit(lambda state: state["w"].sum())
    state = fresh()
    with Run(path, every=[Every(at=[1]), Every(7, until=70)]) as run:
        run.save(1, state)
        is_last = False
        while not is_last:
            step += 1
            state = train(state, 1.0)
            stops = jax.process_index() == 0 and Path(stop).exists()
            is_last = bool(multihost_utils.broadcast_one_to_all(np.asarray(stops)))
            float(total(state))
            time.sleep(0.001 * (step % 3 if jax.process_index() else 1))
            if run.after(step, state) is not None:
                saved.append(step)
    return saved


def run_asked_often(path):
    """The first process asks for a save at every seventh step, and the others are many steps behind. Returns the saved
    steps."""
    requests._ON_DISK, saved, state = 0.01, [], fresh()
    with Run(path, options=SaveOptions(timeout=20)) as run:
        run.save(1, state).result()
        for step in range(2, 60):
            if step % 7 == 0:
                run.request_save()
            time.sleep(0.003 + 0.01 * jax.process_index())
            if run.after(step, state) is not None:
                saved.append(step)
    return saved


def run_cancelling(path):
    """Every process cancels the saves of odd steps, each a bit later than the one before it. Returns the answers."""
    state, answers = fresh(), []
    with Run(path, every=1, max_pending=2, options=SaveOptions(timeout=20)) as run:
        for step in range(1, 13):
            pending = run.after(step, state)
            time.sleep(0.003 * (step % 4 + jax.process_index()))
            if step % 2:
                answers.append(pending.cancel())
    return answers
