"""A resumed run sees the batches of an uninterrupted one, with loaders of torchdata and datasets of Hugging Face."""

import datasets
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from eformer.checkpoint import Run

# torchdata calls what torch has deprecated
pytestmark = pytest.mark.filterwarnings("ignore:.*set_vital.*:UserWarning")


def loader(**options):
    generator = torch.Generator()
    generator.manual_seed(5)
    return StatefulDataLoader(torch.arange(200.0), batch_size=4, generator=generator, **options)


def iterable(**options):
    table = datasets.Dataset.from_dict({"n": list(range(200))}).shuffle(seed=5)
    return table.to_iterable_dataset(num_shards=5).batch(4)


SOURCES = {
    "torchdata": loader,
    "torchdata-shuffled": lambda: loader(shuffle=True),
    "torchdata-workers": lambda: loader(
        shuffle=True, num_workers=1, multiprocessing_context="spawn"
    ),  # JAX cannot be forked
    "datasets": iterable,
}


@jax.jit
def train(state, batch):
    key, dropout = jax.random.split(state["key"])
    kept = batch * jax.random.bernoulli(dropout, 0.8, batch.shape)
    return {"w": 0.9 * state["w"] + kept.sum(), "key": key}


def loop(path, source, until):
    """Train; return where it began, the batches by step, and the last state."""
    state, data, seen = {"w": jnp.zeros(2), "key": jax.random.key(3)}, SOURCES[source](), {}
    with Run(path, every=5) as run:
        if found := run.resume(like=state, data=data):
            state = found.tree
        began, batches = run.step, iter(data)  # made after its position is known
        for step in range(began + 1, until + 1):
            batch = next(batches)
            seen[step] = np.asarray(batch["n"] if source == "datasets" else batch, np.float32)
            state = train(state, seen[step])
            run.after(step, state, data=data)
    return began, seen, state


@pytest.mark.parametrize("source", SOURCES)
def test_a_resumed_run_sees_the_batches_of_an_uninterrupted_one(tmp_path, source):
    _, expected, whole = loop(tmp_path / "whole", source, 30)
    loop(tmp_path / "parts", source, 13)
    began, seen, parts = loop(tmp_path / "parts", source, 30)
    assert began == 10
    assert list(seen) == list(range(11, 31))
    assert all(seen[step].tobytes() == expected[step].tobytes() for step in seen)
    assert bool((parts["w"] == whole["w"]).all())
    assert len({batch.tobytes() for batch in expected.values()}) == 30
