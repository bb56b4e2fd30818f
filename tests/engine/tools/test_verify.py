"""Check every byte of a checkpoint."""

import numpy as np
import pytest
import safetensors.numpy

from eformer import checkpoint
from eformer.checkpoint import SaveOptions, save, verify
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
    assert "7 leaves, 4800 bytes: every digest matches" in str(report)


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

    check, calls = _verify.check, []

    def replace_first(*args):
        if not calls:
            calls.append(1)
            flip(max(path.glob("*.safetensors")), -1, 4)
            save({"new": np.ones(3)}, path)
        check(*args)

    monkeypatch.setattr(_verify, "check", replace_first)
    assert verify(path).ok
    assert checkpoint.load(path)["new"][0] == 1
