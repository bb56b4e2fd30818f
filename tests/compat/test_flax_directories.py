"""Directories of flax load: the last of the files of `flax.training.checkpoints`, and `flax_model.msgpack`."""

import flax.serialization
import numpy as np
import pytest

from eformer import checkpoint
from eformer.errors import FormatError


def write(path, number):
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(flax.serialization.msgpack_serialize({"w": np.full(3, number), "at": number}))


@pytest.mark.parametrize("names", [["checkpoint_9", "checkpoint_10"], ["checkpoint_0.5", "checkpoint_1.25"]])
def test_the_last_step_is_the_one_that_is_read(tmp_path, names):
    for number, name in enumerate(names):
        write(tmp_path / name, number)
    (tmp_path / "checkpoint_tmp").write_bytes(b"unfinished")
    assert checkpoint.load(tmp_path)["at"] == 1
    assert checkpoint.load(tmp_path / names[0])["at"] == 0
    assert checkpoint.verify(tmp_path).ok


@pytest.mark.parametrize("order", [(9, 10), (10, 9)])
def test_the_last_step_is_read_be_it_a_file_or_a_directory(tmp_path, order):
    pytest.importorskip("orbax.checkpoint")
    from orbax.checkpoint import PyTreeCheckpointer

    in_file, in_directory = order
    write(tmp_path / f"checkpoint_{in_file}", in_file)
    PyTreeCheckpointer().save(tmp_path / f"checkpoint_{in_directory}", {"at": in_directory, "w": np.ones(3)})
    assert checkpoint.load(tmp_path)["at"] == 10


def test_a_last_step_that_cannot_be_read_is_an_error_and_not_the_one_before(tmp_path):
    write(tmp_path / "checkpoint_9", 9)
    for data in (b"", b"something else", (tmp_path / "checkpoint_9").read_bytes()[:-3]):
        (tmp_path / "checkpoint_10").write_bytes(data)
        with pytest.raises(FormatError, match="checkpoint_10"):
            checkpoint.load(tmp_path)


def test_a_last_step_that_is_a_link_is_refused(tmp_path):
    write(tmp_path / "outside", 3)
    write(tmp_path / "run" / "checkpoint_1", 1)
    (tmp_path / "run" / "checkpoint_2").symlink_to(tmp_path / "outside")
    with pytest.raises(FormatError, match="checkpoint_2 is a link; pass the path"):
        checkpoint.load(tmp_path / "run")


def test_files_beside_a_safetensors_checkpoint_are_not_its_steps(tmp_path):
    checkpoint.save({"w": np.ones(2)}, tmp_path)
    write(tmp_path / "checkpoint_1", 1)
    assert set(checkpoint.load(tmp_path)) == {"w"}


def test_a_model_of_flax_is_the_directory(tmp_path):
    write(tmp_path / "flax_model.msgpack", 7)
    (tmp_path / "config.json").write_text("{}")
    assert checkpoint.load(tmp_path)["at"] == 7
    assert checkpoint.verify(tmp_path).ok
    assert checkpoint.inspect(tmp_path).left_out == ()


def test_weights_beside_a_model_of_flax_are_left_out(tmp_path):
    write(tmp_path / "flax_model.msgpack", 7)
    write(tmp_path / "other.msgpack", 8)
    assert checkpoint.verify(tmp_path).left_out == ("other.msgpack",)
    with pytest.raises(ValueError, match=r"other\.msgpack"):
        checkpoint.convert(tmp_path, tmp_path.parent / "new", to="safetensors")


def test_a_model_of_flax_in_several_files_is_refused_by_name(tmp_path):
    (tmp_path / "flax_model.msgpack.index.json").write_text('{"weight_map": {}}')
    with pytest.raises(FormatError, match=r"flax_model\.msgpack\.index\.json is the index of a flax model"):
        checkpoint.load(tmp_path)
