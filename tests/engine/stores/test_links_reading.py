"""Nothing outside of a checkpoint is opened, not even to refuse it, by whatever reads it."""

import json
import os
import shutil
import socket
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from eformer import checkpoint
from eformer._engine.stores.directory import directory_inside, open_inside, walk
from eformer.checkpoint import convert, load, save
from eformer.errors import EformerError, FormatError, NotFoundError
from support.links import LAYOUTS, TREE, save_as
from support.opens import Opens

COMPAT = Path(__file__).parents[2] / "compat"


@pytest.fixture
def has_openat2(request, monkeypatch):
    if not request.param:
        monkeypatch.setattr("eformer._engine.stores.directory._syscall", None)
    return request.param


BOTH = pytest.mark.parametrize("has_openat2", [True, False], ids=["openat2", "step by step"], indirect=True)


@pytest.fixture
def watch():
    """Returns a watch over what is opened at and below some paths."""
    watches = []

    def begin(*paths):
        watches.append(Opens(*paths))
        return watches[-1]

    yield begin
    for one in watches:
        one.close()


def read_in_every_way(path, new):
    """Read a checkpoint with all readers that there are; each may refuse it."""
    for read in (
        load,
        checkpoint.inspect,
        checkpoint.verify,
        lambda path: checkpoint.diff(path, path),
        lambda path: convert(path, new / "files", to="safetensors"),
        lambda path: convert(path, new / "file.npz", to="npz"),
    ):
        with suppress(EformerError, OSError, ValueError):
            read(path)


def entries(path):
    files = [path] if path.is_file() else sorted(path.rglob("*"))
    return [str(file.relative_to(path.parent)) for file in files]


def test_the_watch_sees_what_is_opened(tmp_path, watch):
    save(TREE, tmp_path / "run", format="tensorstore", options=LAYOUTS["database"]["options"])
    opens = watch(tmp_path / "run")
    load(tmp_path / "run")
    assert str(tmp_path / "run" / "tensorstore_index.json") in opens.seen()


def check_every_part(tmp_path, watch, first):
    """Move each part of a checkpoint out, with a link in its place, and read what is left."""
    for number, name in enumerate(entries(first)):
        folder, elsewhere, new = (tmp_path / f"{kind}-{number}" for kind in ("in", "out", "new"))
        shutil.copytree(first.parent, folder, symlinks=True)
        elsewhere.mkdir()
        new.mkdir()
        (folder / name).rename(elsewhere / "moved")
        (folder / name).symlink_to(elsewhere / "moved")
        opens = watch(elsewhere)
        read_in_every_way(folder / "run", new)
        assert opens.seen() == [], name


@pytest.mark.sample(4)
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "file"])
@BOTH
def test_no_part_of_a_checkpoint_that_was_moved_out_is_opened(tmp_path, watch, layout, has_openat2):
    check_every_part(tmp_path, watch, save_as(layout, TREE, tmp_path / "first"))


OTHERS = [
    "orbax/bare_plain",
    "orbax/v0_zarr3",
    "orbax/v0_standard",
    "data/ts_v1",
    "data/ts_noindex",
    "data/pytree_basic",
    "torch/shards",
    "torch/distributed",
]


@pytest.mark.sample(4)
@pytest.mark.parametrize("sample", OTHERS)
def test_no_part_of_a_checkpoint_of_others_that_was_moved_out_is_opened(tmp_path, watch, sample):
    shutil.copytree(COMPAT / sample, tmp_path / "first" / "run")
    check_every_part(tmp_path, watch, tmp_path / "first" / "run")


IN_ARCHIVES = {
    "a group of zarr 3": ("zarr/samples.zip", "v3-default"),
    "a group of zarr 2": ("zarr/samples.zip", "v2-default"),
    "shards of zarr 3": ("zarr/samples.zip", "v3-shards"),
    "items of orbax": ("orbax-old/kinds.tar.xz", "orbax-0.12.8/item_json"),
    "an aggregate of orbax": ("orbax-old/kinds.tar.xz", "orbax-0.5.3/half_aggregated-texts"),
    "a database in one of orbax": ("orbax-old/kinds.tar.xz", "orbax-0.3.5/pytree_ocdbt-slashes"),
    "files of flax": ("orbax-old/kinds.tar.xz", "orbax-0.12.8/flax_legacy-optimizer"),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("sample", IN_ARCHIVES)
def test_no_part_of_a_sample_in_an_archive_that_was_moved_out_is_opened(tmp_path, watch, sample):
    archive, name = IN_ARCHIVES[sample]
    shutil.unpack_archive(
        COMPAT / archive, tmp_path / "all", **({"filter": "data"} if "tar" in archive else {})
    )
    shutil.copytree(tmp_path / "all" / name, tmp_path / "first" / "run")
    check_every_part(tmp_path, watch, tmp_path / "first" / "run")


def test_no_shard_that_was_moved_out_is_opened(tmp_path, watch):
    run = tmp_path / "first" / "run"
    run.mkdir(parents=True)
    for name in ("a", "b"):
        safetensors.numpy.save_file({name: np.ones(3)}, run / f"{name}.safetensors")
    weights = {name: f"{name}.safetensors" for name in ("a", "b")}
    (run / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    check_every_part(tmp_path, watch, run)


# ------------------------------------------------------------------------------------------- steps


def test_the_last_step_of_orbax_is_refused_if_it_is_a_link_out_of_its_run(tmp_path, watch):
    shutil.copytree(COMPAT / "orbax" / "manager", tmp_path / "run")
    last = max(int(name) for name in os.listdir(tmp_path / "run") if name.isdecimal())
    shutil.copytree(tmp_path / "run" / f"{last}", tmp_path / "outside")
    (tmp_path / "run" / f"{last + 1}").symlink_to(tmp_path / "outside")
    opens = watch(tmp_path / "outside")
    with pytest.raises(FormatError, match="outside the run; pass that path"):
        load(tmp_path / "run")
    assert opens.seen() == []
    assert load(tmp_path / "run" / f"{last + 1}")  # the path of the caller
    (tmp_path / "run" / f"{last + 1}").unlink()
    (tmp_path / "run" / f"{last + 1}").symlink_to(f"{last}")
    assert load(tmp_path / "run")


def test_nothing_is_opened_for_a_hint(tmp_path, watch):
    (tmp_path / "run").mkdir()
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "checkpoint").write_bytes(b"\x81\xa1a\x01")
    (tmp_path / "run" / "there").symlink_to(tmp_path / "outside")
    opens = watch(tmp_path / "outside")
    with pytest.raises(NotFoundError, match="holds no checkpoint"):
        load(tmp_path / "run")
    assert opens.seen() == []


def test_a_database_is_not_read_through_a_link_above_it(tmp_path, watch):
    """The root in a manifest may have several parts."""
    run, how = tmp_path / "run", LAYOUTS["database"]
    save(TREE, run, **how)
    root = checkpoint.inspect(run).trees[""].root
    (tmp_path / "outside").mkdir()
    (run / root).rename(tmp_path / "outside" / root)
    (run / "way").symlink_to(tmp_path / "outside")
    opens = watch(tmp_path / "outside")
    with pytest.raises(FormatError, match="is a link, or not a directory"):
        directory_inside(run, f"way/{root}")
    assert opens.seen() == []


# ---------------------------------------------------------------------------------- one call at a time


@BOTH
def test_links_inside_are_followed(tmp_path, has_openat2):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "file").write_text("text")
    for link, target in (
        ("plain", "file"),
        ("absolute", tmp_path / "file"),
        ("a/b/relative", "../../file"),
        ("way", "a"),
        ("twice", "way/b/relative"),
    ):
        (tmp_path / link).symlink_to(target)
    for name in ("plain", "absolute", "a/b/relative", "way/b/relative", "twice"):
        with open(open_inside(tmp_path, name)) as file:
            assert file.read() == "text"
    assert [path for path, _ in walk(tmp_path, "way")] == ["b", "b/relative"]


@BOTH
def test_links_outside_are_refused_unopened(tmp_path, watch, has_openat2):
    run, outside = tmp_path / "run", tmp_path / "run-outside"
    (run / "a").mkdir(parents=True)
    (outside / "b").mkdir(parents=True)
    (outside / "b" / "file").write_text("secret")
    (run / "way").symlink_to(outside)
    (run / "file").symlink_to(outside / "b" / "file")
    (run / "a" / "file").symlink_to("../../run-outside/b/file")
    (run / "twice").symlink_to("a/file")
    opens = watch(outside)
    before = len(os.listdir("/dev/fd"))
    for name in ("file", "a/file", "way/b/file", "twice"):
        with pytest.raises(FormatError, match="outside of the checkpoint"):
            open_inside(run, name)
    for name in ("way", "way/b"):
        with pytest.raises(FormatError, match="outside of the checkpoint"):
            list(walk(run, name))
    assert [path for path, _ in walk(run) if "/" in path] == ["a/file"]
    assert opens.seen() == []
    assert len(os.listdir("/dev/fd")) == before


@BOTH
def test_pipes_sockets_loops_and_impossible_paths_are_refused_at_once(tmp_path, monkeypatch, has_openat2):
    monkeypatch.chdir(tmp_path)  # for names of sockets are short
    os.mkfifo("pipe")
    with socket.socket(socket.AF_UNIX) as end:
        end.bind("socket")
    os.mkdir("a")
    os.symlink("../pipe", "a/pipe")
    os.symlink("../socket", "a/socket")
    for name in ("pipe", "socket", "a/pipe", "a/socket", "a"):
        with pytest.raises(FormatError, match="not a regular file"):
            open_inside(tmp_path, name)
    os.symlink("loop", "loop")
    (tmp_path / "file").write_text("")
    for name in ("loop", "loop/x", "file/x", "a/" + "x" * 300):
        with pytest.raises(FormatError, match="cannot be a file"):
            open_inside(tmp_path, name)


def test_blobs_belong_to_snapshots_alone(tmp_path, watch):
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "0").write_text("text")
    for name in ("snapshots", "runs"):
        (tmp_path / name / "one").mkdir(parents=True)
        (tmp_path / name / "one" / "file").symlink_to("../../blobs/0")
    os.close(open_inside(tmp_path / "snapshots" / "one", "file"))
    opens = watch(tmp_path / "blobs")
    with pytest.raises(FormatError, match="outside of the checkpoint"):
        open_inside(tmp_path / "runs" / "one", "file")
    assert opens.seen() == []
