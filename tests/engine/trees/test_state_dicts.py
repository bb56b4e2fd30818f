import pickle
import threading
from collections import OrderedDict, defaultdict
from typing import NamedTuple

import equinox as eqx
import flax.serialization
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from hypothesis import given
from jax.tree_util import Partial

from eformer._engine.trees import state_dicts as _state
from eformer._engine.trees.state_dicts import (
    current_path,
    from_state_dict,
    is_serializable,
    register_serialization_state,
    to_state_dict,
)
from eformer.errors import MismatchError, StructureError
from eformer.pytree._serialization import msgpack_serialize
from support.trees import Layer, Moments, Pair, assert_same, state_trees


class Thing:
    """Neither a pytree nor known to anybody."""

    def __init__(self, value):
        self.value = value


@pytest.fixture
def things(monkeypatch):
    """`Thing` registered for one test."""
    monkeypatch.setattr(_state, "_registered", {})
    register_serialization_state(
        Thing,
        lambda thing: {"value": to_state_dict(thing.value)},
        lambda thing, state: Thing(from_state_dict(thing.value, state["value"], name="value")),
    )


# ------------------------------------------------------------------------------------------- there and back


@given(state_trees)
def test_any_tree_comes_back_and_its_state_is_what_flax_makes_of_it(tree):
    state = to_state_dict(tree)
    assert_same(state, flax.serialization.to_state_dict(tree))
    assert_same(from_state_dict(tree, state), tree)


@flax.struct.dataclass
class Params:
    w: jax.Array
    name: str = flax.struct.field(pytree_node=False, default="x")


def train_state():
    return TrainState.create(apply_fn=len, params={"w": jnp.ones(2)}, tx=optax.adam(0.1))


FLAX_KNOWS = {
    "struct": lambda: Params(jnp.ones(2), "name"),
    "TrainState": train_state,
    "FrozenDict": lambda: flax.core.freeze({"b": {"z": 1, "y": 2}, "a": 2}),
    "Partial": lambda: Partial(len, 1, [2], key=3),
    "optax": lambda: optax.adamw(0.1).init({"w": jnp.ones(2)}),
    "Partitioned": lambda: flax.linen.Partitioned(jnp.ones(2), names=("x",)),
}


@pytest.mark.parametrize("make", FLAX_KNOWS.values(), ids=FLAX_KNOWS)
def test_what_flax_takes_apart_we_take_apart_alike_without_flax(make):
    target = make()
    state = to_state_dict(target)
    assert msgpack_serialize(state, in_place=True) == flax.serialization.to_bytes(target)
    again = from_state_dict(target, state)
    assert type(again) is type(target)
    assert jax.tree.structure(again) == jax.tree.structure(target)


OURS = {
    "OrderedDict": (lambda: OrderedDict(b=1, a=2), {"b": 1, "a": 2}),
    "defaultdict": (lambda: defaultdict(list, b=1, a=2), {"b": 1, "a": 2}),
    "dataclass": (lambda: Layer(1, [2], "n"), {"weight": 1, "bias": {"0": 2}}),
    "by position": (lambda: Pair(1, 2, "t"), {"0": 1, "1": 2}),
    "int keys": (lambda: {1: "a", 10: "b"}, {"1": "a", "10": "b"}),
    "empty": (lambda: {"a": {}, "b": (), "c": None}, {"a": {}, "b": {}, "c": None}),
}


@pytest.mark.parametrize(("make", "state"), OURS.values(), ids=OURS)
def test_every_class_that_jax_knows_is_taken_apart(make, state):
    assert_same(to_state_dict(make()), state)
    assert_same(from_state_dict(make(), state), make())


def test_an_equinox_module_comes_back():
    module = eqx.nn.Linear(2, 3, key=jax.random.key(0))
    state = to_state_dict(module)
    assert state.keys() == {"weight", "bias"}
    other = eqx.nn.Linear(2, 3, key=jax.random.key(1))
    assert eqx.tree_equal(from_state_dict(other, state), module)


def test_registered_objects_come_back(things):
    state = to_state_dict({"t": [Thing({"w": 1})]})
    assert state == {"t": {"0": {"value": {"w": 1}}}}
    assert from_state_dict({"t": [Thing({"w": 0})]}, state)["t"][0].value == {"w": 1}


def test_what_is_no_container_is_returned_as_it_is():
    for leaf in (3, "x", None, np.ones(2), Thing(1)):
        assert to_state_dict(leaf) is leaf


# ----------------------------------------------------------------------------------------------- registry


def test_a_type_is_registered_once_unless_overridden(things):
    register_serialization_state(OrderedDict, lambda x: {"n": len(x)}, lambda x, s: x)
    assert to_state_dict(OrderedDict(a=1)) == {"n": 1}
    for kind in (dict, list, tuple, Partial, Thing, OrderedDict):
        with pytest.raises(
            ValueError, match=f'a serialization handler for "{kind.__name__}" is already registered'
        ):
            register_serialization_state(kind, lambda x: {}, lambda x, s: x)
    register_serialization_state(Thing, lambda x: {"other": 1}, lambda x, s: x, override=True)
    assert to_state_dict(Thing(1)) == {"other": 1}


def test_a_builtin_can_be_overridden(monkeypatch):
    monkeypatch.setattr(_state, "_registered", {})
    register_serialization_state(list, lambda x: {"n": len(x)}, lambda x, s: [0] * s["n"], override=True)
    assert to_state_dict({"a": [1, 2]}) == {"a": {"n": 2}}
    assert from_state_dict({"a": []}, {"a": {"n": 2}}) == {"a": [0, 0]}


def test_serializable_is_what_is_taken_apart(things):
    for yes in (
        {},
        [],
        (),
        Moments(1, 2),
        Moments,
        dict,
        Thing(1),
        Thing,
        Layer(1, 2),
        Layer,
        OrderedDict,
        Pair,
        Partial(len),
    ):
        assert is_serializable(yes), yes
    for no in (42, "x", None, type(None), int, jnp.ones(2), np.ones(2), object()):
        assert not is_serializable(no), no


def test_keys_of_a_handler_must_be_strings(things):
    register_serialization_state(Thing, lambda x: {1: 2}, lambda x, s: x, override=True)
    with pytest.raises(TypeError, match=r"must only have string keys.*Thing's handler gave 1"):
        to_state_dict(Thing(1))


def test_keys_of_one_spelling_are_refused_with_their_place():
    with pytest.raises(ValueError, match=r"\./deep/er: .*unique string representation"):
        to_state_dict({"deep": {"er": {1: "a", "1": "b"}}})


def test_a_target_whose_keys_read_the_same_is_refused_with_its_place():
    with pytest.raises(StructureError, match=r"\./a: .*unique string representation"):
        from_state_dict({"a": {1: "a", "1": "b"}}, {"a": {"1": "c"}})


def test_what_jax_cannot_take_apart_is_refused_with_its_place():
    with pytest.raises(StructureError, match=r"\./a: JAX cannot take this FrozenDict apart"):
        to_state_dict({"a": flax.core.freeze({1: 2, "a": 3})})


def test_a_tree_that_contains_itself_is_refused():
    loop = {}
    loop["a"] = loop
    with pytest.raises(StructureError, match="contains itself"):
        to_state_dict(loop)


def test_any_mapping_serves_as_a_state():
    assert from_state_dict({"a": [1]}, flax.core.freeze({"a": {"0": 2}})) == {"a": [2]}


# ------------------------------------------------------------------------------------------------ mismatches

W = jnp.ones((2, 3))


@pytest.mark.parametrize(
    ("target", "state", "problem"),
    [
        ({"a": W}, {"a": np.ones((3, 2), np.float32)}, r"\./a: expected float32\[2, 3\], found float32\[3, 2\]"),
        ({"a": W}, {"a": np.ones((2, 3), np.float64)}, r"\./a: expected float32\[2, 3\], found float64\[2, 3\]"),
        ({"a": W}, {"a": jnp.ones((2, 3), jnp.bfloat16)}, r"expected float32\[2, 3\], found bfloat16\[2, 3\]"),
        ({"a": W}, {"a": 3}, r"expected float32\[2, 3\], found int 3"),
        ({"a": W}, {"a": {"b": 1}}, r"expected float32\[2, 3\], found a dict"),
        ({"a": W}, {"a": None}, r"expected float32\[2, 3\], found"),
        ({"a": W}, {"a": 1.5}, r"expected float32\[2, 3\], found float 1.5"),
        ({"a": jnp.int32(0)}, {"a": 1.5}, r"expected int32\[\], found float 1.5"),
        ({"a": np.uint8(0)}, {"a": 300}, r"expected uint8\[\], found int 300"),
        ({"a": np.uint8(0)}, {"a": -1}, r"expected uint8\[\], found int -1"),
        ({"a": 1}, {"a": [1]}, "expected int 1, found a list"),
        ({"a": 1}, {"a": (1,)}, "expected int 1, found a tuple"),
        ({"1": 1}, {1: 1}, "missing key '1'"),
        ({"a": jnp.int32(0)}, {"a": True}, r"expected int32\[\], found bool True"),
        ({"a": jax.random.key(0)}, {"a": np.zeros(2, np.uint32)}, r"expected key<fry>\[\], found uint32\[2\]"),
        ({"a": 1}, {"a": {"b": 1}}, "expected int 1, found a dict"),
        ({"kernel": 1}, {"kernal": 1}, "missing key 'kernel' \\(nearest is 'kernal'\\)"),
        ({"a": 1}, {"a": 1, "b": 2}, "unexpected key 'b'"),
        ([1, 2], {"0": 1}, "missing key '1'"),
        ([1], {"0": 1, "1": 2}, "unexpected key '1'"),
        ([1], {"a": 1}, "missing key '0'"),
        ({"a": [1]}, {"a": [1]}, r"\./a: expected the state of a list, found a list"),
        ({"a": [1]}, {"a": 3}, r"\./a: expected the state of a list, found int 3"),
        (Moments(1, 2), {"mu": 1}, "missing key 'nu'"),
        (Moments(1, 2), {"mu": 1, "nu": 2, "xi": 3}, "unexpected key 'xi'"),
        (Layer(W, 1), {"weight": W}, "missing key 'bias'"),
        ({}, {"a": 1}, "unexpected key 'a'"),
        ((), None, "expected the state of a tuple, found"),
    ],
)  # fmt: skip
def test_a_mismatch_names_the_path_and_both_sides(target, state, problem):
    with pytest.raises(MismatchError, match=problem):
        from_state_dict(target, state)


def test_all_mismatches_are_reported_at_once(things):
    target = {"a": W, "b": [W, {"c": 1}], "t": Thing({"w": W}), "ok": W}
    state = {"a": np.ones(1), "b": {"0": W, "1": {}}, "t": {"value": {"w": np.ones(2)}}, "ok": W, "x": 1}
    with pytest.raises(MismatchError) as caught:
        from_state_dict(target, state)
    assert caught.value.problems == (
        ".: unexpected key 'x'",
        "./a: expected float32[2, 3], found float64[1]",
        "./b/1: missing key 'c'",
        "./t/value/w: expected float32[2, 3], found float64[2]",
    )
    assert "4 mismatches" in str(caught.value)


shapes_seen = []


@flax.struct.dataclass
class Strict:
    w: jax.Array

    def __post_init__(self):
        shapes_seen.append(self.w.shape)


def test_a_class_never_sees_a_leaf_that_does_not_fit():
    with pytest.raises(MismatchError) as caught:
        from_state_dict({"a": Strict(W), "b": W}, {"a": {"w": np.ones(3)}, "b": np.ones(3)})
    assert len(caught.value.problems) == 2
    assert set(shapes_seen) == {(2, 3)}


@flax.struct.dataclass
class Picky:
    w: jax.Array
    n: int = 0

    def __post_init__(self):
        assert self.n == 0


def test_a_class_that_refuses_its_fields_does_not_hide_the_mismatches():
    state = {"a": {"w": W, "n": 1}, "b": np.ones(3)}
    with pytest.raises(MismatchError, match=r"\./b: expected"):
        from_state_dict({"b": W, "a": Picky(W)}, state)
    with pytest.raises(AssertionError):
        from_state_dict({"a": Picky(W)}, {"a": state["a"]})


def test_a_mismatch_survives_being_sent_to_another_process():
    error = MismatchError(["a: x", "b: y"], context="where")
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) == "where: 2 mismatches\n  a: x\n  b: y"
    assert again.problems == error.problems


def test_many_mismatches_are_counted_and_found_quickly():
    target = {f"key{i}": 0 for i in range(20_000)}
    with pytest.raises(MismatchError, match="and 39950 more") as caught:
        from_state_dict(target, {f"other{i}": 0 for i in range(20_000)})
    assert len(caught.value.problems) == 40_000


@pytest.mark.parametrize(
    ("target", "state"),
    [
        (jnp.int32(0), 7),
        (jnp.float32(0), 1.5),
        (jnp.bfloat16(0), 1.5),
        (np.bool_(0), True),
        (np.uint8(0), 3),
        (0, np.int32(7)),
        (0, jnp.ones(3)),
        (None, {"any": "thing"}),
        (np.ones(2, ">f4"), np.ones(2, "<f4")),
        (jax.ShapeDtypeStruct((2,), jnp.int8), np.ones(2, np.int8)),
    ],
)
def test_values_that_fit_are_taken_as_they_are(target, state):
    assert from_state_dict({"a": target}, {"a": state})["a"] is state


def test_a_handler_may_answer_a_mismatch_itself(things):
    def from_either(thing, state):
        try:
            return Thing(from_state_dict(thing.value, state["value"]))
        except ValueError:
            return Thing(from_state_dict([thing.value], state["value"])[0])

    register_serialization_state(Thing, lambda t: {"value": t.value}, from_either, override=True)
    assert from_state_dict([Thing({"w": 1})], {"0": {"value": {"0": {"w": 2}}}})[0].value == {"w": 2}


# --------------------------------------------------------------------------------------- namedtuples of old


class Named(NamedTuple):
    name: object
    fields: object
    values: object


def test_old_flax_namedtuples_are_read_and_ours_are_not_taken_for_them():
    old = {"name": "Moments", "fields": {"0": "mu", "1": "nu"}, "values": {"0": 1, "1": 2}}
    assert from_state_dict(Moments(0, 0), old) == Moments(1, 2)
    named = Named(1, {"0": "a"}, {"0": 2})
    assert from_state_dict(named, to_state_dict(named)) == named
    damaged = [
        {"name": "x", "fields": 1, "values": 2},
        {"name": "x", "fields": {"0": "mu", "1": "nu"}, "values": {"0": 1, "2": 2}},
        {"name": "x", "fields": {"0": [1], "1": "nu"}, "values": {"0": 1, "1": 2}},
    ]
    for state in damaged:
        with pytest.raises(MismatchError, match="missing key 'mu'"):
            from_state_dict(Moments(0, 0), state)


# -------------------------------------------------------------------------------------------------- the path


def test_the_path_is_known_while_restoring_and_empty_outside(things):
    seen = []

    def restore(thing, state):
        seen.append(current_path())
        return thing

    register_serialization_state(Thing, lambda t: {}, restore, override=True)
    from_state_dict({"a": [Thing(0)]}, {"a": {"0": {}}})
    from_state_dict(Thing(0), {}, name="model")
    assert seen == ["./a/0", "model"]
    assert current_path() == ""


def test_the_path_is_cleared_after_a_failure(things):
    with pytest.raises(KeyError):
        from_state_dict({"a": Thing(0)}, {"a": {}})
    assert current_path() == ""


def test_threads_have_paths_of_their_own(things):
    inside, done = threading.Event(), threading.Event()

    def restore(thing, state):
        inside.set()
        assert done.wait(10)
        return thing

    register_serialization_state(Thing, lambda t: {}, restore, override=True)
    thread = threading.Thread(target=from_state_dict, args=({"a": Thing(0)}, {"a": {}}))
    thread.start()
    assert inside.wait(10)
    assert current_path() == ""
    done.set()
    thread.join(10)
