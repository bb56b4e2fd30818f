"""azurite, Microsoft's own double of Azure's blobs."""

from contracts.bucket import BucketArrays, BucketCommits, BucketDirectory, BucketFile, BucketStoreContract
from contracts.bucket_processes import BucketProcesses, job  # noqa: F401
from contracts.bucket_tools import BucketCommands, BucketTools

SERVER = "azurite"


class TestStore(BucketStoreContract):
    """On azurite."""


class TestDirectory(BucketDirectory):
    """On azurite."""


class TestOneFile(BucketFile):
    """On azurite."""


class TestArrays(BucketArrays):
    """On azurite."""


class TestCommits(BucketCommits):
    """On azurite."""


class TestTools(BucketTools):
    """On azurite."""


class TestCommands(BucketCommands):
    """On azurite."""


class TestProcesses(BucketProcesses):
    """On azurite."""
