"""Files of torch.save: read as data, without PyTorch, equal to what PyTorch loads; hostile pickles do nothing."""

import io
import json
import os
import pickle
import shutil
import struct
import zipfile
from pathlib import Path

import jax
import numpy as np
import pytest

from eformer import checkpoint
from eformer.errors import CorruptionError, EformerError, FormatError
from support.commands import run

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
def test_files_of_pytorch_are_what_pytorch_loads(name):
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
        ("quantised", "'w': torch._utils:_rebuild_qtensor"),
        ("sparse", "'w': torch._utils:_rebuild_sparse_tensor"),
        ("meta", "'w': torch._utils:_rebuild_meta_tensor_no_storage"),
        ("module", "holds an object of the class torch.nn.modules.container:Sequential"),
        ("script", "is a program of TorchScript"),
    ],
)
def test_what_is_not_read_is_named(name, what):
    with pytest.raises(FormatError) as caught:
        checkpoint.load(HERE / f"{name}.pt")
    assert what in str(caught.value)


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


# ------------------------------------------------------------------------------------------ hostile


def archive(pickled, **members):
    """An archive as torch.save writes it, around this pickle."""
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w") as file:
        file.writestr("archive/data.pkl", pickled)
        file.writestr("archive/byteorder", "little")
        for name, data in members.items():
            file.writestr(f"archive/data/{name.removeprefix('_')}", data)
    return memory.getvalue()


class Call:
    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("inside", [True, False], ids=["in a dict", "alone"])
def test_a_pickle_that_would_run_something_runs_nothing(tmp_path, protocol, inside):
    sentinel = tmp_path / "sentinel"
    attack = Call(os.system, f"touch {sentinel}")
    raw = pickle.dumps({"a": attack, "b": 1} if inside else attack, protocol=protocol)
    path = tmp_path / "m.pt"
    path.write_bytes(archive(raw))
    if inside:
        assert checkpoint.load(path) == {"b": 1}
    else:
        with pytest.raises(FormatError, match="holds an object of the class"):
            checkpoint.load(path)
    assert not sentinel.exists()


def tensor(storage="0", kind=b"FloatStorage", size=4, offset=0, shape=(4,), strides=(1,)):
    """The pickle of one tensor, written opcode by opcode."""

    def number(value):
        return b"J" + struct.pack("<i", value)

    def several(values):
        return b"(" + b"".join(map(number, values)) + b"t"

    def text(value):
        return b"X" + struct.pack("<I", len(value)) + value.encode()

    persistent = (
        b"(" + text("storage") + b"ctorch\n" + kind + b"\n" + text(storage) + text("cpu") + number(size)
    )
    return (
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(" + persistent + b"tQ" + number(offset) + several(shape)
        + several(strides) + b"\x89}tR."
    )  # fmt: skip


def test_the_pickle_of_these_tests_is_one(tmp_path):
    (tmp_path / "m.pt").write_bytes(archive(tensor(), _0=np.arange(4, dtype="<f4").tobytes()))
    np.testing.assert_array_equal(checkpoint.load(tmp_path / "m.pt"), np.arange(4))


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"size": 400}, "has 16 bytes, not 1600"),
        ({"shape": (5,)}, "ends after element 5"),
        ({"offset": 1}, "ends after element 5"),
        ({"strides": (2,)}, "ends after element 7"),
        ({"shape": (-1,)}, "makes no sense"),
        ({"strides": (-1,)}, "makes no sense"),
        ({"shape": (4, 4)}, "makes no sense"),
        ({"storage": "../../0"}, "is missing"),
        ({"storage": "1"}, "is missing"),
        ({"kind": b"QInt8Storage"}, "QInt8Storage"),
        ({"shape": (2**30, 2**20), "strides": (0, 0)}, "by using them again"),
        ({"size": -4}, "makes no sense"),
    ],
)
def test_tensors_that_make_no_sense_are_refused(tmp_path, changes, what):
    path = tmp_path / "m.pt"
    path.write_bytes(archive(tensor(**changes), _0=np.arange(4, dtype="<f4").tobytes()))
    with pytest.raises(FormatError) as caught:
        checkpoint.load(path)
    assert what in str(caught.value)


@pytest.mark.parametrize("name", ["weights", "weights_stream", "kinds"])
def test_damaged_files_are_refused_or_give_trees(tmp_path, name):
    """Whatever the bytes are, the error is ours."""
    original = (HERE / f"{name}.pt").read_bytes()
    random = np.random.default_rng(0)
    path = tmp_path / "m.pt"
    outcomes = set()
    for _ in range(150):
        data = bytearray(original)
        for at in random.integers(0, len(data), random.integers(1, 4)):
            data[at] = random.integers(0, 256)
        path.write_bytes(data[: random.integers(1, len(data) + 1)] if random.random() < 0.3 else data)
        try:
            checkpoint.load(path)
            outcomes.add("loaded")
        except EformerError:
            outcomes.add("refused")
    assert "refused" in outcomes


def test_a_pickle_that_unfolds_without_end_is_refused(tmp_path):
    """Lists of references to lists: a few hundred bytes that stand for more than fits into memory."""
    raw = b"\x80\x02(](K\x01eq\x00"
    for number in range(30):
        raw += b"](" + (b"h" + bytes([number])) * 16 + b"eq" + bytes([number + 1])
    (tmp_path / "m.pt").write_bytes(archive(raw + b"t."))
    with pytest.raises(FormatError, match="far larger than its text"):
        checkpoint.load(tmp_path / "m.pt")


def test_a_pickle_that_is_nested_too_deep_is_refused(tmp_path):
    (tmp_path / "m.pt").write_bytes(archive(b"\x80\x02" + b"](" * 5000 + b"e" * 5000 + b"."))
    with pytest.raises(FormatError, match="nested too deep"):
        checkpoint.load(tmp_path / "m.pt")
