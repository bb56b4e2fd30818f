"""Models are uploaded to a double of the Hugging Face Hub: one commit, which replaces older weights."""

import numpy as np
import pytest

from eformer.checkpoint import convert, export, load, save
from support.models import CONFIG, weights, write_model

library = pytest.importorskip("huggingface_hub")

URL = "hf://org/model"


@pytest.fixture
def hub(hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_allowed")
    return hub


@pytest.fixture
def like(tmp_path):
    return write_model(tmp_path / "like")


def files(hub, revision="main"):
    return hub.commits["org/model", hub.revisions["org/model", revision]]


def commits(hub):
    return [asked.path for asked in hub.asked if "/commit/" in asked.path]


def test_an_export_to_the_hub_is_one_commit_of_a_whole_model(hub, like):
    export(weights(), URL, like=like, max_shard_size=200)
    assert len(commits(hub)) == 1
    assert files(hub)["tokenizer.json"] == (like / "tokenizer.json").read_bytes()
    assert {"README.md", "config.json", "manifest.json", "model.safetensors.index.json"} < files(hub).keys()
    found = load(URL, keys=list(weights()))
    np.testing.assert_array_equal(found["lm_head.weight"], weights()["lm_head.weight"])


def test_a_commit_removes_older_weights_and_keeps_other_files(hub, like):
    old = ["model-00001-of-00009.safetensors", "model.safetensors.index.json", "pytorch_model.bin"]
    hub.commit("org/model", dict.fromkeys([*old, ".gitattributes", "notes.md"], b"old"))
    export(weights(), URL, like=like)
    assert files(hub).keys().isdisjoint(old)
    assert files(hub)["notes.md"] == files(hub)[".gitattributes"] == b"old"


def test_a_revision_is_a_branch(hub, like):
    hub.commit("org/model", {"a": b"b"})
    export(weights(), f"{URL}@tuned", like=like)
    assert files(hub) == {"a": b"b"}
    assert "model.safetensors" in files(hub, "tuned")


def test_a_model_of_the_hub_can_be_like(hub, like, tmp_path):
    hub.commit("org/base", {file.name: file.read_bytes() for file in like.iterdir()})
    export(weights(), tmp_path / "new", like="hf://org/base")
    assert "base_model: org/base\n" in (tmp_path / "new" / "README.md").read_text()
    assert (tmp_path / "new" / "LICENSE").read_text() == "free"


def test_without_the_right_to_write_nothing_is_converted(hub, like, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret_other")
    seen = []
    with pytest.raises((PermissionError, OSError, FileNotFoundError)) as caught:
        export(weights(), URL, like=like, progress=lambda *done: seen.append(done))
    assert "hf_secret_other" not in str(caught.value)
    assert not seen


def test_a_dry_run_asks_for_nothing(hub, like):
    export(weights(), URL, like=like, dry_run=True)
    assert not hub.asked


def test_only_models_are_uploaded(hub, tmp_path):
    save(weights(), tmp_path / "step")
    with pytest.raises(OSError, match="models of the Hugging Face Hub can only be read"):
        convert(tmp_path / "step", URL, to="safetensors")
    with pytest.raises(ValueError, match=r"is a directory of a model; expected hf://org/model\[@revision\]"):
        export(weights(), f"{URL}/sub", config=CONFIG)
