"""A real server: killed processes, lost answers, races. Without EFORMER_FAULTS_STRIDE=1 only a few of each."""

import os
import secrets
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import numpy as np
import pytest

from eformer import checkpoint
from eformer._engine.formats.safetensors.read import read_manifest
from eformer._engine.stores import leases
from eformer._engine.stores.base import SwapError
from eformer._engine.stores.locate import store_at
from eformer.checkpoint import load, save
from support import forkserver, ministack
from support.bucket_faults import (
    EXPIRED,
    SCENES,
    SERVER,
    STRIDE,
    Deaths,
    Scene,
    forget_all,
    hooked,
    is_torn,
    killed,
)
from support.faults import noted

pytestmark = pytest.mark.xdist_group("ministack")
IS_FULL = STRIDE == 1


@pytest.fixture(scope="module")
def port():
    found = ministack.program()
    if found is None:
        pytest.skip("ministack is not installed")
    with ministack.running(found) as port:
        yield port


@pytest.fixture
def url(port):
    with ministack.s3(ministack.client(port)):
        found = f"s3://{ministack.BUCKET}/{secrets.token_hex(4)}/x"
        yield found
        forget_all(found)


def killed_save(port, scene, url, at):
    """What a process does that is killed before one of its requests."""
    with ministack.s3(ministack.client(port)), hooked(Deaths(at, killed)):
        scene.save(url)
    os._exit(0)


def start(work, *args):
    process = forkserver.context().Process(target=work, args=args)
    process.start()
    return process


def killed_prune(port, run, at):
    """What a process does that is killed before one of the requests of its removals."""
    with ministack.s3(ministack.client(port)), hooked(Deaths(at, killed)):
        checkpoint.prune(run, keep=1)
    os._exit(0)


def test_a_killed_prune_leaves_whole_steps_and_the_next_one_goes_on(port, url):
    at, is_over = 1, False
    while not is_over:
        run = f"{url}-{at}/x"
        for step in (1, 2):
            save({"w": np.full(9, step)}, f"{run}/step-{step}")
        process = start(killed_prune, port, run, at)
        process.join(60)
        is_over = process.exitcode == 0
        with noted(f"killed before request {at}"), mock.patch.object(leases, "LEASE", EXPIRED):
            there = [step.number for step in checkpoint.steps(run)]
            assert there in ([1, 2], [2])
            assert [load(f"{run}/step-{step}")["w"][0] for step in there] == there
            checkpoint.prune(run, keep=1)
            assert [step.number for step in checkpoint.steps(run)] == [2]
            assert len(list(store_at(run).objects.list(f"{key_of(run)}/step-1/"))) <= 1
        forget_all(run)
        at += 1 if IS_FULL else 17
    assert at > 20


def key_of(url):
    return url.partition("://")[2].partition("/")[2]


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", SCENES)
@pytest.mark.parametrize("layout", SERVER, ids=str)
def test_a_killed_process_leaves_the_old_tree_or_the_new(port, url, layout, name, record_property):
    if not IS_FULL and (name, layout.title) != ("sweep", "one data file"):
        pytest.skip("make faults kills all of them")
    scene = Scene.of(layout, name, url)
    points, left = scene.points(f"{url}-count/x", 1 if IS_FULL else 12), []
    for at in points:
        place = f"{url}-{at}/x"
        scene.put(place)
        process = start(killed_save, port, scene, place, at)
        process.join(60)
        assert process.exitcode == -9
        with noted(f"killed before request {at}"):
            left.append(scene.check(place))
        forget_all(place)
    record_property("kills", len(left))
    assert left == sorted(left)


# ---------------------------------------------------------------------------------------- lost answers


@pytest.mark.parametrize("mode", ministack.MODES if IS_FULL else ["mixed"])
def test_what_a_save_is_told_is_what_is_there(port, url, mode, record_property):
    """Answers to two of five puts of the index are lost; eight writers, four prefixes."""
    rounds = 6 if IS_FULL else 1
    told = {}

    def write(writer):
        ministack.own.objects = ministack.client(lost, timeout=1.0, retries=0 if writer % 2 else 5)
        for number in range(rounds):
            value = 100 * writer + number
            try:
                save(
                    {"w": np.full(9, value), "n": value}, url, prefix=f"p{writer % 4}", metadata={"n": value}
                )
                told[value] = "committed"
            except OSError as error:
                told[value] = repr(error)

    with ministack.lossy(port, mode, 0.4) as lost, ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(8)))
    manifest, _ = read_manifest(store_at(url))
    assert len(told) == 8 * rounds
    committed = [value for value, what in told.items() if what == "committed"]
    record_property("saves", f"{len(committed)} of {len(told)} committed")
    assert len(manifest.log.done) == len(committed), told
    for number in range(4):
        found = load(url, prefix=f"p{number}")
        assert told[found["n"]] == "committed"
        assert (found["w"] == found["n"]).all()
    assert checkpoint.verify(url).ok


# ----------------------------------------------------------------------------------------------- races


@pytest.mark.parametrize("is_there", [False, True], ids=["create", "update"])
def test_of_sixteen_racers_one_wins(port, url, is_there):
    store = store_at(url)
    for number in range(50 if IS_FULL else 5):
        name = f"index-{number}"
        version = None
        if is_there:
            store.begin().swap(name, b"before", None)
            version = store.read(name)[1].version

        def race(racer, name=name, version=version):
            try:
                store_at(url).begin().swap(name, b"%d" % racer, version)
            except SwapError:
                return None
            return racer

        with ThreadPoolExecutor(16) as pool:
            winners = [racer for racer in pool.map(race, range(16)) if racer is not None]
        assert len(winners) == 1
        assert store.read(name)[0] == b"%d" % winners[0]


def write_often(port, url, writer, rounds):
    with ministack.s3(ministack.client(port)):
        for number in range(rounds):
            save({"w": np.full(99, number), "n": number}, url, prefix=f"p{writer}")


def test_processes_that_save_at_once_keep_each_others_trees(port, url):
    rounds = 6 if IS_FULL else 1
    writers = [start(write_often, port, url, writer, rounds) for writer in range(4)]
    for writer in writers:
        writer.join(90)
        assert writer.exitcode == 0
    assert not is_torn(url, [f"p{n}" for n in range(4)])
    assert [load(url, prefix=f"p{n}")["n"] for n in range(4)] == [rounds - 1] * 4
    assert len(read_manifest(store_at(url))[0].log.done) == 4 * rounds
