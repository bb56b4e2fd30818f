"""Files of torch.save are read as data, without PyTorch, equal to the trees that PyTorch loads, and completely."""

import json
import shutil
import zipfile
from pathlib import Path

import jax
import numpy as np
import pytest

from eformer import checkpoint
from eformer.errors import CorruptionError, EformerError, FormatError
from support.commands import run
from support.torch_files import archive, tensor

HERE = Path(__file__).parent / "torch"
READ = sorted(path.stem for path in HERE.glob("*.npz"))


def leaves_of(tree):
    """The arrays by path, with dtype, shape and bytes."""
    found = {}
    for path, leaf in jax.tree.leaves_with_path(tree):
        if hasattr(leaf, "dtype"):
            name = "".join(f"/{getattr(key, 'key', getattr(key, 'idx', None))}" for key in path)
            array = np.asarray(leaf)
            found[f"{name}|{array.dtype.name}|{list(array.shape)}"] = array.tobytes()
    return found


@pytest.mark.parametrize("name", READ)
def test_files_of_pytorch_equal_the_trees_that_pytorch_loads(name):
    with np.load(HERE / f"{name}.npz") as expected:
        path = HERE / name if (HERE / name).is_dir() else HERE / f"{name}.pt"
        assert leaves_of(checkpoint.load(path)) == {k: v.tobytes() for k, v in expected.items()}


def test_plain_values_and_containers_come_back():
    tree = checkpoint.load(HERE / "kinds.pt")
    assert tree["plain"] == {
        "size": (1, 2),
        "dtype": "torch.float32",
        "none": None,
        "bytes": b"\x00\xff",
    }
    assert tree["numbered"] == {3: "three"}
    assert isinstance(tree["inside"], list)
    assert tree["inside"][2][1] is None
    assert checkpoint.load(HERE / "training.pt")["epoch"] == 3


def test_objects_of_other_classes_are_left_out_and_said(caplog):
    tree = checkpoint.load(HERE / "training.pt")
    assert "args" not in tree
    assert "args (argparse:Namespace)" in caplog.text
    assert checkpoint.inspect(HERE / "training.pt").left_out == ("args (argparse:Namespace)",)
    assert "argparse:Namespace" in run("verify", HERE / "training.pt", code=1).stdout


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("quantised", "leaf 'w': torch._utils:_rebuild_qtensor"),
        ("sparse", "leaf 'w': torch._utils:_rebuild_sparse_tensor"),
        ("meta", "leaf 'w': torch._utils:_rebuild_meta_tensor_no_storage"),
        ("packed", "leaf 'fp4': elements of torch:float4_e2m1fn_x2"),
        ("module", "holds an object of the class torch.nn.modules.container:Sequential"),
        ("script", "is a program of TorchScript"),
        ("two", "belong to no member of this archive; are there several in one file?"),
    ],
)
def test_unread_contents_are_named(name, what):
    with pytest.raises(FormatError) as caught:
        checkpoint.load(HERE / f"{name}.pt")
    assert what in str(caught.value)


def test_tensors_beside_one_that_is_refused_load_when_asked_for(tmp_path):
    path = HERE / "packed.pt"
    np.testing.assert_array_equal(checkpoint.load(path, keys="w")["w"], [1, 1])
    assert checkpoint.inspect(path).left_out == (
        "storage 1 (no tensor uses it)",
        "fp4 (elements of torch:float4_e2m1fn_x2)",
    )
    run("convert", path, tmp_path / "m.safetensors", code=1)
    run("convert", path, tmp_path / "m.safetensors", "--allow-missing")
    assert set(checkpoint.load(tmp_path / "m.safetensors")) == {"w"}


@pytest.mark.parametrize("name", [f"protocol_{n}{end}" for n in (3, 4, 5) for end in ("", "_stream")])
def test_values_of_every_protocol_come_back(name):
    values = [1, 2.5, "x", b"y", None, True, (1,), {1, 2}, 2**70, 1 + 2j, None]
    assert checkpoint.load(HERE / f"{name}.pt")["values"] == values
    assert checkpoint.inspect(HERE / f"{name}.pt").left_out == ("values.10 (builtins:bytearray)",)


def test_classes_and_functions_are_left_out_and_dtypes_are_texts(tmp_path):
    raw = b"\x80\x02}(X\x01\x00\x00\x00fcos\nsystem\nX\x01\x00\x00\x00dctorch\nfloat32\nu."
    (tmp_path / "m.pt").write_bytes(archive(raw))
    assert checkpoint.load(tmp_path / "m.pt") == {"d": "torch.float32"}
    assert checkpoint.inspect(tmp_path / "m.pt").left_out == ("f (os:system)",)


def test_parts_are_read_and_damage_is_found(tmp_path):
    path = tmp_path / "m.pt"
    path.write_bytes((HERE / "weights.pt").read_bytes())
    run("verify", path)
    some = checkpoint.load(path, keys="0.weight")
    np.testing.assert_array_equal(some["0.weight"], checkpoint.load(path)["0"]["weight"])
    data = bytearray(path.read_bytes())
    weight = np.asarray(some["0.weight"]).tobytes()
    data[data.index(weight)] ^= 1
    path.write_bytes(data)
    assert "damaged" in run("verify", path, code=1).stdout


def test_a_file_converts_to_safetensors_and_back_to_the_same_leaves(tmp_path):
    run("convert", HERE / "weights.pt", tmp_path / "m.safetensors")
    assert leaves_of(checkpoint.load(tmp_path / "m.safetensors")) == leaves_of(
        checkpoint.load(HERE / "weights.pt")
    )


def test_a_directory_with_one_file_is_a_model_too(tmp_path):
    shutil.copy(HERE / "weights.pt", tmp_path / "pytorch_model.bin")
    (tmp_path / "optimizer.pt").write_bytes(b"x")
    assert leaves_of(checkpoint.load(tmp_path)) == leaves_of(checkpoint.load(HERE / "weights.pt"))
    assert checkpoint.inspect(tmp_path).left_out == ("optimizer.pt",)


def test_shards_and_index_have_to_agree(tmp_path):
    shutil.copytree(HERE / "shards", tmp_path / "m")
    index = tmp_path / "m" / "pytorch_model.bin.index.json"
    changed = json.loads(index.read_text())
    changed["weight_map"]["9.weight"] = changed["weight_map"].pop("0.weight")
    index.write_text(json.dumps(changed))
    with pytest.raises(FormatError, match=r"do not agree on: '0.weight' in .*; '9.weight' in"):
        checkpoint.load(tmp_path / "m")
    changed["weight_map"]["x"] = "../outside.bin"
    index.write_text(json.dumps(changed))
    with pytest.raises(CorruptionError, match=r"names files that are missing: ../outside.bin"):
        checkpoint.load(tmp_path / "m")
    index.write_text("{}")
    with pytest.raises(FormatError, match="is not an index of a model"):
        checkpoint.load(tmp_path / "m")


def test_plain_values_of_several_processes_come_back():
    tree = checkpoint.load(HERE / "distributed")
    assert (tree["step"], tree["name"], type(tree["list"])) == (7, "x", list)
    some = checkpoint.load(HERE / "distributed", keys="model.layer.0.weight")
    np.testing.assert_array_equal(some["model.layer.0.weight"], np.arange(24.0).reshape(6, 4))


def test_the_state_of_a_training_run_comes_back():
    path = HERE / "distributed_training"
    tree = checkpoint.load(path)
    assert tree["optimizer"]["param_groups"][0]["foreach"] is None
    assert tree["optimizer"]["param_groups"][0]["betas"] == (0.9, 0.999)
    assert tree["values"] == {
        "none": None,
        "pair": (1, 2),
        "list": [],
        "text": "x",
        "bytes": b"y",
    }
    assert "args" not in tree
    assert checkpoint.inspect(path).left_out == ("args (argparse:Namespace)",)


@pytest.mark.parametrize("change", ["missing", "short", "garbage"])
def test_damaged_directories_of_several_processes_are_refused(tmp_path, change):
    shutil.copytree(HERE / "distributed", tmp_path / "d")
    file = tmp_path / "d" / "__1_0.distcp"
    if change == "missing":
        file.unlink()
    else:
        data = file.read_bytes()
        file.write_bytes(data[:500] if change == "short" else bytes(len(data)))
    with pytest.raises(EformerError) as caught:
        checkpoint.load(tmp_path / "d")
    assert "__1_0.distcp" in str(caught.value)


def test_metadata_that_is_damaged_is_refused(tmp_path):
    shutil.copytree(HERE / "distributed", tmp_path / "d")
    original = (tmp_path / "d" / ".metadata").read_bytes()
    random = np.random.default_rng(0)
    refused = 0
    for _ in range(150):
        data = bytearray(original)
        data[random.integers(0, len(data))] = random.integers(0, 256)
        (tmp_path / "d" / ".metadata").write_bytes(data)
        try:
            checkpoint.load(tmp_path / "d")
        except EformerError:
            refused += 1
    assert refused > 50


# ------------------------------------------------------------------------------------- nothing is passed over


def left_out_of(path):
    """Whatever `inspect` lists, after `verify` and `convert` have refused to pass it over."""
    run("verify", path, code=1)
    run("convert", path, path.parent / "new.safetensors", code=1)
    run("convert", path, path.parent / "new.safetensors", "--allow-missing")
    return checkpoint.inspect(path).left_out


def test_further_members_of_an_archive_are_left_out(tmp_path):
    shutil.copy(HERE / "weights.pt", tmp_path / "m.pt")
    with zipfile.ZipFile(tmp_path / "m.pt", "a") as file:
        root = file.namelist()[0].partition("/")[0]
        file.writestr(f"{root}/more.bin", "x")
        file.writestr("other/data/0", "y")
    assert left_out_of(tmp_path / "m.pt") == (f"{root}/more.bin", "other/data/0")


def test_storages_that_no_tensor_uses_are_left_out(tmp_path):
    (tmp_path / "m.pt").write_bytes(archive(tensor(), _0=bytes(16), _1=bytes(4)))
    assert left_out_of(tmp_path / "m.pt") == ("storage 1 (no tensor uses it)",)


def test_a_second_tree_in_a_stream_is_left_out(tmp_path):
    shutil.copy(HERE / "two_stream.pt", tmp_path / "m.pt")
    assert set(checkpoint.load(tmp_path / "m.pt")) == {"a"}
    (line,) = left_out_of(tmp_path / "m.pt")
    assert line.endswith("bytes after the tree, perhaps of another torch.save")


def test_shards_that_no_index_lists_are_left_out(tmp_path):
    shutil.copytree(HERE / "shards", tmp_path / "m")
    shutil.copy(HERE / "weights.pt", tmp_path / "m" / "pytorch_model-00003-of-00003.bin")
    assert left_out_of(tmp_path / "m") == ("pytorch_model-00003-of-00003.bin",)


def test_a_shard_with_more_than_tensors_is_refused(tmp_path):
    shutil.copytree(HERE / "shards", tmp_path / "m")
    shutil.copy(HERE / "training.pt", tmp_path / "m" / "pytorch_model-00001-of-00002.bin")
    with pytest.raises(FormatError, match=r"holds more than tensors; load it by its own name: 'optimizer"):
        checkpoint.load(tmp_path / "m")


def test_files_and_bytes_that_no_item_has_are_left_out(tmp_path):
    shutil.copytree(HERE / "distributed", tmp_path / "d")
    shutil.copy(tmp_path / "d" / "__0_0.distcp", tmp_path / "d" / "__9_0.distcp")
    with (tmp_path / "d" / "__1_0.distcp").open("ab") as file:
        file.write(b"more")
    assert left_out_of(tmp_path / "d") == ("__9_0.distcp", "4 bytes of __1_0.distcp (no item has them)")


def test_items_that_are_stored_and_not_named_are_left_out(tmp_path):
    shutil.copytree(HERE / "distributed_more", tmp_path / "d")
    assert left_out_of(tmp_path / "d") == ("b at None (no item names it)",)


def test_a_directory_without_its_metadata_is_said_to_be_unfinished(tmp_path):
    shutil.copytree(HERE / "distributed", tmp_path / "d")
    (tmp_path / "d" / ".metadata").unlink()
    with pytest.raises(CorruptionError, match=r"no \.metadata, which is written last"):
        checkpoint.load(tmp_path / "d")
