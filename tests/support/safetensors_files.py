"""Read safetensors files as other programs do, and make malformed ones."""

import json

import numpy as np
import safetensors

F32 = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}


def read_by_index(folder):
    """Read all tensors as transformers does: the index names the file of each tensor."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] > 0
    tensors = {}
    for name, file in index["weight_map"].items():
        with safetensors.safe_open(folder / file, "np") as opened:
            assert opened.metadata()["format"] == "pt"
            tensors[name] = opened.get_tensor(name)
    return tensors


def tensors_in(folder):
    """Read all tensors of all files, as some programs do. No two may have the same name."""
    found = {}
    for file in folder.glob("*.safetensors"):
        with safetensors.safe_open(file, "np") as opened:
            assert found.keys().isdisjoint(opened.keys())
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return found


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name in expected:
        np.testing.assert_array_equal(np.asarray(found[name]), expected[name])


def header(tensors, data=b"", length=None):
    text = tensors if isinstance(tensors, bytes) else json.dumps(tensors).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data
