"""The promises of docs/format/stability.md about files that a later version writes."""

import json

import numpy as np
import pytest

from eformer import checkpoint
from eformer._engine.record.digests import NO_DIGEST, stamp_digest
from eformer.errors import FormatError, VersionError

INDEXES = {"safetensors": "manifest.json", "tensorstore": "tensorstore_index.json"}


@pytest.fixture(params=INDEXES)
def layout(request):
    return request.param


@pytest.fixture
def path(layout, tmp_path):
    checkpoint.save({"w": np.ones((2, 3)), "step": 7}, tmp_path / "saved", format=layout)
    return tmp_path / "saved"


def rewrite(path, layout, change):
    """Change a manifest as a later version would write it: its digests are right."""
    index = path / INDEXES[layout]
    document = json.loads(index.read_bytes())
    change(document if layout == "safetensors" else document["eformer"])
    text = json.dumps(document | {"digest": NO_DIGEST}, separators=(",", ":"))
    index.write_bytes(stamp_digest(text.encode()))


def add_fields(manifest):
    tree = manifest["trees"][""]
    leaf = tree["leaves"]["w"]
    for record in (manifest, tree, tree["files"][0]):
        record["later"] = {"any": ["thing"]}
    leaf.append("later")
    leaf[2][0].append("later")


def test_fields_that_a_later_version_adds_are_ignored(path, layout):
    rewrite(path, layout, add_fields)
    assert checkpoint.load(path)["step"] == 7
    assert checkpoint.verify(path).ok


@pytest.mark.parametrize("change", [{}, {"trees": ["other", "fields"]}, {"trees": {"": {"save_id": 3}}}])
def test_a_higher_version_is_refused_as_such_whatever_else_it_changes(path, layout, change):
    rewrite(path, layout, lambda manifest: manifest.update(version=2, **change))
    with pytest.raises(VersionError, match=r"version 2; this eformer reads up to 1, upgrade it"):
        checkpoint.load(path)


def test_a_save_leaves_a_checkpoint_of_a_higher_version_alone(path, layout):
    rewrite(path, layout, lambda manifest: manifest.update(version=2))
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    with pytest.raises(VersionError, match="version 2"):
        checkpoint.save({"w": np.zeros(3)}, path, prefix="ema", format=layout)
    assert {file: file.read_bytes() for file in path.rglob("*") if file.is_file()} == before


def test_a_step_of_a_higher_version_is_not_taken_for_damaged(tmp_path):
    with checkpoint.Run(tmp_path) as run:
        run.save(1, {"w": np.ones(3)})
    rewrite(tmp_path / "step-1", "safetensors", lambda manifest: manifest.update(version=2, trees=[]))
    with checkpoint.Run(tmp_path) as run, pytest.raises(VersionError, match="version 2"):
        run.resume()
    assert (tmp_path / "step-1").is_dir()


def test_a_version_that_is_not_a_number_is_malformed(path, layout):
    rewrite(path, layout, lambda manifest: manifest.update(version="2.0"))
    with pytest.raises(FormatError, match="version"):
        checkpoint.load(path)
