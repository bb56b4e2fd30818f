"""A training run of two processes in a bucket that is killed again and again: it goes on from its last committed step,
bit for bit.

EFORMER_BUCKET_RUN_KILLS says how often: once, or 50 times by `make faults`, half of them in either format.
"""

import os
import random
import secrets
import time
from collections import Counter

import pytest

from eformer import checkpoint
from eformer._engine.formats.find import find
from eformer._engine.record.indexes import INDEX, MANIFEST
from eformer._engine.stores.leases import LEASES
from support.buckets import around
from support.buckets import leases as leases_of
from support.faults import noted
from support.processes import Job
from support.servers import CannotStartError, running

pytestmark = [pytest.mark.xdist_group("processes"), pytest.mark.sample(2)]

KILLS = int(os.environ.get("EFORMER_BUCKET_RUN_KILLS", "1"))
HEARTBEAT = 6  # seconds after which a rank notices that the other one is dead
FOREVER, LAST = 10**9, 20  # steps of a job that is killed, and of one that is not
INDEXES = (MANIFEST, INDEX, "model.safetensors.index.json")


@pytest.fixture(scope="module")
def server():
    try:
        with running("ministack") as started:
            yield started
    except CannotStartError as error:
        pytest.skip(str(error))


@pytest.fixture
def url(server, monkeypatch):
    for variable, value in server.environment.items():
        monkeypatch.setenv(variable, value)
    return f"{server.url}/{secrets.token_hex(4)}/run"


class Training:
    """A run that is started as often as it is killed, and what its ranks have noted."""

    def __init__(self, server, url, kind, folder):
        self.url, self.kind = url, kind
        self.resumed = []  # steps that ranks went on from, with the ranks and digests of what they had loaded
        self.told = 0  # the last step that a rank was told is committed
        self._server, self._folder, self._jobs = server, folder, 0

    def start(self, steps=FOREVER, rank=0, at=0):
        self._jobs += 1
        job = Job(2, 2, self._folder / f"job-{self._jobs}", HEARTBEAT)
        notes = self._folder / f"notes-{self._jobs}"
        job.start("train_in_a_bucket", self._server.environment, self.url, self.kind, notes, steps, rank, at)
        return job

    def notes(self, what):
        """Return what the ranks of the last job have noted: steps, ranks and digests."""
        files = [self._folder / f"notes-{self._jobs}-{rank}" for rank in (0, 1)]
        texts = [file.read_text() if file.exists() else "" for file in files]
        lines = [(rank, *line.split()) for rank, text in enumerate(texts) for line in text.splitlines()]
        return [(int(step), rank, digest) for rank, kind, step, digest in lines if kind == what]

    def check(self):
        """Check where the last job began, and what a reader finds after it."""
        began = self.notes("resumed")
        assert len({step for step, *_ in began}) <= 1
        assert all(step >= self.told for step, *_ in began)
        self.resumed += began
        self.told = max([self.told, *(step for step, *_ in self.notes("committed"))])
        if self.told:
            there = checkpoint.steps(self.url)
            assert there[-1].number >= self.told
            assert all(checkpoint.verify(step.path).ok for step in there)
            assert checkpoint.load(self.url)["n"] == there[-1].number


def kill(training, rng):
    """Start a job, and kill one rank or both. Return how: while they start, while they train, or before a request."""
    how, rank = rng.choice(["starting", "training", "request", "request", "request"]), rng.randrange(2)
    at = rng.randrange(1, 40) if how == "request" else 0
    ranks = [rank] if at else rng.choice([[0], [1], [0, 1]])
    with training.start(rank=rank, at=at) as job:
        if at:
            assert job.wait(rank, 60) == -9, job.told(rank)
        else:
            if how == "training":
                wait_for(lambda: len(training.notes("resumed")) == 2)
            time.sleep(rng.uniform(0, 1.5))
            for one in ranks:
                job.kill(one)
        if len(ranks) == 1:  # the other one goes on for a while, or notices
            time.sleep(rng.choice([0, 0.3, 1.0, HEARTBEAT + 3]))
    return f"{how}, ranks {ranks}, request {at}"


def wait_for(is_so):
    until = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.01)


def remains(url):
    """Return the objects that are not of a step: those of dead saves and removals, whose leases are there; those of dead
    probes; and others."""
    found, start = around(f"{url}/x")
    keys = {entry.key.removeprefix(start) for entry in found.list(start)} - {"run.json"}
    steps = {step.name: find(step.path).manifest.trees[""].save_id for step in checkpoint.steps(url)}
    leases = {tuple(key.split(f"/{LEASES}/")) for key in keys if f"/{LEASES}/" in key}
    left = {key for key in keys if not is_of(key, steps.items()) and key.partition("/")[2] not in INDEXES}
    removed = {directory for directory, lease in leases if lease.startswith("removal-")}
    dead = {key for key in left if is_of(key, leases) or key.partition("/")[0] in removed - steps.keys()}
    probes = {key for key in left - dead if key.startswith(f"{LEASES}/")}
    return dead, probes, left - dead - probes


def is_of(key, saves):
    return any(key.startswith(f"{directory}/") and save_id in key for directory, save_id in saves)


@pytest.mark.thorough
@pytest.mark.parametrize(("kind", "kills"), [("safetensors", (KILLS + 1) // 2), ("tensorstore", KILLS // 2)])
def test_a_killed_run_goes_on_as_if_it_had_not_been(server, url, kind, kills, tmp_path, record_property):
    if not kills:
        pytest.skip("make faults kills more")
    training, rng, ways = Training(server, url, kind, tmp_path), random.Random(kind), Counter()
    in_saves, leases = 0, set()
    for number in range(kills):
        way = kill(training, rng)
        with noted(f"kill {number}: {way}"):
            training.check()
        before, leases = leases, set(leases_of(f"{url}/x"))
        in_saves += bool(leases - before)
        ways[way.partition(",")[0]] += 1
    with training.start(steps=LAST) as job:
        assert [job.answer(rank, time.monotonic() + 90) for rank in (0, 1)] == [None, None]
        training.check()
        whole = job.run("digests_of_training", training.told)
    assert all(digest == whole[rank][step] for step, rank, digest in training.resumed)
    assert training.told >= training.resumed[-1][0] + LAST - 1
    dead, probes, others = remains(url)
    figures = {
        "kills": dict(ways),
        "in saves": in_saves,
        "loads": len(training.resumed),
        "steps": training.told,
    }
    for name, value in {**figures, "left": [sorted(dead), sorted(probes)]}.items():
        record_property(name, value)
    assert not others
