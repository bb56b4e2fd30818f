"""Paths as people write them: "~", file:// URLs, and URLs that lost a slash."""

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest

from eformer import checkpoint
from eformer._engine.stores.urls import local_path
from eformer.checkpoint import SaveOptions
from eformer.pytree._serialization import load_from_file, save_to_file
from eformer.serialization.async_manager import AsyncCheckpointManager
from eformer.serialization.checkpointer import Checkpointer, find_latest_checkpoint
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
    assert local_path("./~") == tmp_path / "~"
    assert checkpoint.verify("./~").ok
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
    with pytest.raises(ValueError, match="is in a bucket, expected a local path"):
        local_path(url)


# ------------------------------------------------------------------------------- URLs that lost a slash

PATH_CALLS = {
    "save": lambda path: checkpoint.save(TREE, path),
    "save_async": lambda path: checkpoint.save_async(TREE, path).result(),
    "reuse": lambda path: checkpoint.save(TREE, "other", options=SaveOptions(reuse=path)),
    "load": checkpoint.load,
    "load with a cache": lambda path: checkpoint.load("memory://x", options={"cache": path}),
    "store_options": lambda path: checkpoint.store_options(path, region="x"),
    "load with options": lambda path: checkpoint.load(path, options={"store_options": {"region": "x"}}),
    "open": checkpoint.open,
    "inspect": checkpoint.inspect,
    "abstract": checkpoint.abstract,
    "verify": checkpoint.verify,
    "diff": lambda path: checkpoint.diff(path, path),
    "report": checkpoint.report,
    "sign": lambda path: checkpoint.sign(path, private_key="key.pem"),
    "convert from": lambda path: checkpoint.convert(path, "x.npz"),
    "convert to": lambda path: checkpoint.convert("source", path, to="npz"),
    "Run": checkpoint.Run,
    "near": lambda path: checkpoint.Run("run", near=checkpoint.Near(path, every=1)),
    "steps": checkpoint.steps,
    "latest": checkpoint.latest,
    "follow": lambda path: next(checkpoint.follow(path)),
    "prune": lambda path: checkpoint.prune(path, keep=1),
    "manager.save": lambda path: AsyncCheckpointManager().save(TREE, path),
    "manager.load": lambda path: AsyncCheckpointManager().load(path, None),
    "manager.is_tensorstore": AsyncCheckpointManager.is_tensorstore,
    "Checkpointer": lambda path: Checkpointer(path, None, []),
    "find_latest_checkpoint": find_latest_checkpoint,
    "tree_serialize_leaves": lambda path: tree_serialize_leaves(path, TREE),
    "tree_deserialize_leaves": lambda path: tree_deserialize_leaves(path, None),
    "save_to_file": lambda path: save_to_file(TREE, path),
    "load_from_file": lambda path: load_from_file(TREE, path),
}


@pytest.mark.parametrize("call", PATH_CALLS.values(), ids=PATH_CALLS)
def test_a_url_in_a_pathlib_path_is_refused_and_nothing_is_written(tmp_path, monkeypatch, call):
    monkeypatch.chdir(tmp_path)
    checkpoint.save(TREE, "source")
    expected = (
        "s3:/bucket/run is a URL without its second slash, which pathlib.Path drops; pass the URL as text, "
        "'s3://bucket/run', or rename the directory 's3:' if it is local"
    )
    with pytest.raises(ValueError, match=re.escape(expected)):
        call(Path("s3://bucket/run"))
    assert {entry.name for entry in Path().iterdir()} <= {"source", "run", "other"}


@pytest.mark.parametrize(
    "scheme", ["S3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "memory", "hf", "https", "http"]
)
def test_every_scheme_needs_both_slashes(scheme):
    with pytest.raises(ValueError, match=f"pass the URL as text, '{scheme}://a/b'"):
        checkpoint.save(TREE, f"{scheme}:/a/b")


def test_a_secret_in_a_url_that_lost_a_slash_is_not_shown():
    with pytest.raises(ValueError, match="pass the URL as text, 's3://bucket/x'") as caught:
        checkpoint.save(TREE, "s3:/bucket/x?token=secret")
    assert "secret" not in str(caught.value)


def test_a_relative_path_of_a_manager_with_a_bucket_is_refused_as_well():
    manager = AsyncCheckpointManager()
    manager.gcs_bucket = "bucket"
    with pytest.raises(ValueError, match="'gs://other/run'"):
        manager.save(TREE, Path("gs://other/run"))


@pytest.mark.parametrize(
    "spell", [os.path.abspath, lambda url: Path(url).absolute(), lambda url: Path("runs", url)]
)
def test_a_url_that_became_the_end_of_a_path_is_refused(tmp_path, monkeypatch, spell):
    monkeypatch.chdir(tmp_path)
    Path("s3:/bucket").mkdir(parents=True)  # as programs make it before they save
    with pytest.raises(
        ValueError, match=r"s3:/bucket/x is a URL without.*'s3://bucket/x', or rename the direc"
    ):
        checkpoint.save(TREE, spell("s3://bucket/x"))
    assert [str(path) for path in Path().rglob("*")] == ["s3:", "s3:/bucket"]


@pytest.mark.parametrize(
    ("spell", "url"),
    [
        (os.path.abspath, "file:///tmp/x"),
        (lambda url: Path(url).absolute(), "file:///tmp/x"),
        (Path, "FILE:///x"),
        (Path, "memory://"),
        (Path, "s3://"),
        (lambda url: Path(url).absolute(), "S3://"),
    ],
)
def test_a_url_of_a_file_and_one_without_a_bucket_are_refused_as_well(tmp_path, monkeypatch, spell, url):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=f"is a URL without its second slash.* as text, '{url}', or rename"):
        checkpoint.save(TREE, spell(url))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", ["x:/y", "as3:/y", "a/step:1/s3", "s3/x", "s3:x/y", "xs3:"])
def test_other_names_with_colons_are_local_paths(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    checkpoint.save(TREE, path)
    assert (tmp_path / path / "manifest.json").exists()


@pytest.mark.parametrize("path", [Path("s3://bucket/page.html"), "s3://bucket/page.html"])
def test_a_report_is_not_written_below_a_directory_called_like_a_scheme(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    checkpoint.save(TREE, "source")
    with pytest.raises(ValueError, match=r"second slash|is in a bucket"):
        checkpoint.report("source").save(path)
    assert [entry.name for entry in Path().iterdir()] == ["source"]


@pytest.mark.parametrize("command", [["inspect"], ["convert", "source"], ["demo"], ["prune", "--keep", "1"]])
def test_the_command_line_refuses_them(tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    checkpoint.save(TREE, "source")
    ended = run(*command, "s3:/bucket/run", code=1)
    assert "pass the URL as text, 's3://bucket/run'" in ended.stderr
    assert [entry.name for entry in Path().iterdir()] == ["source"]
