"""The steps of a run, as a directory has them."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from flax.serialization import to_bytes

from eformer import checkpoint
from eformer._engine.formats import find as find_module
from eformer._engine.formats import steps as steps_module
from eformer._engine.record.indexes import INDEX
from eformer.checkpoint import Keep, Run, latest, load, save, steps
from eformer.errors import CorruptionError, NotFoundError, VersionError
from support.damage import newer_version
from support.trees import assert_same

ORBAX = Path(__file__).parents[2] / "compat" / "orbax"


def tree(number):
    return {"w": np.full(3, number, np.float32), "step": number}


@pytest.fixture
def run(tmp_path):
    for number in (9, 10, 100):
        save(tree(number), tmp_path / "run" / f"step-{number}")
    return tmp_path / "run"


def test_the_number_of_a_step_leads_to_its_name(run):
    with pytest.raises(NotFoundError, match=r"no checkpoint at .*10 \(nearest is 'step-10'\)"):
        load(run / "10")


def test_steps_are_in_the_order_of_their_numbers(run):
    assert [(step.number, step.path) for step in steps(run)] == [(n, f"{run}/step-{n}") for n in (9, 10, 100)]
    assert latest(run) == f"{run}/step-100"


def test_a_run_is_its_last_whole_step(run):
    assert_same(load(run), tree(100))
    assert checkpoint.inspect(run).trees[""].values == {"step": 100}
    assert checkpoint.verify(run).ok
    with checkpoint.open(run) as view:
        assert view["step"] == 100


# ------------------------------------------------------------------------- a damaged newest step


HARMS = {
    "cut short": lambda step: os.truncate(step / "model.safetensors", 100),
    "a file gone": lambda step: (step / "model.safetensors").unlink(),
    "a bad manifest": lambda step: (step / "manifest.json").write_bytes(b"{"),
    "an empty manifest": lambda step: (step / "manifest.json").write_bytes(b""),
    "no manifest": lambda step: (step / "manifest.json").unlink(),
    "a newer version": newer_version,
}
READERS = {
    "load": load,
    "open": checkpoint.open,
    "latest": latest,
    "inspect": checkpoint.inspect,
    "abstract": checkpoint.abstract,
    "diff": lambda run: checkpoint.diff(run, run / "step-10"),
    "convert": lambda run: checkpoint.convert(run, run / "out.npz"),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
@pytest.mark.parametrize("harm", HARMS)
def test_a_damaged_newest_step_is_an_error_that_names_the_one_before(run, harm, read):
    HARMS[harm](run / "step-100")
    kind, state = (VersionError, "of a newer version") if "version" in harm else (CorruptionError, "damaged")
    message = f"the newest step, 100, is {state}: .*; the step before is {run}/step-10. Pass that path"
    with pytest.raises(kind, match=message):
        read(run)
    assert not (run / "out.npz").exists()
    assert_same(load(run / "step-10"), tree(10))


HARMS_OF_ORBAX = {
    "no metadata": lambda step: (step / "default" / "_METADATA").unlink(),
    "cut metadata": lambda step: os.truncate(step / "default" / "_METADATA", 100),
    "no data": lambda step: shutil.rmtree(step / "default" / "d"),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("read", [load, latest, checkpoint.inspect, checkpoint.open])
@pytest.mark.parametrize("harm", HARMS_OF_ORBAX.values(), ids=HARMS_OF_ORBAX)
def test_a_damaged_newest_step_of_orbax_is_an_error_that_names_the_one_before(tmp_path, harm, read):
    run = shutil.copytree(ORBAX / "manager", tmp_path / "run")
    harm(run / "3")
    with pytest.raises(
        CorruptionError, match=f"the newest step, 3, is damaged: .*; the step before is {run}/2"
    ):
        read(run)
    assert load(run / "2")


def test_a_whole_item_of_orbax_is_loaded_beside_a_damaged_one(tmp_path):
    run = shutil.copytree(ORBAX / "manager", tmp_path / "run")
    shutil.copytree(run / "3" / "default", run / "3" / "other")
    os.truncate(run / "3" / "default" / "_METADATA", 100)
    assert load(run, prefix="other")


def test_the_last_whole_step_is_named_if_several_are_damaged(run):
    for number in (10, 100):
        os.truncate(run / f"step-{number}" / "model.safetensors", 100)
    with pytest.raises(
        CorruptionError, match=f"step, 100, is damaged.*; the last whole step is {run}/step-9"
    ):
        latest(run)
    os.truncate(run / "step-9" / "model.safetensors", 100)
    for read in (latest, load):
        with pytest.raises(CorruptionError, match=r"no step of .* is whole: step-100: .*step-10.*step-9"):
            read(run)


def test_an_older_step_may_be_damaged(run):
    (run / "step-10" / "manifest.json").write_bytes(b"{")
    assert latest(run) == f"{run}/step-100"
    assert_same(load(run), tree(100))


def test_a_newest_step_that_is_removed_or_replaced_while_it_is_read_is_not_damaged(run, monkeypatch):
    looked, problem_of = [], find_module.problem_of

    def late(found):
        looked.append(found.path)
        if len(looked) == 1:
            (run / "step-100" / "model.safetensors").unlink()
        if len(looked) == 2:
            shutil.rmtree(run / "step-100")
        return problem_of(found)

    monkeypatch.setattr(find_module, "problem_of", late)
    assert latest(run) == f"{run}/step-10"


def test_a_run_whose_newest_step_is_removed_while_it_is_read_is_looked_at_again(run):
    def use(found):
        if found.path.endswith("step-100"):
            shutil.rmtree(found.path)
        found.store.read("model.safetensors")
        return found.path

    assert find_module.look_at(run, use) == f"{run}/step-10"


def test_a_save_into_a_directory_that_was_there_is_not_damage(run):
    from eformer._engine.stores.local_upload import LocalUpload

    (run / "step-200").mkdir()
    upload = LocalUpload(run / "step-200")
    (run / "step-200" / "model.safetensors").write_bytes(b"in place, before its manifest is")
    assert latest(run) == f"{run}/step-100"
    upload.close()
    with pytest.raises(CorruptionError, match="the newest step, 200, is damaged"):
        latest(run)


def test_a_directory_of_notes_is_no_step(run):
    (run / "step-200").mkdir()
    for name in ("config.json", "notes.txt"):
        (run / "step-200" / name).write_text("{}")
    assert latest(run) == f"{run}/step-100"
    (run / "step-200" / "model.safetensors").write_bytes(b"x")
    with pytest.raises(CorruptionError, match="the newest step, 200, is damaged"):
        latest(run)


def test_an_index_for_other_readers_without_a_manifest_is_damage(run):
    (run / "step-200").mkdir()
    (run / "step-200" / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(CorruptionError, match="the newest step, 200, is damaged"):
        latest(run)
    assert not checkpoint.verify(run).ok


LAYOUTS = {
    "files": {},
    "arrays": {"format": "tensorstore"},
    "a prefix": {"format": "tensorstore", "prefix": "model"},
    "a database": {"format": "tensorstore", "options": {"ocdbt": True}},
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_step_of_the_checkpointer_without_its_index_is_damaged(tmp_path, layout):
    for number in (1, 2, 3):
        save(tree(number), tmp_path / f"run-{number}", **layout)
    index = "tensorstore_index.json" if "format" in layout else "manifest.json"
    (tmp_path / "run-3" / index).unlink()
    for read in (latest, load):
        with pytest.raises(CorruptionError, match=f"newest step, 3, is damaged: .* is {tmp_path}/run-2"):
            read(tmp_path)
    assert not checkpoint.verify(tmp_path).ok
    with checkpoint.Run(tmp_path, every=1) as run:
        assert list(run.resume(prefix=layout.get("prefix")).skipped) == [3]


def test_a_directory_of_another_program_called_as_the_checkpointer_does_is_no_step(tmp_path):
    save(tree(1), tmp_path / "run-1")
    (tmp_path / "run-2" / "plots").mkdir(parents=True)
    np.savez(tmp_path / "run-2" / "weights.npz", w=np.ones(2))
    safetensors.numpy.save_file({"w": np.ones(2)}, tmp_path / "run-2" / "model.safetensors")
    assert latest(tmp_path) == f"{tmp_path}/run-1"
    assert [step.number for step in steps(tmp_path)] == [1]


@pytest.mark.parametrize("form", ["safetensors", "tensorstore"])
@pytest.mark.parametrize("name", ["run", "step"])
def test_a_run_is_no_step_of_the_directory_that_it_is_in(tmp_path, name, form):
    save(tree(1), tmp_path / f"{name}-1")
    for number in (1, 2):
        save(tree(number), tmp_path / f"{name}-2" / f"step-{number}", format=form)
    (tmp_path / f"{name}-2" / "step-2" / ("manifest.json" if form == "safetensors" else INDEX)).unlink()
    (tmp_path / f"{name}-3").mkdir()
    (tmp_path / f"{name}-3" / "run.json").write_text("{}")
    assert latest(tmp_path) == f"{tmp_path}/{name}-1"
    assert [step.number for step in steps(tmp_path)] == [1]
    assert len(checkpoint.verify(tmp_path).steps) == 1


def test_a_file_that_is_not_readable_is_no_damage(run, monkeypatch):
    def refuse(found):
        raise PermissionError(13, "Permission denied", found.path)

    monkeypatch.setattr(find_module, "problem_of", refuse)
    with pytest.raises(PermissionError):
        load(run)


def test_names_of_other_programs_are_steps_too(tmp_path):
    for name in ("step_1", "run-2", "3", "checkpoint_4", "step-5"):
        save(tree(int(name[-1])), tmp_path / name)
    (tmp_path / "step-7").mkdir()
    save(tree(8), tmp_path / "best-8")
    assert [step.number for step in steps(tmp_path)] == [1, 2, 3, 4, 5]
    assert_same(load(tmp_path), tree(5))


def test_without_steps_there_is_no_run(tmp_path):
    assert latest(tmp_path) is None
    assert latest(tmp_path / "nothing") is None
    assert steps(tmp_path) == ()
    with pytest.raises(NotFoundError):
        steps(tmp_path / "nothing")
    with pytest.raises(NotFoundError):
        load(tmp_path)


def test_listing_reads_no_manifest(tmp_path):
    for number in range(3):
        (tmp_path / f"step-{number}").mkdir()
        (tmp_path / f"step-{number}" / "manifest.json").write_bytes(b"not a manifest")
    assert [step.number for step in steps(tmp_path)] == [0, 1, 2]
    with pytest.raises(CorruptionError, match="is whole: step-2"):
        latest(tmp_path)


def test_what_a_dead_save_left_is_no_step(run):
    from eformer._engine.stores.local_upload import LocalUpload

    (run / "step-200").mkdir()
    upload = LocalUpload(run / "step-200")
    upload.put([("model.safetensors", b"half")])
    upload.abandon()
    assert [step.number for step in steps(run)] == [9, 10, 100]
    assert latest(run) == f"{run}/step-100"
    save(tree(200), run / "step-200")
    assert latest(run) == f"{run}/step-200"
    assert not [path.name for path in (run / "step-200").iterdir() if path.name.startswith(".")]


def test_a_resume_from_a_step_of_a_newer_version_says_how_to_go_on_from_the_one_before(run):
    newer_version(run / "step-100")
    message = (
        r"the newest step 100 is of a newer version: .* version 99; .* upgrade it; to go on from the step before, "
        r"call resume\(step=10, rewind=True\)"
    )
    with checkpoint.Run(run, signals=()) as again:
        with pytest.raises(VersionError, match=message):
            again.resume()
        assert again.resume(step=10, rewind=True).step == 10
    assert (run / "step-100.rewound").is_dir()


@pytest.mark.parametrize("is_claimed", [False, True])
def test_a_later_file_of_flax_is_the_newest_step_for_every_reader_unless_the_directory_is_a_run(
    run, is_claimed
):
    (run / "checkpoint_200").write_bytes(to_bytes(tree(200)))
    if is_claimed:
        (run / "run.json").write_text("{}")
    newest = "step-100" if is_claimed else "checkpoint_200"
    assert latest(run) == f"{run}/{newest}"
    assert_same(load(run), load(run / newest))
    assert checkpoint.verify(run).ok
    (run / "checkpoint_200").write_bytes(b"\x81")
    assert checkpoint.verify(run).ok == is_claimed


def test_a_run_refuses_a_directory_whose_newest_step_is_a_file_of_flax(run):
    (run / "checkpoint_200").write_bytes(to_bytes(tree(200)))
    with (
        Run(run, signals=()) as job,
        pytest.raises(FileExistsError, match=r"another program \(checkpoint_200\)"),
    ):
        job.resume(like=tree(0))
    assert not (run / "run.json").exists()


def test_steps_of_orbax_whose_time_is_not_recorded_are_not_old(tmp_path):
    run = shutil.copytree(ORBAX / "manager", tmp_path / "run")
    for mark in run.glob("*/_CHECKPOINT_METADATA"):
        mark.write_text("{}")
    save(tree(4), run / "step-4")
    assert checkpoint.prune(run, keep=Keep(hours=24, foreign=True), dry_run=True).removed == ()


@pytest.mark.parametrize(
    "look", [checkpoint.latest, lambda run: checkpoint.steps(run)[0].path, checkpoint.verify]
)
def test_a_step_that_the_next_one_replaces_while_it_is_looked_at_is_not_missed(tmp_path, monkeypatch, look):
    """A run that keeps one step commits the next one, and then removes the one before."""
    save({"w": np.ones(3)}, tmp_path / "step-1")
    is_step = steps_module._is_step

    def late(store, name):
        if (tmp_path / "step-1").exists():
            save({"w": np.ones(3)}, tmp_path / "step-2")
            shutil.rmtree(tmp_path / "step-1")
        return is_step(store, name)

    monkeypatch.setattr(steps_module, "_is_step", late)
    assert "step-2" in str(look(tmp_path))
