"""A double of Google's XML API, whose conditions are generations."""

from contracts.bucket_server import *  # noqa: F403

SERVER = "google"
