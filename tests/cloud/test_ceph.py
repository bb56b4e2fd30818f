"""Ceph, whose gateway compares ETags without quotes up to version 16."""

from contracts.bucket_server import *  # noqa: F403

SERVER = "ceph"
