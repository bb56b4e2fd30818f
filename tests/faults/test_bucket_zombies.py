"""A save that was taken for dead wakes up and commits, between any two requests of the save that clears it away: it is
committed whole, or refused; nothing is ever torn."""

import threading
from unittest import mock

import numpy as np
import pytest

from eformer._engine.stores import leases
from eformer._engine.stores.leases import Leases
from eformer.checkpoint import SaveOptions, load, save
from support.bucket_faults import EXPIRED, STRIDE, Countdown, Paused, interleaved, is_torn, new_url, watched
from support.faults import noted

ZOMBIE, SWEEPER, OLD = 1.0, 2.0, 0.0
KINDS = pytest.mark.parametrize("kind", ["safetensors", "tensorstore"])


def tree(number):
    return {"base": {"w": np.arange(4000.0)}, "head": {"v": np.full(5, number)}, "n": number}


def put(url, prefix, number, kind, *, reuse=False):
    save(tree(number), url, prefix=prefix, format=kind, options=SaveOptions(threads=1, reuse=reuse))


def meetings(kind, begin, *, reuse=False, prefix="b"):
    """Yield all ways in which a slow save of "a" and a sweeping one of another prefix can meet, with their ends."""
    at, requests = 1, 99
    while at < 99:
        where = 1
        while where <= requests + 1:
            url = new_url()
            begin(url)
            with mock.patch.object(leases, "LEASE", EXPIRED):
                zombie, requests = interleaved(
                    lambda url=url: put(url, "a", ZOMBIE, kind, reuse=reuse),
                    at,
                    lambda url=url: put(url, prefix, SWEEPER, kind),
                    where,
                )
            with noted(f"the zombie at {at}, the sweep at {where}"):
                yield url, zombie
            where += max(1, STRIDE // 8)
        if zombie.count < at:
            return
        at += max(1, STRIDE // 8)


def count(outcomes):
    return {told: outcomes.count(told) for told in set(outcomes)}


@KINDS
def test_a_zombie_is_committed_whole_or_refused(kind, record_property):
    outcomes = []
    for url, zombie in meetings(kind, lambda url: put(url, "a", OLD, kind)):
        assert load(url, prefix="b")["n"] == SWEEPER
        assert load(url, prefix="a")["n"] == (ZOMBIE if zombie.told == "committed" else OLD)
        assert not is_torn(url, ["a", "b"])
        outcomes.append(zombie.told)
    record_property("outcomes", count(outcomes))
    assert set(outcomes) == {"committed", "refused"}


@KINDS
def test_a_zombie_that_replaces_the_same_tree_is_committed_or_refused(kind, record_property):
    outcomes = []
    for url, zombie in meetings(kind, lambda url: put(url, "a", OLD, kind), prefix="a"):
        assert load(url, prefix="a")["n"] in ((ZOMBIE, SWEEPER) if zombie.told == "committed" else (SWEEPER,))
        assert not is_torn(url, ["a"])
        outcomes.append(zombie.told)
    record_property("outcomes", count(outcomes))
    assert set(outcomes) == {"committed", "refused"}


def reuse_meetings():
    """Yield meetings of a save that uses files again with one that removes them, which a third one has replaced."""
    requests, where = 99, 1
    while where <= requests + 1:
        url = new_url()
        put(url, "a", OLD, "safetensors")
        zombie = Paused(lambda url=url: put(url, "a", ZOMBIE, "safetensors", reuse=True), 1)
        before = Countdown(where, zombie.finish)
        hooks = {zombie.thread: zombie.before, threading.current_thread(): before}
        with watched(hooks, {zombie.thread: zombie.commits}):
            zombie.start()
            before.is_on = False
            put(url, "a", 5.0, "safetensors")
            before.is_on = True
            with mock.patch.object(leases, "LEASE", EXPIRED):
                put(url, "b", SWEEPER, "safetensors")
            zombie.finish()
        with noted(f"the sweep at {where}"):
            yield url, zombie
        requests = before.count
        where += max(1, STRIDE // 16)


def test_files_that_are_used_again_are_there_or_the_save_is_refused(record_property):
    outcomes = []
    with mock.patch.object(leases, "_HEARTBEAT", 3600):
        for url, zombie in reuse_meetings():
            assert not is_torn(url, ["a", "b"])
            assert load(url, prefix="a")["n"] == (ZOMBIE if zombie.told == "committed" else 5.0)
            outcomes.append(zombie.told)
    record_property("outcomes", count(outcomes))
    assert set(outcomes) == {"committed", "refused"}


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["a zombie", "files used again"])
def test_the_test_can_fail_without_barring_trees_are_torn(how, record_property):
    """A commit that does not look at what the index bars."""
    found = (
        meetings("tensorstore", lambda url: put(url, "a", OLD, "tensorstore"))
        if how == "a zombie"
        else reuse_meetings()
    )
    with mock.patch.object(Leases, "_refuse_dead", mock.Mock(return_value=None)):
        torn = [is_torn(url, ["a", "b"]) for url, _ in found]
    record_property("torn", f"{sum(torn)} of {len(torn)}")
    assert sum(torn) > (2 if STRIDE == 1 else 0)
