"""A real disk that is full: the save says so, and the checkpoint that was there still is."""

import errno
import re
import shutil
from unittest import mock

import numpy as np
import pytest

from eformer._engine.stores import new_files
from eformer.checkpoint import SaveOptions, load, save
from support.faults import NEW, OLD, Scene, calls_of, noted

pytestmark = pytest.mark.sample(3)


def test_a_disk_that_has_no_room_for_a_second_checkpoint_keeps_the_first(layout, small_disk):
    scene = Scene.of(layout, small_disk.place)
    scene.reset()
    with small_disk.filled_but_for(pages=2), pytest.raises(OSError, match="No space left") as raised:
        layout.save(scene.folder, NEW)
    assert raised.value.errno == errno.ENOSPC
    assert scene.generation == OLD
    scene.check_next_save()


@pytest.mark.sample(6)
def test_a_save_that_runs_out_of_room_anywhere_leaves_the_old_tree_or_the_new(layout, small_disk):
    scene = Scene.of(layout, small_disk.place)
    endings, no_pause = set(), mock.patch.object(new_files, "_REMOVING", 0.0)
    for pages in range(0, 60, 2):
        scene.reset()
        with noted(f"a disk with {pages} free pages"), no_pause:
            with small_disk.filled_but_for(pages):
                endings.add(code := save_and_tell(scene))
            assert scene.generation in ({OLD, NEW} if code else {NEW})
            scene.check_next_save()
    assert endings == {errno.ENOSPC, 0}


def test_a_save_that_cannot_fit_says_so_before_its_first_byte(small_disk):
    path, tree = small_disk.place / "x", {"w": np.arange(50_000.0)}
    save(tree, path)

    def refused():
        text = rf"No space left on device: this save writes 400 kB, and .* kB are free\. .*: '{re.escape(str(path))}'"
        with pytest.raises(OSError, match=text) as raised:
            save(tree, path)
        assert raised.value.errno == errno.ENOSPC

    with small_disk.filled_but_for(pages=40):
        assert not {"open", "pwrite", "write"} & set(calls_of(refused))
    assert load(path)["w"][-1] == 49_999


def test_a_save_waits_for_the_room_of_a_removal_that_is_under_way(small_disk):
    place, tree = small_disk.place, {"w": np.arange(50_000.0)}
    save(tree, place / "old")
    removal = mock.Mock(side_effect=lambda _: shutil.rmtree(place / "old"))
    with small_disk.filled_but_for(pages=40), mock.patch.object(new_files.time, "sleep", removal):
        save(tree, place / "new")
    assert load(place / "new")["w"][-1] == 49_999


def test_linked_and_compressed_leaves_need_no_room_of_their_own(small_disk):
    place, tree = small_disk.place, {"w": np.zeros(50_000)}
    save(tree, place / "old")
    with small_disk.filled_but_for(pages=40):
        save(tree, place / "linked", options=SaveOptions(reuse=place / "old"))
        save(tree, place / "small", format="zarr", options=SaveOptions(compression="zstd"))


def save_and_tell(scene):
    try:
        scene.layout.save(scene.folder, NEW)
    except OSError as error:
        return error.errno
    return 0
