"""A run that keeps one step is killed at any call of a save and of what it removes: one whole step is always there."""

import pytest

from support.faults import NEW, NEXT, OLD, STRIDE, Scene, noted
from support.run_faults import RUNS
from support.trees import assert_same

pytestmark = [pytest.mark.xdist_group("kills"), pytest.mark.sample(2)]

MOMENTS = pytest.mark.parametrize("moment", ["before", "after"])


@pytest.fixture(params=RUNS, ids=str)
def layout(request):
    return request.param


def go_on(scene):
    """Resume, and save what was lost; return the step that it went on from."""
    with scene.layout.run(scene.folder) as run:
        found = run.resume()
        assert found.skipped == {}
        assert_same(found.tree, scene.layout.tree(found.step))
        for step in range(found.step + 1, NEXT + 1):
            run.save(step, scene.layout.tree(step))
    return found.step


@pytest.mark.sample(4)
@MOMENTS
def test_a_run_killed_at_any_call_resumes_at_the_last_commit_and_clears_up(forks, layout, place, moment):
    scene, survivors, deleting = Scene.of(layout, place), [], 0
    for death in forks.deaths(scene, moment):
        with noted(death):
            survivors.append(scene.generation)
            deleting += survivors[-1] == NEW and death.call in ("unlink", "rmdir")
            assert survivors[-1] in (OLD, NEW)
            assert go_on(scene) == survivors[-1]
            assert scene.generation == NEXT
            scene.layout.check_tidy(scene.folder)
    assert set(survivors) == {OLD, NEW}
    assert survivors == sorted(survivors)  # at one single call the new one is there
    assert len(survivors) >= 60 // STRIDE
    assert deleting
