"""A resumed run sees the batches that an uninterrupted one would, bit for bit, with iterators of Grain."""

import json
import os
import signal
import subprocess
import sys

import grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eformer.checkpoint import Run, steps
from support.trees import assert_same

pytestmark = pytest.mark.sample(2)

AHEAD = grain.ReadOptions(num_threads=2, prefetch_buffer_size=8)  # without it, 500 examples on 16 threads


def noisy(number, rng):
    return np.float32(number) + rng.random((3,), np.float32)


def shuffled():
    """Every epoch in another order, every example with other noise."""
    examples = grain.MapDataset.range(50).seed(7).shuffle().repeat()
    return iter(examples.random_map(noisy).batch(4, drop_remainder=True).to_iter_dataset(AHEAD))


def filtered():
    """How many examples a batch takes is not known before, and threads read ahead of it."""
    examples = grain.MapDataset.range(50).seed(7).shuffle().repeat().to_iter_dataset(AHEAD)
    return iter(examples.filter(lambda number: number % 3 == 0).batch(4, drop_remainder=True))


def mixed():
    """Two sources by weight."""
    sources = [grain.MapDataset.range(start, start + 40).seed(start).shuffle().repeat() for start in (0, 100)]
    return iter(grain.MapDataset.mix(sources, weights=[0.7, 0.3]).batch(4).to_iter_dataset(AHEAD))


def loader():
    """The loader, whose position is bytes."""
    sampler = grain.samplers.IndexSampler(
        num_records=50, shard_options=grain.sharding.NoSharding(), shuffle=True, num_epochs=None, seed=7
    )
    source = grain.sources.RangeDataSource(0, 50, 1)
    operations = [grain.transforms.Batch(4, drop_remainder=True)]
    return iter(
        grain.DataLoader(data_source=source, sampler=sampler, operations=operations, read_options=AHEAD)
    )


PIPELINES = {pipeline.__name__: pipeline for pipeline in (shuffled, filtered, mixed, loader)}


@jax.jit
def train(state, batch):
    key, dropout = jax.random.split(state["key"])
    kept = batch * jax.random.bernoulli(dropout, 0.8, batch.shape)
    return {"w": 0.9 * state["w"] + kept.sum(), "key": key}


def loop(path, pipeline, until, seen=lambda step, batch: None):
    """Train; tell of every batch; return where it began and the state."""
    state, data = {"w": jnp.zeros(4), "key": jax.random.key(3)}, PIPELINES[pipeline]()
    with Run(path, every=5) as run:
        if found := run.resume(like=state, data=data):
            state = found.tree
        began = run.step
        for step in range(began + 1, until + 1):
            batch = np.asarray(next(data), np.float32)
            state = train(state, batch)
            run.after(step, state, data=data)
            seen(step, batch)
    return began, state


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_a_resumed_run_sees_the_batches_of_an_uninterrupted_one(tmp_path, pipeline):
    expected, seen = {}, {}
    _, whole = loop(tmp_path / "whole", pipeline, 25, expected.__setitem__)
    loop(tmp_path / "parts", pipeline, 13)
    began, parts = loop(tmp_path / "parts", pipeline, 25, seen.__setitem__)
    assert began == 10
    assert list(seen) == list(range(11, 26))
    for step, batch in seen.items():
        assert batch.tobytes() == expected[step].tobytes(), step
    assert_same(parts, whole)
    assert len({batch.tobytes() for batch in expected.values()}) > 20  # they are not all the same


def killed_loop(path, pipeline):
    """Train until somebody kills this process."""

    def tell(step, batch):
        sys.stdout.write(f"{json.dumps([step, batch.tobytes().hex()])}\n")
        sys.stdout.flush()

    loop(path, pipeline, 10_000, tell)


@pytest.mark.thorough
def test_a_killed_run_sees_the_batches_of_an_uninterrupted_one(tmp_path):
    expected, seen, pipeline = {}, {}, "filtered"
    loop(tmp_path / "whole", pipeline, 60, expected.__setitem__)
    command = [sys.executable, __file__, tmp_path / "run", pipeline]
    paths = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, env=paths, stdout=subprocess.PIPE) as process:
        for line in process.stdout:
            step, batch = json.loads(line)
            assert batch == expected[step].tobytes().hex()
            if step >= 23 and steps(tmp_path / "run"):
                break
        process.kill()
    assert process.returncode == -signal.SIGKILL
    began, _ = loop(tmp_path / "run", pipeline, 60, seen.__setitem__)
    assert began % 5 == 0 < began
    assert list(seen) == list(range(began + 1, 61))
    assert all(seen[step].tobytes() == expected[step].tobytes() for step in seen)


if __name__ == "__main__":
    killed_loop(*sys.argv[1:])
