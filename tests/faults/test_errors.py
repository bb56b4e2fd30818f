"""A save of which any call fails raises that error or succeeds; the checkpoint is whole in either case."""

import errno
import os

import pytest

from support.faults import NEW, NOTHING, OLD, Scene, coarse, failures, noted

pytestmark = pytest.mark.sample(5)

FAULTS = pytest.mark.parametrize(
    ("code", "lasting"),
    [(errno.EIO, False), (errno.ENOSPC, False), (errno.ENOSPC, True)],
    ids=["EIO", "ENOSPC", "ENOSPC from there on"],
)
BEFORE = pytest.mark.parametrize("before", [NOTHING, OLD], ids=["first save", "over an older one"])


@pytest.mark.sample(10)
@FAULTS
@BEFORE
def test_a_failing_call_leaves_the_old_tree_or_the_new(layout, place, before, code, lasting):
    scene = Scene.of(coarse(layout), place, before)
    for failure in failures(scene, OSError(code, os.strerror(code)), lasting=lasting):
        with noted(failure):
            assert failure.error is None or failure.error.errno == code
            assert scene.generation in ({before, NEW} if failure.error else {NEW})
            scene.check_next_save()


def test_an_interrupted_call_leaves_the_old_tree_or_the_new(layout, place):
    scene = Scene.of(coarse(layout), place)
    for failure in failures(scene, KeyboardInterrupt()):
        with noted(failure):
            assert failure.error
            assert scene.generation in (OLD, NEW)
            scene.check_next_save()


def test_a_failing_call_leaves_no_file_open(layout, place):
    scene = Scene.of(coarse(layout), place)
    before = os.listdir("/dev/fd")
    for failure in failures(scene, OSError(errno.EIO, "bad sector")):
        assert os.listdir("/dev/fd") == before, failure
