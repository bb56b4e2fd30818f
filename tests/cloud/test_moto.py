"""moto, the double of S3 that most projects test with."""

from contracts.bucket import BucketArrays, BucketCommits, BucketDirectory, BucketFile, BucketStoreContract
from contracts.bucket_processes import BucketProcesses, job  # noqa: F401
from contracts.bucket_tools import BucketCommands, BucketTools

SERVER = "moto"


class TestStore(BucketStoreContract):
    """On moto."""


class TestDirectory(BucketDirectory):
    """On moto."""


class TestOneFile(BucketFile):
    """On moto."""


class TestArrays(BucketArrays):
    """On moto."""


class TestCommits(BucketCommits):
    """On moto."""


class TestTools(BucketTools):
    """On moto."""


class TestCommands(BucketCommands):
    """On moto."""


class TestProcesses(BucketProcesses):
    """On moto."""
