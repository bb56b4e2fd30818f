"""Wait for saves in the background: by hand, and by reading what they write."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from eformer import checkpoint
from eformer.checkpoint import Pending, load, save, save_async, wait
from eformer.serialization.async_manager import AsyncCheckpointManager
from support.cancelling import held
from support.trees import assert_same

TREE, NEXT = {"w": np.arange(5.0)}, {"w": np.arange(7.0)}


READERS = {
    "load": load,
    "open": lambda path: {"w": checkpoint.open(path)["w"][...]},
    "inspect": lambda path: {"w": np.zeros(checkpoint.inspect(path).trees[""].leaves["w"].shape)},
    "abstract": lambda path: {"w": np.zeros(checkpoint.abstract(path)["w"].shape)},
    "verify": lambda path: {"w": np.zeros(checkpoint.verify(path).nbytes // 8)},
    "diff": lambda path: {"w": np.zeros(7)} if checkpoint.diff(path, path).same else {},
    "manager": lambda path: AsyncCheckpointManager().load(path, None)[0],
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", ["safetensors", "tensorstore"])
@pytest.mark.parametrize("reader", READERS)
def test_reading_what_this_process_is_saving_waits_for_the_save(tmp_path, kind, reader):
    path = tmp_path / "x"
    with ThreadPoolExecutor() as pool:
        with held(path):
            pending = save_async(NEXT, path, format=kind)
            read = pool.submit(READERS[reader], path)
            with pytest.raises(TimeoutError):
                read.result(0.3)
        assert read.result(60)["w"].shape == (7,)
        assert pending.done()


def test_it_waits_under_every_name_of_the_place(tmp_path, monkeypatch):
    path = tmp_path / "x"
    save(TREE, path)
    (tmp_path / "link").symlink_to("x")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    names = ["x", "./x/", "~/x", path.as_uri(), "link", "x/manifest.json", tmp_path / "link" / ".." / "x"]
    with ThreadPoolExecutor(len(names)) as pool:
        with held(path):
            save_async(NEXT, path)
            reads = [pool.submit(load, name) for name in names]
            for read in reads:
                with pytest.raises(TimeoutError):
                    read.result(0.1)
        for read in reads:
            assert_same(read.result(60), NEXT)


@pytest.mark.parametrize("name", ["x.safetensors", "x"])
def test_it_waits_for_a_single_file(tmp_path, name):
    with ThreadPoolExecutor() as pool:
        with held(tmp_path):
            save_async(NEXT, tmp_path / "x.safetensors")
            read = pool.submit(load, tmp_path / name)
            with pytest.raises(TimeoutError):
                read.result(0.3)
        assert_same(read.result(60), NEXT)


def test_other_places_are_read_at_once(tmp_path):
    save(TREE, tmp_path / "y")
    with held(tmp_path / "x"):
        pending = save_async(NEXT, tmp_path / "x")
        assert_same(load(tmp_path / "y"), TREE)
        assert not pending.done()


def test_a_failed_save_leaves_the_earlier_checkpoint_to_read(tmp_path):
    save(TREE, tmp_path / "x", format="tensorstore")
    pending = save_async(NEXT, tmp_path / "x")  # the place holds another format
    assert_same(load(tmp_path / "x"), TREE)
    with pytest.raises(FileExistsError):
        pending.result()


def test_the_functions_that_a_save_calls_may_read_its_path(tmp_path):
    seen = []
    save(TREE, tmp_path / "x")
    save(NEXT, tmp_path / "x", progress=lambda *_: seen.append(load(tmp_path / "x")))
    assert_same(seen[0], TREE)
    manager = AsyncCheckpointManager(use_tensorstore=False)
    pending = manager.save_async(TREE, tmp_path / "x", callback=lambda path: seen.append(load(path)))
    pending.add_done_callback(lambda done: seen.append(load(done.path)))
    wait()
    assert_same(seen[-2:], [TREE, TREE])


def test_waiting_is_for_all_saves(tmp_path):
    with held(tmp_path / "x"), held(tmp_path / "y"):
        pending = [save_async(TREE, tmp_path / name) for name in "xy"]
        with pytest.raises(TimeoutError, match=r"not finished after 0.2 seconds: saving to .*x; .*y"):
            wait(timeout=0.2)
    wait()
    assert all(save.done() for save in pending)
    wait()  # nothing is under way


def test_waiting_raises_the_first_error_once_and_logs_the_others(tmp_path, caplog):
    (tmp_path / "file").touch()
    pending = [save_async(TREE, tmp_path / "file" / name) for name in "ab"]
    with pytest.raises(NotADirectoryError, match="a"):
        wait()
    assert f"saving to {tmp_path / 'file' / 'b'} failed" in caplog.text
    wait()
    assert all(save.exception() for save in pending)


def test_the_function_of_a_save_may_wait_for_all_others(tmp_path):
    waited = threading.Event()

    def callback(_):
        wait(60)
        waited.set()

    AsyncCheckpointManager().save_async(TREE, tmp_path, callback=callback)
    wait(60)
    assert waited.is_set()


def test_a_pending_save_whose_making_was_interrupted_says_nothing():
    Pending.__new__(Pending).complain()
