"""Ceph, whose gateway compares ETags without quotes up to version 16."""

from contracts.bucket import BucketArrays, BucketCommits, BucketDirectory, BucketFile, BucketStoreContract
from contracts.bucket_processes import BucketProcesses, job  # noqa: F401
from contracts.bucket_tools import BucketCommands, BucketTools

SERVER = "ceph"


class TestStore(BucketStoreContract):
    """On Ceph."""


class TestDirectory(BucketDirectory):
    """On Ceph."""


class TestOneFile(BucketFile):
    """On Ceph."""


class TestArrays(BucketArrays):
    """On Ceph."""


class TestCommits(BucketCommits):
    """On Ceph."""


class TestTools(BucketTools):
    """On Ceph."""


class TestCommands(BucketCommands):
    """On Ceph."""


class TestProcesses(BucketProcesses):
    """On Ceph."""
