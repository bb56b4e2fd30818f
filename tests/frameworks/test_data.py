"""A resumed run sees the batches of an uninterrupted one, with loaders of torchdata and datasets of Hugging Face.

Some streams go on in another number of processes, which are simulated here: docs/guides/data.md.
"""

import datasets
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from datasets.distributed import split_dataset_by_node
from torchdata.stateful_dataloader import StatefulDataLoader

from eformer._engine.runs.positions import position_of, set_position
from eformer.checkpoint import Run
from support.pages import blocks

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


# ------------------------------------------------------------------------- another number of processes


def stream(shards=5):
    return datasets.Dataset.from_dict({"n": list(range(96))}).to_iterable_dataset(num_shards=shards)


@pytest.fixture
def whole():
    """The class of the guide."""
    [block] = [one for one in blocks("docs/guides/data.md") if "test_data.py" in one.not_run]
    variables = {"stream": stream(), "jax": jax}
    exec(compile(block.text, block.page, "exec", dont_inherit=True), variables)
    return variables["Whole"]


def put(job, facts):
    for number, data in enumerate(job):
        set_position(data, facts, "step 5", number=number, count=len(job))


def recorded(job):
    return {"data": [position_of(data).decode() for data in job]}


@pytest.mark.parametrize("after", [1, 2, 8])
def test_a_stream_that_each_process_reads_whole_goes_on_in_any_number(whole, after):
    first = [whole(stream(), 8, number, 4) for number in range(4)]
    begin = [sorted(row for data in first for row in next(data)["n"]) for _ in range(3)]
    then = [whole(stream(), 8, number, after) for number in range(after)]
    put(then, recorded(first))
    rest = [sorted(row for data in then for row in next(data)["n"]) for _ in range(9)]
    assert [row for batch in begin + rest for row in batch] == list(range(96))


def test_a_stream_whose_processes_were_at_different_batches_is_refused(whole):
    first = [whole(stream(), 8, number, 2) for number in range(2)]
    next(first[1])
    with pytest.raises(ValueError, match="the processes were not at the same batch"):
        put([whole(stream(), 8, 0, 1)], recorded(first))


def test_a_split_stream_is_refused_although_its_positions_are_equal():
    first = [split_dataset_by_node(stream(4), number, 2) for number in range(2)]
    assert [next(iter(data))["n"] for data in first] == [0, 24]
    facts = recorded(first)
    assert facts["data"][0] == facts["data"][1]
    with pytest.raises(ValueError, match=r"do not say which rows .*; the first position is \{'examples_"):
        put([stream(4)], facts)


def test_a_loader_of_torchdata_is_refused():
    first = [loader(), loader()]
    for data in first:
        next(iter(data))
    with pytest.raises(ValueError, match=r"give the StatefulDataLoader a method load_state_dicts"):
        put([loader()], recorded(first))
