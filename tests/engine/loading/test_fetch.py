"""Bytes from files into memory: where they go, and what is said of damage."""

import numpy as np
import pytest

from eformer._engine.formats.find import find
from eformer._engine.loading import sources
from eformer._engine.loading.fetch import Arena, aligned, check_pieces, fetch, raise_damage, together
from eformer._engine.loading.read_plan import Read, Want, plan_reads
from eformer._engine.loading.sources import check_sha256
from eformer._engine.record.boxes import Box
from eformer._engine.record.digests import sha256_of
from eformer._engine.record.pieces import ALIGNMENT
from eformer.checkpoint import save
from eformer.errors import CorruptionError, Damage
from support.damage import flip


def address(array):
    return array.__array_interface__["data"][0]


# ---------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("nbytes", [1, 1000, 2**21, 2**21 + 1])
def test_memory_is_aligned(nbytes):
    memory = aligned(nbytes)
    assert len(memory) == nbytes
    assert address(memory) % ALIGNMENT == 0


def test_leaves_of_many_small_files_share_memory_and_each_is_aligned(tmp_path):
    saved = {f"w{i}": np.full(3 + i % 5, i, np.float32) for i in range(200)}
    save(saved, tmp_path, format="tensorstore")
    found = find(tmp_path)
    tree = found.tree(None)
    files = found.files(tree)
    wants = [want(tree, name) for name in tree.leaves]
    arrays = [array for (array,) in fetch(plan_reads(wants, tree), wants, tree, files, 1)]
    files.close()
    for name, array in zip(tree.leaves, arrays, strict=True):
        np.testing.assert_array_equal(array, saved[name])
    assert {address(array) % ALIGNMENT for array in arrays} == {0}
    assert len({id(array.base) for array in arrays}) < len(arrays) / 8


def read_of(number, nbytes, offset=0):
    return Read(number, offset, nbytes, ())


def test_small_reads_go_together_within_bounds():
    reads = [read_of(number, 100) for number in range(5000)]
    groups = list(together(reads, 2))
    assert [read for group in groups for read in group] == reads
    assert {len(group) for group in groups[:-1]} == {128}
    assert all(len(group) == 1 for group in together(reads[:15], 2))  # each thread has enough to do
    assert all(len(group) == 1 for group in together([read_of(n, 2**20) for n in range(5000)], 2))
    assert list(together([], 2)) == []


def test_neighbours_share_an_allocation_and_each_is_aligned():
    arena = Arena()
    arrays = [arena.target(Box.whole((size,)), np.dtype(np.int8)).array for size in (3, 100, 0, 7)]
    assert [array.shape for array in arrays] == [(3,), (100,), (0,), (7,)]
    assert [address(array) - address(arrays[0]) for array in arrays[:2]] == [0, ALIGNMENT]
    assert not any(np.shares_memory(a, b) for a in arrays for b in arrays if a is not b)


def test_memory_that_is_given_is_used_as_long_as_it_lasts():
    memory = aligned(2 * ALIGNMENT)
    arena = Arena(memory, has_neighbours=False)
    inside, outside = (arena.target(Box.whole((ALIGNMENT + 1,)), np.dtype(np.int8)).array for _ in range(2))
    assert np.shares_memory(inside, memory)
    assert not np.shares_memory(outside, memory)


# ----------------------------------------------------------------------------------------------- reads


@pytest.fixture
def opened(tmp_path, monkeypatch):
    """A tree with a large leaf in several pieces and a small one, and its files."""
    monkeypatch.setattr("eformer._engine.saving.commit.PIECE_BYTES", 1024)
    save({"large": np.arange(64 * 64, dtype=np.int32).reshape(64, 64), "small": np.arange(5)}, tmp_path)
    found = find(tmp_path)
    tree = found.tree(None)
    files = found.files(tree)
    yield tree, files, tmp_path / "model.safetensors"
    files.close()


def want(tree, name, dtype=None, boxes=None):
    return Want(name, tree.leaves[name], dtype or tree.leaves[name].dtype, boxes)


def test_leaves_boxes_and_casts_are_fetched_together(opened):
    tree, files, _ = opened
    boxes = [Box((0, 0), (64, 8)), Box((10, 4), (11, 64))]
    wants = [
        want(tree, "large"),
        want(tree, "small"),
        want(tree, "large", None, boxes),
        want(tree, "small", "float32"),
    ]
    (large,), (small,), parts, (cast,) = fetch(plan_reads(wants, tree), wants, tree, files, 2)
    whole = np.arange(64 * 64, dtype=np.int32).reshape(64, 64)
    np.testing.assert_array_equal(large, whole)
    np.testing.assert_array_equal(small, np.arange(5))
    for part, box in zip(parts, boxes, strict=True):
        np.testing.assert_array_equal(part, whole[box.slices])
    assert (cast.dtype, cast.tolist()) == (np.float32, [0, 1, 2, 3, 4])


def damages(tree, files, *names):
    found = []
    check_pieces([want(tree, name) for name in names], tree, files, 2, found.append)
    return found


def test_a_check_reports_every_damaged_piece_with_both_digests(opened):
    tree, files, file = opened
    assert damages(tree, files, "large", "small") == []
    large = tree.files[0].header_nbytes + tree.leaves["large"].extents[0].offset
    for offset in (5, 5000):
        flip(file, large + offset)
    found = damages(tree, files, "large", "small")
    assert [(d.leaf, d.start - large, d.stop - large) for d in found] == [
        ("large", 0, 1024),
        ("large", 4096, 5120),
    ]
    assert all("are damaged: their digest is " in d.problem and ", expected " in d.problem for d in found)


def test_a_file_that_was_cut_short_is_reported_where_bytes_are_missing(opened):
    tree, files, file = opened
    last = max(tree.leaves, key=lambda name: tree.leaves[name].extents[0].offset)
    with file.open("r+b") as writable:
        writable.truncate(file.stat().st_size - 1)
    found = damages(tree, files, "large", "small")
    assert {d.leaf for d in found} == {last}
    assert "are incomplete: the file was cut short" in found[-1].problem


def test_damage_is_raised_with_what_to_do():
    with pytest.raises(
        CorruptionError, match=r"leaf 'w': bytes 0 to 4 of x are bad; restore run/x from a copy"
    ):
        raise_damage("run/{}".format, Damage("w", "x", 0, 4, "are bad"))


# --------------------------------------------------------------------------------------------- SHA-256


def test_every_leaf_with_another_sha256_is_listed(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "_SHA256_BYTES", 100)
    tree = {name: np.arange(200) + n for n, name in enumerate("abc")}
    save(tree, tmp_path)
    found = find(tmp_path)
    digests = {name: sha256_of([array]) for name, array in tree.items()}
    check_sha256(found, found.tree(None), digests, 2)
    wrong = {"a": digests["a"], "b": "0" * 64, "c": "1" * 64}
    with pytest.raises(CorruptionError) as error:
        check_sha256(found, found.tree(None), wrong, 2)
    text = str(error.value)
    assert f"leaf 'b' in model.safetensors has SHA-256 {digests['b']}, expected {'0' * 64}" in text
    assert "leaf 'c'" in text
    assert "leaf 'a'" not in text
