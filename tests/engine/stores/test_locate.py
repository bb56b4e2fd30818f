"""Paths as people write them: "~" and file:// URLs."""

import json
from pathlib import Path

import numpy as np
import pytest

from eformer import checkpoint
from eformer._engine.stores.locate import local_path
from eformer.checkpoint import SaveOptions
from eformer.pytree._serialization import load_from_file, save_to_file
from eformer.serialization.async_manager import AsyncCheckpointManager
from eformer.serialization.serialization import tree_deserialize_leaves, tree_serialize_leaves
from support.commands import run

TREE = {"w": np.arange(4, dtype=np.float32)}


@pytest.fixture(params=["home", "url"])
def spelled(request, tmp_path, monkeypatch):
    """Spell the path of a name in the folder, which has a space in its name, in another way."""
    home = tmp_path / "my home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(tmp_path)
    return lambda name: f"~/{name}" if request.param == "home" else f"{home.as_uri()}/{name}"


def test_the_functions_of_checkpoint_take_them(spelled):
    step, other, file = spelled("run/step-1"), spelled("run/step-2"), spelled("x.safetensors")
    assert checkpoint.save(TREE, step) == step
    checkpoint.save(TREE, other, options=SaveOptions(reuse=step))
    assert checkpoint.save_async(TREE, file).result() == file
    assert Path("my home/run/step-1/manifest.json").exists()
    assert Path("my home/x.safetensors").is_file()
    for path in (step, other, file):
        np.testing.assert_array_equal(checkpoint.load(path)["w"], TREE["w"])
        np.testing.assert_array_equal(checkpoint.open(path)["w"][1:2], [1])
        assert list(checkpoint.inspect(path).trees) == [""]
        assert checkpoint.verify(path).ok
    assert checkpoint.diff(step, other).same
    checkpoint.convert(step, spelled("x.npz"), rename={"w": "v"})
    assert list(np.load("my home/x.npz")) == ["v"]
    assert checkpoint.prune(spelled("run"), keep=1).removed == ("step-1",)
    assert {entry.name for entry in Path().iterdir()} == {"my home"}


def test_the_documented_doors_take_them(spelled):
    manager = AsyncCheckpointManager()
    manager.save(TREE, spelled("managed"))
    assert manager.is_tensorstore(spelled("managed"))
    np.testing.assert_array_equal(manager.load(spelled("managed"), None)[0]["w"], TREE["w"])
    tree_serialize_leaves(spelled("arrays"), TREE)
    np.testing.assert_array_equal(tree_deserialize_leaves(spelled("arrays"), None)["w"], TREE["w"])
    save_to_file(TREE, spelled("x.msgpack"))
    np.testing.assert_array_equal(load_from_file(TREE, spelled("x.msgpack"))["w"], TREE["w"])
    names = {entry.name for entry in Path("my home").iterdir()}
    assert names == {"managed", "arrays", "x.msgpack"}


def test_the_command_line_takes_them(spelled):
    checkpoint.save(TREE, spelled("run"))
    facts = json.loads(run("inspect", spelled("run"), "--json").stdout)
    assert facts["path"] == str(Path("my home/run").absolute())


def test_a_directory_called_tilde_is_reached_by_its_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    checkpoint.save(TREE, "./~")
    assert Path("~/manifest.json").exists()
    assert local_path("~no-such-user/x") == Path("~no-such-user/x")
    assert local_path("a/~") == Path("a/~")


def test_a_url_is_decoded_and_must_be_of_this_machine():
    assert local_path("file:///a/b%20c%23d") == Path("/a/b c#d")
    assert local_path("file://localhost/a?b") == Path("/a?b")
    for url in ("file://host/x", "file://x", Path("file:///x")):
        with pytest.raises(ValueError, match="expected file:///absolute/path"):
            checkpoint.save(TREE, url)


@pytest.mark.parametrize("url", ["s3://bucket/x", "gs://bucket/x", "az://container/x", "memory://x"])
def test_what_works_on_disks_only_says_so_of_a_bucket(url):
    with pytest.raises(ValueError, match="is in a bucket, and this works in local directories only"):
        local_path(url)
