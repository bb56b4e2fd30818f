"""One of several processes cancels a save in the background: it fails in all of them, and nothing is left.

EFORMER_FAULTS_STRIDE says how many calls lie between two cases.
"""

import pytest

from eformer.checkpoint import load
from multihost import scenes
from support.faults import STRIDE, noted
from support.links import contents

pytestmark = pytest.mark.xdist_group("processes")


@pytest.mark.sample(4)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("layout", ["safetensors", "tensorstore"])
def test_a_save_that_one_process_cancels_fails_in_all_and_leaves_nothing(two, tmp_path, layout, rank):
    path, at, answers = tmp_path / layout, 1, []
    two.run("save_tree", path, "sync", {})
    while not answers or answers[-1] is not None:
        before = contents(tmp_path)
        outcomes = two.run("save_cancelled", path, rank, at)
        with noted(f"call {at}: {outcomes}"):
            answers.append(check(outcomes, rank))
            scenes.check(load(path), 0 if answers[-1] else 1)
            assert not answers[-1] or contents(tmp_path) == before
        two.run("save_tree", path, "sync", {})
        at += min(STRIDE, 4)
    assert True in answers


def check(outcomes, rank):
    """Check the errors of all ranks, and return the answer of the rank that cancelled."""
    was_stopped, kind, _ = outcomes[rank]
    _, other, said = outcomes[1 - rank]
    if was_stopped:
        assert (kind, other) == ("CancelledError", "ProcessError")
        assert f"nothing was committed: process {rank}: the save was cancelled" in said
    else:
        assert (kind, other) == ("", "")
    return was_stopped
