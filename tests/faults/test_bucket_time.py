"""A server that hangs: every wait ends, with an error that says for what; Ctrl-C ends it at once."""

import asyncio
import os
import signal
import time
from contextlib import ExitStack
from unittest import mock

import numpy as np
import pytest

from eformer._engine.stores import bucket
from eformer._engine.stores.objects import Objects
from eformer.checkpoint import SaveOptions, load, save
from support import forkserver, ministack
from support.bucket_faults import forget_all, new_url

TREE = {"w": np.arange(9.0), "n": 1}
URL = f"s3://{ministack.BUCKET}/hangs/x"
WITHIN = 5.0  # seconds in which Ctrl-C ends a process; two are promised, on a machine that is not busy with other tests


@pytest.fixture(scope="module")
def hung():
    with ministack.hanging() as port:
        yield port


def test_a_server_that_hangs_is_an_error_that_says_what_was_asked_and_for_how_long(hung):
    with ministack.s3(ministack.client(hung, timeout=30, retries=0, limit=0.5)):
        for call in (lambda: save(TREE, URL), lambda: load(URL)):
            with pytest.raises(
                TimeoutError, match=r"s3://bkt/hangs.*not answered a request to \w+ it( up)? for 0\.5 s"
            ):
                call()


def test_an_upload_in_parts_that_hangs_is_a_timeout(hung):
    objects = ministack.client(hung, timeout=0.5, retries=0)
    with pytest.raises(TimeoutError, match=r"s3://bkt/key: .* to upload it for \d"):
        objects.stream("key", [bytes(2**24), bytes(2**24)]).wait()


def test_timeout_bounds_a_whole_save_and_a_whole_load(hung):
    with ministack.s3(ministack.client(hung, timeout=30)):
        with pytest.raises(TimeoutError, match=r"SaveOptions\(timeout=0.3\) is over"):
            save(TREE, URL, options=SaveOptions(timeout=0.3))
        with pytest.raises(TimeoutError, match=r"LoadOptions\(timeout=0.3\) is over"):
            load(URL, options={"timeout": 0.3})


def test_timeout_bounds_many_requests_that_are_answered_slowly():
    url, request = new_url(), Objects._request

    def slow(self, operation, key, work):
        async def later():
            await asyncio.sleep(0.2)
            return await work()

        return request(self, operation, key, later)

    with mock.patch.object(Objects, "_request", slow), pytest.raises(TimeoutError, match=r"timeout=0\.5"):
        save(TREE, url, options=SaveOptions(timeout=0.5))
    save(TREE, url)
    with mock.patch.object(Objects, "_request", slow), pytest.raises(TimeoutError, match=r"timeout=0\.3"):
        load(url, options={"timeout": 0.3})
    forget_all(url)


# ---------------------------------------------------------------------------------------------- Ctrl-C


async def for_ever(*_, **__):
    await asyncio.sleep(3600)


def hanging_put(at, told):
    """Makes the put of an object hang whose key has `at` in it."""
    put = Objects._put

    async def put_or_hang(self, key, data, **how):
        if at in key:
            told.send("hangs")
            await for_ever()
        await put(self, key, data, **how)

    return mock.patch.object(Objects, "_put", put_or_hang)


def play(scene, port, told):
    """What a process does until it is interrupted."""
    with ExitStack() as stack:
        url = new_url()
        if scene in ("first request", "parts", "load"):
            stack.enter_context(ministack.s3(ministack.client(port, timeout=60)))
            told.send("soon")
        if scene == "first request":
            save(TREE, URL)
        elif scene == "load":
            load(URL)
        elif scene == "parts":
            with mock.patch.object(bucket, "PART_BYTES", 1):
                objects = ministack.client(port, timeout=60)
                objects.stream("key", [bytes(2**24), bytes(2**24)]).wait()
        else:
            stack.enter_context(hanging_put(scene, told))
            save(TREE, url)


@pytest.mark.parametrize(
    "scene", ["first request", "load", "parts", ".eformer-leases", "model.", "manifest.json"]
)
def test_ctrl_c_ends_a_process_at_once_while_the_server_hangs(hung, scene, record_property):
    context = forkserver.context()
    ours, theirs = context.Pipe()
    process = context.Process(target=play, args=(scene, hung, theirs))
    process.start()
    assert ours.poll(60)
    time.sleep(0.5 if ours.recv() == "soon" else 0)  # until the request is on its way
    began = time.monotonic()
    os.kill(process.pid, signal.SIGINT)
    process.join(WITHIN)
    took = time.monotonic() - began
    code = process.exitcode
    if code is None:
        process.kill()
        process.join()
    assert code == 1
    record_property("seconds", round(took, 2))


def fork_after_use(told):
    url = new_url()
    save(TREE, url)
    if os.fork():
        os._exit(0)
    try:
        load(url)
    except RuntimeError as error:
        told.send(str(error))
    finally:
        os._exit(0)


def test_a_fork_after_use_is_refused():
    context = forkserver.context()
    ours, theirs = context.Pipe()
    process = context.Process(target=fork_after_use, args=(theirs,))
    process.start()
    assert ours.poll(30)
    assert "'spawn' or 'forkserver'" in ours.recv()
    process.join()
