"""Pruning and converting change nothing outside, whatever links lead there."""

import os
import shutil

import pytest

from eformer.checkpoint import Run, convert, load, prune, save, steps
from eformer.errors import NotFoundError
from support.links import SCRATCH, TREE, contents, foreign_array
from support.trees import assert_same

# ----------------------------------------------------------------------------------------------- prune


def test_prune_removes_links_and_not_what_they_lead_to(tmp_path, unchanged):
    for step in (1, 2, 3):
        save(TREE, tmp_path / "run" / f"step-{step}")
    (tmp_path / "run" / "step-1" / "linked").symlink_to(unchanged)
    (tmp_path / "run" / "step-1" / "notes").mkdir()
    (tmp_path / "run" / "step-1" / "notes" / "file").symlink_to(unchanged / "0")
    (tmp_path / "run" / SCRATCH).symlink_to(unchanged)
    prune(tmp_path / "run", keep=1)
    assert sorted(os.listdir(tmp_path / "run")) == [SCRATCH, "step-3"]


def test_a_step_that_has_become_a_link_is_not_pruned(tmp_path, unchanged):
    from eformer._engine.tools.prune import plan_removal, remove_planned

    for step in (1, 2):
        save(TREE, tmp_path / "run" / f"step-{step}")
    plan = plan_removal(tmp_path / "run", 1)
    shutil.rmtree(tmp_path / "run" / "step-1")
    (tmp_path / "run" / "step-1").symlink_to(unchanged)
    with pytest.raises(ValueError, match="has changed since its removal was planned"):
        remove_planned(plan)
    assert (tmp_path / "run" / "step-1").is_symlink()


def test_a_directory_with_arrays_somewhere_below_is_no_step(tmp_path):
    for number in (1, 2, 3):
        foreign_array(tmp_path / f"project{number}" / "deep" / "data")
        (tmp_path / f"project{number}" / "thesis.tex").write_text("years")
        save(TREE, tmp_path / f"step-{number}")
    pruned = prune(tmp_path, keep=1)
    assert pruned.removed == ("step-1", "step-2")
    assert pruned.left == {}
    assert sorted(os.listdir(tmp_path)) == ["project1", "project2", "project3", "step-3"]
    with pytest.raises(NotFoundError, match="arrays without an index, and perhaps other data"):
        prune(tmp_path, keep=1, pattern="project*", foreign=True)


def test_a_link_into_a_step_keeps_it(tmp_path):
    for step in (1, 2, 3):
        save(TREE, tmp_path / f"step-{step}")
    (tmp_path / "best.safetensors").symlink_to("step-1/model.safetensors")
    (tmp_path / "loop").symlink_to("loop")
    assert prune(tmp_path, keep=1).removed == ("step-2",)


def test_a_step_that_took_the_name_of_another_is_not_pruned(tmp_path):
    from eformer._engine.tools.prune import plan_removal, remove_planned

    for step in (1, 2):
        save(TREE, tmp_path / f"step-{step}")
    plan = plan_removal(tmp_path, 1)
    (tmp_path / "step-1").rename(tmp_path / "kept")
    (tmp_path / "step-1").mkdir()
    (tmp_path / "step-1" / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match="has changed since its removal"):
        remove_planned(plan)
    assert (tmp_path / "step-1" / "thesis.txt").read_text() == "mine"


def test_a_step_with_something_mounted_in_it_is_left_and_the_others_are_pruned(
    tmp_path, unchanged, mounted, caplog
):
    for step in (1, 2, 3):
        save(TREE, tmp_path / "run" / f"step-{step}")
    mounted(unchanged, tmp_path / "run" / "step-1" / "data")
    done = prune(tmp_path / "run", keep=1)
    assert (done.removed, done.kept) == (("step-2",), ("step-3",))
    assert done.left["step-1"].startswith("it contains a mount point")
    assert "run/step-1 stays: it contains a mount point" in caplog.text
    assert_same(load(tmp_path / "run" / "step-1"), TREE)


def test_a_run_goes_on_removing_steps_beside_one_with_something_mounted_in_it(
    tmp_path, unchanged, mounted, caplog
):
    with Run(tmp_path / "run", keep=1) as run:
        run.save(1, TREE).result()
        mounted(unchanged, tmp_path / "run" / "step-1" / "data")
        for step in (2, 3, 4):
            run.save(step, TREE).result()
    assert [step.number for step in steps(tmp_path / "run")] == [1, 4]
    assert caplog.text.count("run/step-1 stays: it contains a mount point") == 1


# --------------------------------------------------------------------------------------------- convert


@pytest.mark.parametrize("to", ["safetensors", "npz"])
def test_a_conversion_into_nowhere_is_refused(tmp_path, to):
    save(TREE, tmp_path / "run")
    with pytest.raises(ValueError, match="does not name a file or directory to create"):
        convert(tmp_path / "run", tmp_path / "absent" / "..", to=to)


@pytest.mark.sample(4)
@pytest.mark.parametrize("to", ["safetensors", "tensorstore", "npz", "msgpack"])
@pytest.mark.parametrize("target", ["0", "empty", "absent"])
def test_a_conversion_to_a_link_is_refused_before_anything_is_read(tmp_path, outside, to, target):
    (outside / "empty").mkdir()
    before = contents(outside)
    name = {"npz": "new.npz", "msgpack": "new.msgpack"}.get(to, "new")
    (tmp_path / name).symlink_to(outside / target)
    told = []
    with pytest.raises(FileExistsError, match="already exists"):
        convert(outside / "plain", tmp_path / name, to=to, progress=lambda *said: told.append(said))
    assert not told
    assert contents(outside) == before
    assert sorted(os.listdir(tmp_path)) == [name, "outside"]


def test_a_conversion_sweeps_nothing_through_links(tmp_path, unchanged):
    (tmp_path / SCRATCH).symlink_to(unchanged)
    convert(unchanged / "plain", tmp_path / "new", to="tensorstore")
    assert_same(load(tmp_path / "new"), TREE)
