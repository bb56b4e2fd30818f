"""All that is promised of checkpoints in buckets, as the tests of one server.

A module of tests/cloud imports everything from here, and says by SERVER which one of support/servers.py it is about.
"""

from contracts.bucket import BucketArrays, BucketCommits, BucketDirectory, BucketFile, BucketStoreContract
from contracts.bucket_cache import BucketCache, cache, fetched, tree
from contracts.bucket_processes import BucketProcesses, job
from contracts.bucket_runs import BucketRuns
from contracts.bucket_tools import BucketCommands, BucketTools

__all__ = [
    "TestArrays",
    "TestCache",
    "TestCommands",
    "TestCommits",
    "TestDirectory",
    "TestOneFile",
    "TestProcesses",
    "TestRuns",
    "TestStore",
    "TestTools",
    "cache",
    "fetched",
    "job",
    "tree",
]


class TestStore(BucketStoreContract):
    """Of the store alone."""


class TestDirectory(BucketDirectory):
    """Safetensors files."""


class TestOneFile(BucketFile):
    """A single safetensors file."""


class TestArrays(BucketArrays):
    """Arrays of TensorStore."""


class TestCommits(BucketCommits):
    """Saves that meet each other."""


class TestRuns(BucketRuns):
    """Steps of a run."""


class TestCache(BucketCache):
    """Loads through a cache."""


class TestTools(BucketTools):
    """Tools and documented functions."""


class TestCommands(BucketCommands):
    """The command line."""


class TestProcesses(BucketProcesses):
    """Several processes."""
