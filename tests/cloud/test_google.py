"""A double of Google's XML API, whose conditions are generations."""

from contracts.bucket import BucketArrays, BucketCommits, BucketDirectory, BucketFile, BucketStoreContract
from contracts.bucket_processes import BucketProcesses, job  # noqa: F401
from contracts.bucket_tools import BucketCommands, BucketTools

SERVER = "google"


class TestStore(BucketStoreContract):
    """On the double of Google's XML API."""


class TestDirectory(BucketDirectory):
    """On the double of Google's XML API."""


class TestOneFile(BucketFile):
    """On the double of Google's XML API."""


class TestArrays(BucketArrays):
    """On the double of Google's XML API."""


class TestCommits(BucketCommits):
    """On the double of Google's XML API."""


class TestTools(BucketTools):
    """On the double of Google's XML API."""


class TestCommands(BucketCommands):
    """On the double of Google's XML API."""


class TestProcesses(BucketProcesses):
    """On the double of Google's XML API."""
