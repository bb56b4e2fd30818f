"""A save that is killed, at whichever call, leaves the old checkpoint or the new one; the next save clears up."""

import random

import pytest

from support.faults import LAYOUTS, NEW, NOTHING, OLD, STRIDE, Scene, calls_of, coarse, noted

pytestmark = [pytest.mark.xdist_group("kills"), pytest.mark.sample(3)]

MOMENTS = pytest.mark.parametrize("moment", ["before", "after"])


@pytest.mark.sample(6)
@MOMENTS
def test_a_save_killed_at_any_call_leaves_the_old_tree_or_the_new(forks, layout, place, moment):
    scene, survivors = Scene.of(layout, place), []
    for death in forks.deaths(scene, moment):
        with noted(death):
            survivors.append(scene.generation)
            scene.check_next_save()
    assert set(survivors) == {OLD, NEW}
    assert survivors == sorted(survivors)  # at one single call the old one gives way to the new
    assert len(survivors) >= 60 // STRIDE


@pytest.mark.sample(6)
@MOMENTS
def test_a_first_save_killed_at_any_call_leaves_nothing_or_the_tree(forks, layout, place, moment):
    scene, survivors = Scene.of(coarse(layout), place, NOTHING), []
    for death in forks.deaths(scene, moment):
        with noted(death):
            survivors.append(scene.generation)
            scene.check_no_half(survivors[-1])
            scene.check_next_save()
    assert set(survivors) == {NOTHING, NEW}
    assert survivors == sorted(survivors)


def test_saves_killed_one_after_another_never_mix(forks, layout, place):
    scene, there, rng = Scene.of(layout, place), OLD, random.Random(0)
    scene.reset()
    calls = len(calls_of(lambda: layout.save(scene.folder, NEW)))
    scene.reset()
    for generation in range(10, 40 if STRIDE == 1 else 25):
        at, moment = rng.randrange(calls // 2, calls * 3 // 2), rng.choice(["before", "after"])
        with noted(forks.save(layout, scene.folder, generation, at, moment)):
            assert scene.generation in (there, generation)
            there = scene.generation
    assert there != OLD  # some died late enough
    scene.check_next_save()


@MOMENTS
@pytest.mark.parametrize("layout", [coarse(layout) for layout in LAYOUTS if layout.prefix], ids=str)
def test_a_save_of_the_tree_beside_clears_up_after_a_killed_one(forks, layout, place, moment):
    scene = Scene.of(layout, place)
    for death in forks.deaths(scene, moment):
        with noted(death):
            layout.save_beside(scene.folder)
            assert scene.generation in (OLD, NEW)
            layout.check_tidy(scene.folder)
