"""A real disk that is full: the save says so, and the checkpoint that was there still is."""

import errno

import pytest

from support.faults import NEW, OLD, Scene, noted

pytestmark = pytest.mark.sample(3)


def test_a_disk_that_has_no_room_for_a_second_checkpoint_keeps_the_first(layout, small_disk):
    scene = Scene.of(layout, small_disk.place)
    scene.reset()
    with small_disk.filled_but_for(pages=2), pytest.raises(OSError, match="No space left") as raised:
        layout.save(scene.folder, NEW)
    assert raised.value.errno == errno.ENOSPC
    assert scene.generation == OLD
    scene.check_next_save()


def test_a_save_that_runs_out_of_room_anywhere_leaves_the_old_tree_or_the_new(layout, small_disk):
    scene = Scene.of(layout, small_disk.place)
    endings = set()
    for pages in range(0, 60, 2):
        scene.reset()
        with noted(f"a disk with {pages} free pages"):
            with small_disk.filled_but_for(pages):
                endings.add(code := save_and_tell(scene))
            assert scene.generation in ({OLD, NEW} if code else {NEW})
            scene.check_next_save()
    assert endings == {errno.ENOSPC, 0}


def save_and_tell(scene):
    try:
        scene.layout.save(scene.folder, NEW)
    except OSError as error:
        return error.errno
    return 0
