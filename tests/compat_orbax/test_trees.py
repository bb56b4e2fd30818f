"""Trees become dicts and lists by the key paths of JAX, as Orbax's callers expect them."""

from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from eformer.compat import orbax as ocp
from eformer.compat.orbax.tree import plain, rebuild, to_flat


class Point(NamedTuple):
    x: Any
    y: Any


class Nothing(NamedTuple):
    pass


def test_tuples_are_lists_and_namedtuples_are_dicts():
    assert plain({"t": (1, 2), "p": Point(3, [4]), 5: 6}) == {"t": [1, 2], "p": {"x": 3, "y": [4]}, "5": 6}


def test_empty_containers_are_kept_and_an_empty_namedtuple_is_none():
    assert plain({"d": {}, "l": [], "t": (), "n": None, "e": Nothing()}) == {
        "d": {},
        "l": [],
        "t": (),
        "n": None,
        "e": None,
    }


def test_a_target_is_rebuilt_with_its_own_empty_containers():
    target = {"p": Point(0, Nothing()), "t": (0,)}
    assert rebuild(target, {("p", "x"): 1, ("t", "0"): 2}) == {"p": Point(1, Nothing()), "t": (2,)}


def test_flat_dicts():
    tree = {"a": 1, "b": {"c": [2, {}]}}
    assert ocp.tree.to_flat_dict(tree) == {("a",): 1, ("b", "c", "0"): 2}
    assert ocp.tree.to_flat_dict(tree, sep="/", keep_empty_nodes=True) == {"a": 1, "b/c/0": 2, "b/c/1": {}}
    assert ocp.tree.from_flat_dict({"a": 1, "b/c": 2}, sep="/") == {"a": 1, "b": {"c": 2}}
    assert ocp.tree.from_flat_dict({("a",): 1, ("b", "c", "0"): 3}, target={"a": 0, "b": {"c": [0]}}) == {
        "a": 1,
        "b": {"c": [3]},
    }
    assert to_flat({"a": {}}) == {("a",): {}}


def test_serialized_trees_come_back():
    tree = {"p": Point(1, (2, 3))}
    assert ocp.tree.deserialize_tree(ocp.tree.serialize_tree(tree), tree) == tree
    with pytest.raises(ValueError, match="Unable to uniquely reconstruct"):
        ocp.tree.serialize_tree({"a": {}})


def test_shapes_and_merges():
    found = ocp.tree.to_shape_dtype_struct(jax.numpy.ones((2, 3)))
    assert (found.shape, found.dtype) == ((2, 3), np.float32)
    assert ocp.merge_trees({"a": 1, "b": 2}, {"b": 3}) == {"a": 1, "b": 3}
    assert ocp.transform_utils.intersect_trees({"a": 1, "b": 2}, {"b": 3}) == {"b": 3}
