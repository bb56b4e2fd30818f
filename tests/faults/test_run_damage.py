"""The newest step of a run is damaged at rest: the run resumes from the one before, and nothing sound goes.

EFORMER_DAMAGES says how many times: 40, or 1,000 by `make faults`.
"""

import os
import random

import pytest

from eformer import checkpoint
from eformer.errors import CorruptionError
from support.faults import Scene, flip, noted, zero
from support.run_faults import MARKS, RUNS, several_files
from support.trees import assert_same

DAMAGES = int(os.environ.get("EFORMER_DAMAGES", "40"))
LAST = 3
KINDS = ("bit", "bit", "bit", "cut", "gone", "more", "empty", "page")


@pytest.fixture(params=[RUNS[0], several_files(RUNS[0]), RUNS[1]], ids=["file", "files", "arrays"])
def scene(request, place):
    layout, template = request.param, place / "template"
    layout.begin(template)
    layout.save_more(template, range(1, LAST + 1))
    return Scene(layout, place / "folder", template)


def damage(file, kind, chance):
    """Damage a file; return whether that changed anything."""
    data = file.read_bytes()
    changed = {
        "bit": lambda: flip(data, chance.randrange(8 * len(data))) if data else b"x",
        "cut": lambda: data[: chance.randrange(len(data))] if data else None,
        "gone": lambda: None,
        "more": lambda: data + chance.randbytes(chance.choice([1, 8, 64])),
        "empty": lambda: b"",
        "page": lambda: zero(data, chance.randrange(max(1, len(data))), 512),
    }[kind]()
    if changed is None:
        file.unlink()
    else:
        file.write_bytes(changed)
    return changed != data


def contents(folder):
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def step_of(scene, number):
    return scene.layout.path(scene.folder) / f"step-{number}"


def check_resume(scene):
    """Resume; check what was resumed from and what is there afterwards. Return the step."""
    path = scene.layout.path(scene.folder)
    before, damaged = contents(path), contents(step_of(scene, LAST))
    with scene.layout.run(scene.folder) as run:
        found = run.resume()
        assert_same(found.tree, scene.layout.tree(found.step))
        after = contents(path)
        if found.step == LAST:
            assert after.keys() == before.keys()
        else:
            assert found.step == LAST - 1
            assert list(found.skipped) == [LAST]
            assert found.skipped[LAST]
            assert contents(path / f"step-{LAST}.damaged") == damaged
        for name, data in before.items():
            assert after.get(name) == data or name == "run.json" or name.startswith(f"step-{LAST}/")
        run.save(LAST, scene.layout.tree(LAST))
    assert checkpoint.verify(path / f"step-{LAST}").ok
    return found.step


@pytest.mark.sample(3)
def test_a_damaged_newest_step_is_never_resumed_wrongly(scene):
    chance, taken = random.Random(0), []
    for number in range(DAMAGES // 3 + 1):
        scene.reset()
        file = chance.choice(sorted(file for file in step_of(scene, LAST).rglob("*") if file.is_file()))
        kind = chance.choice(KINDS)
        with noted(f"number {number}, {kind} in {file.name}"):
            if damage(file, kind, chance):
                taken.append(check_resume(scene))
    assert (
        taken.count(LAST - 1) > len(taken) / 4
    )  # of arrays, more than half of the files only serve other programs


def test_if_all_steps_are_damaged_it_is_an_error_and_no_file_changes(scene):
    chance = random.Random(1)
    for number in range(DAMAGES // 30 + 1):
        scene.reset()
        for step in range(1, LAST + 1):
            file = chance.choice([file for file in step_of(scene, step).rglob("*") if file.name in MARKS])
            damage(file, chance.choice(["bit", "cut", "empty", "more"]), chance)
        before = contents(scene.folder)
        with noted(f"number {number}"), scene.layout.run(scene.folder) as run:
            with pytest.raises(CorruptionError, match=r"no step of .* is sound.*step 3.*step 2.*step 1"):
                run.resume()
            changed = {name for name, data in contents(scene.folder).items() if before.get(name) != data}
            assert changed == {"run/run.json"}  # which says who has looked last


@pytest.mark.parametrize("layout", RUNS, ids=str)
def test_a_step_that_was_saved_anew_has_not_the_scores_of_the_damaged_one(place, layout):
    layout.begin(place / "folder")
    layout.save_more(place / "folder", range(1, 3))
    path = layout.path(place / "folder")
    checkpoint.score(path, 2, {"eval.loss": 0.1})
    assert checkpoint.steps(path)[-1].metrics == {"eval.loss": 0.1}
    for file in (path / "step-2").rglob("*"):
        if file.name in MARKS:
            file.write_bytes(b"")
    with layout.run(place / "folder", keep=None) as run:
        assert run.resume().step == 1
        run.save(2, layout.tree(2), metrics={"loss": 2.0})
    assert checkpoint.steps(path)[-1].metrics == {"loss": 2.0}
