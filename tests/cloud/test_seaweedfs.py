"""SeaweedFS, a store that people run: versions and conditions of its own making."""

from contracts.bucket_server import *  # noqa: F403

SERVER = "seaweedfs"
