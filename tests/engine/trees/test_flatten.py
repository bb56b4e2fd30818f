import collections
import contextlib
import dataclasses
import json
import math
import pkgutil
import subprocess
import sys
import types
from typing import NamedTuple

import equinox as eqx
import flax
import flax.linen
import flax.training.train_state
import jax
import jax.experimental
import jax.numpy as jnp
import msgspec
import numpy as np
import optax
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from eformer._engine.record.names import MAX_DEPTH, name_to_path
from eformer._engine.trees.flatten import flatten
from eformer._engine.trees.nodes import register_node
from eformer._engine.trees.unflatten import unflatten, unflatten_like
from eformer.errors import MismatchError, StructureError
from eformer.serialization._keys import is_array_like, join_key, leaf_key_paths
from support import programs
from support.trees import HOSTILE, Empty, Layer, Moments, Pair, Setting, Unregistered, any_trees, assert_same

pytestmark = pytest.mark.usefixtures("trusted")


def through_json(structure):
    again = json.loads(json.dumps(structure))
    assert msgspec.json.decode(msgspec.json.encode(structure)) == again
    return again


def round_trip(tree):
    leaves, structure = flatten(tree)
    return unflatten(through_json(structure), leaves)


# ------------------------------------------------------------------------------------- every tree of JAX


@given(any_trees)
@example({})
@example([(), [], {}, None, Empty()])
@example({1: {2: 3}, -1: [4]})
@example({"a.b": 1, "a": {"b": 2}})
@example(collections.OrderedDict([(1, 2), ("1", 3), ("1%+int", 4)]))
@example({frozenset({1}): 1, frozenset({1, 2}): 2, frozenset(): 3, frozenset({3}): 4})
@example(dict.fromkeys(sorted(HOSTILE), 0))
def test_any_tree_comes_back_exactly(tree):
    assert_same(round_trip(tree), tree)
    assert jax.tree.structure(round_trip(tree)) == jax.tree.structure(tree)


@given(any_trees)
def test_names_are_as_many_as_leaves_in_jax_order_and_lead_into_the_directory(tree):
    leaves, _ = flatten(tree)
    assert list(leaves.values()) == jax.tree.leaves(tree)
    paths = {name_to_path(name) for name in leaves}
    assert len(paths) == len(leaves)
    for path in paths:  # a leaf's directory never holds another leaf's
        assert not any(path[:n] in paths for n in range(1, len(path)))


@given(any_trees)
def test_any_tree_comes_back_in_the_structure_of_a_like_tree(tree):
    leaves, _ = flatten(tree)
    like = jax.tree.map(lambda _: jax.ShapeDtypeStruct((), jnp.float32), tree)
    assert jax.tree.structure(unflatten_like(like, leaves)) == jax.tree.structure(tree)
    assert jax.tree.leaves(unflatten_like(like, leaves)) == jax.tree.leaves(tree)


def test_the_names_people_know():
    state = {"params": {"layers": [{"w": 1}, {"w": 2}]}, "opt": (Moments(3, {"w": 4}),)}
    assert list(flatten(state)[0]) == ["opt.0.mu", "opt.0.nu.w", "params.layers.0.w", "params.layers.1.w"]
    assert flatten(5) == ({"%": 5}, "%")


def test_a_dict_keeps_its_own_order():
    assert list(round_trip({"b": 1, "a": 2, "c": {"z": 3, "y": 4}})) == ["b", "a", "c"]


def test_colliding_spellings_keep_names_of_their_own():
    both = collections.OrderedDict([(1, "int"), ("1", "str")])
    assert list(flatten(both)[0]) == ["1%+int", "1"]
    assert list(flatten({"a.b": 1, "a": {"b": 2}})[0]) == ["a.b", "a%2Eb"]


# --------------------------------------------------------------------------------- classes of the field


def network():
    return eqx.nn.MLP(2, 3, 4, 2, key=jax.random.key(0))


@flax.struct.dataclass
class Config:
    w: jax.Array
    size: int = flax.struct.field(pytree_node=False, default=3)
    kind: tuple = flax.struct.field(pytree_node=False, default=("a", 1.5))


class Gated(eqx.Module):
    linear: eqx.nn.Linear
    scale: float = eqx.field(static=True)


FIELD_TREES = {
    "optax adamw": lambda: optax.adamw(1e-3).init({"w": jnp.ones((2, 2)), "b": jnp.ones(2)}),
    "optax chain": lambda: optax.chain(optax.clip(1.0), optax.sgd(0.1, momentum=0.9)).init([jnp.ones(2)]),
    "flax struct": lambda: Config(jnp.arange(3.0)),
    "FrozenDict": lambda: flax.core.freeze({"b": {"c": 1}, "a": 2}),
    "equinox Linear": lambda: eqx.nn.Linear(2, 3, key=jax.random.key(0)),
    "equinox MLP": network,
    "equinox own": lambda: Gated(eqx.nn.Linear(2, 3, key=jax.random.key(0)), 0.5),
    "flax Partitioned": lambda: flax.linen.Partitioned(jnp.ones(2), names=("x", None)),
    "by position": lambda: Pair({"a": 1}, [2], ("tag", 3)),
    "dataclass": lambda: Layer([1], None, "first"),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("make", FIELD_TREES.values(), ids=FIELD_TREES)
def test_states_and_modules_of_the_field_come_back(make):
    tree = make()
    again = round_trip(tree)
    assert type(again) is type(tree)
    assert jax.tree.structure(again) == jax.tree.structure(tree)
    assert all(a is b for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(tree), strict=True))


@pytest.mark.thorough
def test_a_class_of_a_trusted_package_is_imported_when_needed():
    _, structure = flatten(optax.adam(0.1).init(jnp.ones(2)))
    code = (
        "import sys, json; from eformer._engine.trees.unflatten import unflatten\n"
        "assert 'optax' not in sys.modules\n"
        "print(unflatten(json.loads(sys.argv[1]), {'0.count': 1, '0.mu': 2, '0.nu': 3}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(structure)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "(ScaleByAdamState(count=1, mu=2, nu=3), EmptyState())"


def test_a_node_whose_data_json_cannot_hold_needs_a_like_tree():
    state = flax.training.train_state.TrainState.create(
        apply_fn=len, params={"w": jnp.ones(2)}, tx=optax.sgd(0.1)
    )
    leaves, structure = flatten(state)
    with pytest.raises(StructureError, match=r"TrainState\.apply_fn: this value was not recorded.*like="):
        unflatten(through_json(structure), leaves)
    assert jax.tree.structure(unflatten_like(state, leaves)) == jax.tree.structure(state)


NAN_KEYS = {1.0: "one", math.nan: "nan", 2.0: "two", 0.0: "zero"}
SET_KEYS = {frozenset(s): s for s in [(1,), (1, 2), (3,), (), (2,)]}


@pytest.mark.parametrize("tree", [NAN_KEYS, SET_KEYS], ids=["nan", "sets"])
def test_keys_without_an_order_of_their_own_keep_their_leaves(tree):
    leaves, _ = flatten(tree)
    assert list(leaves.values()) == jax.tree.leaves(tree)
    assert unflatten_like(tree, leaves) == tree


def test_a_like_tree_may_have_its_keys_in_another_order():
    leaves, _ = flatten(collections.OrderedDict([(1, "int"), ("1", "str"), ("b", "b"), ("a", "a")]))
    like = collections.OrderedDict([("a", 0), ("1", 0), (1, 0), ("b", 0)])
    assert dict(unflatten_like(like, leaves)) == {"a": "a", "1": "str", 1: "int", "b": "b"}


def test_a_like_tree_takes_leaves_by_name_and_refuses_others():
    assert unflatten_like({"a": 0, "b": 0}, {"b": 2, "a": 1}) == {"a": 1, "b": 2}
    with pytest.raises(MismatchError, match="unexpected leaf 'c'"):
        unflatten_like({"a": 0}, {"a": 1, "c": 3})


# ------------------------------------------------------------------- dataclasses that are more than fields


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass
class Packed:
    """Its child is not its field."""

    w: object

    def tree_flatten_with_keys(self):
        return ((jax.tree_util.GetAttrKey("w"), self.w.reshape(-1)),), self.w.shape

    @classmethod
    def tree_unflatten(cls, shape, children):
        return cls(children[0].reshape(shape))


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass
class Quantized:
    """Its auxiliary data is no field."""

    w: object
    mode = None

    def tree_flatten_with_keys(self):
        return ((jax.tree_util.GetAttrKey("w"), self.w),), self.mode

    @classmethod
    def tree_unflatten(cls, mode, children):
        self = cls(*children)
        self.mode = mode
        return self


@dataclasses.dataclass
class Cached:
    """JAX drops its second field."""

    w: object
    cache: object = None


jax.tree_util.register_dataclass(Cached, data_fields=["w"], meta_fields=[], drop_fields=["cache"])


def test_a_class_that_is_more_than_its_fields_comes_back_whole():
    packed = round_trip(Packed(np.arange(6).reshape(2, 3)))
    assert packed.w.tolist() == [[0, 1, 2], [3, 4, 5]]
    quantized = Quantized(1)
    quantized.mode = "fp8"
    assert round_trip(quantized).mode == "fp8"
    assert round_trip({"a": Setting(3, ("x", "y")), "b": 1}) == {"a": Setting(3, ("x", "y")), "b": 1}


def test_what_jax_drops_from_a_class_does_not_keep_it_from_coming_back():
    assert round_trip(Cached(1, cache=len)) == Cached(1)


def test_a_tuple_that_only_claims_to_have_fields_is_refused():
    class Claims(tuple):
        __slots__ = ()
        _fields = ("a",)

    with pytest.raises(StructureError, match=r"at 'x': .*2 elements in a .*Claims of 1 fields"):
        flatten({"x": Claims((1, 2))})


def test_defaultdict_factories_come_back_or_say_that_they_cannot():
    for factory in (None, list, int, dict, tuple, set, float, str, bool, collections.OrderedDict):
        again = round_trip(collections.defaultdict(factory, a=1))
        assert again.default_factory is factory

    def impostor():
        return 3

    impostor.__name__ = "list"
    for factory in (lambda: 3, impostor):
        with pytest.raises(StructureError, match="factory"):
            round_trip(collections.defaultdict(factory, a=1))


# ----------------------------------------------------------------------------------- what may be built


def test_a_namedtuple_of_the_program_must_be_registered_or_shown():
    class Local(NamedTuple):
        x: int

    leaves, structure = flatten({"a": Local(1)})
    with pytest.raises(
        StructureError,
        match=r"at 'a': the tree holds a .*Local, which this program may not build.*like=.*register_node",
    ):
        unflatten(structure, leaves)
    assert unflatten_like({"a": Local(0)}, leaves) == {"a": Local(1)}
    register_node(Local)
    assert unflatten(structure, leaves) == {"a": Local(1)}


@pytest.mark.parametrize(
    "name",
    ["os:system", "builtins:eval", "subprocess:Popen", "nowhere:Thing", "jax:nothing", "jax.nowhere:X", "optax:adam",
     ":", "", "os", "jax:__dict__", "json.decoder:JSONDecoder", "pathlib:Path", "support.trees:Moments.mu", "jaxevil:X",
     "support.trees:Unregistered", "builtins:dict", "builtins:list", "builtins:tuple", "types:NoneType",
     "collections:OrderedDict", "collections:defaultdict"],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["namedtuple", "dataclass", "node"])
def test_nothing_else_is_ever_built_from_a_name(kind, name):
    structure = {kind: name, "children": [] if kind == "node" else {}}
    structure |= {"dataclass": {"static": {}}, "node": {"aux": None}, "namedtuple": {}}[kind]
    with pytest.raises(StructureError, match="may not build from a name"):
        unflatten(structure, {})


CRASHED_ONCE = [  # in native code, when these reached it
    {"node": "builtins:dict", "aux": {"list": []}, "children": ["a", "b", "c"]},
    {"node": "flax.core.meta:Partitioned", "aux": {"tuple": [1]}, "children": []},
    {"node": "support.trees:Layer", "aux": {"tuple": ["x"]}, "children": ["a"]},
    {"node": "support.trees:Layer", "aux": {"tuple": [1]}, "children": ["a", "b", "c"]},
    {"node": "optax:EmptyState", "aux": None, "children": ["a", "b", "c"]},
    {"node": "types:NoneType", "aux": None, "children": ["a", "b", "c"]},
    {"node": "support.trees:Setting", "aux": 5, "children": []},
    {"node": "support.trees:Setting", "aux": 5, "children": ["a", "b", "c"]},
    {"dataclass": "support.trees:Layer", "static": {}, "children": {"weight": "a"}},
    {"dataclass": "support.trees:Layer", "static": {"weight": 1}, "children": {"bias": "a"}},
]


def test_structures_that_a_class_does_not_fit_are_errors_and_not_crashes():
    code = (
        "import sys, json, flax.linen, optax, support.trees\n"
        "from eformer._engine.trees.unflatten import unflatten; from eformer.errors import StructureError\n"
        "for text in sys.argv[1:]:\n"
        "    leaves = {name: 1 for name in 'abc' if f'\"{name}\"' in text}\n"
        "    try: print(unflatten(json.loads(text), leaves))\n"
        "    except StructureError: print('refused', flush=True)"
    )
    done = programs.run(code, *map(json.dumps, CRASHED_ONCE))
    assert done.stdout.splitlines() == ["refused"] * len(CRASHED_ONCE), done


def test_a_module_that_is_not_trusted_is_not_imported():
    assert "antigravity" not in sys.modules
    with pytest.raises(StructureError):
        unflatten({"node": "antigravity:X", "aux": None, "children": []}, {})
    assert "antigravity" not in sys.modules


def test_a_module_of_a_trusted_package_is_imported_only_with_its_package():
    found = (f"jax.experimental.{m.name}" for m in pkgutil.iter_modules(jax.experimental.__path__))
    module = next(name for name in found if name not in sys.modules)
    with pytest.raises(StructureError):
        unflatten({"node": f"{module}:X", "aux": None, "children": []}, {})
    assert module not in sys.modules


def test_a_package_whose_name_begins_like_a_trusted_one_is_not_trusted(monkeypatch):
    for name in ("jaxevil", "jaxevil.jax"):
        module = types.ModuleType(name)
        module.Unregistered = Unregistered
        monkeypatch.setitem(sys.modules, name, module)
        with pytest.raises(StructureError, match="may not build"):
            unflatten({"namedtuple": f"{name}:Unregistered", "children": {"x": "x"}}, {"x": 1})


def test_a_lazy_module_does_not_run_because_a_checkpoint_named_it(monkeypatch):
    lazy = types.ModuleType("lazy")
    lazy.__getattr__ = lambda name: pytest.fail("ran")
    monkeypatch.setitem(sys.modules, "lazy", lazy)
    with pytest.raises(StructureError):
        unflatten({"node": "lazy:X", "aux": None, "children": []}, {})


def test_only_nodes_can_be_registered():
    with pytest.raises(StructureError, match="is not a pytree class"):
        register_node(int)
    with pytest.raises(StructureError, match="is not a pytree class"):
        register_node(dict)


def test_a_class_that_has_changed_since_is_refused():
    _, structure = flatten(Moments(1, 2))
    structure["children"] = {"nu": "nu", "mu": "mu"}
    with pytest.raises(StructureError, match="saved with fields"):
        unflatten(structure, {"mu": 1, "nu": 2})
    structure["children"] = {"mu": "mu"}
    with pytest.raises(StructureError, match=r"saved with fields \('mu',\), it now has \('mu', 'nu'\)"):
        unflatten(structure, {"mu": 1})
    _, structure = flatten(Layer(1, 2))
    structure["static"] = {"colour": 1}
    with pytest.raises(StructureError, match="has no field colour"):
        unflatten(structure, {"weight": 1, "bias": 2})


json_like = st.recursive(
    st.none() | st.integers() | st.sampled_from(["a", "b", "list", "jax:Array"]),
    lambda c: st.lists(c, max_size=3)
    | st.dictionaries(
        st.sampled_from(["dict", "list", "tuple", "OrderedDict", "defaultdict", "factory", "namedtuple", "dataclass",
                         "node", "aux", "static", "children", "a"]),
        c | st.sampled_from(["support.trees:Moments", "support.trees:Layer", "support.trees:Pair"]),
        max_size=4,
    ),
    max_leaves=12,
)  # fmt: skip


@given(json_like)
@example(True)
@example(1.5)
@example({"list": "abc"})
@example({"node": "support.trees:Pair", "aux": 1, "children": ["a"]})
@example({"node": "support.trees:Pair", "aux": {"tuple": [{"list": []}]}, "children": ["a", "b"]})
def test_a_damaged_structure_is_an_error_and_never_a_crash(structure):
    with contextlib.suppress(StructureError, MismatchError):
        unflatten(structure, {"a": 1, "b": 2})


@pytest.mark.parametrize(
    "structure",
    [{"list": "abc"}, {"tuple": {"x": "a"}}, {"list": [], "junk": 1}, {"children": {}}, {}, [], 5, {"dict": "a"},
     {"dict": [["k", "a"], ["k", "b"]]}, {"dict": {"x%+1": "a", "x": "b"}}, {"OrderedDict": [[1, "a"], [1, "b"]]},
     {"dict": [["k"]]}, {"defaultdict": []}, {"namedtuple": "support.trees:Moments", "children": ["a", "b"]}],
    ids=str,
)  # fmt: skip
def test_json_that_flatten_does_not_write_is_refused(structure):
    with pytest.raises(StructureError, match=r"not a recorded structure|duplicate keys"):
        unflatten(structure, {"a": 1, "b": 2})


def test_the_order_of_keys_in_json_objects_does_not_matter():
    tree = {"b": Moments(1, (2,)), "a": Layer(3, 4, "x")}
    leaves, structure = flatten(tree)
    again = unflatten(json.loads(json.dumps(structure, sort_keys=True)), leaves)
    assert jax.tree.structure(again) == jax.tree.structure(tree)
    assert jax.tree.leaves(again) == jax.tree.leaves(tree)


def test_a_leaf_stands_in_one_place():
    with pytest.raises(StructureError, match=r"leaves in two places: \['a'\]"):
        unflatten({"list": ["a", "b", "a"]}, {"a": 1, "b": 2})


def test_an_error_names_the_place_in_the_tree():
    structure = {"dict": {"model": {"list": [{"node": "nowhere:X", "aux": None, "children": []}]}}}
    with pytest.raises(StructureError, match=r"^at 'model\.0': the tree holds a nowhere:X"):
        unflatten(structure, {})


def test_a_structure_nested_beyond_reason_is_an_error():
    structure = "a"
    for _ in range(100_000):
        structure = {"list": [structure]}
    with pytest.raises(StructureError, match="nested more than"):
        unflatten(structure, {"a": 1})


def test_a_tree_nested_beyond_reason_or_containing_itself_is_refused_at_once():
    loop = []
    loop.append(loop)
    with pytest.raises(StructureError, match="nested more than"):
        flatten(loop)
    for wrap in (
        lambda t: [t],
        lambda t: {1: t},
        lambda t: collections.OrderedDict(a=t),
        lambda t: Moments(t, 0),
    ):
        deep = 1
        for _ in range(MAX_DEPTH):
            deep = wrap(deep)
        assert jax.tree.structure(round_trip(deep)) == jax.tree.structure(deep)
        with pytest.raises(StructureError, match="nested more than"):
            flatten([deep])


def test_keys_that_jax_cannot_sort_are_refused_with_their_place():
    with pytest.raises(StructureError, match="at 'a': JAX cannot sort the keys"):
        flatten({"a": {1: 1, "x": 2}})


def test_leaves_that_do_not_fit_are_all_listed_with_the_nearest_name():
    _, structure = flatten({"kernel": 1, "bias": 2})
    with pytest.raises(MismatchError) as caught:
        unflatten(structure, {"kernal": 1})
    assert caught.value.problems == (
        "missing leaf 'kernel' (nearest is 'kernal')",
        "missing leaf 'bias'",
        "unexpected leaf 'kernal'",
    )
    with pytest.raises(MismatchError, match="missing leaf 'kernel'"):
        unflatten_like({"kernel": 0, "bias": 0}, {"bias": 2})


# ------------------------------------------------------------------------------------------- questions


def test_array_like_means_shape_and_dtype():
    yes = [jnp.ones(2), np.ones(2), np.float32(1), jax.ShapeDtypeStruct((2,), jnp.int32), jax.random.key(0)]
    yes.append(types.SimpleNamespace(shape=(), dtype="x"))
    assert all(map(is_array_like, yes))
    assert not any(
        map(
            is_array_like,
            [3, 1.5, [1], None, "x", types.SimpleNamespace(shape=()), types.SimpleNamespace(dtype=1)],
        )
    )


def test_leaf_key_paths_are_dotted_and_of_the_same_structure():
    assert leaf_key_paths({"a": 1, "b": [2, {"c": 3}]}) == {"a": "a", "b": ["b.0", {"c": "b.1.c"}]}
    assert leaf_key_paths({"a": [1]}, "root") == {"a": ["root.a.0"]}
    assert leaf_key_paths({"a": 1}, None) == {"a": "a"}
    assert leaf_key_paths(1) == ""
    assert leaf_key_paths(1, "p") == "p"
    assert leaf_key_paths({0: 1, 1: None}) == {0: "0", 1: None}
    assert leaf_key_paths([None], is_leaf=lambda x: x is None) == ["0"]
    assert leaf_key_paths(Moments(1, (2,))) == Moments("mu", ("nu.0",))
    assert leaf_key_paths(Pair(1, 2, "t")).right == "1"
    state = leaf_key_paths(optax.adam(0.1).init({"w": jnp.ones(2)}))
    assert jax.tree.leaves(state) == ["0.count", "0.mu.w", "0.nu.w"]


def test_join_key_leaves_out_what_is_empty():
    assert join_key("p", "k") == "p.k"
    assert join_key("", "k") == join_key(None, "k") == "k"
    assert join_key("p", "") == join_key("p", None) == "p"
    assert join_key(None, None) == ""
