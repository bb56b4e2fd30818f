"""Classes of another script: nested dicts in their place when asked."""

from typing import NamedTuple

import jax
import numpy as np
import pytest

from eformer import checkpoint
from eformer.checkpoint import abstract, load, save
from eformer.errors import StructureError
from support import programs
from support.trees import assert_same

SCRIPT = """
import dataclasses, sys
from typing import Any, NamedTuple
import equinox, flax.struct, jax, numpy as np, optax
from eformer import checkpoint

@flax.struct.dataclass
class State:
    params: Any
    rate: float = flax.struct.field(pytree_node=False, default=0.1)

class Moments(NamedTuple):
    mu: Any
    nu: Any

@jax.tree_util.register_pytree_with_keys_class
class Box:
    def __init__(self, *parts): self.parts = parts
    def tree_flatten_with_keys(self):
        keys = map(jax.tree_util.GetAttrKey, ("in", "out"))
        return list(zip(keys, self.parts)), "aux"
    def tree_unflatten(aux, parts): return Box(*parts)

@jax.tree_util.register_pytree_node_class
class Bag:
    def __init__(self, *parts): self.parts = parts
    def tree_flatten(self): return self.parts, None
    def tree_unflatten(aux, parts): return Bag(*parts)

class Layer(equinox.Module):
    w: Any

a, b = np.arange(2.0), np.arange(3.0)
tree = {
    "state": State({"layers": [Layer(a), Layer(b)]}),
    "moments": Moments(a, {"x": (b, None)}),
    "box": Box(a, [Box(b, Bag(a, b))]),
    "opt": optax.adam(0.1).init({"w": a}),
    "step": 3,
}
with checkpoint.Run(sys.argv[1]) as run:
    run.save(1, tree)
checkpoint.save(State(a), sys.argv[1] + "/whole")
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with classes of a script that is not here."""
    path = tmp_path_factory.mktemp("other") / "run"
    assert programs.run(SCRIPT, str(path)).returncode == 0
    return path


def expected(a, b):
    return {
        "state": {"params": {"layers": [{"w": a}, {"w": b}]}},
        "moments": {"mu": a, "nu": {"x": (b, None)}},
        "box": {"in": a, "out": [{"in": b, "out": {"0": a, "1": b}}]},
        "step": 3,
    }


def test_a_state_of_another_script_is_nested_dicts_when_asked(run):
    found = load(run, plain=True)
    assert type(found.pop("opt")[0]).__name__ == "ScaleByAdamState"  # a class that can be built
    assert_same(found, expected(np.arange(2.0), np.arange(3.0)))


def test_without_plain_the_error_says_so(run):
    for read in (load, abstract):
        with pytest.raises(
            StructureError, match=r"__main__:\w+, which .*; or pass plain=True for nested dicts"
        ):
            read(run)


def test_its_shapes_are_nested_dicts_too(run):
    found = abstract(run, plain=True)
    assert (
        found["box"]["out"][0]["out"]["1"].shape == found["state"]["params"]["layers"][1]["w"].shape == (3,)
    )


def test_a_part_of_it_and_a_tree_that_is_one_object(run):
    found = load(run, root="box.out.0", plain=True)
    assert_same(found, expected(np.arange(2.0), np.arange(3.0))["box"]["out"][0])
    assert_same(load(run / "whole", plain=True), {"params": np.arange(2.0)})
    assert_same(load(run, root="state.params", plain=True)["layers"][0], {"w": np.arange(2.0)})


def test_a_run_resumes_with_nested_dicts(run):
    with checkpoint.Run(run) as again:
        assert_same(again.resume(plain=True).tree["moments"]["mu"], np.arange(2.0))


def test_plain_is_not_for_a_tree_that_gives_the_classes(run):
    with pytest.raises(ValueError, match="plain=True excludes like="):
        load(run, like={}, plain=True)
    with pytest.raises(ValueError, match="plain=True excludes into="):
        load(run, into={}, plain=True)


def test_a_class_that_has_changed_since_is_a_dict_too(tmp_path):
    class Pair(NamedTuple):
        x: object
        y: object

    save(Pair(np.ones(1), 2), tmp_path / "x")
    checkpoint.register_node(Pair)
    Pair._fields = ("x", "z")
    with pytest.raises(StructureError, match=r"saved with fields .*; or pass plain=True for nested dicts"):
        load(tmp_path / "x")
    assert_same(load(tmp_path / "x", plain=True), {"x": np.ones(1), "y": 2})


def test_keys_that_read_the_same_are_numbers(tmp_path):
    @jax.tree_util.register_pytree_with_keys_class
    class Local:
        def __init__(self, *parts):
            self.parts = parts

        def tree_flatten_with_keys(self):
            keys = (jax.tree_util.DictKey(1), jax.tree_util.DictKey("1"))
            return list(zip(keys, self.parts, strict=True)), None

        @classmethod
        def tree_unflatten(cls, aux, parts):
            return cls(*parts)

    save({"a": Local(np.ones(1), np.ones(2)), "b": Local(None, np.ones(3))}, tmp_path / "x")
    found = load(tmp_path / "x", plain=True)
    assert_same(found["a"], {"0": np.ones(1), "1": np.ones(2)})
    assert_same(found["b"], {"0": None, "1": np.ones(3)})
