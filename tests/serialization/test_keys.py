"""The names of leaves: what is an array, the paths of a tree, and keys that are joined."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from eformer.serialization.serialization import is_array_like, join_key, leaf_key_paths
from support.trees import Layer, Moments, Pair


@pytest.mark.parametrize(
    ("thing", "is_array"),
    [
        (jnp.ones(3), True),
        (np.ones(3), True),
        (np.float32(1), True),
        (jax.ShapeDtypeStruct((3,), jnp.float32), True),
        (jax.random.key(0), True),
        (SimpleNamespace(shape=(), dtype="x"), True),
        (SimpleNamespace(shape=()), False),
        (SimpleNamespace(dtype="x"), False),
        (3, False),
        (0.5, False),
        ([1, 2], False),
        (None, False),
        ("text", False),
    ],
    ids=repr,
)
def test_an_array_is_what_has_a_shape_and_a_dtype(thing, is_array):
    assert is_array_like(thing) is is_array


@pytest.mark.parametrize(
    ("tree", "paths"),
    [
        ({"a": 1, "b": [2, {"c": 3}]}, {"a": "a", "b": ["b.0", {"c": "b.1.c"}]}),
        ((1, (2,)), ("0", ("1.0",))),
        (Moments(1, {"x": 2}), Moments("mu", {"x": "nu.x"})),
        (Layer(1, None, "kept"), Layer("weight", None, "kept")),
        ({0: 1, 1: {2: 3}}, {0: "0", 1: {2: "1.2"}}),
        ({(1, 2): 3}, {(1, 2): "(1, 2)"}),
        ({"a.b": 1, "a": {"b": 2}}, {"a.b": "a.b", "a": {"b": "a.b"}}),
        ({"": 1}, {"": ""}),
        ({"x": {"": 2}}, {"x": {"": "x."}}),
        ({"a": None}, {"a": None}),
        (1, ""),
        ({}, {}),
        ([], []),
        (None, None),
    ],
    ids=str,
)
def test_every_leaf_is_replaced_by_its_path(tree, paths):
    assert leaf_key_paths(tree) == leaf_key_paths(tree, "") == leaf_key_paths(tree, None) == paths


@pytest.mark.parametrize(
    ("tree", "paths"),
    [
        ({"a": 1, "b": [2, {"c": 3}]}, {"a": "root.a", "b": ["root.b.0", {"c": "root.b.1.c"}]}),
        (1, "root"),
        ({"": 1}, {"": "root"}),
        ({}, {}),
    ],
    ids=str,
)
def test_a_prefix_stands_before_every_path(tree, paths):
    assert leaf_key_paths(tree, "root") == leaf_key_paths(tree, prefix="root") == paths


def test_is_leaf_decides_where_a_path_ends():
    assert leaf_key_paths({"a": None}, is_leaf=lambda x: x is None) == {"a": "a"}
    assert leaf_key_paths({"a": [1, 2]}, "p", is_leaf=lambda x: isinstance(x, list)) == {"a": "p.a"}


def test_a_node_without_keys_has_paths_by_position():
    paths = leaf_key_paths(Pair(1, {"q": 2}, "tag"))
    assert (paths.left, paths.right, paths.tag) == ("0", {"q": "1.q"}, "tag")


def test_the_state_of_an_optimizer_has_readable_paths():
    names = leaf_key_paths(optax.adam(1e-3).init({"w": jnp.ones(2)}))
    assert jax.tree.leaves(names) == ["0.count", "0.mu.w", "0.nu.w"]


def test_keys_that_cannot_be_sorted_are_refused():
    with pytest.raises(ValueError, match="sorting"):
        leaf_key_paths({0: 1, "a": 2})


@pytest.mark.parametrize(
    ("prefix", "key", "joined"),
    [("p", "k", "p.k"), ("", "k", "k"), (None, "k", "k"), ("p", "", "p"), ("p", None, "p"), (None, None, "")],
)
def test_keys_are_joined_by_a_dot_if_there_are_two(prefix, key, joined):
    assert join_key(prefix, key) == joined
