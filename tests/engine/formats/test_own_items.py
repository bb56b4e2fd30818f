"""A step whose items are checkpoints by eformer is one step: read, listed, verified and pruned."""

import json

import numpy as np
import pytest

from eformer import checkpoint
from eformer.errors import CorruptionError, NotFoundError

HANDLER = "eformer.compat.orbax.StandardCheckpointHandler"
HANDLERS = {
    "params": HANDLER,
    "opt": HANDLER,
    "config": "eformer.compat.orbax.JsonCheckpointHandler",
    "data": "mine.H",
}


@pytest.fixture
def run(tmp_path):
    for number in (1, 2, 3):
        make_step(tmp_path / "run" / str(number), number)
    return tmp_path / "run"


def make_step(path, number, handlers=HANDLERS):
    checkpoint.save({"w": np.full(4, number, np.float32)}, path / "params")
    checkpoint.save({"m": np.arange(number)}, path / "opt")
    write(path / "config" / "metadata", json.dumps({"lr": 0.5}))
    write(path / "data" / "process_0.bin", "position")
    described = {
        "item_handlers": handlers,
        "commit_timestamp_nsecs": 10**18,
        "custom_metadata": {"note": "hi"},
    }
    write(path / "_CHECKPOINT_METADATA", json.dumps(described))


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_items_are_prefixes(run):
    assert checkpoint.load(run / "2", prefix="params")["w"].tolist() == [2, 2, 2, 2]
    assert checkpoint.load(run, prefix="opt")["m"].tolist() == [0, 1, 2]
    assert sorted(checkpoint.inspect(run / "2").trees) == ["opt", "params"]


def test_json_items_are_metadata_and_trees(run):
    assert checkpoint.load(run / "2", prefix="config") == {"lr": 0.5}
    assert checkpoint.steps(run)[0].metadata == {"config": {"lr": 0.5}, "note": "hi"}


def test_the_steps_are_listed_and_whole(run):
    assert [step.number for step in checkpoint.steps(run)] == [1, 2, 3]
    assert [step.problem() for step in checkpoint.steps(run)] == [None] * 3
    assert checkpoint.latest(run) == str(run / "3")


def test_a_step_without_its_last_file_is_absent(run):
    (run / "3" / "_CHECKPOINT_METADATA").unlink()
    assert [step.number for step in checkpoint.steps(run)] == [1, 2]
    assert checkpoint.latest(run) == str(run / "2")
    with pytest.raises(NotFoundError, match="holds no checkpoint"):
        checkpoint.load(run / "3")


def test_verify_covers_every_item_and_lists_the_files_of_handlers(run):
    found = checkpoint.verify(run / "2")
    assert (found.ok, found.trees, found.leaves, found.has_digests) == (True, 2, 2, True)
    assert found.not_checked == ("data/",)
    assert "data/" in str(found)


@pytest.mark.parametrize("item", ["params", "opt"])
def test_verify_finds_a_flipped_bit_in_any_item(run, item):
    file = run / "2" / item / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert [damage.file for damage in checkpoint.verify(run / "2").damages] == [f"{item}/model.safetensors"]
    assert not checkpoint.verify(run).ok


def test_an_item_that_lost_its_manifest_is_damaged_and_the_others_can_be_read(run):
    (run / "3" / "opt" / "manifest.json").unlink()
    assert checkpoint.load(run / "3", prefix="params")["w"][0] == 3
    with pytest.raises(CorruptionError, match=r"opt/manifest.json is missing"):
        checkpoint.load(run / "3", prefix="opt")
    assert "opt/manifest.json is missing" in str(checkpoint.verify(run / "3"))
    with pytest.raises(CorruptionError, match="is damaged"):
        checkpoint.latest(run)


def test_a_file_that_nobody_wrote_is_left_out(run):
    write(run / "2" / "weights.bin", "?")
    assert checkpoint.verify(run / "2").left_out == ("weights.bin",)


def test_prune_removes_whole_steps_and_names_the_files_of_handlers(run):
    plan = checkpoint.prune(run, keep=1, dry_run=True)
    assert (plan.removed, plan.kept) == (("1", "2"), ("3",))
    assert plan.other_files == {"1": ("data/process_0.bin",), "2": ("data/process_0.bin",)}
    checkpoint.prune(run, keep=1, check=True)
    assert [step.number for step in checkpoint.steps(run)] == [3]
    assert not (run / "1").exists()


def test_steps_differ_by_item(run):
    assert not checkpoint.diff(run / "1", run / "2", prefix="params").same
    assert checkpoint.diff(run / "1", run / "1", prefix="params").same
