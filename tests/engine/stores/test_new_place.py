"""A directory that a save makes appears under its name when it is complete, and not before."""

import errno
import os
import threading
from contextlib import closing

import numpy as np
import pytest

from eformer._engine.stores.directory import Directory, remove_opened
from eformer._engine.stores.local import LocalStore
from eformer.checkpoint import load, save
from support.commits import SAVE, One, die_before_the_swap

TREE = {"w": np.arange(6.0)}


def upload_to(directory, data=b"x"):
    upload = LocalStore(directory).begin()
    upload.put([("file", data)])
    upload.sync()
    return upload


def publish(upload, index):
    upload.commit(One({"file": "file"}, name=index, index=lambda _: b"{}"))
    upload.close()


def test_the_name_is_free_until_everything_is_there(tmp_path):
    upload = upload_to(tmp_path / "new")
    seen = []

    def look(place):
        seen.append((place.kinds(), (tmp_path / "new").exists()))

    upload.commit(One({"file": "file"}, index=lambda _: b"{}", while_committing=look))
    assert seen == [({"file": "file", "index": "file"}, False)]
    assert sorted(os.listdir(tmp_path / "new")) == ["file", "index"]
    upload.close()
    assert os.listdir(tmp_path) == ["new"]


def test_who_comes_second_goes_on_in_the_directory_of_the_first(tmp_path):
    first, second = upload_to(tmp_path / "new", b"first"), upload_to(tmp_path / "new", b"second")
    publish(first, "index")
    publish(second, "other")
    assert sorted(os.listdir(tmp_path / "new")) == ["file", "index", "other"]
    assert (tmp_path / "new" / "file").read_bytes() == b"second"
    assert os.listdir(tmp_path) == ["new"]


def test_who_comes_second_and_dies_is_undone_by_the_next_save_to_the_directory(tmp_path):
    """Its journal is in the directory that both wanted to make, where the next save looks for it."""
    first, second = upload_to(tmp_path / "new"), LocalStore(tmp_path / "new").begin()
    second.put([("w/.zarray", b'{"shape":[1],"chunks":[1],"eformer":"%s"}' % SAVE.encode()), ("w/0", b"1")])
    second.sync()
    publish(first, "index")
    die_before_the_swap(second, {"": "tree"})
    second.abandon()
    assert (tmp_path / "new" / "tree" / "w" / "0").exists()
    with closing(LocalStore(tmp_path / "new").begin()) as third:
        third.commit(One(save_ids=set(), sweeps=True))
    assert sorted(os.listdir(tmp_path / "new")) == ["file", "index"]
    assert os.listdir(tmp_path) == ["new"]


@pytest.mark.parametrize("fmt", ["safetensors", "tensorstore"])
def test_trees_that_are_saved_at_once_into_a_new_directory_are_all_there(tmp_path, fmt):
    names = ["model", "ema", "optimizer"]
    barrier = threading.Barrier(len(names))

    def work(name):
        barrier.wait()
        save(TREE, tmp_path / "new", prefix=name, format=fmt)

    threads = [threading.Thread(target=work, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name in names:
        np.testing.assert_array_equal(load(tmp_path / "new", prefix=name)["w"], TREE["w"])
    assert os.listdir(tmp_path) == ["new"]


def test_what_takes_the_name_meanwhile_is_not_replaced(tmp_path):
    def take_the_name(_):
        (tmp_path / "new").mkdir()
        (tmp_path / "new" / "mine").touch()

    upload = upload_to(tmp_path / "new")
    with pytest.raises(FileExistsError, match="already exists"):
        upload.commit(One({"file": "file"}, while_committing=take_the_name))
    upload.close()
    assert os.listdir(tmp_path / "new") == ["mine"]
    assert os.listdir(tmp_path) == ["new"]


def test_a_process_that_means_another_directory_does_not_join(tmp_path):
    upload = upload_to(tmp_path / "new")
    with pytest.raises(FileNotFoundError):
        LocalStore(tmp_path / "other").begin(token=upload.token)
    joined = LocalStore(tmp_path / "new").begin(token=upload.token)
    joined.put([("more", b"y")])
    assert sorted(upload.names()) == ["file", "more"]
    joined.close()
    upload.close()
    assert os.listdir(tmp_path) == []


def test_what_a_dead_save_left_beside_its_directory_is_removed_by_the_next(tmp_path):
    upload_to(tmp_path / "new").abandon()
    assert len(os.listdir(tmp_path)) == 1
    save(TREE, tmp_path / "other")
    assert os.listdir(tmp_path) == ["other"]
    upload_to(tmp_path / "new").abandon()
    save(TREE, tmp_path / "other")
    assert os.listdir(tmp_path) == ["other"]


def test_a_live_save_beside_it_is_not_disturbed(tmp_path):
    upload = upload_to(tmp_path / "new")
    save(TREE, tmp_path / "other")
    save(TREE, tmp_path / "other")
    publish(upload, "index")
    assert (tmp_path / "new" / "file").read_bytes() == b"x"


def test_an_error_names_the_directory_that_cannot_be_written(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied", "the name alone")

    monkeypatch.setattr("eformer._engine.stores.directory.os.mkdir", refuse)
    with pytest.raises(PermissionError, match=f"Permission denied: .*: '{tmp_path}'"):
        save(TREE, tmp_path / "new")


@pytest.mark.parametrize("at", ["unlink", "rmdir"])
def test_a_tree_may_be_removed_by_two_at_once(tmp_path, monkeypatch, at):
    (tmp_path / "tree" / "inner").mkdir(parents=True)
    (tmp_path / "tree" / "inner" / "file").touch()
    (tmp_path / "tree" / "other").touch()
    remove = getattr(os, at)

    def late(name, **where):
        remove(name, **where)  # by the other one
        remove(name, **where)

    monkeypatch.setattr(f"eformer._engine.stores.directory.os.{at}", late)
    with Directory.open(tmp_path) as place, place.enter("tree") as tree:
        remove_opened(place, "tree", tree)
    assert not os.listdir(tmp_path)


def test_a_save_to_a_new_directory_lists_few_directories(tmp_path, monkeypatch):
    save(TREE, tmp_path / "first")
    listed, scandir = [], os.scandir

    def noted(path):
        listed.append(path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", noted)
    save(TREE, tmp_path / "second")
    assert len(listed) <= 3
