"""What objects show at a prompt."""

import numpy as np
import pytest

from eformer import checkpoint
from eformer._engine.record.text import glance
from eformer.checkpoint import save
from support.meshes import line


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shown")
    for name in ("a", "b"):
        save({f"\x1b[31m{i}{name * (i > 80)}": np.full(3, i) for i in range(90)}, folder / name)
    return folder / "a", folder / "b"


@pytest.mark.parametrize(
    "call",
    [
        lambda a, b: checkpoint.diff(a, b),
        lambda a, b: checkpoint.verify(a),
        lambda a, b: checkpoint.placement(a, mesh=line()),
        lambda a, b: checkpoint.load(a, return_report=True)[1],
        lambda a, b: checkpoint.convert(a, b, to="safetensors", dry_run=True),
    ],
    ids=["Diff", "Verification", "Placement", "LoadReport", "Conversion"],
)
def test_a_result_is_shown_in_a_few_lines_that_a_terminal_cannot_misread(paths, call):
    shown = repr(call(*paths))
    assert len(shown.split("\n")) <= 31
    assert "\x1b" not in shown
    assert shown == glance(str(call(*paths)))


def test_what_a_run_resumes_from_is_shown_without_the_tree():
    found = checkpoint.Resumed({"w": np.ones(10**6)}, 1, {2: "damaged\x07"})
    assert repr(found) == "<Resumed: 1 step done>\nskipped step 2: damaged\\x07"


def test_lines_that_are_left_out_are_counted():
    assert glance("\n".join("x" * 31)).endswith("x\n... and 1 more line")
    assert glance("\n".join("x" * 30)).endswith("x\nx")
    assert len(glance("y" * 1000)) == 160
