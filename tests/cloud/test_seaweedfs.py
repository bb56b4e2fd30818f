"""SeaweedFS, a store that people run: versions and conditions of its own making."""

from contracts.bucket import BucketArrays, BucketCommits, BucketDirectory, BucketFile, BucketStoreContract
from contracts.bucket_processes import BucketProcesses, job  # noqa: F401
from contracts.bucket_tools import BucketCommands, BucketTools

SERVER = "seaweedfs"


class TestStore(BucketStoreContract):
    """On SeaweedFS."""


class TestDirectory(BucketDirectory):
    """On SeaweedFS."""


class TestOneFile(BucketFile):
    """On SeaweedFS."""


class TestArrays(BucketArrays):
    """On SeaweedFS."""


class TestCommits(BucketCommits):
    """On SeaweedFS."""


class TestTools(BucketTools):
    """On SeaweedFS."""


class TestCommands(BucketCommands):
    """On SeaweedFS."""


class TestProcesses(BucketProcesses):
    """On SeaweedFS."""
