"""A run compares the copies of arrays on its devices, before it saves them."""

import pickle

import jax
import numpy as np
import pytest

from eformer.checkpoint import Run
from eformer.errors import ReplicaError
from support.meshes import grid, on


def with_damage(array, device, element=1.0):
    """Return the array with other elements on one device."""
    shards = [np.asarray(shard.data) for shard in array.addressable_shards]
    shards[device] = shards[device] + np.asarray(element, shards[device].dtype)
    placed = [
        jax.device_put(data, shard.device)
        for data, shard in zip(shards, array.addressable_shards, strict=True)
    ]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, placed)


def state():
    array = np.arange(64, dtype=np.float32).reshape(8, 8)
    return {
        "everywhere": jax.device_put(array, on(grid())),
        "half": jax.device_put(array, on(grid(), "data")),
        "sharded": jax.device_put(array, on(grid(), "data", "model")),
        "own": np.arange(3),
        "n": 1,
    }


def test_copies_that_agree_are_saved(tmp_path):
    with Run(tmp_path, every=1, check_replicas=1) as run:
        run.after(1, state())
    assert [step.number for step in run.steps] == [1]


@pytest.mark.parametrize("leaf", ["everywhere", "half"])
def test_the_device_and_the_leaf_whose_copy_differs_are_named(tmp_path, leaf):
    tree = state()
    tree[leaf] = with_damage(tree[leaf], 5)
    with Run(tmp_path, every=1, check_replicas=1) as run, pytest.raises(ReplicaError) as caught:
        run.after(1, tree)
    assert (caught.value.step, run.steps) == (1, ())
    problem = f"leaf {leaf!r}: process 0 (device 5) has other elements than the others"
    assert caught.value.problems == (problem,)
    assert f"step 1: copies of arrays differ\n  {problem}" in str(caught.value)


def test_arrays_without_copies_are_not_compared(tmp_path):
    tree = state()
    tree["sharded"] = with_damage(tree["sharded"], 5)
    with Run(tmp_path, every=1, check_replicas=1) as run:
        run.after(1, tree)


def test_steps_between_are_not_compared(tmp_path):
    tree = state()
    tree["half"] = with_damage(tree["half"], 0)
    with Run(tmp_path, every=100, check_replicas=3) as run:
        run.after(1, tree)
        run.after(2, lambda: pytest.fail("the tree is not needed"))
        with pytest.raises(ReplicaError, match="step 3"):
            run.after(3, lambda: tree)


def test_half_of_the_copies_that_differ_are_named_beside_the_other_half(tmp_path):
    tree = state()
    tree["half"] = with_damage(with_damage(tree["half"], 1), 2)
    with Run(tmp_path, check_replicas=1) as run, pytest.raises(ReplicaError) as caught:
        run.after(1, tree)
    (problem,) = caught.value.problems
    assert "(devices 1, 2)" in problem
    assert "(devices 0, 3)" in problem


def test_keys_are_compared(tmp_path):
    keys = jax.device_put(jax.random.split(jax.random.key(0), 4), on(grid()))
    data = with_damage(jax.random.key_data(keys), 7)
    with Run(tmp_path, check_replicas=1) as run, pytest.raises(ReplicaError, match="leaf 'keys'"):
        run.after(1, {"keys": jax.random.wrap_key_data(data)})


def test_the_number_of_steps_is_positive(tmp_path):
    with pytest.raises(ValueError, match="check_replicas=0: expected a number of steps"):
        Run(tmp_path, check_replicas=0)


def test_the_error_survives_being_pickled():
    error = ReplicaError("a", 3, ["leaf 'w'"])
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
