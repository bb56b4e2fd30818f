"""Files that the original package wrote (eformer 0.0.101) come back as its manifest says."""

import hashlib
import json

import numpy as np
import pytest

from eformer._engine.trees.flatten import flatten
from eformer.pytree import _serialization as ours
from support.original import DATA

SAMPLES = {
    name: sample
    for name, sample in json.loads((DATA / "manifest.json").read_text("utf-8"))["samples"].items()
    if "msgpack" in name
}


def restore(name):
    data = (DATA / name).read_bytes()
    return ours.msgpack_restore(ours.decompress_bytes(data) if name.endswith(".gz") else data)


@pytest.mark.parametrize("name", [name for name, sample in SAMPLES.items() if sample["arrays"]])
def test_arrays_are_as_the_manifest_says(name):
    arrays, _ = flatten(restore(name))
    found = {
        key: {
            "shape": list(a.shape),
            "dtype": a.dtype.name,
            "sha256": hashlib.sha256(a.tobytes()).hexdigest(),
        }
        for key, a in arrays.items()
    }
    assert found == SAMPLES[name]["arrays"]


def as_manifest(value):
    """A value in the manifest's notation."""
    if isinstance(value, dict):
        return {key: as_manifest(child) for key, child in value.items()}
    if isinstance(value, np.generic):
        return [value.dtype.name, value.item()]
    if isinstance(value, complex):
        return [value.real, value.imag]
    return value.hex() if isinstance(value, bytes) else value


def test_scalars_are_as_the_manifest_says():
    name = "msgpack_scalars.msgpack"
    assert as_manifest(restore(name)) == SAMPLES[name]["values"]


@pytest.mark.parametrize("name", [name for name in SAMPLES if not name.endswith(".gz")])
def test_written_again_they_are_the_same_bytes(name, monkeypatch):
    if "chunked" in name:
        monkeypatch.setattr(ours, "MAX_CHUNK_SIZE", 64)  # as it was when the sample was written
    assert ours.msgpack_serialize(restore(name), in_place=True) == (DATA / name).read_bytes()


def test_every_sample_is_covered():
    assert {p.name for p in DATA.iterdir() if "msgpack" in p.name} == set(SAMPLES)
    assert len(SAMPLES) == 4
