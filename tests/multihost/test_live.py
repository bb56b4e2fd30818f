"""Several processes digest the state that they hold, compare it with checkpoints, and compare their copies."""

import pytest

from multihost import scenes
from support.processes import Failed

pytestmark = pytest.mark.xdist_group("processes")

LAYOUTS = {"safetensors": {}, "tensorstore": {}, "tensorstore-zstd": {"compression": "zstd"}}
SPECS = [("x", "y"), ("y",), (None, "x"), (None, ("x", "y")), (("x", "y"),), ()]


def succeed(outcomes):
    problems = [f"rank {rank}: {o}" for rank, o in enumerate(outcomes) if isinstance(o, Failed)]
    assert not problems, "\n".join(problems)
    return outcomes


@pytest.mark.sample(6)
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_fingerprints_of_sharded_leaves_are_those_of_numpy_in_every_process(two, spec):
    expected = scenes.fingerprint_numpy()
    assert succeed(two.run("fingerprint_sharded", spec)) == [expected] * 2


@pytest.mark.thorough
def test_fingerprints_of_four_processes_are_those_of_one(four):
    assert succeed(four.run("fingerprint_sharded", ("x", "y"))) == [scenes.fingerprint_numpy()] * 4


@pytest.mark.parametrize("layout", ["safetensors", "tensorstore"])
def test_the_record_has_the_fingerprints_of_leaves_whose_boxes_are_whole_pieces(two, tmp_path, layout):
    for found, recorded in succeed(two.run("fingerprint_recorded", tmp_path / layout, {})):
        known = {name for name, digest in recorded.items() if digest}
        assert {"rows", "tree.global.everywhere", "tree.global.odd", "tree.numpy", "tree.number"} <= known
        assert {name: found[name] for name in known} == {name: recorded[name] for name in known}
        assert recorded["tree.global.columns"] is None


def test_a_tree_that_differs_between_processes_is_an_error_that_names_the_process(two):
    for outcome in two.run("fingerprint_different_trees"):
        assert "process 1 has other leaves than process 0" in str(outcome)


@pytest.mark.sample(3)
@pytest.mark.parametrize("layout", ["safetensors", "tensorstore"])
@pytest.mark.parametrize("spec", SPECS[::3], ids=str)
def test_a_tree_is_compared_with_a_checkpoint_that_was_cut_another_way(two, tmp_path, layout, spec):
    outcome = (True, 12, False, ["rows"], ("odd",), ("more",))
    assert succeed(two.run("compare_with_a_checkpoint", tmp_path / layout, {}, spec)) == [outcome] * 2


def test_chunks_that_several_processes_compressed_are_not_compared(two, tmp_path):
    options = {"compression": "zstd"}
    for outcome in two.run("compare_with_a_checkpoint", tmp_path / "tensorstore", options, ()):
        assert outcome.kind == "ValueError"
        assert "the record has no digests of" in str(outcome)


@pytest.mark.sample(2)
@pytest.mark.parametrize("rank", [0, 1])
def test_copies_that_differ_are_named_by_process_leaf_and_step_and_are_not_saved(four, tmp_path, rank):
    for step, text, saved in succeed(four.run("train_until_copies_differ", tmp_path, rank, 3)):
        assert (step, saved) == (4, [2])
        assert f"leaf 'w': process {rank} (devices" in text
        assert "has other elements than the others" in text
        assert "'v'" not in text


def test_of_two_copies_that_differ_both_are_named(two, tmp_path):
    for step, text, _ in succeed(two.run("train_until_copies_differ", tmp_path, 1, 4)):
        assert step == 4
        assert "step 4: copies of arrays differ" in text
        assert "process 1" in text
        assert "process 0" in text


def test_copies_that_agree_are_no_error(two, tmp_path):
    assert succeed(two.run("train_until_copies_differ", tmp_path, 0, 99)) == [None] * 2
