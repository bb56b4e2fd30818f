"""The bytes of placed leaves: how many are read, and what is refused before memory is allocated."""

import msgspec
import numpy as np
import pytest

from eformer._engine.formats.find import find
from eformer._engine.loading.read import nbytes_read, read_targets
from eformer._engine.loading.select import LeafTarget
from eformer._engine.record.boxes import Box
from eformer._engine.record.manifest import DataFile
from eformer.checkpoint import save
from eformer.errors import CorruptionError, FormatError


@pytest.fixture
def found(tmp_path):
    save({"a": np.arange(2**18), "b": np.arange(3)}, tmp_path)
    return find(tmp_path)


def targets(found, **more):
    leaves = found.tree(None).leaves
    return [LeafTarget(name, entry, entry.dtype, as_numpy=True, **more) for name, entry in leaves.items()]


def test_arrays_are_read_into_their_targets(found):
    a, b = targets(found)
    read_targets(found, found.tree(None), [a, b], 2, verify=True)
    np.testing.assert_array_equal(a.arrays[0], np.arange(2**18))
    np.testing.assert_array_equal(b.arrays[0], np.arange(3))


def test_values_that_are_not_stored_are_left_alone(found):
    made = targets(found, is_stored=False, arrays=["made"])
    read_targets(found, found.tree(None), made, 2, verify=True)
    assert [target.arrays for target in made] == [["made"]] * 2
    assert nbytes_read(found.tree(None), made) == 0


def test_bytes_are_counted_as_they_are_read(found):
    a, b = targets(found)
    assert nbytes_read(found.tree(None), [a, b]) == 8 * 2**18 + 24
    a.boxes = [Box((0,), (10,))]
    assert nbytes_read(found.tree(None), [a]) < 8 * 2**18


def test_a_file_that_is_too_short_is_refused_before_it_is_read(found, tmp_path):
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.truncate(2**20)
    with pytest.raises(
        CorruptionError, match=r"model.safetensors was cut short: it ends after 1048576 bytes, the leaf"
    ):
        read_targets(found, found.tree(None), targets(found), 2, verify=True)


def test_leaves_that_claim_more_than_the_file_has_are_refused(found):
    tree = found.tree(None)
    small = msgspec.structs.replace(
        tree, files=(DataFile(tree.files[0].name, 100, tree.files[0].header_nbytes),)
    )
    with pytest.raises(FormatError, match=r"'model.safetensors' claim \d+ bytes, but it has 100"):
        read_targets(found, small, targets(found), 2, verify=True)


def test_a_file_without_digests_that_is_written_to_meanwhile_is_refused(tmp_path, monkeypatch):
    np.savez(tmp_path / "x.npz", w=np.arange(10))
    found = find(tmp_path / "x.npz")
    tree = found.tree(None)
    files = found.files(tree)
    monkeypatch.setattr(type(files), "rewritten", lambda self: "x.npz")
    files.close()
    with pytest.raises(FileNotFoundError, match=r"x\.npz was written to while it was being read"):
        read_targets(found, tree, targets(found), 2, verify=True)
