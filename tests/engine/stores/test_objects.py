"""Requests to a server: what its answers become."""

import subprocess
import sys
import time

import numpy as np
import pytest
from msgspec import structs
from obstore.store import MemoryStore

from eformer import checkpoint
from eformer._engine.stores.locate import store_at
from eformer._engine.stores.objects import Objects
from support.object_server import credentials, serving


@pytest.fixture
def server():
    with serving() as server, checkpoint.store_options("s3://answers", endpoint=server.url, **credentials()):
        yield server


def test_a_number_in_a_message_is_not_taken_for_a_status(server):
    server.refuse_with = 400, b"<Error><Code>Bad</Code><RequestId>416 InvalidRange</RequestId></Error>"
    objects = store_at("s3://answers/x").objects
    for ask in (
        lambda: objects.read("416"),
        lambda: objects.children("416"),
        lambda: objects.put("416", b""),
    ):
        with pytest.raises(OSError, match=r"s3://answers/416: .*failed.*Bad"):
            ask()


def test_a_range_behind_the_end_is_empty(server):
    objects = store_at("s3://answers/x").objects
    objects.put("a", b"123")
    for start, nbytes in ((3, 5), (7, None)):
        data, found = objects.read("a", start, nbytes)
        assert (bytes(data), found.nbytes) == (b"", 3)
    assert bytes(objects.read("a", 1, 9)[0]) == b"23"


def test_an_object_that_is_replaced_all_the_time_is_read(monkeypatch):
    """By a longer one after the range was found to be behind its end, and then by a short one again."""
    objects = store_at("memory://objects").objects
    objects.put("a", b"123")
    now = objects.head("a")

    def head(key):
        monkeypatch.undo()
        return structs.replace(now, nbytes=9)

    monkeypatch.setattr(objects, "head", head)
    assert objects.read("a", 5, 2) == (b"", now)


def test_an_object_of_which_the_server_gives_two_lengths_is_an_error(monkeypatch):
    """As a stale replica does: it is asked a few times, and not for ever."""
    objects = store_at("memory://objects").objects
    objects.put("a", b"123")
    longer = structs.replace(objects.head("a"), nbytes=9)
    monkeypatch.setattr(objects, "head", lambda key: longer)
    with pytest.raises(
        OSError, match="does not read it from byte 5 on, although it says that it is longer; try again"
    ):
        objects.read("a", 5, 2)


def test_a_refusal_after_many_errors_is_not_taken_for_success(monkeypatch):
    objects = Objects(MemoryStore(), "memory:/")
    objects.put("index", b"one")
    outcomes = iter(
        [OSError("lost")] * 7 + [False]
    )  # then the server is asked without quotes around the ETag

    def answered(key, data, _):
        if isinstance(outcome := next(outcomes, True), OSError):
            raise outcome
        if outcome:
            objects.put(key, data)
        return outcome

    monkeypatch.setattr(objects, "put_if", answered)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    objects.swap("index", b"two", objects.head("index").version)
    assert bytes(objects.read("index")[0]) == b"two"


def test_an_object_of_any_length_is_written(server):
    store_at("s3://answers/x").objects.put("a", b"12")
    assert server.objects == {"a": b"12"}


@pytest.mark.parametrize("kind", ["safetensors", "tensorstore"])
def test_a_checkpoint_can_be_all_of_a_bucket(server, kind):
    for number in range(2):
        checkpoint.save({"w": np.full(3, number)}, "s3://answers", format=kind)
    assert checkpoint.load("s3://answers")["w"].tolist() == [1, 1, 1]
    assert checkpoint.verify("s3://answers").ok
    store = store_at("s3://answers")
    assert (store.url, store.path_to("x"), store.at("x").url) == (
        "s3://answers",
        "s3://answers/x",
        "s3://answers/x",
    )


def test_threads_that_use_a_bucket_first_at_once_share_one_loop():
    program = """
import sys, threading
sys.setswitchinterval(1e-6)
from eformer._engine.stores.objects import _loop
begin, found = threading.Barrier(8), []
def use():
    begin.wait()
    found.append(_loop())
threads = [threading.Thread(target=use) for _ in range(8)]
[t.start() for t in threads]; [t.join() for t in threads]
assert len({id(one) for one in found}) == 1
assert [t.name for t in threading.enumerate()].count("eformer-requests") == 1
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_interpreter_ends_only_after_the_threads_of_obstore_have_left_the_loop():
    program = """
import threading, time
from eformer._engine.stores.objects import _loop
loop = _loop().loop
def answer():
    loop.calls += 1
    time.sleep(0.3)
    print("answered", flush=True)
    loop.calls -= 1
threading.Thread(target=answer, daemon=True).start()
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout == "answered\n"
