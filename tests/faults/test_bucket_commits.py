"""Single moments of a commit to a bucket that once went wrong, or nearly did."""

from unittest import mock

import numpy as np
import pytest

from eformer import checkpoint
from eformer._engine.formats.safetensors import write
from eformer._engine.record.indexes import MANIFEST
from eformer._engine.runs.writer import Writer
from eformer._engine.stores import bucket, leases
from eformer._engine.stores.base import SwapError
from eformer._engine.stores.bucket import BucketUpload
from eformer._engine.stores.objects import Objects
from eformer.checkpoint import Run, SaveOptions, load, save
from support.bucket_faults import EXPIRED, forget_all, new_url
from support.buckets import leases as leases_of
from support.buckets import objects

REUSE = SaveOptions(reuse=True)


@pytest.fixture
def url():
    found = new_url()
    yield found
    forget_all(found)


def tree(number):
    return {"n": number, "w": np.full(9, number)}


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_interrupt_around_the_put_of_the_index_removes_nothing_it_may_name(url, when):
    save(tree(1), url)
    put_if = Objects.put_if

    def interrupted(self, *args):
        if when == "after":
            put_if(self, *args)
        raise KeyboardInterrupt

    with mock.patch.object(Objects, "put_if", interrupted), pytest.raises(KeyboardInterrupt):
        save(tree(2), url)
    assert load(url)["n"] == (2 if when == "after" else 1)
    assert checkpoint.verify(url).ok
    with mock.patch.object(leases, "LEASE", EXPIRED):
        save(tree(3), url)
        save(tree(4), url)
    assert checkpoint.verify(url).ok
    assert len({found for key in objects(url) for found in leases.ids_in({key})}) == 2


def test_an_interrupt_right_after_the_commit_removes_nothing(url):
    with (
        mock.patch.object(bucket, "tidy_up", mock.Mock(side_effect=KeyboardInterrupt)),
        pytest.raises(KeyboardInterrupt),
    ):
        save(tree(1), url)
    assert load(url)["n"] == 1


def test_a_refused_save_that_cannot_look_again_is_not_told_that_it_is_committed(url):
    save(tree(1), url)
    put_if = Objects.put_if
    broken = mock.patch.object(write, "read_manifest", mock.Mock(side_effect=OSError("the network is down")))

    def refused(self, *args):
        with mock.patch.object(Objects, "put_if", put_if):
            save(tree(2), url, prefix="other")
        broken.start()
        return put_if(self, *args)

    with (
        mock.patch.object(Objects, "put_if", refused),
        mock.patch("eformer._engine.tasks.turns.Turn.wait"),
        pytest.raises(OSError, match="network is down"),
    ):
        save(tree(3), url)
    broken.stop()
    assert load(url, prefix="")["n"] == 1


def test_what_is_replaced_keeps_its_lease_when_its_own_save_ends_late(url):
    """The save that wrote it has committed and is not yet over when another one replaces it."""
    end = leases.Renewed.end

    def replaced_first(self):
        with mock.patch.object(leases.Renewed, "end", end):
            save(tree(2), url)
        end(self)

    with (
        mock.patch.object(leases.Renewed, "end", replaced_first),
        mock.patch("eformer._engine.tasks.turns.Turn.wait"),
    ):
        save(tree(1), url)
    assert len(leases_of(url)) == 1
    with mock.patch.object(leases, "LEASE", EXPIRED):
        save(tree(3), url)
    assert load(url)["n"] == 3
    assert len({found for key in objects(url) for found in leases.ids_in({key})}) == 2


def test_a_file_with_outdated_leaves_is_used_again(url):
    group = {"a": np.arange(5000.0), "b": np.zeros(3)}
    for number in range(3):
        group["b"] += number
        save({"g": group}, url, options=REUSE)
        assert load(url)["g"]["b"].tolist() == group["b"].tolist()
        assert checkpoint.verify(url).ok


def test_files_of_another_checkpoint_are_used_again_after_they_were_removed_here(url):
    """Their names are barred here, so they are written under new ones."""
    base = {"base": {"w": np.arange(5000.0)}, "head": {"v": np.zeros(3)}}
    save(base, f"{url}-base", options=REUSE)
    other = SaveOptions(reuse=f"{url}-base")
    with mock.patch.object(leases, "LEASE", EXPIRED):
        for options in (other, SaveOptions(), SaveOptions(), other):
            base["head"]["v"] += 1
            save(base, url, options=options)
            assert checkpoint.verify(url).ok
    assert load(url)["head"]["v"].tolist() == [4.0] * 3


def test_a_save_that_fails_leaves_its_lease_only_if_a_request_may_still_arrive(url):
    with (
        mock.patch.object(BucketUpload, "_publish", mock.Mock(side_effect=RuntimeError("full"))),
        pytest.raises(RuntimeError, match="full"),
    ):
        save(tree(1), url)
    assert not objects(url)
    assert not leases_of(url)
    with (
        mock.patch.object(Objects, "put_all", mock.Mock(side_effect=OSError("lost"))),
        pytest.raises(OSError, match="lost"),
    ):
        save(tree(1), url)
    assert len(leases_of(url)) == 1
    with mock.patch.object(leases, "LEASE", EXPIRED):
        save(tree(1), url)
    assert not leases_of(url)


def test_after_a_lost_answer_a_committed_step_does_not_ask_for_its_writer_again(url):
    """The network that lost the answer may fail again, and the step is in place."""
    swap, told = BucketUpload.swap, []

    def lost(self, name, data, expected):
        swap(self, name, data, expected)
        if name == MANIFEST and not told:
            told.append(name)
            raise SwapError

    check = mock.Mock(side_effect=[None, OSError("the network is down")])
    with (
        mock.patch.object(BucketUpload, "swap", lost),
        mock.patch.object(Writer, "check", check),
        Run(url, signals=()) as run,
    ):
        run.save(1, tree(1)).result()
    assert told
    assert not leases_of(f"{url}/step-1")
