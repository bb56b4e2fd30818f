"""Every file in a directory of another writer is read, known to hold no leaves, or listed as left out."""

import json
import logging
import shutil
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from eformer import checkpoint
from eformer.errors import FormatError

COMPAT = Path(__file__).parents[2] / "compat"
W = np.arange(4, dtype=np.float32)

# As they lie in snapshots of Hugging Face.
WITHOUT_LEAVES = [
    "config.json", "generation_config.json", "special_tokens_map.json", "tokenizer.json", "tokenizer_config.json",
    "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model", "chat_template.jinja", "README.md",
    "LICENSE", "LICENSE.txt", "USE_POLICY.md", ".gitattributes", "modeling_x.py", "trainer_state.json",
    "training_args.bin", "1_Pooling/config.json", ".cache/huggingface/model.bin", "model.safetensors.md5",
    "preprocessor_config.json", "assets/logo.png", "runs/events.out.tfevents.17", "manifest.json",
]  # fmt: skip
MAY_HOLD_LEAVES = [
    "pytorch_model.bin", "tf_model.h5", "flax_model.msgpack", "optimizer.pt", "rng_state.pth", "weights.npz", "x.ckpt",
    "onnx/model.onnx", "original/consolidated.00.pth", "2_Dense/model.safetensors", "deep/er/part", "checkpoint",
    "tokenizer.safetensors.bin", "zarr.json",
]  # fmt: skip


def put(directory, *names, data=b"\0\1"):
    for name in names:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(data)
    return directory


def zarr(directory, name):
    about = {
        "chunks": [4], "compressor": None, "dtype": "<f4", "fill_value": None, "filters": None, "order": "C",
        "shape": [4], "zarr_format": 2,
    }  # fmt: skip
    put(directory, f"{name}/.zarray", data=json.dumps(about).encode())
    return put(directory, f"{name}/0", data=W.tobytes())


@pytest.fixture(params=["safetensors", "zarr", "index", "orbax"])
def path(request, tmp_path):
    """A directory of another writer."""
    path = tmp_path / "c"
    path.mkdir()
    if request.param == "safetensors":
        safetensors.numpy.save_file({"w": W}, path / "model.safetensors")
    elif request.param == "orbax":
        shutil.copytree(COMPAT / "orbax" / "v0_plain", path, dirs_exist_ok=True)
    else:
        zarr(path, "w")
    if request.param == "index":
        listed = {
            "format": "tensorstore",
            "version": "1.0",
            "arrays": [{"path": "w", "shape": [4], "dtype": "float32"}],
        }
        (path / "tensorstore_index.json").write_text(json.dumps(listed))
    return path


def test_a_whole_directory_leaves_nothing_out(path):
    assert checkpoint.inspect(path).left_out == ()
    assert checkpoint.verify(path).ok


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", WITHOUT_LEAVES)
def test_files_that_are_known_to_hold_no_leaves_do_not_count(path, name):
    if name != "manifest.json" or (path / "model.safetensors").exists():
        put(path, name, data=b"{}")
    assert checkpoint.verify(path).ok


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", MAY_HOLD_LEAVES)
def test_all_other_files_are_listed(path, name):
    put(path, name)
    assert checkpoint.inspect(path).left_out == (name,)
    report = checkpoint.verify(path)
    assert not report.ok
    assert report.damages == ()
    assert f"1 file not read, which may hold leaves: {name}" in str(report)


@pytest.mark.parametrize("mark", ["zarr.json", "manifest.ocdbt"])
def test_a_directory_of_arrays_is_listed_as_one(path, mark):
    put(path, f"more/{mark}", "more/d/0", "more/c/0/0")
    assert checkpoint.inspect(path).left_out == ("more/",)


def test_a_link_to_a_directory_is_listed(path, tmp_path):
    zarr(tmp_path / "elsewhere", "a")
    (path / "linked").symlink_to(tmp_path / "elsewhere")
    if (path / "_METADATA").exists():  # TensorStore would follow it
        with pytest.raises(FormatError, match="linked is not a regular file"):
            checkpoint.inspect(path)
    else:
        assert checkpoint.inspect(path).left_out == ("linked",)


@pytest.mark.parametrize("form", ["safetensors", "tensorstore"])
def test_a_checkpoint_of_ours_below_is_another_one(path, form):
    checkpoint.save({"a": W}, path / "ours", format=form)
    assert checkpoint.verify(path).ok


def test_a_conversion_is_refused_unless_it_may_leave_something_out(path, tmp_path):
    put(path, "optimizer.pt")
    with pytest.raises(FormatError, match=r"1 file would be lost.*optimizer\.pt\. Pass allow_missing=True"):
        checkpoint.convert(path, tmp_path / "new", to="safetensors")
    assert not (tmp_path / "new").exists()
    done = checkpoint.convert(path, tmp_path / "new", to="safetensors", allow_missing=True)
    assert "not read, may hold leaves: optimizer.pt" in done.notes
    assert checkpoint.verify(tmp_path / "new").ok


def test_a_load_warns_once(path, caplog):
    put(path, "optimizer.pt", "more.bin")
    with caplog.at_level(logging.WARNING, "eformer"):
        checkpoint.load(path)
    (record,) = [record for record in caplog.records if "may hold leaves" in record.message]
    assert "more.bin; optimizer.pt" in record.message


def test_left_out_files_are_shown(path):
    put(path, "optimizer.pt")
    with checkpoint.open(path) as view:
        assert view.left_out == ("optimizer.pt",)
        for shown in (checkpoint.inspect(path), view):
            assert "left out  optimizer.pt" in repr(shown)
            assert "<i>left out:</i> optimizer.pt" in shown._repr_html_()


def test_a_comparison_says_that_it_is_not_of_all(path):
    put(path, "optimizer.pt")
    assert any("optimizer.pt" in note for note in checkpoint.diff(path, path).notes)


@pytest.mark.parametrize("form", ["safetensors", "tensorstore"])
def test_files_of_our_checkpoints_are_known_by_the_manifest(tmp_path, form):
    checkpoint.save({"w": W}, tmp_path / "c", format=form)
    put(tmp_path / "c", "README.md", "pytorch_model.bin", "checkpoint", "more/x.npz")
    assert checkpoint.verify(tmp_path / "c").ok
    assert checkpoint.inspect(tmp_path / "c").left_out == ()


def test_a_file_that_is_named_is_all_there_is(tmp_path):
    safetensors.numpy.save_file({"w": W}, tmp_path / "model.safetensors")
    put(tmp_path, "optimizer.pt")
    assert checkpoint.verify(tmp_path / "model.safetensors").ok


def test_the_original_leaves_nothing_out():
    found = [*(COMPAT / "data").rglob("tensorstore_index.json"), *(COMPAT / "data").rglob("*.index.json")]
    for index in found:
        assert checkpoint.inspect(index.parent).left_out == (), index


# ---------------------------------------------------------------------------------------------- items of Orbax


@pytest.fixture
def items(tmp_path):
    return Path(shutil.copytree(COMPAT / "orbax" / "v1", tmp_path / "items"))


def test_an_item_that_cannot_be_read_is_left_out_whatever_its_files_are_called(items):
    put(items, "data/process_0.json", "data/process_1.json", data=b"{}")
    assert checkpoint.inspect(items).left_out == ("data/",)


def test_a_file_beside_the_items_is_left_out(items):
    put(items, "extra.bin")
    assert checkpoint.inspect(items).left_out == ("extra.bin",)


def test_a_file_in_an_item_is_left_out_of_that_item(items, tmp_path):
    put(items, "data/a", "state/extra.bin")
    assert checkpoint.inspect(items).left_out == ("data/", "state/extra.bin")
    with pytest.raises(FormatError, match=r"1 file would be lost.*state/extra\.bin"):
        checkpoint.convert(items, tmp_path / "new", to="safetensors", prefix="state")


def test_a_tree_that_is_asked_for_leaves_out_no_other_item(items, tmp_path):
    put(items, "data/a")
    assert not checkpoint.convert(items, tmp_path / "new", to="safetensors", prefix="state").kept


def test_an_item_of_json_is_metadata_of_the_tree(items, tmp_path):
    put(items, "data/metadata", data=b'{"epoch": 3, "loss": NaN}')
    checkpoint.convert(items, tmp_path / "new", to="safetensors")
    assert checkpoint.inspect(tmp_path / "new").trees["state"].metadata["data"]["epoch"] == 3


def test_an_item_of_json_whose_name_is_taken_is_left_out(items):
    about = json.loads((items / "_CHECKPOINT_METADATA").read_text())
    (items / "_CHECKPOINT_METADATA").write_text(json.dumps(about | {"custom_metadata": {"data": 1}}))
    put(items, "data/metadata", data=b"{}")
    assert checkpoint.inspect(items).left_out == ("data/",)


def test_an_item_that_is_not_finished_does_not_count(items):
    put(items, "data.orbax-checkpoint-tmp-3/metadata")
    assert checkpoint.verify(items).ok


def test_safetensors_beside_the_steps_of_a_run_are_the_checkpoint(tmp_path):
    safetensors.numpy.save_file({"w": W}, tmp_path / "model.safetensors")
    shutil.copytree(COMPAT / "orbax" / "manager" / "3", tmp_path / "3")
    assert set(checkpoint.load(tmp_path)) == {"w"}
    assert checkpoint.inspect(tmp_path).left_out
