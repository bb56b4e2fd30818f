"""Structure files of the original package (eformer 0.0.101) become ours."""

import collections
import dataclasses
import functools
import json
import pickle
import subprocess
import sys
from typing import Any

import equinox as eqx
import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from eformer._engine.formats.zarr.original_structure import parse_original_structure
from eformer._engine.record.values import value_from_json, value_to_json
from eformer._engine.trees.flatten import flatten
from eformer._engine.trees.unflatten import unflatten, unflatten_like
from eformer.errors import StructureError
from eformer.serialization._keys import is_array_like
from support.original import BASIC, DATA, STRUCTURES, Module, Struct, as_original, encoded, one, with_renamed
from support.trees import Empty, Layer, Moments, Pair, Setting, Unregistered, any_trees, bits, scalars

pytestmark = pytest.mark.usefixtures("trusted")


def leaves_of(parsed, tree):
    """The leaves by our names: values as they were recorded, arrays by the order of their paths."""
    arrays = [leaf for leaf in jax.tree.leaves(tree) if is_array_like(leaf)]
    leaves = dict(zip(parsed.arrays, arrays, strict=True))
    return leaves | {name: value_from_json(value) for name, value in parsed.values.items()}


def assert_comes_back(tree):
    parsed = parse_original_structure(as_original(tree), "x")
    leaves = leaves_of(parsed, tree)
    again = unflatten(json.loads(json.dumps(parsed.document)), leaves)
    assert jax.tree.structure(again) == jax.tree.structure(tree)
    assert list(map(bits, jax.tree.leaves(again))) == list(map(bits, jax.tree.leaves(tree)))
    assert leaves.keys() == flatten(tree)[0].keys()


# --------------------------------------------------------------------------------------------- samples


def test_there_are_samples():
    assert len(STRUCTURES) == 4


@pytest.mark.parametrize("name", STRUCTURES)
def test_a_sample_names_the_arrays_of_its_manifest(name):
    samples = json.loads((DATA / "manifest.json").read_text("utf-8"))["samples"]
    sample = samples[name.partition("/")[0]]
    parsed = parse_original_structure((DATA / name).read_bytes(), name)
    expected = {key for key in sample["arrays"] if key.startswith(parsed.prefix + ".")}
    assert {f"{parsed.prefix}.{leaf}" for leaf in parsed.arrays} == expected
    assert all((DATA / name).with_name(path.split("/")[0]).is_dir() for path in parsed.arrays.values())


def test_the_basic_sample_is_a_tree_of_ours():
    parsed = parse_original_structure((DATA / BASIC).read_bytes(), BASIC)
    assert parsed.prefix == "state"
    assert parsed.extras == {"step": 3}
    assert parsed.arrays == {
        "params.b": "state/params/b",
        "params.w": "state/params/w",
        "seq.0": "state/seq/0",
        "seq.1.0": "state/seq/1/0",
    }
    assert parsed.values == {"flag": True, "lr": 0.5, "n": 5, "name": "x"}
    assert unflatten(parsed.document, {name: name for name in parsed.arrays} | parsed.values) == {
        "flag": True,
        "lr": 0.5,
        "n": 5,
        "name": "x",
        "params": {"b": "params.b", "w": "params.w"},
        "seq": ("seq.0", ["seq.1.0", None]),
    }


def test_the_optax_sample_is_the_state_that_optax_makes():
    parsed = parse_original_structure((DATA / "pytree_optax/tx_structure.json").read_bytes(), "tx")
    state = optax.adamw(1e-3).init({"w": jnp.zeros(2)})
    assert jax.tree.structure(unflatten(parsed.document, parsed.arrays)) == jax.tree.structure(state)
    assert parsed.arrays == {"0.count": "tx/0/count", "0.mu.w": "tx/0/mu/w", "0.nu.w": "tx/0/nu/w"}


def test_the_samples_are_read_without_jax():
    code = (
        "import sys; from pathlib import Path\n"
        "from eformer._engine.formats.zarr.original_structure import parse_original_structure\n"
        "for path in sys.argv[1:]: parse_original_structure(Path(path).read_bytes(), path)\n"
        "assert not {'jax', 'optax', 'flax'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, *(str(DATA / name) for name in STRUCTURES)], check=True)


# ----------------------------------------------------------------------------------------------- trees


@functools.partial(jax.tree_util.register_dataclass, data_fields=["b", "a"], meta_fields=["z", "y"])
@dataclasses.dataclass
class Reordered:
    a: Any
    y: int
    b: Any
    z: int


@jax.tree_util.register_pytree_with_keys_class
class Keyed:
    def __init__(self, content):
        self.content = content

    def tree_flatten_with_keys(self):
        pairs = [(jax.tree_util.DictKey(key), child) for key, child in self.content.items()]
        return pairs, tuple(self.content)

    @classmethod
    def tree_unflatten(cls, keys, children):
        return cls(dict(zip(keys, children, strict=True)))


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass
class Doubled:
    """A dataclass whose auxiliary data is made of its fields."""

    x: Any
    n: int

    def tree_flatten_with_keys(self):
        return [(jax.tree_util.GetAttrKey("x"), self.x)], (2 * self.n,)

    @classmethod
    def tree_unflatten(cls, aux, children):
        return cls(children[0], aux[0] // 2)


@jax.tree_util.register_pytree_with_keys_class
class Negated(Doubled):
    """The same, and not to be made of a text."""

    def tree_flatten_with_keys(self):
        return [(jax.tree_util.GetAttrKey("x"), self.x)], (-2 * -self.n,)


TREES = {
    "a bare array": one(),
    "a bare value": 1.5,
    "None": None,
    "nothing but containers": {"a": {}, "b": [], "c": (), "d": [{}, ({},)]},
    "None in places": {"a": None, "b": [None, one()], "c": (None,)},
    "values": [True, 0, -1, 2**80, 1.5, float("inf"), 1 + 2j, "é", b"\0", float("nan")],
    "containers as values of one leaf": [frozenset({1, "a"}), frozenset()],
    "dotted, empty and odd keys": {"a.b": 1, "": 2, "a": {"": 3, "/": 4}, "%": 5, "x.": {"y": {".": 6}}},
    "an empty key above fields": {"": Moments(0, [1])},
    "keys that are no strings": {1: one(), -2: {(1, "x"): 2}, 3: {1.5: 3}, 4: {b"k": 4}, 5: {True: 5}},
    "an OrderedDict": collections.OrderedDict([("b", 1), (1, one()), ("1", {"c": 2})]),
    "defaultdicts": [
        collections.defaultdict(factory, a=1) for factory in (None, list, int, complex, collections.OrderedDict)
    ],
    "namedtuples": Moments(Moments(1, one()), Empty()),
    "namedtuples of fields without leaves": {"s": Moments({}, one()), "t": Moments((), [])},
    "a registered dataclass": Layer(one(), [None, 2], "name"),
    "a dataclass of fields without leaves": Layer({}, one(), "x"),
    "a dataclass of fields in an order of its own": Reordered(1, 2, one(), 4),
    "dataclasses of derived data": [Doubled(one(), 3), Negated(one(), 3)],
    "flax.struct": [Struct(one(), "note"), Struct({"w": one()}, (1, 2j), None, rest=[])],
    "static dtypes": [Struct(1, jnp.bfloat16), Struct(1, np.float32)],
    "equinox": Module(one(), "n", [Module({}, (1, None), None), eqx.nn.LayerNorm(2)]),
    "a FrozenDict": flax.core.FrozenDict(a=one(), b={"c": 1}),
    "a class without keys": [Pair(one(), {"q": 1}, "tag"), Pair((), Pair(1, None, 2), None)],
    "a class with keys": Keyed({"left": 1, "a.b": one(), "right": {"x.y": 2}}),
    "adam": optax.adam(1e-3).init({"w": one(), "layer.0": {"b": one()}}),
    "optimizers within optimizers": (
        optax.MultiSteps(optax.sgd(0.1), 2).init({"w": one()}),
        optax.inject_hyperparams(optax.adam)(1e-3).init({"w": one()}),
        optax.masked(optax.sgd(0.1, momentum=0.9), {"a": True, "b": False}).init({"a": one(), "b": one()}),
    ),
}  # fmt: skip


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_a_tree_comes_back_under_our_names(tree):
    assert_comes_back(tree)


@given(any_trees)
@example({"": 1})
@example(collections.OrderedDict([(1, 2), ("1", 3), ("1%+int", 4)]))
def test_any_tree_comes_back_under_our_names(tree):
    assert_comes_back(tree)


hashable = st.one_of(scalars, st.tuples(st.integers(), st.text()), st.frozensets(st.integers(), max_size=3))


plain_values = st.recursive(
    scalars | st.integers() | st.text(st.characters(codec=None)) | st.text("x", min_size=300, max_size=300),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(hashable, inner, max_size=3),
        st.sets(hashable, max_size=3),
        st.frozensets(hashable, max_size=3),
    ),
    max_leaves=8,
)


@given(plain_values.filter(lambda value: value is not None), st.sampled_from([4, 5]))
def test_any_plain_value_is_read(value, protocol):
    data = as_original(0, nonarray_payload={"0": encoded(pickle.dumps(value, protocol))})
    assert parse_original_structure(data, "x").values == {"%": value_to_json(value)}


def test_a_tree_of_many_leaves_is_read():
    tree = {f"layer.{i}": Moments(one(), [i] * 10) for i in range(1000)}
    assert_comes_back(tree)


def test_none_counts_as_a_leaf_only_to_the_original():
    parsed = parse_original_structure(as_original({"a": None, "b": 1}), "x")
    assert parsed.document == {"dict": {"a": None, "b": "b"}}
    assert parsed.values == {"b": 1}


def test_a_none_that_was_no_leaf_is_none():
    treedef = encoded(pickle.dumps(jax.tree.structure([None, 1]), 4))
    data = as_original([1], treedef_b64=treedef, leaf_keys_full=["state.1"])
    assert parse_original_structure(data, "x").document == {"list": [None, "1"]}


def test_a_dotted_prefix_and_extras_are_kept():
    extras = {"loss": float("nan"), "name": "\ud800", "step": 3}
    parsed = parse_original_structure(as_original({"a": 1}, "m.b", extras=extras), "x")
    assert (parsed.prefix, parsed.values) == ("m.b", {"a": 1})
    assert str(parsed.extras) == str(extras)


def test_a_class_that_may_not_be_built_keeps_its_names():
    tree = Unregistered([one(), {"a": 1}])
    parsed = parse_original_structure(as_original(tree), "x")
    leaves = leaves_of(parsed, tree)
    assert list(leaves) == ["x.0", "x.1.a"]
    assert jax.tree.structure(unflatten_like(tree, leaves)) == jax.tree.structure(tree)
    with pytest.raises(StructureError, match=r"support.trees:Unregistered, which this program may not build"):
        unflatten(parsed.document, leaves)


@pytest.mark.parametrize(
    "tree", [Struct(1, Moments), Struct(1, np.dtype("f4")), jax.tree_util.Partial(jnp.sum, 1), Setting(1, ())]
)
def test_static_data_that_is_no_value_comes_back_only_into_a_template(tree):
    parsed = parse_original_structure(as_original(tree), "x")
    leaves = leaves_of(parsed, tree)
    assert jax.tree.structure(unflatten_like(tree, leaves)) == jax.tree.structure(tree)
    with pytest.raises(StructureError, match="pass like= with a tree of that structure"):
        unflatten(parsed.document, leaves)


def test_the_treedef_of_an_older_jax_is_read():
    data = with_renamed([1], b"jaxlib._jax.pytree", b"jaxlib.xla_extension.pytree")
    assert parse_original_structure(data, "x").document == {"list": ["0"]}
