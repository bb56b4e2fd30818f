"""moto, the double of S3 that most projects test with."""

from contracts.bucket_server import *  # noqa: F403

SERVER = "moto"
