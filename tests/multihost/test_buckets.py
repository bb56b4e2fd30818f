"""Several processes save to one place in a bucket; one of them dies."""

import os
import random
import secrets
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest

from eformer._engine.stores import leases
from eformer.checkpoint import diff, load, save, verify
from multihost import scenes
from support import ministack
from support.bucket_faults import EXPIRED
from support.buckets import around
from support.conversions import make_sources, words_of
from support.faults import noted
from support.launched import launched
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


def to_bucket(port):
    options = ["--store-option", f"endpoint=http://127.0.0.1:{port}", "--store-option", "region=us-east-1"]
    return options, {"AWS_ACCESS_KEY_ID": "AKIDOFTESTS", "AWS_SECRET_ACCESS_KEY": "of-tests"}


@pytest.mark.parametrize("case", ["shards", "zarr", "trees"])
def test_processes_convert_to_a_bucket_as_one_process_does(port, url_of, tmp_path, case):
    make_sources(tmp_path)
    source, _, words = words_of(case, tmp_path)
    alone, many = (url_of(name) for name in ("alone", "many"))
    options, secret = to_bucket(port)
    for count, url in ((1, alone), (3, many)):
        outcome = launched(count, "convert", source, url, *words, *options, **secret)
        assert outcome.codes == [0] * count, outcome
    assert verify(many).ok
    assert diff(alone, many).same
    assert len(keys(alone)) == len(keys(many))
    outcome = launched(2, "convert", source, many, *words, *options, **secret)
    assert outcome.codes == [1, 1], outcome
    assert "already exists" in outcome.errors[0]


def test_an_error_of_a_process_leaves_no_object_in_the_bucket(port, url_of, tmp_path):
    make_sources(tmp_path)
    source, _, words = words_of("shards", tmp_path)
    url, (options, secret) = url_of("failed"), to_bucket(port)
    full = "import eformer._engine.saving.in_parts as p\ndef fail(*a, **b): raise OSError('no route')\np.write = fail"
    outcome = launched(2, "convert", source, url, *words, *options, programs={1: full}, **secret)
    assert outcome.codes == [1, 1], outcome
    assert "process 1: OSError('no route')" in outcome.errors[0]
    assert not [key for key in keys(url) if leases.LEASES not in key]


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
