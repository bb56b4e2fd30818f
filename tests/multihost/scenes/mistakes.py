"""Processes that do not do the same, that fail, or that do not come."""

from __future__ import annotations

import os
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.array_serialization.serialization import GlobalAsyncCheckpointManager
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from eformer import checkpoint
from eformer._engine.processes import coordination
from eformer._engine.stores.local import LocalStore
from eformer._engine.stores.local_upload import LocalUpload
from eformer.checkpoint import SaveOptions, load, save, save_async
from eformer.serialization import tree_serialize_leaves
from multihost.scenes.state import format_of, mesh, put, tree, whole


def save_and_load_watched(path, options, rank=None):
    """What the callbacks of a save and of a load were called with; in the process `rank` that of the save fails."""
    saved, loaded = [], []

    def watch(*how_far):
        saved.append(how_far)
        if jax.process_index() == rank:
            raise ZeroDivisionError("seen enough")

    options = SaveOptions(**options, timeout=20)
    save(tree(), path, options=options, progress=watch, **format_of(path))
    load(path, mesh=mesh(), shardings={"local": P()}, progress=lambda *how_far: loaded.append(how_far))
    return saved, loaded


def save_another_tree(path, rank, kind):
    """One process saves something else."""
    saved, options = tree(), {"options": SaveOptions(timeout=20)}
    if jax.process_index() == rank:
        if kind == "leaf more":
            saved["more"] = np.ones(3)
        elif kind == "other shape":
            saved["numpy"] = np.ones(6)
        elif kind == "other dtype":
            saved["global"]["odd"] = saved["global"]["odd"].astype(jnp.int8)
        elif kind == "other sharding":
            saved["global"]["rows"] = put(whole("rows"), NamedSharding(mesh(), P("y")))
        elif kind == "unstorable leaf":
            saved["text"] = object()
        elif kind == "other number":
            saved["number"] = 7
        elif kind == "other replica":
            saved["global"]["scalar"] = put(whole("scalar", 9), NamedSharding(mesh(), P()))
        elif kind == "other compression":
            options["options"] = SaveOptions(timeout=20, compression="zstd")
        elif kind == "other order":
            saved = dict(reversed(saved.items()))
        elif kind == "other prefix":
            options["prefix"] = "other"
        elif kind == "other path":
            path = f"{path}-of-its-own"
        elif kind == "file in the way":
            Path(f"{path}-file").touch()
            path = f"{path}-file"
    started = time.monotonic()
    try:
        save(saved, path, **format_of(path), **options)
    finally:
        took.append(time.monotonic() - started)


took = []


def last_took():
    return took[-1]


def save_apart(folder):
    """The same path in all processes, which leads each of them somewhere else, as a disk of its own would."""
    own = Path(folder) / str(jax.process_index())
    own.mkdir()
    before = os.getcwd()
    os.chdir(own)
    try:
        save(tree(), "/proc/self/cwd/checkpoint", options=SaveOptions(timeout=20))
    finally:
        os.chdir(before)


def miss_a_save(path, kind):
    """One process does not make the first of two calls: the second one of it meets the first of the other."""
    outcomes = []
    for step in (10, 20):
        if jax.process_index() == 1 and step == 10:
            continue
        everywhere = NamedSharding(mesh(), P())
        step_of = {"plain": step, "replicated": put(np.float32(step), everywhere), "numpy": np.array(step)}[
            kind
        ]
        state = {"step": step_of, "w": put(np.full(8, step, np.float32), NamedSharding(mesh(), P("x")))}
        try:
            save(state, path, options=SaveOptions(timeout=3))
            outcomes.append("saved")
        except Exception as error:  # noqa: BLE001
            outcomes.append(f"{type(error).__name__}: {error}")
    return outcomes


def save_and_load_at_once(path, rank):
    if jax.process_index() == rank:
        load(path, mesh=mesh(), shardings={"local": P()}, options={"timeout": 20})
    else:
        save(tree(), path, options=SaveOptions(timeout=20), **format_of(path))


def gather_and_fail(path, rank):
    """A function of the caller's fails in one process, before anything is saved."""
    from eformer.serialization.async_manager import AsyncCheckpointManager

    def gather(x):
        if jax.process_index() == rank:
            raise ZeroDivisionError
        return x

    manager = AsyncCheckpointManager()
    manager.save_async(tree(), path, mesh=mesh(), gather_fns={"global.rows": gather}).result(60)


def outlive_many(path, count):
    """One save takes longer than very many others together."""
    sync, go = LocalUpload.sync, threading.Event()
    if jax.process_index() == 0:
        LocalUpload.sync = lambda upload: (go.wait(60), sync(upload))
    slow = save_async({"w": tree()["global"]["rows"]}, path, options=SaveOptions(timeout=50))
    time.sleep(0.5)
    LocalUpload.sync = sync
    for number in range(count):
        save({"n": number}, f"{path}-others", options=SaveOptions(timeout=50))
    go.set()
    slow.result(60)


def load_on_some(path, processes):
    """All call, but only some have devices there: the others need not wait for anybody."""
    devices = np.array([d for d in jax.devices() if d.process_index in processes])
    loaded = load(
        path, keys="numpy", shardings=NamedSharding(Mesh(devices, ("x",)), P()), options={"timeout": 20}
    )
    return [np.asarray(shard.data).tolist() for shard in loaded["numpy"].addressable_shards]


def interrupted(path, rank, version):
    """Ctrl-C in one process, right after it has said what it is about to do."""
    wait, hosts = coordination.Together._wait_for, coordination.Together

    def interrupt(self, key, deadline, absent):
        if key.endswith("/1/answer"):
            raise KeyboardInterrupt
        return wait(self, key, deadline, absent)

    if jax.process_index() == rank:
        hosts._wait_for = interrupt
    started = time.monotonic()
    try:
        save(tree(version), path, options=SaveOptions(timeout=20), **format_of(path))
    except KeyboardInterrupt:
        raise RuntimeError("interrupted") from None
    finally:
        hosts._wait_for = wait
        took.append(time.monotonic() - started)


def save_and_fail_after_the_seal(path):
    """The new manifest is in place; then the first process's disk fails."""
    kept = LocalUpload._finish
    if jax.process_index() == 0:
        LocalUpload._finish = lambda *_: 1 / 0
    try:
        save(tree(3), path, options=SaveOptions(timeout=20))
    finally:
        LocalUpload._finish = kept


def save_what_cannot_be(path):
    started = time.monotonic()
    try:
        save({"w": object()}, path, options=SaveOptions(timeout=20))
    finally:
        took.append(time.monotonic() - started)


def save_but_one(path, rank):
    """One process does not come."""
    if jax.process_index() == rank:
        return
    started = time.monotonic()
    try:
        save(tree(), path, options=SaveOptions(timeout=1.5), **format_of(path))
    finally:
        took.append(time.monotonic() - started)


def save_and_fail_at(path, rank, step):
    """A disk fails in one process."""
    with _disk_that_fails(rank, step):
        save(tree(1), path, options=SaveOptions(timeout=20), **format_of(path))


def serialize_and_fail_at(path, rank, step):
    """A disk fails in one process while JAX's manager waits for the save."""
    manager = GlobalAsyncCheckpointManager(20)
    with _disk_that_fails(rank, step):
        tree_serialize_leaves(path, tree(1), manager)
        checkpoint.wait() if jax.process_index() else manager.wait_until_finished()


@contextmanager
def _disk_that_fails(rank, step):
    def broken(*_, **__):
        raise OSError(28, "No space left on device")

    module, name = {
        "write": (LocalUpload, "sync"),
        "write arrays": (LocalUpload, "put"),
        "seal": (LocalUpload, "_publish"),
        "seal arrays": (LocalUpload, "swap"),
        "place": (LocalStore, "begin"),
    }[step]
    kept = getattr(module, name)
    if jax.process_index() == rank:
        setattr(module, name, broken)
    try:
        yield
    finally:
        setattr(module, name, kept)


def load_what_only_one_sees(path, rank):
    load(path if jax.process_index() == rank else f"{path}-nowhere", mesh=mesh(), shardings={"local": P()})


def load_with_a_bad_callback(path, rank):
    """An error of the caller's own, when all have read: nobody else has to hear of it."""

    def callback(array, name):
        if jax.process_index() == rank and name == "global.rows":
            raise ZeroDivisionError
        return array

    load(path, mesh=mesh(), shardings={"local": P()}, callback=callback)
