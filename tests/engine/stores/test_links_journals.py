"""Nothing outside of a checkpoint is removed, moved or written, whatever journals and scratch lead there."""

import errno
import json
import os
import shutil
import socket

import pytest

from eformer import checkpoint
from eformer._engine.stores.directory import Directory
from eformer._engine.stores.journal import Journal
from eformer._engine.stores.local_upload import LocalUpload
from eformer._engine.stores.removal import Described, Moved
from eformer.checkpoint import load, save
from support.links import (
    DIRECTORIES,
    NEXT,
    SCRATCH,
    TREE,
    contents,
    foreign_array,
    inode,
    save_as,
    scratch_in,
)
from support.trees import assert_same


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


@pytest.mark.sample(4)
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


@pytest.mark.sample(4)
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


@pytest.mark.sample(4)
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
        patch.setattr(LocalUpload, "_finish", lambda *_: None)
        patch.setattr(LocalUpload, "close", LocalUpload.abandon)
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
