"""Saves to a bucket of a server on loopback."""

import hashlib
import os

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from eformer.checkpoint import Run, load, save
from multihost.scenes.runs import Data, fresh, train
from multihost.scenes.state import check, mesh, put, tree
from support import ministack
from support.bucket_faults import Deaths, hooked, killed

__all__ = [
    "die_in_a_save_to_a_bucket",
    "digests_of_training",
    "find_server",
    "load_from_a_bucket",
    "save_to_a_bucket",
    "train_in_a_bucket",
]


def find_server(environment):
    """Takes over the variables that lead to a server; returns what this process knows of others."""
    os.environ.update(environment)
    return jax.process_count(), os.environ["http_proxy"]


def save_to_a_bucket(port, url, version, kind):
    with ministack.s3(ministack.client(port)):
        save(tree(version), url, format=kind)


def load_from_a_bucket(port, url, version):
    with ministack.s3(ministack.client(port)):
        check(load(url), version)


def die_in_a_save_to_a_bucket(port, url, version, kind, rank, at):
    """One rank is killed before one of its requests."""
    deaths = Deaths(at if jax.process_index() == rank else 0, killed)
    with ministack.s3(ministack.client(port)), hooked(deaths):
        save(tree(version), url, format=kind)


# ------------------------------------------------------------------------------------------------ runs


def digest(state, data):
    """Return a digest of all bits of the state that this process holds, and of its position in the data."""
    shards = [shard for leaf in jax.tree.leaves(state) for shard in leaf.addressable_shards]
    found = hashlib.sha256(b"".join(np.asarray(shard.data).tobytes() for shard in shards))
    return f"{found.hexdigest()}-{data.position}"


def begin():
    """Return the state before the first step, with other numbers in every row, and the data."""
    rows = np.arange(32, dtype=np.float32).reshape(8, 4)
    return {**fresh(), "w": put(rows, NamedSharding(mesh(), P("x")))}, Data()


def digests_of_training(until):
    """Trains without interruption or checkpoints; returns the digests after each step, the first one of step 0."""
    state, data = begin()
    digests = [digest(state, data)]
    for _ in range(until):
        state = train(state, next(data))
        digests.append(digest(state, data))
    return digests


def train_in_a_bucket(environment, url, kind, notes, steps, rank, at):
    """Trains for some steps. Notes which step it resumes from and which it is told are committed; if `at` is not 0, one
    rank is killed before that one of its requests that change the bucket."""
    os.environ.update(environment)
    state, data = begin()
    file = os.open(f"{notes}-{jax.process_index()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(*words):
        os.write(file, " ".join([*map(str, words), "\n"]).encode())

    def note_commit(pending, step):
        if pending.exception() is None:
            note("committed", step, "-")

    deaths = Deaths(at if jax.process_index() == rank else 0, killed)

    def before(operation, key):
        if operation in ("write", "upload", "copy", "delete"):
            deaths(operation, key)

    with hooked(before), Run(url, every=2, keep=2, format=kind, signals=()) as run:
        if found := run.resume(like=state, data=data):
            state = found.tree
            assert not found.skipped
        note("resumed", run.step, digest(state, data))
        for step in range(run.step + 1, run.step + 1 + steps):
            state = train(state, next(data))
            if pending := run.after(step, state, data=data):
                pending.add_done_callback(lambda pending, step=step: note_commit(pending, step))
