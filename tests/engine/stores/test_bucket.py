"""Buckets in the memory of this process: the same code as for those of a server, without the network."""

import asyncio
import itertools
import os
import threading
from collections import Counter
from contextlib import contextmanager

import numpy as np
import pytest

from contracts.bucket import (
    BucketArrays,
    BucketCommits,
    BucketDirectory,
    BucketFile,
    BucketStoreContract,
    forget,
)
from contracts.bucket_runs import BucketRuns
from contracts.bucket_tools import BucketTools
from eformer import checkpoint
from eformer._engine.stores import objects as requests
from eformer._engine.stores.checkpoints import has_unfinished, held
from eformer._engine.stores.local import usage
from eformer._engine.stores.locate import store_at
from eformer.checkpoint import SaveOptions
from support.bucket_faults import hooked
from support.buckets import objects

numbers = itertools.count()


@pytest.fixture
def url():
    found = f"memory://test-{os.getpid()}-{next(numbers)}/x"
    yield found
    forget(found)


class TestStore(BucketStoreContract):
    """In memory."""


class TestDirectory(BucketDirectory):
    """In memory."""


@pytest.mark.sample(4)
class TestOneFile(BucketFile):
    """In memory."""


@pytest.mark.sample(4)
class TestArrays(BucketArrays):
    """In memory."""


class TestCommits(BucketCommits):
    """In memory."""


class TestRuns(BucketRuns):
    """In memory."""


class TestTools(BucketTools):
    """In memory."""


# -------------------------------------------------------------------------------------------- requests


@contextmanager
def counted():
    """Count requests, by operation."""
    requests = Counter()
    with hooked(lambda operation, _: requests.update([operation])):
        yield requests


def test_lengths_of_many_objects_are_listed_and_not_asked_for_one_by_one(url):
    tree = {f"w{number}": np.full(4, number) for number in range(50)}
    checkpoint.save(tree, f"{url}/step-1", format="tensorstore")
    with counted() as requests:
        assert checkpoint.steps(url)[0].problem() is None
    assert requests.total() < 20
    with counted() as requests:
        assert checkpoint.verify(f"{url}/step-1").ok
    assert requests["look up"] < 10
    assert requests["read"] < 120  # one for each description, and one for each chunk


def test_headers_of_files_are_verified_several_at_once(url):
    checkpoint.save({f"w{n}": np.ones(9) for n in range(12)}, url, options=SaveOptions(max_shard_bytes=1))
    meeting, met = threading.Barrier(4, timeout=10), []

    def meet(operation, key):
        if operation == "read" and key.endswith(".safetensors") and len(met) < 4:
            met.append(key)
            meeting.wait()

    with hooked(meet):
        assert checkpoint.verify(url).ok


def test_sizes_of_all_steps_are_one_listing(url):
    for step in range(5):
        checkpoint.save({"w": np.ones(step)}, f"{url}/step-{step}")
    with counted() as requests:
        sizes = usage(store_at(url), [f"step-{step}" for step in range(5)])
    assert requests == {"list": 1}
    assert sizes["step-4"] == sum(len(data) for key, data in objects(f"{url}/x").items() if "/step-4/" in key)


def test_a_lease_that_is_collected_in_the_thread_of_requests_does_not_hang(url):
    lease = held(store_at(url).parent()[0], "x")
    lease.__enter__()

    async def collected():
        lease.__exit__(None, None, None)

    asyncio.run_coroutine_threadsafe(collected(), requests._loop().loop).result(10)
    assert has_unfinished(store_at(url))  # it runs out


def test_a_hold_whose_lease_cannot_be_removed_ends_without_an_error(url, monkeypatch):
    def lost(*_):
        raise OSError("the network is down")

    with held(store_at(url).parent()[0], "x"):
        monkeypatch.setattr(requests.Objects, "delete", lost)
    assert has_unfinished(store_at(url))  # it runs out


def test_a_request_in_the_thread_of_requests_is_refused(url):
    async def asked():
        store_at(url).exists("x")

    with pytest.raises(RuntimeError, match="would wait for itself"):
        asyncio.run_coroutine_threadsafe(asked(), requests._loop().loop).result(10)
