"""Classes of one's own whose state is stored in their place."""

import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from eformer import checkpoint
from eformer._engine.trees import modules
from eformer.errors import MismatchError, StructureError


class Ema:
    """Averages, which know their decay."""

    def __init__(self, average, decay=0.9):
        self.average, self.decay = average, decay

    def set(self, average):
        self.average = average


class Slow(Ema):
    pass


def build(ema, average):
    return type(ema)(average, ema.decay)


@pytest.fixture
def register():
    """Registers for one test."""
    before = dict(modules._registered.functions)
    yield lambda **functions: checkpoint.register_module(Ema, state=lambda ema: ema.average, **functions)
    modules._registered.functions = before
    modules._framework_of.cache_clear()


def average(number):
    return {"w": jnp.full(3, number), "layers": [jnp.full((), number)]}


def test_the_state_of_an_object_is_stored_in_its_place(tmp_path, register):
    register(build=build)
    checkpoint.save({"ema": Ema(average(1.0)), "step": 3}, tmp_path / "run")
    assert sorted(checkpoint.open(tmp_path / "run")) == ["ema.layers.0", "ema.w", "step"]
    tree = checkpoint.load(tmp_path / "run")
    np.testing.assert_array_equal(tree["ema"]["w"], [1, 1, 1])


def test_like_builds_a_new_object_and_leaves_the_old_one(tmp_path, register):
    register(build=build, update=Ema.set)
    checkpoint.save(Ema(average(1.0)), tmp_path / "ema")
    like = Ema(average(2.0), decay=0.5)
    loaded = checkpoint.load(tmp_path / "ema", like=like)
    assert (type(loaded), loaded.decay) == (Ema, 0.5)
    np.testing.assert_array_equal(loaded.average["w"], [1, 1, 1])
    np.testing.assert_array_equal(like.average["w"], [2, 2, 2])


def test_into_updates_the_object(tmp_path, register):
    register(update=Ema.set)
    checkpoint.save(Ema(average(1.0)), tmp_path / "ema")
    ema = Ema(average(2.0))
    assert checkpoint.load(tmp_path / "ema", into=ema) is ema
    np.testing.assert_array_equal(ema.average["w"], [1, 1, 1])


def test_into_builds_a_new_object_if_there_is_no_update(tmp_path, register):
    register(build=build)
    checkpoint.save(Ema(average(1.0)), tmp_path / "ema")
    ema = Ema(average(2.0))
    loaded = checkpoint.load(tmp_path / "ema", into=ema)
    assert loaded is not ema
    np.testing.assert_array_equal(loaded.average["w"], [1, 1, 1])


def test_like_without_build_says_what_to_do(tmp_path, register):
    register(update=Ema.set)
    checkpoint.save(Ema(average(1.0)), tmp_path / "ema")
    with pytest.raises(
        StructureError, match=r"Ema is registered without build=, .*: pass into= instead of like="
    ):
        checkpoint.load(tmp_path / "ema", like=Ema(average(2.0)))


def test_neither_update_nor_build_is_refused(register):
    with pytest.raises(ValueError, match="needs update=, build=, or both"):
        register()


def test_objects_anywhere_in_a_tree(tmp_path, register):
    register(update=Ema.set)

    def tree(number):
        return {"a": [Ema(average(number)), jnp.full(2, number)], "b": (Slow(average(number + 1)), None)}

    checkpoint.save(tree(1.0), tmp_path / "run")
    target = tree(5.0)
    loaded = checkpoint.load(tmp_path / "run", into=target)
    assert loaded["a"][0] is target["a"][0]
    assert loaded["b"][0] is target["b"][0]
    assert loaded["b"][1] is None
    np.testing.assert_array_equal(loaded["a"][1], [1, 1])  # an array cannot be changed: it is in the result
    np.testing.assert_array_equal(loaded["b"][0].average["w"], [2, 2, 2])


def test_an_object_inside_the_state_of_another(tmp_path, register):
    register(build=build)
    checkpoint.save(Ema({"inner": Ema(average(1.0))}), tmp_path / "ema")
    assert sorted(checkpoint.open(tmp_path / "ema")) == ["inner.layers.0", "inner.w"]
    loaded = checkpoint.load(tmp_path / "ema", like=Ema({"inner": Ema(average(2.0))}))
    np.testing.assert_array_equal(loaded.average["inner"].average["w"], [1, 1, 1])


def test_a_state_that_does_not_fit_changes_nothing(tmp_path, register):
    register(update=Ema.set)
    checkpoint.save({"ema": Ema(average(1.0))}, tmp_path / "run")
    ema = Ema({"w": jnp.zeros(4), "more": jnp.zeros(1)})
    with pytest.raises(MismatchError, match=r"'ema.w': expected float32\[4\], found float32\[3\]"):
        checkpoint.load(tmp_path / "run", into={"ema": ema})
    np.testing.assert_array_equal(ema.average["w"], jnp.zeros(4))


def test_what_is_lacking_stays(tmp_path, register):
    register(update=Ema.set)
    checkpoint.save({"ema": Ema({"w": jnp.ones(3)})}, tmp_path / "run")
    ema = Ema({"w": jnp.zeros(3), "more": jnp.zeros(1)})
    checkpoint.load(tmp_path / "run", into={"ema": ema}, partial=True)
    np.testing.assert_array_equal(ema.average["w"], [1, 1, 1])
    np.testing.assert_array_equal(ema.average["more"], [0])


def test_parts_that_start_anew_by_themselves_stop_no_load(tmp_path, register, monkeypatch):
    register(update=Ema.set)
    monkeypatch.setattr(modules._registered, "transient", lambda _: ("metrics",))
    few, more = (
        {"w": jnp.ones(3), "metrics": {"loss": 1.0}},
        {"w": jnp.ones(3), "metrics": {"loss": 2.0, "mae": 3.0}},
    )
    for saved, like, kept, left_out in ((few, more, ("mae",), ()), (more, few, (), ("mae",))):
        checkpoint.save({"ema": Ema(saved)}, tmp_path / "run")
        ema = Ema(like)
        report = checkpoint.load(tmp_path / "run", into={"ema": ema}, return_report=True)[1]
        assert report.kept == tuple(f"ema.metrics.{name}" for name in kept)
        assert report.left_out == tuple(f"ema.metrics.{name}" for name in left_out)
        assert ema.average["metrics"] == like["metrics"] | {"loss": saved["metrics"]["loss"]}
    with pytest.raises(MismatchError, match=r"missing leaf 'ema.v'") as caught:
        checkpoint.load(tmp_path / "run", into={"ema": Ema({**few, "v": jnp.ones(1)})})
    assert "metrics" not in str(caught.value.problems)


def test_without_a_registration_the_error_names_the_leaf(tmp_path):
    with pytest.raises(Exception, match=r"leaf 'ema': a .*Ema cannot be stored"):
        checkpoint.save({"ema": Ema(average(1.0))}, tmp_path / "run")


PROGRAM = """
import sys, jax.numpy as jnp
from eformer import checkpoint
tree = {"w": jnp.ones(3), "layers": [jnp.ones(1), 3]}
checkpoint.save(tree, sys.argv[1])
checkpoint.load(sys.argv[1], like=tree)
checkpoint.load(sys.argv[1])
print(*{"flax", "equinox", "haiku", "keras", "optax", "torch"} & sys.modules.keys())
"""


def test_no_framework_is_imported(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "x")], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == ""
