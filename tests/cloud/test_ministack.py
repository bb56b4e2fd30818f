"""ministack, a quick double of S3: the server of `make test`."""

from contracts.bucket_server import *  # noqa: F403

SERVER = "ministack"
