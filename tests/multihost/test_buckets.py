"""Several processes save to one place in a bucket; one of them dies."""

import os
import random
import secrets
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest

from eformer._engine.stores import leases
from eformer.checkpoint import load, save, verify
from multihost import scenes
from support import ministack
from support.bucket_faults import EXPIRED
from support.buckets import around
from support.faults import noted
from support.processes import Job

pytestmark = pytest.mark.xdist_group("processes")

KILLS = int(
    os.environ.get("EFORMER_KILLS", "0")
)  # by `make faults` only: JAX takes seconds to notice a death
HEARTBEAT = 6
AT_ONCE = 3


@pytest.fixture(scope="module")
def port():
    found = ministack.program()
    if found is None:
        pytest.skip("ministack is not installed")
    with ministack.running(found) as port, ministack.s3(ministack.client(port)):
        yield port


def keys(url):
    found, start = around(url)
    return [entry.key for entry in found.list(start)]


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", ["safetensors", "tensorstore"])
def test_two_processes_save_to_a_bucket(two, port, url_of, kind):
    url = url_of(kind)
    for version in (1, 2):
        assert two.run("save_to_a_bucket", port, url, version, kind) == [None, None]
        assert two.run("load_from_a_bucket", port, url, version) == [None, None]
        scenes.check(load(url), version)
    assert verify(url).ok
    assert all(
        "." in key.rpartition("/")[2] for key in keys(url) if leases.LEASES in key
    )  # no save is under way


@pytest.fixture
def url_of():
    return lambda name: f"s3://{ministack.BUCKET}/{secrets.token_hex(4)}-{name}/x"


@pytest.mark.skipif(not KILLS, reason="make faults kills processes")
def test_a_dead_rank_leaves_only_what_the_next_sweep_removes(port, url_of, tmp_path, record_property):
    rng = random.Random(KILLS)
    cases = [
        (number, ("safetensors", "tensorstore")[number % 2], number // 2 % 2, rng.randrange(1, 26))
        for number in range(KILLS)
    ]
    # In this process, not in the ranks; and around all threads, which would end the patches of each other.
    expired = mock.patch.object(leases, "LEASE", EXPIRED)
    with expired, ThreadPoolExecutor(AT_ONCE) as pool:
        outcomes = list(pool.map(lambda case: kill(port, url_of(str(case[0])), tmp_path, *case), cases))
    killed = [version for code, version in outcomes if code == -9]
    record_property("killed", f"{len(killed)}, of which {killed.count(2)} leave the new tree")
    assert len(killed) > KILLS // 2


def kill(port, url, folder, number, kind, rank, at):
    """Kill one rank before a request. Return how it ended, and the version that is there."""
    ministack.own.objects = ministack.client(port)
    save(scenes.tree(1), url, format=kind)
    with Job(2, 2, folder / str(number), HEARTBEAT) as job:
        job.start("die_in_a_save_to_a_bucket", port, url, 2, kind, rank, at)
        other, code = 1 - rank, job.wait(rank, 40 if rank else HEARTBEAT + 40)
        if code == -9:
            assert job.wait(other, HEARTBEAT + 20) is not None, job.told(other)
    with noted(f"{kind}: rank {rank} before its request {at}"):
        version = int(load(url)["number"])
        assert version in (1, 2)
        scenes.check(load(url), version)
        assert verify(url).ok
        for later in (3, 4):
            save(scenes.tree(later), url, format=kind)
        scenes.check(load(url), 4)
        assert len({save_id for key in keys(url) for save_id in leases.ids_in({key})}) <= 2, keys(url)
    return code, version
