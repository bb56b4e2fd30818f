"""The power fails: what a save has acknowledged is there afterwards, and one that was under way is no half."""

import zlib
from contextlib import suppress

import pytest

from eformer.checkpoint import save, save_async
from support.faults import NEW, NOTHING, OLD, STRIDE, Scene, calls_of, coarse, hooked, noted

pytestmark = pytest.mark.sample(2)


def save_and_wait(*args, **kwargs):
    return save_async(*args, **kwargs).result()


HOW = pytest.mark.parametrize("how", [save, save_and_wait], ids=["save", "save_async"])


def test_a_cut_is_a_cut(fragile_disk):
    (fragile_disk.place / "not synced").write_bytes(b"x")
    fragile_disk.cut_power()
    fragile_disk.restart()
    assert not (fragile_disk.place / "not synced").exists()


@HOW
def test_a_first_save_is_there_after_a_cut(any_layout, fragile_disk, how):
    folder = any_layout.begin(fragile_disk.place / "folder")
    any_layout.save(folder, OLD, how)
    fragile_disk.cut_power()
    fragile_disk.restart()
    assert any_layout.generation(folder) == OLD


@HOW
def test_a_save_over_an_older_one_is_there_after_a_cut(any_layout, fragile_disk, how):
    folder = any_layout.begin(fragile_disk.place / "folder")
    any_layout.save(folder, OLD)
    fragile_disk.sync()
    any_layout.save(folder, NEW, how)
    fragile_disk.cut_power()
    fragile_disk.restart()
    assert any_layout.generation(folder) == NEW


@pytest.mark.parametrize("before", [NOTHING, OLD], ids=["first save", "over an older one"])
def test_a_cut_during_a_save_leaves_the_old_tree_or_the_new(layout, fragile_disk, before):
    scene = Scene.of(coarse(layout), fragile_disk.place, before)
    scene.reset()
    calls = calls_of(lambda: scene.layout.save(scene.folder, NEW))
    first = zlib.crc32(f"{layout} {before}".encode()) % STRIDE
    for at, call in list(enumerate(calls, 1))[first::STRIDE]:
        if call != "pwrite":
            with noted(f"a cut before call {at}, {call}"):
                check_cut(scene, fragile_disk, before, at)


def check_cut(scene, disk, before, at):
    scene.reset()
    disk.sync()
    there = {before, NEW}
    with suppress(OSError), hooked(before=lambda number, name: number == at and disk.cut_power()):
        scene.layout.save(scene.folder, NEW)
        there = {NEW}
    disk.restart()
    assert scene.generation in there
    scene.check_no_half(scene.generation)
    scene.check_next_save()
