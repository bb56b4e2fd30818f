"""azurite, Microsoft's own double of Azure's blobs."""

from contracts.bucket_server import *  # noqa: F403

SERVER = "azurite"
