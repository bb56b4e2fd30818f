"""Check every byte of a checkpoint."""

import re
import shutil
import threading

import numpy as np
import pytest
import safetensors.numpy

from eformer import checkpoint
from eformer._engine.formats.safetensors import hf_index, write
from eformer.checkpoint import SaveOptions, save, verify
from eformer.errors import NotFoundError
from support.damage import flip


@pytest.fixture
def path(tmp_path):
    save(
        {f"w{i}": np.arange(100) + i for i in range(6)} | {"n": 1},
        tmp_path,
        options=SaveOptions(max_shard_bytes=1700),
    )
    return tmp_path


def test_a_sound_checkpoint_is_reported_so(path):
    report = verify(path)
    assert report.ok
    assert (report.trees, report.leaves, report.nbytes, report.has_digests) == (1, 7, 4800, True)
    assert "7 leaves, 4.8 kB: every digest matches" in str(report)


def test_all_damage_is_in_one_report(path):
    first, second, third = sorted(path.glob("*.safetensors"))
    flip(first, -1, 4)
    flip(second, 10, 4)
    third.unlink()
    report = verify(path)
    assert not report.ok
    assert [damage.leaf for damage in sorted(report.damages, key=str)] == ["", "w1", "w4", "w5"]
    assert "header" in str(report)
    assert f"of {third.name} cannot be read" in str(report)


def test_appended_and_missing_bytes_are_noticed(path):
    first, second, _ = sorted(path.glob("*.safetensors"))
    first.write_bytes(first.read_bytes() + bytes(64))
    second.write_bytes(second.read_bytes()[:-100])
    assert [d.leaf for d in verify(path).damages] == ["", "", "w3"]


def test_files_of_other_programs_have_no_digests(tmp_path):
    safetensors.numpy.save_file({"w": np.ones(3)}, tmp_path / "x.safetensors")
    report = verify(tmp_path / "x.safetensors")
    assert report.ok
    assert not report.has_digests
    assert "there are no digests to check the bytes against" in str(report)


def test_a_checkpoint_that_is_replaced_meanwhile_is_not_called_damaged(path, monkeypatch):
    from eformer._engine.tools import verify as _verify

    check, calls = _verify.check_pieces, []

    def replace_first(*args):
        if not calls:
            calls.append(1)
            flip(max(path.glob("*.safetensors")), -1, 4)
            save({"new": np.ones(3)}, path)
        check(*args)

    monkeypatch.setattr(_verify, "check_pieces", replace_first)
    assert verify(path).ok
    assert checkpoint.load(path)["new"][0] == 1


# ------------------------------------------------------------------------------------------ beside the leaves


@pytest.fixture
def shards(tmp_path):
    tree = {"a": np.arange(100.0), "b": np.ones(100)}
    save(tree, tmp_path / "shards", options=SaveOptions(max_shard_bytes=900))
    return tmp_path / "shards"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda text: text.replace("00001-of", "00009-of"), "do not list what the files hold"),
        (lambda text: text.replace('"total_size": 1600', '"total_size": 1'), "do not list what the files hold"),
        (lambda text: re.sub('"eformer": ".*"', f'"eformer": "{"0" * 16}"', text), "are of the save '0000000000000000'"),
        (lambda text: text[:-9], "cannot be read: "),
        (lambda text: "", "cannot be read: "),
    ],
)  # fmt: skip
def test_an_index_for_other_readers_is_compared_with_the_files(shards, change, problem):
    index = shards / "model.safetensors.index.json"
    text = index.read_text()
    index.write_text(change(text))
    (damage,) = verify(shards).damages
    assert damage.file == index.name
    assert problem in damage.problem
    index.write_text(text)
    assert verify(shards).ok


def test_an_index_for_other_readers_that_is_missing_is_noticed(shards):
    (shards / "model.safetensors.index.json").unlink()
    assert "are missing. Only other readers use them" in str(verify(shards))
    save({"a": np.ones(3)}, shards)
    assert verify(shards).ok  # one file needs none


def test_an_index_of_another_program_is_not_looked_at(shards):
    for text in ('{"weight_map": {}}', "garbage"):
        (shards / "model.safetensors.index.json").write_text(text)
        assert verify(shards).ok


def test_an_index_that_a_save_is_about_to_write_is_waited_for(shards, monkeypatch):
    """The manifest is swapped first, the index is written last."""
    saves, began, bring = [], threading.Event(), write.bring_up_to_date

    def slowly(*args):
        began.set()
        asked.wait(60)
        return bring(*args)

    asked, differences = threading.Event(), hf_index._differences

    def look(*args):
        found = differences(*args)
        asked.set()
        return found

    monkeypatch.setattr(write, "bring_up_to_date", slowly)
    monkeypatch.setattr(hf_index, "_differences", look)
    again = {"a": np.ones(100), "b": np.arange(100.0)}
    saves.append(
        threading.Thread(target=lambda: save(again, shards, options=SaveOptions(max_shard_bytes=900)))
    )
    saves[0].start()
    began.wait(60)
    report = verify(shards)
    saves[0].join()
    assert asked.is_set()
    assert report.ok, report


@pytest.mark.parametrize("mark", [b"", b"x", None])
def test_the_mark_of_a_database_is_compared_with_the_manifest(tmp_path, mark):
    save({"a": np.ones(3)}, tmp_path, format="tensorstore", options=SaveOptions(ocdbt=True))
    assert verify(tmp_path).ok
    file = tmp_path / "tree.ocdbt" / ".eformer"
    file.write_bytes(mark) if mark is not None else file.unlink()
    (damage,) = verify(tmp_path).damages
    assert damage.file == "tree.ocdbt/.eformer"
    assert ("cannot be read" if mark is None else "are the mark") in damage.problem


@pytest.mark.parametrize("text", ["{}", '{"format": "tensorstore"}'])
def test_an_index_of_nothing_is_no_checkpoint(tmp_path, text):
    (tmp_path / "tensorstore_index.json").write_text(text)
    for call in (verify, checkpoint.inspect, checkpoint.load):
        with pytest.raises(NotFoundError, match="holds no trees: its index lists none"):
            call(tmp_path)


# ------------------------------------------------------------------------------------------------ runs


@pytest.fixture
def run(tmp_path):
    for number in (1, 2, 3):
        save({"w": np.full(100, number), "n": number}, tmp_path / "run" / f"step-{number}")
    return tmp_path / "run"


def test_every_step_of_a_run_is_checked(run):
    report = verify(run)
    assert report.ok
    assert (report.path, report.leaves, report.nbytes) == (str(run), 6, 2400)
    assert [(each.path, each.leaves) for each in report.steps] == [(f"{run}/step-{n}", 2) for n in (1, 2, 3)]
    assert str(report).count("every digest matches") == 3
    flip(run / "step-1" / "model.safetensors", -1, 4)
    report = verify(run)
    assert not report.ok
    assert [damage.file for damage in report.damages] == ["step-1/model.safetensors"]
    assert [each.ok for each in report.steps] == [False, True, True]


@pytest.mark.parametrize("number", [1, 3])
def test_a_step_that_cannot_be_read_at_all_is_damage_of_its_run(run, number):
    (run / f"step-{number}" / "manifest.json").write_bytes(b"{")
    (damage,) = verify(run).damages
    assert damage.file == f"step-{number}"
    assert str(damage).startswith(f"step-{number} cannot be read: ")
    assert "bytes 0 to 0" not in str(verify(run))


def test_one_step_of_a_run_can_be_checked(run):
    (run / "step-3" / "manifest.json").write_bytes(b"{")
    report = verify(run, step=2)
    assert (report.ok, report.path, report.steps) == (True, f"{run}/step-2", ())
    with pytest.raises(NotFoundError, match=f"{run} has no step 9"):
        verify(run, step=9)


def test_steps_that_are_removed_while_their_run_is_checked_are_left_out(run):
    def remove(done, total):
        shutil.rmtree(run / "step-2", ignore_errors=True)

    report = verify(run, progress=remove)
    assert report.ok
    assert [each.path for each in report.steps] == [f"{run}/step-1", f"{run}/step-3"]
