"""Directories with an adapter of PEFT: leaves as they are stored, the configuration as metadata."""

import json

import numpy as np
import pytest
import safetensors.numpy

from eformer.checkpoint import inspect, load, verify
from eformer.errors import FormatError

CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q"], "revision": None}
TENSORS = {
    "base_model.model.q.lora_A.weight": np.ones((2, 4), np.float32),
    "base_model.model.q.lora_B.weight": np.ones((6, 2), np.float32),
}


@pytest.fixture
def adapter(tmp_path):
    safetensors.numpy.save_file(TENSORS, tmp_path / "adapter_model.safetensors", metadata={"format": "pt"})
    (tmp_path / "adapter_config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "README.md").write_text("an adapter")
    return tmp_path


def test_leaves_are_loaded_as_they_are_stored(adapter):
    assert load(adapter)["base_model"]["model"]["q"]["lora_B"]["weight"].shape == (6, 2)
    assert verify(adapter).ok


def test_the_configuration_is_metadata(adapter):
    found = inspect(adapter)
    assert found.format == "PEFT adapter"
    assert found.trees[""].metadata == {"format": "pt", "adapter_config": CONFIG}


def test_a_snapshot_of_hugging_faces_cache_has_links(adapter):
    snapshot = adapter / "snapshots" / "0a1b"
    snapshot.mkdir(parents=True)
    (adapter / "blobs").mkdir()
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        (adapter / name).rename(adapter / "blobs" / name)
        (snapshot / name).symlink_to(f"../../blobs/{name}")
    assert inspect(snapshot).trees[""].metadata["adapter_config"] == CONFIG
    assert load(snapshot)["base_model"]["model"]["q"]["lora_A"]["weight"].shape == (2, 4)


def test_other_weights_beside_it_are_not_hidden(adapter):
    (adapter / "optimizer.pt").write_bytes(b"x")
    assert verify(adapter).left_out == ("optimizer.pt",)
    safetensors.numpy.save_file({"w": np.ones(3)}, adapter / "model.safetensors")
    assert sorted(inspect(adapter).trees) == ["adapter_model", "model"]


@pytest.mark.parametrize("text", ["{", "[1]", "\ud800".encode("utf-8", "surrogatepass").decode("latin-1")])
def test_a_damaged_configuration_is_an_error_that_names_it(adapter, text):
    (adapter / "adapter_config.json").write_text(text)
    with pytest.raises(FormatError, match=r"adapter_config\.json is not the configuration of an adapter"):
        load(adapter)
    assert "base_model" in load(adapter / "adapter_model.safetensors")
