"""The judges of the door: views tell what a caller can see apart, and the list of deviations neither hides nor rots."""

import importlib
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from orbax_door import compare, kinds
from orbax_door.compare import Deviation
from orbax_door.graft import plugin, run
from orbax_door.inputs import Params, sharded, spread
from orbax_door.record import Viewer
from orbax_door.scenario import outcome

OCP = pytest.importorskip("orbax.checkpoint")
MODULES = [path.stem for path in sorted(Path(__file__).with_name("scenarios").glob("*.py"))]


def view(value, root="/root-of-a-test"):
    return Viewer(OCP, root).view(value)


DIFFERENT = {
    "numpy or jax": (np.zeros(2, np.float32), jnp.zeros(2)),
    "numpy or its scalar": (np.array(1.0), np.float64(1.0)),
    "int or float": (1, 1.0),
    "bool or int": (True, 1),
    "dtype": (jnp.zeros(2), jnp.zeros(2, jnp.bfloat16)),
    "shape": (np.zeros((2, 1)), np.zeros((1, 2))),
    "bits": (np.array([0.0]), np.array([-0.0])),
    "weak type": (jnp.asarray(1.0), jnp.float32(1.0)),
    "sharding": (spread(8, spec=("x",)), spread(8, spec=("y",))),
    "device": (jnp.zeros(2), jax.device_put(jnp.zeros(2), jax.devices()[1])),
    "tuple or list": ((1, 2), [1, 2]),
    "namedtuple or dict": (Params(1, 2), {"w": 1, "b": 2}),
    "int keys": ({1: 2}, {"1": 2}),
    "None or empty": (None, {}),
    "key or its data": (jax.random.key(0), jax.random.key_data(jax.random.key(0))),
    "abstract sharding": (
        jax.ShapeDtypeStruct((8,), "int32"),
        jax.ShapeDtypeStruct((8,), "int32", sharding=sharded()),
    ),
    "value or exception": (outcome(int, "1"), outcome(int, "x")),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_values_that_a_caller_can_tell_apart_have_other_views(name):
    one, two = map(view, DIFFERENT[name])
    assert compare.agree(one, one)
    assert not compare.agree(one, two)


def test_trailing_none_of_a_spec_and_the_root_do_not_matter():
    assert view(sharded("x", None)) == view(sharded("x"))
    assert view("/a/b", root="/a") == view("/c/b", root="/c")


def test_an_exception_of_the_door_may_be_caught_by_more_names_but_not_by_fewer():
    class Own(FileNotFoundError, ValueError):
        pass

    wide, narrow = (view(outcome(_raise, error)) for error in (Own("a"), FileNotFoundError("b")))
    assert compare.agree(narrow, wide)
    assert not compare.agree(wide, narrow)


def _raise(error):
    raise error


def test_words_that_callers_match_are_compared_and_other_words_are_not():
    said = view(outcome(_raise, ValueError("already exists"), words="already"))
    other = view(outcome(_raise, ValueError("it exists already"), words="already"))
    silent = view(outcome(_raise, ValueError("no"), words="already"))
    assert compare.agree(said, other)
    assert not compare.agree(said, silent)


def test_a_difference_is_listed_or_a_failure_and_a_listed_one_that_agrees_is_stale():
    oracle = {"m.a": {"x": {"python": "int", "value": "1"}, "y": {"python": "int", "value": "2"}}}
    door = {"m.a": {"x": {"python": "int", "value": "9"}}}
    listed, stale = (Deviation("m.a", label, "topic", "reason") for label in "xy")
    verdict = compare.judge(oracle, door, [listed])
    assert [each.label for each in verdict.listed] == ["x"]
    assert [each.label for each in verdict.failures] == ["y"], "a label that the door lacks differs"
    assert compare.judge(oracle, oracle, [stale]).stale == (stale,)


@pytest.mark.parametrize("module", MODULES)
def test_scenarios_have_names_of_their_own(module):
    names = [each.name for each in importlib.import_module(f"orbax_door.scenarios.{module}").SCENARIOS]
    assert len(names) == len({name.lower() for name in names})


def test_every_listed_deviation_names_a_scenario():
    known = {
        f"{module}.{each.name}": {}
        for module in MODULES
        for each in importlib.import_module(f"orbax_door.scenarios.{module}").SCENARIOS
    }
    for each in compare.read_deviations():
        assert any(compare.fnmatchcase(name, each.scenario) for name in known), each
        assert each.reason.endswith("."), each


def test_cells_of_the_table_are_compared_with_orbax():
    name = "kinds.comes_back[int by standard]"
    wrong = {name: {"standard for none": view(outcome(float, 3))}}
    assert kinds.check(wrong, write=False) == [
        "kinds.toml: int: standard for none: has 'int 3', Orbax has 'float 3.0'"
    ]


def test_a_graft_replaces_objects_in_every_module_that_has_them_and_names_the_missing():
    theirs, own = type("A", (), {}), type("A", (), {})
    package = SimpleNamespace(A=theirs, B=int, sub=SimpleNamespace(A=theirs))
    door = SimpleNamespace(A=own)
    found = plugin.pairs(package, door, {"": ["A", "B"]})
    modules = [SimpleNamespace(A=theirs, other=1), SimpleNamespace(renamed=theirs)]
    assert plugin.graft(found, modules) == ["B"]
    assert modules[0].A is own
    assert modules[1].renamed is own


def test_a_report_of_pytest_is_read_as_the_outcomes_of_its_cases(tmp_path):
    report = tmp_path / "report.xml"
    report.write_text(
        '<testsuites><testsuite><testcase classname="m.T" name="a"/>'
        '<testcase classname="m.T" name="b"><failure/></testcase>'
        '<testcase classname="m.T" name="c"><skipped/></testcase></testsuite></testsuites>'
    )
    assert run.read(report) == {"T.a": "passed", "T.b": "failed", "T.c": "skipped"}
