"""Where the parts of near steps are, and which processes hold copies of them."""

import shutil

import numpy as np
import pytest

from eformer import checkpoint
from eformer._engine.processes.lines import DoorAddress
from eformer._engine.runs.near_parts import (
    Held,
    Here,
    NearPart,
    NearStep,
    PartStore,
    found_by_url,
    holders_of_copies,
    where_parts_are,
)
from eformer._engine.runs.own_part import joined_tree, own_part_of
from eformer.errors import CorruptionError, FormatError

EPOCH = "0123456789abcdef"
STEP = NearStep(3, EPOCH)
DOOR = DoorAddress("127.0.0.1", 1, "")


@pytest.mark.parametrize(
    ("hosts", "copies", "holders"),
    [
        ([0], 1, [[]]),
        ([0, 1], 0, [[], []]),
        ([0, 1], 1, [[1], [0]]),
        ([0, 1], 5, [[1], [0]]),
        ([0, 0, 0], 1, [[1], [2], [0]]),
        ([0, 0, 1, 1], 1, [[2], [3], [0], [1]]),
        ([0, 1, 0, 1], 1, [[1], [0], [3], [2]]),
        ([0, 0, 1], 1, [[2], [2], [0]]),
        ([0, 1, 2], 2, [[1, 2], [2, 0], [0, 1]]),
    ],
)
def test_copies_are_on_other_hosts_as_long_as_there_are_any(hosts, copies, holders):
    assert holders_of_copies(hosts, copies) == holders


def found(*parts_of_each, doors=True, count=2):
    held = [
        Held(str(process), DOOR if doors else None, [NearPart(STEP, owner, count) for owner in parts])
        for process, parts in enumerate(parts_of_each)
    ]
    return [one.step for one in where_parts_are(held, lambda step: step == STEP).steps]


def test_a_step_is_usable_if_every_part_is_somewhere():
    assert found([0], [1]) == [STEP]
    assert found([], [0, 1]) == found([1], [0]) == [STEP]
    assert found([0], []) == found([0], [0]) == []


def test_without_doors_every_process_needs_its_own_part_or_all():
    assert found([0], [1], doors=False) == [STEP]
    assert found([], [0, 1], doors=False) == found([1], [0], doors=False) == []
    assert found([0, 1], [0, 1], doors=False) == [STEP]


def test_another_number_of_processes_needs_all_parts():
    assert found([0, 1], [2, 3], count=4) == [STEP]
    assert found([0, 1], [2], count=4) == []
    assert found([0, 1], [2, 3], count=4, doors=False) == []


def test_parts_that_cannot_be_are_passed_over():
    held = [
        Held(
            "a", None, [NearPart(STEP, 5, 2), NearPart(STEP, 0, 2**60), NearPart(NearStep(9, "f" * 16), 0, 1)]
        )
    ]
    assert where_parts_are(held, lambda step: step == STEP).steps == []


# ------------------------------------------------------------------------------------------- sources


@pytest.fixture
def two(tmp_path):
    """Two places with the same part."""
    checkpoint.save({"w": np.arange(600_000.0)}, tmp_path / "a")
    return [tmp_path / "a", shutil.copytree(tmp_path / "a", tmp_path / "b")]


def loaded(paths):
    with found_by_url(PartStore("near-step://part", [Here(str(path)) for path in paths])) as url:
        return checkpoint.load(url)["w"]


def spoil(path):
    file = next(path.glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-8:] = data[1000:1008] = b"\xff" * 8
    file.write_bytes(data)


def test_a_damaged_source_is_left_for_the_next(two):
    spoil(two[0])
    np.testing.assert_array_equal(loaded(two), np.arange(600_000.0))


def test_a_source_that_has_lost_a_file_is_left_for_the_next(two):
    next(two[0].glob("*.safetensors")).unlink()
    np.testing.assert_array_equal(loaded(two), np.arange(600_000.0))


def test_a_source_with_another_save_is_not_used(two, tmp_path):
    spoil(two[0])
    checkpoint.save({"w": np.zeros(600_000)}, two[1])
    with pytest.raises(CorruptionError, match="are damaged"):
        loaded(two)


def test_damage_in_all_sources_is_an_error_that_names_the_leaf(two):
    for path in two:
        spoil(path)
    with pytest.raises(CorruptionError, match="leaf 'w'"):
        loaded(two)


def test_a_part_without_a_readable_source_is_an_error(two):
    for path in two:
        (path / "manifest.json").write_bytes(b'{"digest":"' + b"0" * 32 + b'"}')
    with pytest.raises(CorruptionError, match="near-step://part cannot be read"):
        loaded(two)


def test_parts_without_a_table_are_refused(two):
    tree = PartStore("near-step://part", [Here(str(two[0]))]).tree
    with pytest.raises(FormatError, match="is not a part of a tree"):
        joined_tree([tree], "near-step://x", "id", own=0, metadata={})


def test_parts_keep_the_origin_of_the_tree(tmp_path):
    part, table = own_part_of({"w": np.zeros(3)})
    checkpoint.save(part, tmp_path / "part", metadata=table, origin={"rules": {"book": "llama/flax"}})
    tree = PartStore("near-step://part", [Here(str(tmp_path / "part"))]).tree
    joined = joined_tree([tree], "near-step://x", "id", own=0, metadata={})
    assert joined.origin == {"rules": {"book": "llama/flax"}}
