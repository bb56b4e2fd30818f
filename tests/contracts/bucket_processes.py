"""What several processes on JAX's distributed runtime do with a bucket of a server."""

from __future__ import annotations

import os

import pytest

from eformer import checkpoint
from support.buckets import leases
from support.processes import Failed, Job


@pytest.fixture(scope="module")
def job(server, tmp_path_factory):
    with Job(2, 2, tmp_path_factory.mktemp("job")) as started:
        assert play(started, "find_server", server.environment) == [(2, os.environ["http_proxy"])] * 2
        yield started


def play(job, scene, *arguments):
    """Play a scene in all processes; raise what one of them has raised."""
    outcomes = job.run(scene, *arguments)
    for outcome in outcomes:
        if isinstance(outcome, Failed):
            raise outcome
    return outcomes


class BucketProcesses:
    """Each process uploads its own parts, and the first commits."""

    @pytest.mark.parametrize("name", ["safetensors", "tensorstore"])
    @pytest.mark.parametrize("how", ["sync", "async"])
    def test_processes_save_and_load_together(self, url, job, name, how):
        path = f"{url}-{name}"
        for version in (0, 1):
            play(job, "save_tree", path, how, {}, version)
            for spec in (("x", "y"), (None, "x")):
                play(job, "load_tree", path, spec, version)
        assert checkpoint.verify(path).ok
        assert len(leases(path)) == 1  # of the save that was replaced

    def test_the_manager_of_jax_commits_what_all_have_written(self, url, job):
        play(job, "serialize_leaves", url, True, True)
        assert checkpoint.verify(url).ok

    def test_many_saves_at_once_keep_all_prefixes(self, url, job):
        play(job, "save_many_at_once", url, 4)
        assert checkpoint.verify(url).ok
