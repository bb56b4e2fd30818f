"""Saves to a bucket of a server on loopback."""

import os

import jax

from eformer.checkpoint import load, save
from multihost.scenes.state import check, tree
from support import ministack
from support.bucket_faults import Deaths, hooked, killed

__all__ = ["die_in_a_save_to_a_bucket", "find_server", "load_from_a_bucket", "save_to_a_bucket"]


def find_server(environment):
    """Takes over the variables that lead to a server; returns what this process knows of others."""
    os.environ.update(environment)
    return jax.process_count(), os.environ["http_proxy"]


def save_to_a_bucket(port, url, version, kind):
    with ministack.s3(ministack.client(port)):
        save(tree(version), url, format=kind)


def load_from_a_bucket(port, url, version):
    with ministack.s3(ministack.client(port)):
        check(load(url), version)


def die_in_a_save_to_a_bucket(port, url, version, kind, rank, at):
    """One rank is killed before one of its requests."""
    deaths = Deaths(at if jax.process_index() == rank else 0, killed)
    with ministack.s3(ministack.client(port)), hooked(deaths):
        save(tree(version), url, format=kind)
