"""Leaves of a file without names, in the order of `like`."""

import jax.numpy as jnp
import numpy as np

from eformer._engine.loading.contents import Contents
from eformer._engine.loading.sources import by_order, completed
from eformer._engine.record.manifest import Extent, LeafEntry


def tree(*entries):
    leaves = {
        str(n): LeafEntry(dtype, shape, (Extent(0, 0, int(np.prod(shape)) * np.dtype(dtype).itemsize, ""),))
        for n, (dtype, shape) in enumerate(entries)
    }
    return Contents(leaves, {}, b"null")


def test_leaves_get_the_names_of_like_in_its_order():
    like = {"w": jnp.ones(3), "act": jnp.tanh, "name": "x", "b": np.ones(2)}
    named, expected = by_order(tree(("float32", (3,)), ("float64", (2,))), like, None)
    assert {name: entry.shape for name, entry in named.arrays.items()} == {"w": (3,), "b": (2,)}
    assert expected == {"w": like["w"], "b": like["b"]}


def test_surplus_arrays_get_names_that_no_leaf_has():
    named, _ = by_order(tree(("float32", (3,)), ("float32", (3,))), {"w": jnp.ones(3)}, None)
    assert list(named.arrays) == ["w", "%array 1"]


def test_too_few_arrays_leave_names_without_one():
    named, expected = by_order(tree(("float32", (3,))), {"w": jnp.ones(3), "v": jnp.ones(3)}, None)
    assert list(named.arrays) == ["w"]
    assert list(expected) == ["w", "v"]


def test_a_numpy_scalar_may_be_stored_in_another_size():
    stored = tree(("float32", ()))
    assert by_order(stored, {"x": np.float64(0)}, None)[1]["x"].dtype == np.float32
    assert by_order(stored, {"x": np.float64(0)}, "bfloat16")[1]["x"].dtype == jnp.bfloat16
    assert by_order(stored, {"x": np.int64(0)}, None)[1]["x"].dtype == np.int64


def test_leaves_that_are_not_stored_are_those_of_like():
    like = {"x": np.float64(0), "act": jnp.tanh, "w": np.zeros(2)}
    found = completed({"x": np.float32(0.5), "w": np.ones(2)}, like)
    assert found["act"] is jnp.tanh
    assert (found["x"], found["x"].dtype) == (0.5, np.float64)
    assert found["w"].tolist() == [1, 1]
