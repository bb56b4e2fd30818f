"""A save in the background is cancelled before any of its calls or requests: nothing of it is left.

EFORMER_FAULTS_STRIDE says how many calls lie between two cases.
"""

import asyncio
import secrets
import threading
from concurrent.futures import CancelledError
from contextlib import suppress
from unittest import mock
from urllib.request import urlopen

import numpy as np
import pytest

from eformer._engine.stores import objects
from eformer._engine.stores.leases import LEASES
from eformer._engine.stores.objects import Objects
from eformer.checkpoint import load, save, save_async
from support import bucket_faults, faults, ministack
from support.buckets import around, leases
from support.cancelling import Cancelling
from support.faults import NEW, OLD, noted, struck
from support.links import contents

STRIDE = min(4, faults.STRIDE)


def cancelled_on_disk(scene, at):
    """Cancel a save at one call, and check what it leaves. Return whether it was stopped, or None after all calls."""
    scene.reset()
    before, cancelling = contents(scene.folder), Cancelling(at)
    with faults.hooked(before=cancelling), suppress(CancelledError):
        scene.layout.save(scene.folder, NEW, cancelling.save)
    with noted(cancelling.where):
        if cancelling.was_stopped:
            assert contents(scene.folder) == before
        assert scene.generation == (OLD if cancelling.was_stopped else NEW)
        scene.check_next_save()
    return cancelling.was_stopped


@pytest.mark.sample(2)
def test_a_save_to_a_disk_that_is_cancelled_at_any_call_leaves_the_old_checkpoint_or_the_new(layout, place):
    scene = faults.Scene.of(layout, place)
    answers = set(struck(lambda at: cancelled_on_disk(scene, at), layout))
    assert answers == {True, False}


def test_a_save_to_a_new_directory_that_is_cancelled_leaves_no_directory(layout, place):
    scene = faults.Scene.of(layout, place, generation=0)
    before, cancelling = contents(scene.template), Cancelling(3)
    scene.reset()
    with faults.hooked(before=cancelling), pytest.raises(CancelledError):
        layout.save(scene.folder, NEW, cancelling.save)
    assert contents(scene.folder).keys() == before.keys()


# ------------------------------------------------------------------------------------------- buckets


def state(url):
    """Return all objects of a checkpoint, with the leases, and what an upload in parts has left on the server."""
    found, start = around(url)
    return {entry.key.removeprefix(start): entry.version for entry in found.list(start)}


def cancelled_in_bucket(scene, url, at):
    scene.put(url)
    before, cancelling = state(url), Cancelling(at)
    with bucket_faults.hooked(cancelling), suppress(CancelledError):
        scene.layout.save(url, NEW, how=cancelling.save)
    with noted(cancelling.where):
        if cancelling.was_stopped:
            assert state(url) == before
        assert scene.layout.generation(url) == (scene.before if cancelling.was_stopped else NEW)
        scene.check(url)
    bucket_faults.forget_all(url)
    return cancelling.was_stopped


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", ["first", "replace"])
@pytest.mark.parametrize("layout", bucket_faults.MEMORY, ids=str)
def test_a_save_to_a_bucket_that_is_cancelled_at_any_request_leaves_no_object_and_no_lease(layout, name):
    url = bucket_faults.new_url()
    scene = bucket_faults.Scene.of(layout, name, url)
    bucket_faults.forget_all(url)
    stride = 1 if layout.suffix else STRIDE  # a single file is a few requests
    assert True in set(struck(lambda at: cancelled_in_bucket(scene, url, at), (layout, name), stride))


@pytest.fixture(scope="module")
def port():
    found = ministack.program()
    if found is None:
        pytest.skip("ministack is not installed")
    with ministack.running(found) as port:
        yield port


@pytest.mark.thorough
@pytest.mark.xdist_group("ministack")
@pytest.mark.parametrize("layout", bucket_faults.SERVER, ids=str)
def test_a_save_to_a_server_that_is_cancelled_at_any_request_leaves_no_object_and_no_lease(layout, port):
    with ministack.s3(ministack.client(port)):
        url = f"s3://{ministack.BUCKET}/{secrets.token_hex(4)}/x"
        scene = bucket_faults.Scene.of(layout, "replace", url)
        assert True in set(struck(lambda at: cancelled_in_bucket(scene, url, at), layout, STRIDE))
    assert b"<UploadId>" not in urlopen(f"http://127.0.0.1:{port}/{ministack.BUCKET}?uploads").read()


# ------------------------------------------------------------------------------------ a server that hangs


@pytest.mark.parametrize("at", [LEASES, "model."])
def test_a_cancelled_save_gives_a_put_that_hangs_some_time_and_keeps_its_lease(at, caplog):
    """The object may still appear: the next save has to know of it."""
    url, put, hangs = bucket_faults.new_url(), Objects._put, threading.Event()

    async def hang(self, key, data, **how):
        if at in key:
            hangs.set()
            await asyncio.sleep(600)
        await put(self, key, data, **how)

    with mock.patch.object(Objects, "_put", hang), mock.patch.object(objects, "_GIVEN_UP", 0.2):
        pending = save_async({"w": np.arange(9.0)}, url)
        assert hangs.wait(10)
        assert pending.cancel()
        assert isinstance(pending.exception(30), CancelledError)
    assert not caplog.records
    assert len(leases(url)) == (at != LEASES)
    save({"w": np.ones(3)}, url)
    assert load(url)["w"][0] == 1.0
