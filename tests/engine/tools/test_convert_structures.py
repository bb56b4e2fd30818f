"""Conversions of manifests whose structure makes no sense: a digest is no signature, and anybody can seal one."""

import json

import numpy as np
import pytest

from eformer._engine.record.digests import stamp_digest
from eformer.checkpoint import convert, save
from eformer.errors import MismatchError, StructureError


def nested_lists(depth):
    return "a" if not depth else {"list": [nested_lists(depth - 1)]}


@pytest.mark.parametrize("target", ["new.msgpack", "new.npz"])
@pytest.mark.parametrize(
    "structure",
    [{}, [], 7, True, {"dict": 5}, {"dict": None}, {"dict": [5]}, {"dict": [["a"]]}, {"dict": {"a": 5}}, {"foo": {}},
     {"list": 3}, {"list": {"a": 1}}, {"children": 3}, {"namedtuple": "x", "children": None},
     {"dict": [[{"bad": 1}, "a"]]}, {"tuple": ["a", [1]]}, {"dict": {}, "list": []}, nested_lists(300)],
    ids=lambda structure: str(structure)[:40],
)  # fmt: skip
def test_a_structure_that_makes_no_sense_is_an_error_of_ours(tmp_path, structure, target):
    with_structure(tmp_path / "old", structure)
    with pytest.raises(StructureError, match=r"not a recorded structure: |nested more than 250 deep"):
        convert(tmp_path / "old", tmp_path / target)
    assert not (tmp_path / target).exists()


@pytest.mark.parametrize("target", ["new.msgpack", "new.npz"])
@pytest.mark.parametrize(
    "structure", [{"list": []}, {"dict": {"a": "b"}}, {"list": ["a", "a"]}, None], ids=str
)
def test_a_structure_that_is_not_of_its_leaves_loses_none(tmp_path, structure, target):
    with_structure(tmp_path / "old", structure)
    with pytest.raises(MismatchError, match=r"(?s)the leaves do not fit the structure: .*'a'"):
        convert(tmp_path / "old", tmp_path / target)


def with_structure(path, structure):
    """A sealed checkpoint with the leaf a, and this structure."""
    save({"a": np.arange(3)}, path)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["trees"][""]["structure"] = structure
    manifest["digest"] = "0" * 32
    text = json.dumps(manifest, separators=(",", ":"))
    (path / "manifest.json").write_bytes(stamp_digest(text.encode()))
