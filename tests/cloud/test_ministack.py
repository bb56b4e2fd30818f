"""ministack, a quick double of S3: the server of `make test`."""

from contracts.bucket import BucketArrays, BucketCommits, BucketDirectory, BucketFile, BucketStoreContract
from contracts.bucket_processes import BucketProcesses, job  # noqa: F401
from contracts.bucket_tools import BucketCommands, BucketTools

SERVER = "ministack"


class TestStore(BucketStoreContract):
    """On ministack."""


class TestDirectory(BucketDirectory):
    """On ministack."""


class TestOneFile(BucketFile):
    """On ministack."""


class TestArrays(BucketArrays):
    """On ministack."""


class TestCommits(BucketCommits):
    """On ministack."""


class TestTools(BucketTools):
    """On ministack."""


class TestCommands(BucketCommands):
    """On ministack."""


class TestProcesses(BucketProcesses):
    """On ministack."""
