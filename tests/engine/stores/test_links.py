"""Nothing outside of a checkpoint is removed, moved or written, whatever links, journals and indexes lead there."""

import errno
import json
import os
import shutil
import socket
import subprocess
from contextlib import suppress

import msgspec
import numpy as np
import pytest
import tensorstore as ts

from eformer import checkpoint
from eformer._engine.record.digests import stamp_digest, xxh3_128
from eformer._engine.stores.directory import Directory
from eformer._engine.stores.local_upload import Journal, ScratchTree
from eformer._engine.stores.removal import Described, Moved
from eformer.checkpoint import SaveOptions, convert, load, prune, save
from eformer.errors import EformerError
from eformer.paths import LocalPath
from eformer.pytree._serialization import save_to_file
from eformer.serialization.serialization import tree_serialize_leaves
from support.trees import assert_same

TREE = {"a": {"w": np.arange(6, dtype=np.float32)}, "b": np.ones((4, 3))}
NEXT = {"a": {"w": np.arange(9, dtype=np.float32)}, "b": np.zeros((4, 3))}
SCRATCH = ".eformer-0123456789abcdef.tmp"
HEX = "0123456789abcdef" * 2

LAYOUTS = {
    "safetensors": {},
    "safetensors, shards": {"options": SaveOptions(max_shard_bytes=64)},
    "safetensors, prefix": {"prefix": "m"},
    "arrays": {"format": "tensorstore"},
    "arrays, prefix": {"format": "tensorstore", "prefix": "m"},
    "arrays, compressed": {
        "format": "tensorstore",
        "prefix": "m",
        "options": SaveOptions(compression="zstd"),
    },
    "database": {"format": "tensorstore", "options": SaveOptions(ocdbt=True)},
    "database, prefix": {"format": "tensorstore", "prefix": "m", "options": SaveOptions(ocdbt=True)},
    "file": {"name": "run.safetensors"},
}
DIRECTORIES = pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "file"])


def save_as(layout, tree, folder):
    how = dict(LAYOUTS[layout])
    path = folder / how.pop("name", "run")
    save(tree, path, **how)
    return path


def contents(path):
    """Everything below a directory: what it is, which one, and what is in it."""
    found = {}
    for file in sorted(path.rglob("*")):
        status = os.lstat(file)
        data = file.read_bytes() if file.is_file() and not file.is_symlink() else None
        found[str(file.relative_to(path))] = (status.st_ino, status.st_mode, data)
    return found


def foreign_array(path, size=10):
    spec = {"driver": "zarr", "kvstore": f"file://{path}", "metadata": {"shape": [size], "chunks": [5], "dtype": "<f4", "compressor": None}}  # fmt: skip
    ts.open(spec, create=True).result().write(np.arange(size, dtype=np.float32)).result()


@pytest.fixture
def outside(tmp_path):
    """What must not change: arrays of others, checkpoints of ours, and files that are called like parts of them."""
    path = tmp_path / "outside"
    foreign_array(path / "w")
    foreign_array(path / "unlisted")
    save(TREE, path / "ours", format="tensorstore", prefix="m")
    save(TREE, path / "database", format="tensorstore", options=SaveOptions(ocdbt=True))
    save(TREE, path / "plain")
    (path / "d").mkdir()
    for name in (
        "0",
        "17",
        "1.2",
        ".zarray",
        ".eformer",
        "manifest.ocdbt",
        HEX,
        f"d/{HEX}",
        f"ours/{HEX}",
        "ours/0",
    ):
        (path / name).write_bytes(b"")
    return path


@pytest.fixture
def unchanged(outside):
    """Fails if something outside has changed by the end of the test."""
    before = contents(outside)
    yield outside
    assert contents(outside) == before


def scratch_in(path, journal):
    scratch = path / SCRATCH
    scratch.mkdir()
    (scratch / "journal.json").write_bytes(msgspec.json.encode(journal))
    return scratch


def inode(path):
    return os.lstat(path).st_ino


# ------------------------------------------------------------------------------------------- indexes


@pytest.mark.parametrize("prefix", [None, "m"])
@pytest.mark.parametrize("path", ["x/w", "w/x/w"])
def test_an_index_that_lists_what_is_behind_a_link(tmp_path, unchanged, prefix, path):
    run = tmp_path / "run"
    link = run / path.rpartition("/")[0]
    link.parent.mkdir(parents=True)
    link.symlink_to(unchanged)
    listed = [{"path": path, "shape": [10], "dtype": "float32"}]
    index = {"prefixes": {"m": listed}} if prefix else {"arrays": listed}
    (run / "tensorstore_index.json").write_text(
        json.dumps({"format": "tensorstore", "version": "2.0", "prefixes": {}} | index)
    )
    save(TREE, run, format="tensorstore", prefix=prefix)
    assert_same(load(run, prefix=prefix), TREE)
    assert link.is_symlink()
    assert not list(run.glob(".eformer-*"))


def test_of_the_arrays_of_others_only_those_are_removed_that_the_index_lists(tmp_path):
    foreign_array(tmp_path / "x" / "w")
    foreign_array(tmp_path / "x" / "unlisted")
    (tmp_path / "x" / "w" / "17").write_text("mine")  # not one of its chunks
    index = {"format": "tensorstore", "version": "2.0", "prefixes": {"m": [{"path": "x/w", "shape": [10]}]}}
    (tmp_path / "tensorstore_index.json").write_text(json.dumps(index))
    save(TREE, tmp_path, format="tensorstore", prefix="m")
    assert sorted(os.listdir(tmp_path / "x" / "unlisted")) == [".zarray", "0", "1"]
    assert os.listdir(tmp_path / "x" / "w") == ["17"]


def test_chunks_whose_numbers_are_parted_by_slashes_go_with_their_array(tmp_path):
    spec = {"driver": "zarr", "kvstore": f"file://{tmp_path}/x/w", "metadata": {"shape": [4, 4], "chunks": [2, 2], "dtype": "<f4", "dimension_separator": "/"}}  # fmt: skip
    ts.open(spec, create=True).result().write(np.ones((4, 4), np.float32)).result()
    index = {"format": "tensorstore", "version": "2.0", "prefixes": {"m": [{"path": "x/w", "shape": [4, 4]}]}}
    (tmp_path / "tensorstore_index.json").write_text(json.dumps(index))
    save(TREE, tmp_path, format="tensorstore", prefix="m")
    assert not (tmp_path / "x").exists()


def test_a_structure_file_behind_a_link_stays(tmp_path, outside):
    (outside / "m_structure.json").write_text("mine")
    before = contents(outside)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "x").symlink_to(outside)
    index = {"format": "tensorstore", "version": "2.0", "prefixes": {"x/m": [{"path": "y/w"}]}}
    (tmp_path / "run" / "tensorstore_index.json").write_text(json.dumps(index))
    save(TREE, tmp_path / "run", format="tensorstore", prefix="x/m")
    assert contents(outside) == before


# ------------------------------------------------------------------------------------------ journals


def marks_outside(outside):
    ours = checkpoint.inspect(outside / "ours").trees["m"].save_id
    database = checkpoint.inspect(outside / "database").trees[""].save_id
    return ["", ours, database]


def forged(outside, name, target):
    """A journal that names a directory by all inodes and marks that it might have."""
    described = tuple(
        Described(f"{name}/{file.relative_to(target)}", inode(file), file.stat().st_mtime_ns)
        for file in (*target.rglob(".zarray"), *target.rglob(".eformer"))
    )
    inodes = [inode(target)]
    moved = tuple(
        Moved(name, number, mark, described) for number in inodes for mark in marks_outside(outside)
    )
    return Journal("id", moved, moved)


@DIRECTORIES
@pytest.mark.parametrize("place", ["top", "below", "process-0", "process-0/d", "d"])
def test_a_journal_that_leads_through_a_link(tmp_path, unchanged, layout, place):
    run = save_as(layout, TREE, tmp_path)
    top = run / "x"
    link = top if place == "top" else top / place
    link.parent.mkdir(parents=True, exist_ok=True)
    if place != "top":
        (top / ".eformer").write_bytes(b"")
    link.symlink_to(unchanged)
    journal = forged(unchanged, "x", unchanged)
    described = journal.new[0].described
    if place != "top":
        described = (Described("x/.eformer", inode(top / ".eformer"), (top / ".eformer").stat().st_mtime_ns),)
    moved = tuple(
        Moved("x", number, moved.mark, described)
        for moved in journal.new
        for number in (inode(top), inode(link), inode(unchanged))
    )
    scratch = scratch_in(run, Journal("id", moved, moved))
    save_as(layout, NEXT, tmp_path)
    assert link.is_symlink()
    assert not scratch.exists()


@DIRECTORIES
@pytest.mark.parametrize("inner", ["ours", "w", "."])
def test_a_journal_that_names_a_directory_of_somebody_else(tmp_path, outside, layout, inner):
    """It is in the checkpoint's directory, and may be named; it holds nothing of this checkpoint."""
    run = save_as(layout, TREE, tmp_path)
    shutil.copytree(outside / inner, run / "x")
    before = contents(run / "x")
    marks = marks_outside(outside)
    moved = tuple(Moved("x", inode(run / "x"), mark) for mark in marks if mark != marks[2] or inner == "ours")
    scratch = scratch_in(run, Journal("id", moved, moved))
    save_as(layout, NEXT, tmp_path)
    if inner == "ours":  # a checkpoint of its own, which is entered by no other
        assert contents(run / "x") == before
    else:
        assert {name for name in before if not name.startswith(("ours/", "database/"))} <= set(
            contents(run / "x")
        )
    assert not scratch.exists()


def test_arrays_without_a_mark_have_to_be_the_very_files_that_are_described(tmp_path):
    save(TREE, tmp_path, format="tensorstore", prefix="m")
    foreign_array(tmp_path / "x" / "w")
    file = tmp_path / "x" / "w" / ".zarray"
    for number, time in ((0, 0), (inode(file), 0), (0, file.stat().st_mtime_ns)):
        moved = Moved("x", inode(tmp_path / "x"), "", (Described("x/w/.zarray", number, time),))
        scratch_in(tmp_path, Journal("id", (moved,), ()))
        save(TREE, tmp_path, format="tensorstore", prefix="m")
        assert sorted(os.listdir(file.parent)) == [".zarray", "0", "1"]


@DIRECTORIES
@pytest.mark.parametrize("kind", ["file", "directory", "dangling"])
def test_scratch_that_is_a_link(tmp_path, unchanged, layout, kind):
    run = save_as(layout, TREE, tmp_path)
    target = {"file": unchanged / "0", "directory": unchanged / "ours", "dangling": unchanged / "new"}[kind]
    (run / SCRATCH).symlink_to(target)
    assert_same(load(save_as(layout, NEXT, tmp_path)), NEXT)
    assert (run / SCRATCH).is_symlink()


@DIRECTORIES
def test_scratch_that_is_full_of_links(tmp_path, unchanged, layout):
    run = save_as(layout, TREE, tmp_path)
    (run / SCRATCH / "data").mkdir(parents=True)
    for name in ("journal.json", "process-0", "data/process-0", "data/x", "data/d"):
        (run / SCRATCH / name).symlink_to(unchanged)
    save_as(layout, NEXT, tmp_path)
    assert not (run / SCRATCH).exists()


def test_scratch_that_is_nested_absurdly_deep_is_left_alone(tmp_path):
    here = os.getcwd()
    try:
        os.makedirs(tmp_path / SCRATCH)
        os.chdir(tmp_path / SCRATCH)
        for _ in range(1500):
            os.mkdir("d")
            os.chdir("d")
    finally:
        os.chdir(here)
    save(TREE, tmp_path)
    save(TREE, tmp_path / "arrays", format="tensorstore")
    assert_same(load(tmp_path), TREE)
    os.system(f"rm -r {tmp_path / SCRATCH}")


def test_a_link_that_is_called_like_scratch_is_no_unfinished_save(tmp_path, unchanged):
    foreign_array(tmp_path / "run" / "w")
    (tmp_path / "run" / SCRATCH).symlink_to(unchanged)
    assert load(tmp_path / "run")["w"].shape == (10,)


def test_a_journal_removes_nothing_that_the_index_knows(tmp_path):
    for prefix in ("a", "b"):
        save(TREE, tmp_path, format="tensorstore", prefix=prefix)
    ids = {prefix: tree.save_id for prefix, tree in checkpoint.inspect(tmp_path).trees.items()}
    there = Moved("b", inode(tmp_path / "b"), ids["b"])
    for journal in (Journal("f" * 16, (there,), ()), Journal(ids["a"], (), (there,))):
        scratch_in(tmp_path, journal)
        save(TREE, tmp_path, format="tensorstore", prefix="c")
        assert_same(load(tmp_path, prefix="b"), TREE)


@pytest.mark.parametrize("what", ["directory", "sparse", "socket"])
def test_a_journal_that_is_no_small_file_is_none(tmp_path, what, monkeypatch):
    save(TREE, tmp_path, format="tensorstore")
    before = len(os.listdir("/dev/fd"))
    (tmp_path / SCRATCH).mkdir()
    journal = tmp_path / SCRATCH / "journal.json"
    if what == "directory":
        journal.mkdir()
    elif what == "sparse":
        journal.touch()
        os.truncate(journal, 2**40)
    else:
        monkeypatch.chdir(journal.parent)  # for names of sockets are short
        with socket.socket(socket.AF_UNIX) as end:
            end.bind(journal.name)
    save(NEXT, tmp_path, format="tensorstore")
    assert not (tmp_path / SCRATCH).exists()
    assert len(os.listdir("/dev/fd")) == before


def test_a_journal_that_cannot_be_read_just_now_is_kept_for_the_next_save(tmp_path, monkeypatch):
    save(TREE, tmp_path, format="tensorstore")
    with monkeypatch.context() as patch:  # it dies right after its commit
        patch.setattr(ScratchTree, "finish", lambda scratch, is_sealed: None)
        patch.setattr(ScratchTree, "discard", ScratchTree.close)
        save(NEXT, tmp_path, format="tensorstore")

    def fail(place, name, most):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(Directory, "read", fail)
        save(TREE, tmp_path, format="tensorstore", prefix="other")
    save(TREE, tmp_path, format="tensorstore", prefix="other")
    assert not (tmp_path / "a").exists()
    assert not list(tmp_path.glob(".eformer-*"))


def test_an_array_of_absurdly_many_axes_is_no_array(tmp_path):
    save(TREE, tmp_path, format="tensorstore", prefix="m")
    mark = checkpoint.inspect(tmp_path).trees["m"].save_id
    (tmp_path / "m" / "deep").mkdir()
    described = {"shape": [1] * 1500, "chunks": [1] * 1500, "dimension_separator": "/", "eformer": mark}
    (tmp_path / "m" / "deep" / ".zarray").write_text(json.dumps(described))
    here = os.getcwd()
    try:
        os.chdir(tmp_path / "m" / "deep")
        for _ in range(1500):
            os.mkdir("0")
            os.chdir("0")
    finally:
        os.chdir(here)
    for tree in (NEXT, TREE):
        save(tree, tmp_path, format="tensorstore", prefix="m")
        assert_same(load(tmp_path), tree)
    os.system(f"rm -r {tmp_path / 'm'}")


# --------------------------------------------------------------------------------------- anything else


def test_arrays_that_were_only_found_there_are_never_removed(tmp_path):
    """Nobody has said that they are a checkpoint, let alone this one."""
    foreign_array(tmp_path / "dataset" / "tokens")
    tree_serialize_leaves(tmp_path / "old_run", TREE, write_index=False)
    save(TREE, tmp_path / "orbax", format="tensorstore")  # as others below: not entered
    (tmp_path / "orbax" / "tensorstore_index.json").rename(tmp_path / "orbax" / "_METADATA")
    before = {name: contents(tmp_path / name) for name in ("dataset", "old_run", "orbax")}
    save(NEXT, tmp_path, format="tensorstore", prefix="m")
    save(NEXT, tmp_path, format="tensorstore")
    save(NEXT, tmp_path, format="tensorstore", prefix="m")
    assert {name: contents(tmp_path / name) for name in before} == before
    assert_same(load(tmp_path, prefix=""), NEXT)


def test_an_index_that_says_another_shape_removes_nothing(tmp_path):
    foreign_array(tmp_path / "mine" / "data")
    listed = [{"path": "mine/data", "shape": [], "dtype": "float32"}]
    index = {"format": "tensorstore", "version": "2.0", "prefixes": {"m": listed}}
    (tmp_path / "tensorstore_index.json").write_text(json.dumps(index))
    (tmp_path / "m_structure.json").write_text("MY PROTEIN")
    before = contents(tmp_path / "mine")
    save(TREE, tmp_path, format="tensorstore", prefix="m")
    assert contents(tmp_path / "mine") == before
    assert (tmp_path / "m_structure.json").read_text() == "MY PROTEIN"


def test_a_mark_that_was_put_into_another_checkpoint_removes_nothing_there(tmp_path):
    save(TREE, tmp_path, format="tensorstore", options=SaveOptions(ocdbt=True), prefix="m")
    root = checkpoint.inspect(tmp_path).trees["m"].root
    (tmp_path / root / "_METADATA").write_text("{}")
    before = contents(tmp_path / root)
    save(NEXT, tmp_path, format="tensorstore", prefix="m")
    assert contents(tmp_path / root) == before


@pytest.mark.parametrize("depth", [300, 1200])
def test_an_index_of_something_nested_absurdly_deep(tmp_path, depth):
    foreign_array(tmp_path / "z")
    descriptor = os.open(tmp_path, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("a", dir_fd=descriptor)
        outer, descriptor = descriptor, os.open("a", os.O_RDONLY, dir_fd=descriptor)
        os.close(outer)
    os.link(tmp_path / "z" / ".zarray", ".zarray", dst_dir_fd=descriptor)
    os.close(descriptor)
    shutil.rmtree(tmp_path / "z")
    listed = [{"path": "/".join("a" * depth), "shape": [10], "dtype": "float32"}]
    index = {"format": "tensorstore", "version": "2.0", "prefixes": {"m": listed}}
    (tmp_path / "tensorstore_index.json").write_text(json.dumps(index))
    for prefix in ("m", "m", "q"):
        save(TREE, tmp_path, format="tensorstore", prefix=prefix)
        assert_same(load(tmp_path, prefix=prefix), TREE)
    assert not list(tmp_path.glob(".eformer-*"))
    os.system(f"rm -rf {tmp_path / 'a'}")


def test_a_path_that_could_not_be_read_again_is_refused(tmp_path):
    path = tmp_path
    while len(str(path)) < 3700:
        path = path / ("x" * 200)
    path = path / ("y" * (3900 - len(str(path)) - 1))
    save({"w": np.ones(3)}, path, format="tensorstore", prefix="m")
    with pytest.raises(OSError, match="File name too long"):
        save({"k" * 150: {"j" * 150: np.ones(3)}}, path, format="tensorstore", prefix="m")
    assert_same(load(path, prefix="m"), {"w": np.ones(3)})
    assert sorted(os.listdir(path)) == ["m", "tensorstore_index.json"]


@pytest.mark.parametrize("layout", ["arrays, prefix", "database, prefix"])
def test_a_path_with_dots_is_as_good_as_any(tmp_path, layout):
    (tmp_path / "a").mkdir()
    how = dict(LAYOUTS[layout])
    for tree in (TREE, NEXT):
        save(tree, tmp_path / "a" / ".." / "run", **how)
        assert_same(load(tmp_path / "a" / ".." / "run"), tree)


def test_an_index_reaches_into_no_other_checkpoint(tmp_path):
    for name in ("sub/m/w", "other/m/w"):
        foreign_array(tmp_path / name)
    for name in ("sub/tensorstore_index.json", "other/_METADATA"):
        (tmp_path / name).write_text("{}")
    listed = [{"path": path, "shape": [10], "dtype": "float32"} for path in ("sub/m/w", "other/m/w")]
    index = {"format": "tensorstore", "version": "2.0", "prefixes": {"m": listed}}
    (tmp_path / "tensorstore_index.json").write_text(json.dumps(index))
    before = {name: contents(tmp_path / name) for name in ("sub", "other")}
    save(TREE, tmp_path, format="tensorstore", prefix="m")
    assert {name: contents(tmp_path / name) for name in before} == before


def test_a_name_that_is_no_text_is_refused_and_leaves_no_trace(tmp_path):
    name = os.fsdecode(b"x\xff")
    foreign_array(tmp_path / "x")
    (tmp_path / "x").rename(tmp_path / name)
    with pytest.raises(EformerError, match="is not UTF-8"):
        save(TREE, tmp_path, format="tensorstore", prefix="m")
    assert os.listdir(tmp_path) == [name]
    with pytest.raises(ValueError, match="is not UTF-8"):
        save(TREE, tmp_path / name / "db", format="tensorstore", options=SaveOptions(ocdbt=True))


def test_a_file_of_ours_that_was_copied_there_alone_stays(tmp_path):
    save(TREE, tmp_path / "run")
    (tmp_path / "work").mkdir()
    shutil.copy(tmp_path / "run" / "model.safetensors", tmp_path / "work")
    save(NEXT, tmp_path / "work", prefix="tuned")
    found = load(tmp_path / "work" / "model.safetensors")
    np.testing.assert_array_equal(found["a"]["w"], TREE["a"]["w"])


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_an_index_for_other_readers_that_is_not_ours_stays(tmp_path, caplog, kind):
    save(TREE, tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"mine": 1}') if kind == "file" else index.mkdir()
    for tree in (NEXT, TREE, NEXT):
        save(tree, tmp_path)
        assert_same(load(tmp_path), tree)
    assert index.is_dir() or index.read_text() == '{"mine": 1}'
    assert "was not written by eformer, and was left as it is" in caplog.text
    assert len(list(tmp_path.glob("*.safetensors"))) == 1


def test_an_index_of_others_that_only_mentions_us_is_not_ours(tmp_path):
    index = tmp_path / "model.safetensors.index.json"
    text = json.dumps({"metadata": {"library": "eformer"}, "weight_map": {"x": "other.safetensors"}})
    index.write_text(text)
    with pytest.raises(FileExistsError, match="was not written by eformer"):
        save(TREE, tmp_path)
    assert index.read_text() == text


def test_another_database_in_that_of_a_save_stays(tmp_path):
    how = {"format": "tensorstore", "prefix": "m", "options": SaveOptions(ocdbt=True)}
    save(TREE, tmp_path, **how)
    inner = tmp_path / checkpoint.inspect(tmp_path).trees["m"].root / "process-1"
    ts.KvStore.open({"driver": "ocdbt", "base": f"file://{inner}/"}).result().write(
        "mine", b"x" * 2000
    ).result()
    before = contents(inner)
    save(NEXT, tmp_path, **how)
    assert contents(inner) == before


@pytest.mark.parametrize("what", ["checkpoint", "array"])
def test_what_lies_among_the_chunks_of_an_array_stays(tmp_path, what):
    metadata = {"shape": [10, 10, 10], "chunks": [1, 1, 1], "dtype": "<f4", "compressor": None, "dimension_separator": "/"}  # fmt: skip
    spec = {"driver": "zarr", "kvstore": f"file://{tmp_path}/w", "metadata": metadata}
    ts.open(spec, create=True).result()[0, 0, 0].write(np.float32(1)).result()
    listed = [{"path": "w", "shape": [10, 10, 10], "dtype": "float32"}]
    (tmp_path / "tensorstore_index.json").write_text(json.dumps({"format": "tensorstore", "arrays": listed}))
    if what == "checkpoint":
        save([np.ones(3), np.zeros(3)], tmp_path / "w" / "7", format="tensorstore")
    else:
        foreign_array(tmp_path / "w" / "7")
    before = contents(tmp_path / "w" / "7")
    save(NEXT, tmp_path, format="tensorstore")
    assert contents(tmp_path / "w" / "7") == before
    assert not (tmp_path / "w" / "0").exists()


def test_a_save_beside_an_index_of_arrays_is_refused(tmp_path):
    save(TREE, tmp_path)
    (tmp_path / "tensorstore_index.json").write_text("{}")
    with pytest.raises(FileExistsError, match="another format"):
        save(NEXT, tmp_path)


@pytest.mark.parametrize("place", ["theirs", "run"])
def test_a_mark_that_leads_out_is_made_into_no_name(tmp_path, place):
    """Whoever has written a file can have written any mark into it."""
    theirs, run, victim = tmp_path / "theirs", tmp_path / "mine" / "run", tmp_path / "mine" / "victim"
    victim.mkdir(parents=True)
    save(TREE, theirs)
    file = theirs / "model.safetensors"
    raw = file.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    header["__metadata__"]["eformer"] = "/../../../victim/planted model"
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % 64)
    forged = len(text).to_bytes(8, "little") + text
    file.unlink()
    (theirs / ".safetensors").write_bytes(forged + raw[start:])
    manifest = json.loads((theirs / "manifest.json").read_bytes())
    manifest["trees"][""]["files"][0].update(
        name=".safetensors",
        nbytes=len(forged) + len(raw) - start,
        header_nbytes=len(forged),
        header=xxh3_128(forged),
    )
    manifest["digest"] = "0" * 32
    (theirs / "manifest.json").write_bytes(stamp_digest(msgspec.json.encode(manifest)))
    if place == "run":
        theirs.rename(run)
    save(TREE, run, options=SaveOptions(reuse=True if place == "run" else theirs))
    assert_same(load(run), TREE)
    assert not list(victim.iterdir())


def can_mount(folder):
    (folder / "a").mkdir()
    (folder / "b").mkdir()
    done = subprocess.run(["mount", "--bind", folder / "a", folder / "b"], capture_output=True)
    return done.returncode == 0 and not subprocess.run(["umount", folder / "b"]).returncode


@pytest.fixture
def mounted(tmp_path_factory):
    """Mounts the outside at a path; a bind mount has the device of what it is a part of."""
    if not can_mount(tmp_path_factory.mktemp("try")):
        pytest.skip("only root may mount")
    places = []

    def mount(what, where):
        where.mkdir(parents=True, exist_ok=True)
        subprocess.run(["mount", "--bind", what, where], check=True)
        places.append(where)

    yield mount
    for place in places:
        subprocess.run(["umount", place], check=True)


@pytest.mark.parametrize("layout", ["safetensors", "arrays", "database"])
@pytest.mark.parametrize("has_openat2", [True, False])
def test_what_is_mounted_there_is_not_swept(tmp_path, unchanged, mounted, layout, has_openat2, monkeypatch):
    if not has_openat2:
        monkeypatch.setattr("eformer._engine.stores.directory._syscall", None)
    run = save_as(layout, TREE, tmp_path)
    mounted(unchanged, run / SCRATCH / "x")
    assert_same(load(save_as(layout, NEXT, tmp_path)), NEXT)


def test_a_root_that_is_mounted_there_is_left_alone(tmp_path, mounted, caplog):
    run = save_as("arrays, prefix", TREE, tmp_path)
    (run / "m").rename(tmp_path / "elsewhere")
    mounted(tmp_path / "elsewhere", run / "m")
    before = contents(tmp_path / "elsewhere")
    save_as("arrays, prefix", NEXT, tmp_path)
    assert contents(tmp_path / "elsewhere") == before
    assert "is replaced, but not removed" in caplog.text
    assert not list(run.glob(".eformer-*"))


def test_a_step_with_something_mounted_in_it_is_not_pruned(tmp_path, unchanged, mounted):
    for step in (1, 2):
        save(TREE, tmp_path / "run" / f"step-{step}")
    mounted(unchanged, tmp_path / "run" / "step-1" / "data")
    with pytest.raises(OSError, match="cross-device"):
        prune(tmp_path / "run", keep=1)
    assert_same(load(tmp_path / "run" / "step-1"), TREE)


def test_without_openat2_directories_are_entered_step_by_step(tmp_path, unchanged, monkeypatch):
    monkeypatch.setattr("eformer._engine.stores.directory._syscall", None)
    (tmp_path / "link").symlink_to(unchanged)
    with Directory.open(tmp_path) as place:
        before = len(os.listdir("/dev/fd"))
        for name in ("link", "link/w", "outside/0", "outside/w/0"):
            with pytest.raises(NotADirectoryError):
                place.enter(name)
        with pytest.raises(FileNotFoundError):
            place.enter("outside/absent/w")
        with place.enter("outside/ours/m") as inner:
            assert sorted(inner.kinds()) == ["a", "b"]
        assert len(os.listdir("/dev/fd")) == before
    assert_same(load(save_as("arrays", TREE, tmp_path)), TREE)


@pytest.mark.parametrize("layout", ["arrays", "arrays, prefix"])
@pytest.mark.parametrize("reuse", [False, True])
def test_a_directory_of_the_scratch_that_is_swapped_for_a_link(tmp_path, outside, layout, reuse):
    large = {"a": {"w": np.arange(2**20, dtype=np.float32)}, "b": np.ones(3)}
    how = {**LAYOUTS[layout], "options": SaveOptions(reuse=reuse)}
    save(large, tmp_path / "run", **how)
    (outside / "w").rename(outside / "x")
    (outside / "w").mkdir()
    (outside / "w" / "0").write_text("precious")
    before = contents(outside)

    def swap(done, total):
        for folder in (tmp_path / "run").glob(".eformer-*.tmp/data/a"):
            if not folder.is_symlink():
                folder.rename(folder.with_name("away"))
                folder.symlink_to(outside)

    large["a"]["w"] = large["a"]["w"] + 1
    with suppress(OSError, EformerError):
        save(large, tmp_path / "run", progress=swap, **how)
    assert contents(outside) == before


def entries(path):
    files = [path] if path.is_file() else sorted(path.rglob("*"))
    return [str(file.relative_to(path.parent)) for file in files]


REUSABLE = ["safetensors", "safetensors, shards", "safetensors, prefix", "arrays", "arrays, prefix"]


@pytest.mark.parametrize(
    ("layout", "reuse"), [(layout, False) for layout in LAYOUTS] + [(layout, True) for layout in REUSABLE]
)
def test_any_part_of_a_checkpoint_that_was_moved_and_linked(tmp_path, layout, reuse):
    """Also without an attacker: the disk was full."""
    first = save_as(layout, TREE, tmp_path / "first")
    for number, name in enumerate(entries(first)):
        folder, elsewhere = tmp_path / f"{number}", tmp_path / f"elsewhere-{number}"
        shutil.copytree(tmp_path / "first", folder)
        elsewhere.mkdir()
        (folder / name).rename(elsewhere / "moved")
        (folder / name).symlink_to(elsewhere / "moved")
        before = contents(elsewhere)
        options = {**LAYOUTS[layout]}
        path = folder / options.pop("name", "run")
        if reuse:
            options["options"] = SaveOptions(reuse=True)
        try:
            save(NEXT, path, **options)
        except (EformerError, FileExistsError) as error:
            assert "link" in str(error) or "outside" in str(error), error  # noqa: PT017
        else:
            assert_same(load(path), NEXT)
        assert contents(elsewhere) == before, name
        assert not list(folder.rglob(".eformer-*.tmp")), name


@pytest.mark.parametrize("kind", ["ocdbt", "files"])
def test_a_root_that_was_moved_to_another_disk_is_left_there(tmp_path, caplog, kind):
    options = SaveOptions(ocdbt=kind == "ocdbt")
    run = tmp_path / "run"
    save(TREE, run, format="tensorstore", prefix="m", options=options)
    root = checkpoint.inspect(run).trees["m"].root
    (run / root).rename(tmp_path / "moved")
    (run / root).symlink_to(tmp_path / "moved")
    before = contents(tmp_path / "moved")
    save(NEXT, run, format="tensorstore", prefix="m", options=options)
    assert contents(tmp_path / "moved") == before
    assert_same(load(run), NEXT)
    assert "is replaced, but not removed" in caplog.text
    assert not list(run.glob(".eformer-*"))


@DIRECTORIES
def test_a_directory_that_is_swapped_during_a_save(tmp_path, outside, layout):
    """TensorStore writes a database by its path, and may put new files where that leads to. It is the one exception."""
    run, before = save_as(layout, TREE, tmp_path), contents(outside)
    how = dict(LAYOUTS[layout])

    def swap(done, total):
        if not run.is_symlink():
            run.rename(tmp_path / "away")
            run.symlink_to(outside / "ours")

    with pytest.raises(FileNotFoundError):
        save(NEXT, run, progress=swap, **how)
    assert_same(load(tmp_path / "away"), TREE)
    assert not list((tmp_path / "away").glob(".eformer-*"))
    after = contents(outside)
    assert before.items() <= after.items()
    assert "database" in layout or after == before


# ------------------------------------------------------------------------------------- Hugging Face


@pytest.fixture
def cache(tmp_path):
    """Turns a checkpoint into a snapshot of a cache, with a second snapshot of the same files."""

    def make(layout):
        run = save_as(layout, TREE, tmp_path)
        blobs = tmp_path / "models--x" / "blobs"
        snapshots = [tmp_path / "models--x" / "snapshots" / name for name in ("one", "two")]
        blobs.mkdir(parents=True)
        for number, file in enumerate(sorted(run.iterdir())):
            file.rename(blobs / f"{number}")
            for snapshot in snapshots:
                snapshot.mkdir(parents=True, exist_ok=True)
                (snapshot / file.name).symlink_to(f"../../blobs/{number}")
        return blobs, *snapshots

    return make


@pytest.mark.parametrize("layout", ["safetensors", "safetensors, shards", "safetensors, prefix"])
@pytest.mark.parametrize("reuse", [False, True])
def test_a_save_into_a_snapshot_harms_no_other(cache, layout, reuse):
    blobs, one, two = cache(layout)
    before = contents(blobs)
    how = {**LAYOUTS[layout], "options": SaveOptions(reuse=reuse)}
    save(NEXT, one, **how)
    assert contents(blobs) == before
    assert_same(load(one), NEXT)
    assert_same(load(two), TREE)
    assert not any(file.is_symlink() for file in one.iterdir())


def test_an_index_of_arrays_in_a_snapshot_is_not_written_through(cache, tmp_path):
    run = tmp_path / "run"
    save(TREE, run, format="tensorstore", prefix="m")
    blobs = tmp_path / "models--x" / "blobs"
    snapshot = tmp_path / "models--x" / "snapshots" / "one"
    blobs.mkdir(parents=True)
    snapshot.parent.mkdir()
    run.rename(snapshot)
    (snapshot / "tensorstore_index.json").rename(blobs / "0")
    (snapshot / "tensorstore_index.json").symlink_to("../../blobs/0")
    before = contents(blobs)
    save(NEXT, snapshot, format="tensorstore", prefix="m")
    assert contents(blobs) == before
    assert_same(load(snapshot), NEXT)


def test_a_file_of_a_snapshot_that_a_manifest_names_is_not_replaced(cache):
    blobs, one, _ = cache("safetensors")
    before = contents(blobs)
    with pytest.raises(ValueError, match="belongs to the checkpoint"):
        save(NEXT, one / "model.safetensors")
    assert_same(load(one), TREE)
    assert contents(blobs) == before


# -------------------------------------------------------------------------------------- single files


def write_path(path):
    LocalPath(path).write_bytes(b"new")


@pytest.mark.parametrize(
    "write",
    [lambda path: save_to_file(TREE, path), lambda path: save(TREE, path), write_path],
    ids=["save_to_file", "save", "write_bytes"],
)
@pytest.mark.parametrize("target", ["0", "plain/model.safetensors", "new", "absent/file"])
def test_a_link_is_replaced_by_a_file_and_not_written_through(tmp_path, unchanged, write, target):
    path = tmp_path / "x.safetensors"
    path.symlink_to(unchanged / target)
    write(path)
    assert path.is_file()
    assert not path.is_symlink()
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


@pytest.mark.parametrize("target", ["/dev/null", "outside"])
def test_a_link_to_no_file_is_not_replaced(tmp_path, outside, target):
    """As root, /dev/stdout would be gone."""
    path = tmp_path / "x.msgpack"
    path.symlink_to(target)
    with pytest.raises(OSError, match="Not a regular file"):
        save_to_file(TREE, path)
    assert path.is_symlink()


def test_a_path_of_the_callers_may_lead_through_links(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk")
    for path in ("link/run", "link/arrays", "link/x.safetensors"):
        save(TREE, tmp_path / path, format="tensorstore" if "arrays" in path else "safetensors")
        save(NEXT, tmp_path / path, format="tensorstore" if "arrays" in path else "safetensors")
        assert_same(load(tmp_path / path), NEXT)
    save_to_file(TREE, tmp_path / "link" / "x.msgpack")
    (tmp_path / "latest").symlink_to("disk/run")
    save(TREE, tmp_path / "latest")
    assert_same(load(tmp_path / "disk" / "run"), TREE)
    assert (tmp_path / "latest").is_symlink()


# ------------------------------------------------------------------------------------ prune, convert


def test_prune_removes_links_and_not_what_they_lead_to(tmp_path, unchanged):
    for step in (1, 2, 3):
        save(TREE, tmp_path / "run" / f"step-{step}")
    (tmp_path / "run" / "step-1" / "linked").symlink_to(unchanged)
    (tmp_path / "run" / "step-1" / "notes").mkdir()
    (tmp_path / "run" / "step-1" / "notes" / "file").symlink_to(unchanged / "0")
    (tmp_path / "run" / SCRATCH).symlink_to(unchanged)
    prune(tmp_path / "run", keep=1)
    assert sorted(os.listdir(tmp_path / "run")) == [SCRATCH, "step-3"]


def test_a_step_that_has_become_a_link_is_not_pruned(tmp_path, unchanged):
    from eformer._engine.tools.prune import plan_removal, remove

    for step in (1, 2):
        save(TREE, tmp_path / "run" / f"step-{step}")
    plan = plan_removal(tmp_path / "run", 1)
    shutil.rmtree(tmp_path / "run" / "step-1")
    (tmp_path / "run" / "step-1").symlink_to(unchanged)
    with pytest.raises(ValueError, match="is not what it was when this was planned"):
        remove(plan)
    assert (tmp_path / "run" / "step-1").is_symlink()


def test_a_directory_with_arrays_somewhere_below_is_no_step(tmp_path):
    for number in (1, 2, 3):
        foreign_array(tmp_path / f"project{number}" / "deep" / "data")
        (tmp_path / f"project{number}" / "thesis.tex").write_text("years")
        save(TREE, tmp_path / f"step-{number}")
    pruned = prune(tmp_path, keep=1)
    assert pruned.removed == ("step-1", "step-2")
    assert list(pruned.left) == ["project1", "project2", "project3"]


def test_a_link_into_a_step_keeps_it(tmp_path):
    for step in (1, 2, 3):
        save(TREE, tmp_path / f"step-{step}")
    (tmp_path / "best.safetensors").symlink_to("step-1/model.safetensors")
    (tmp_path / "loop").symlink_to("loop")
    assert prune(tmp_path, keep=1).removed == ("step-2",)


def test_a_step_that_took_the_name_of_another_is_not_pruned(tmp_path):
    from eformer._engine.tools.prune import plan_removal, remove

    for step in (1, 2):
        save(TREE, tmp_path / f"step-{step}")
    plan = plan_removal(tmp_path, 1)
    (tmp_path / "step-1").rename(tmp_path / "kept")
    (tmp_path / "step-1").mkdir()
    (tmp_path / "step-1" / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match="is not what it was"):
        remove(plan)
    assert (tmp_path / "step-1" / "thesis.txt").read_text() == "mine"


@pytest.mark.parametrize("to", ["safetensors", "npz"])
def test_a_conversion_into_nowhere_is_refused(tmp_path, to):
    save(TREE, tmp_path / "run")
    with pytest.raises(ValueError, match="does not name a file or directory to create"):
        convert(tmp_path / "run", tmp_path / "absent" / "..", to=to)


@pytest.mark.parametrize("to", ["safetensors", "tensorstore", "npz", "msgpack"])
@pytest.mark.parametrize("target", ["0", "empty", "absent"])
def test_a_conversion_to_a_link_is_refused_before_anything_is_read(tmp_path, outside, to, target):
    (outside / "empty").mkdir()
    before = contents(outside)
    name = {"npz": "new.npz", "msgpack": "new.msgpack"}.get(to, "new")
    (tmp_path / name).symlink_to(outside / target)
    told = []
    with pytest.raises(FileExistsError, match="already exists"):
        convert(outside / "plain", tmp_path / name, to=to, progress=lambda *said: told.append(said))
    assert not told
    assert contents(outside) == before
    assert sorted(os.listdir(tmp_path)) == [name, "outside"]


def test_a_conversion_sweeps_nothing_through_links(tmp_path, unchanged):
    (tmp_path / SCRATCH).symlink_to(unchanged)
    convert(unchanged / "plain", tmp_path / "new", to="tensorstore")
    assert_same(load(tmp_path / "new"), TREE)


# --------------------------------------------------------------------------------------- a directory


def test_a_directory_is_entered_through_no_link(tmp_path, outside):
    (tmp_path / "link").symlink_to(outside)
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "link").symlink_to(outside / "w")
    with Directory.open(tmp_path) as place:
        for name in ("link", "link/w", "real/link", "outside/0"):
            with pytest.raises(NotADirectoryError):
                place.enter(name)
        for name in ("", "..", "real/..", "/", "real//link"):
            with pytest.raises(EformerError, match="not the name of a directory"):
                place.enter(name)
        with place.enter("outside/w") as inner:
            assert sorted(inner.kinds()) == [".zarray", "0", "1"]


def test_a_tree_is_removed_with_its_links_and_without_what_they_lead_to(tmp_path, unchanged):
    (tmp_path / "tree" / "inner").mkdir(parents=True)
    (tmp_path / "tree" / "link").symlink_to(unchanged)
    (tmp_path / "tree" / "inner" / "link").symlink_to(unchanged / "0")
    os.mkfifo(tmp_path / "tree" / "pipe")
    with Directory.open(tmp_path) as place:
        place.remove_tree("tree")
        (tmp_path / "link").symlink_to(unchanged)
        with pytest.raises(NotADirectoryError):
            place.remove_tree("link")
    assert not (tmp_path / "tree").exists()


def test_a_place_that_is_a_link_cannot_be_joined(tmp_path, unchanged):
    (tmp_path / SCRATCH).symlink_to(unchanged)
    with pytest.raises(NotADirectoryError):
        ScratchTree.join(tmp_path, SCRATCH)


def test_descriptors_are_closed(tmp_path):
    for layout in LAYOUTS:
        save_as(layout, TREE, tmp_path / layout)
    before = sorted(os.listdir("/dev/fd"))
    for layout in LAYOUTS:
        save_as(layout, NEXT, tmp_path / layout)
    assert sorted(os.listdir("/dev/fd")) == before
