"""Saves, one over the other, on each file system that can be made here: they differ in what a directory lists, and when."""

import pytest

from support.disks import OPTIONS, CannotMount, Mount, make_image
from support.faults import NEW, OLD, Scene

pytestmark = pytest.mark.sample(3)


@pytest.fixture(params=OPTIONS)
def disk(request, tmp_path):
    try:
        make_image(tmp_path / "image", request.param)
        mount = Mount(str(tmp_path / "image"), tmp_path / "disk", "-o", OPTIONS[request.param])
    except CannotMount as reason:
        pytest.skip(str(reason))
    yield mount.place
    mount.close()


def test_a_save_over_an_older_one_is_there_and_leaves_nothing_behind(any_layout, disk):
    scene = Scene.of(any_layout, disk)
    scene.reset()
    assert scene.generation == OLD
    any_layout.save(scene.folder, NEW)
    assert scene.generation == NEW
    scene.check_next_save()
