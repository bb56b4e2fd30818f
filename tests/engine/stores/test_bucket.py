"""Buckets in the memory of this process: the same code as for those of a server, without the network."""

import itertools
import os

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


class TestOneFile(BucketFile):
    """In memory."""


class TestArrays(BucketArrays):
    """In memory."""


class TestCommits(BucketCommits):
    """In memory."""


class TestRuns(BucketRuns):
    """In memory."""


class TestTools(BucketTools):
    """In memory."""
