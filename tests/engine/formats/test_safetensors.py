"""The safetensors layouts: the contract, the files of a directory, and how much of them is read."""

import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from contracts.checkpoint import (
    CheckpointContract,
    DirectoryContract,
    OnDisk,
    TargetContract,
    layouts,
    meshes,
    model,
)
from eformer import checkpoint
from eformer._engine.stores import new_files
from eformer._engine.stores.local import LocalStore
from eformer._engine.tasks.turns import Turn
from eformer.checkpoint import SaveOptions, load, save
from eformer.errors import CorruptionError, FormatError, NotFoundError
from eformer.serialization.async_manager import AsyncCheckpointManager
from support.damage import flip
from support.safetensors_files import F32, assert_equal, header, read_by_index
from support.states import flat
from support.trees import assert_same


class InDirectory:
    def place(self, folder):
        return folder / "checkpoint"

    def data_file(self, path):
        (file,) = path.glob("*.safetensors")
        return file


class TestDirectory(InDirectory, OnDisk, TargetContract, DirectoryContract):
    """One tree in one file, or one file for each tree."""


@pytest.mark.sample(5)
class TestShardedDirectory(InDirectory, OnDisk, DirectoryContract):
    """The same, over many files."""

    options = SaveOptions(max_shard_bytes=2000)

    def data_file(self, path):
        return max(path.glob("*.safetensors"), key=os.path.getsize)

    def test_there_really_are_many_files(self, path):
        save(model(), path)
        assert len(list(path.glob("*.safetensors"))) > 5


@pytest.mark.sample(3)
class TestOneFile(OnDisk, CheckpointContract):
    def place(self, folder):
        return folder / "checkpoint.safetensors"

    def data_file(self, path):
        return path


# ----------------------------------------------------------------------------------------- directories


def test_any_file_of_a_checkpoint_leads_to_it(tmp_path, weights):
    save(weights, tmp_path, options=SaveOptions(max_shard_bytes=300))
    save({"other": 1}, tmp_path, prefix="other")
    for name in ("manifest.json", "model-00002-of-00003.safetensors", "model.safetensors.index.json"):
        assert_same(load(tmp_path / name, prefix="" if name == "manifest.json" else None), weights)


def test_a_file_holds_one_tree(tmp_path):
    save({"w": 1}, tmp_path / "x.safetensors", prefix="a")
    with pytest.raises(ValueError, match=r"holds the tree \['a'\], and one file holds one tree"):
        save({"w": 2}, tmp_path / "x.safetensors")
    save({"w": 3}, tmp_path / "x.safetensors", prefix="a")
    assert load(tmp_path / "x.safetensors") == {"w": 3}


def test_a_file_of_a_checkpoint_is_not_replaced_alone(tmp_path, weights):
    save(weights, tmp_path)
    with pytest.raises(ValueError, match="belongs to the checkpoint"):
        save({"w": 1}, tmp_path / "model.safetensors")
    assert_same(load(tmp_path), weights)


@pytest.mark.parametrize("data", [b"junk", header({"a": F32}, bytes(16))])
def test_a_file_of_another_program_is_replaced_only_if_the_caller_says_so(tmp_path, data):
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    for attempt in (save, lambda *_: checkpoint.save_async(*_).result(), AsyncCheckpointManager().save):
        with pytest.raises(FileExistsError, match=r"x.safetensors .*; to replace it, .* overwrite=True"):
            attempt({"w": 1}, path)
        assert path.read_bytes() == data
    save({"w": 1}, path, overwrite=True)
    assert load(path) == {"w": 1}
    checkpoint.save_async({"w": 2}, path).result()
    assert load(path) == {"w": 2}


def test_a_file_of_eformer_is_replaced_also_if_it_is_empty_damaged_or_without_its_manifest(tmp_path, weights):
    path = tmp_path / "x.safetensors"
    path.touch()
    save(weights, path)
    flip(path, 60)
    with pytest.raises(CorruptionError):
        load(path)
    save(weights, path)
    save(weights, tmp_path / "d")
    (tmp_path / "d" / "manifest.json").unlink()
    save({"w": 1}, tmp_path / "d" / "model.safetensors")
    assert load(tmp_path / "d" / "model.safetensors") == {"w": 1}


def test_a_link_that_the_caller_names_is_followed(tmp_path, weights):
    save(weights, tmp_path / "there" / "x.safetensors")
    save(weights, tmp_path / "there" / "d")
    for name in ("x.safetensors", "d"):
        (tmp_path / name).symlink_to(tmp_path / "there" / name)
        assert_same(load(tmp_path / name), weights)


def test_an_index_that_is_a_link_is_not_written_through(tmp_path, weights):
    save(weights, tmp_path / "d")
    (tmp_path / "mine.json").write_text("{}")
    (tmp_path / "d" / "model.safetensors.index.json").symlink_to("../mine.json")
    save(weights, tmp_path / "d")
    assert (tmp_path / "mine.json").read_text() == "{}"
    assert_equal(read_by_index(tmp_path / "d"), flat(weights))


def test_an_index_leads_to_its_own_tree(tmp_path):
    for prefix in (None, "model_ema", "model"):
        for _ in range(2):
            save({"of": str(prefix), "w": np.ones(3)}, tmp_path, prefix=prefix)
    assert load(tmp_path / "model.safetensors.index.json")["of"] == "None"
    assert load(tmp_path / "model_ema.safetensors.index.json")["of"] == "model_ema"


def test_a_manifest_of_something_else_is_neither_a_hindrance_nor_replaced(tmp_path, weights):
    (tmp_path / "manifest.json").write_text('{"name": "an app"}')
    safetensors.numpy.save_file(flat(weights), tmp_path / "model.safetensors")
    assert load(tmp_path)["a"]["w"].shape == (5, 7)
    with pytest.raises(FileExistsError, match=r"manifest.json was not written by eformer"):
        save(weights, tmp_path, prefix="mine")


def test_a_tensor_of_absurdly_many_axes_is_refused_at_once(tmp_path, weights):
    """The product of a million large numbers takes minutes."""
    save(weights, tmp_path)
    shape = ",".join(["9223372036854775807"] * 10**6)
    (tmp_path / "x.safetensors").write_bytes(
        header(f'{{"x": {{"dtype": "F32", "shape": [{shape}], "data_offsets": [0, 0]}}}}'.encode())
    )
    save(weights, tmp_path)
    with pytest.raises(FormatError, match="has 1000000 axes"):
        load(tmp_path / "x.safetensors")


def test_stray_files_do_not_make_a_save_fail(tmp_path, weights):
    save(weights, tmp_path)
    (tmp_path / "x.safetensors").write_bytes(header(b'{"\xff": 1}'))
    (tmp_path / "model.safetensors.index.json").write_bytes(b'{"metadata": {"eformer": "\xff"}}')
    for _ in range(2):
        save(weights, tmp_path)
    assert_equal(read_by_index(tmp_path), flat(weights))
    assert len(list(tmp_path.iterdir())) == 4


def test_more_leaves_than_one_header_can_name_go_to_a_directory(tmp_path, monkeypatch):
    monkeypatch.setattr("eformer._engine.formats.safetensors.layout.MAX_HEADER_BYTES", 1000)
    tree = {f"w{i}": np.ones(1) for i in range(20)}
    with pytest.raises(FormatError, match="save to a directory"):
        save(tree, tmp_path / "x.safetensors")
    assert not list(tmp_path.iterdir())
    save(tree, tmp_path / "d")
    assert_same(load(tmp_path / "d"), tree)


def test_a_file_can_be_renamed_and_a_directory_moved(tmp_path, weights):
    save(weights, tmp_path / "x.safetensors")
    (tmp_path / "x.safetensors").rename(tmp_path / "y.safetensors")
    assert_same(load(tmp_path / "y.safetensors"), weights)
    save(weights, tmp_path / "a")
    (tmp_path / "a").rename(tmp_path / "b")
    assert_same(load(tmp_path / "b"), weights)


def test_a_checkpoint_whose_manifest_is_gone_is_not_taken_for_foreign(tmp_path, weights):
    save(weights, tmp_path)
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(NotFoundError, match=r"model.safetensors belongs to a save that has not finished"):
        load(tmp_path)
    assert load(tmp_path / "model.safetensors")["a"]["w"].shape == (5, 7)
    save({"new": 1}, tmp_path)
    assert load(tmp_path) == {"new": 1}


def test_a_damaged_manifest_is_neither_read_nor_replaced(tmp_path, weights):
    save(weights, tmp_path)
    manifest = tmp_path / "manifest.json"
    good = manifest.read_bytes()
    for bad in (
        good.replace(b"float32", b"float16", 1),
        good[:-10],
        b"",
        b"{}",
        b"[]",
        good.replace(b'"digest"', b'"digets"'),
    ):
        manifest.write_bytes(bad)
        for call in (
            lambda: load(tmp_path),
            lambda: checkpoint.verify(tmp_path),
            lambda: save(weights, tmp_path),
        ):
            with pytest.raises(FormatError, match=r"manifest.json"):
                call()
        assert manifest.read_bytes() == bad
    manifest.write_bytes(good)
    assert_same(load(tmp_path), weights)


def test_a_manifest_of_a_later_version_asks_for_an_upgrade(tmp_path):
    from eformer._engine.record.manifest import Manifest

    (tmp_path / "manifest.json").write_bytes(Manifest(format="safetensors", version=99).to_json())
    with pytest.raises(FormatError, match=r"version 99.*upgrade"):
        load(tmp_path)


def test_files_that_are_not_ours_are_left_alone(tmp_path, weights):
    save(weights, tmp_path)
    mine = {
        "tokenizer.json": b"{}",
        "notes.safetensors": b"not really",
        ".hidden": b"",
        "backup.safetensors": b"",
    }
    mine["backup.safetensors"] = (tmp_path / "model.safetensors").read_bytes()
    for name, data in mine.items():
        (tmp_path / name).write_bytes(data)
    save(weights, tmp_path)
    for name, data in mine.items():
        assert (tmp_path / name).read_bytes() == data


def is_in_memory(file):
    """Whether every byte of a file can be read without its disk."""
    descriptor = os.open(file, os.O_RDONLY)
    try:
        nbytes = file.stat().st_size
        return os.preadv(descriptor, [bytearray(nbytes)], 0, os.RWF_NOWAIT) == nbytes
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)


def save_in_background(tree, path):
    checkpoint.save_async(tree, path).result(60)


@pytest.mark.parametrize("call", [save, save_in_background])
def test_a_save_up_to_an_eighth_of_the_available_memory_is_warm_for_its_reader(tmp_path, monkeypatch, call):
    passed, write = [], new_files.write_past_cache
    monkeypatch.setattr(new_files, "write_past_cache", lambda *how: passed.append(1) or write(*how))
    tree = {"w": np.arange(2**18)}
    monkeypatch.setattr(new_files, "_SMALL_SAVE", 0)
    monkeypatch.setattr(new_files, "available_memory", lambda: 8 * 2**21 + 8 * 1000)  # with the header
    call(tree, tmp_path / "a")
    assert not passed
    assert is_in_memory(tmp_path / "a" / "model.safetensors")
    monkeypatch.setattr(new_files, "available_memory", lambda: 8 * 2**21)
    call(tree, tmp_path / "b")
    assert len(passed) == 1
    assert_same(load(tmp_path / "b"), tree)


def test_a_small_save_never_looks_at_the_memory_of_the_machine(tmp_path, monkeypatch):
    monkeypatch.setattr(new_files, "available_memory", lambda: pytest.fail("looked at"))
    save({"w": np.arange(2**18)}, tmp_path / "a")
    assert is_in_memory(tmp_path / "a" / "model.safetensors")


@pytest.mark.parametrize("verify", [True, False])
def test_a_file_that_is_replaced_while_it_is_read_is_read_again(tmp_path, monkeypatch, verify):
    from eformer._engine.loading import load as _load
    from eformer._engine.tools import verify as _verify
    from eformer._engine.tools import view as _view

    path, step = tmp_path / "x.safetensors", iter(range(100))

    def then_replaced(call):
        def first_replace(*args, **kwargs):
            monkeypatch.setattr(call[0], call[1], original)
            save({"a": np.full(4, n := next(step)), "step": n}, path)
            return original(*args, **kwargs)

        original = getattr(*call)
        monkeypatch.setattr(*call, first_replace)

    save({"a": np.full(4, -1), "step": -1}, path)
    then_replaced((_load, "read_targets"))
    assert_same(load(path, verify=verify), {"a": np.full(4, 0), "step": 0})
    then_replaced((_verify, "_damages"))
    assert checkpoint.verify(path).ok
    then_replaced((_view, "View"))
    with checkpoint.open(path) as view:
        assert view["a"][0] == view["step"] == 2


def test_an_open_view_outlives_its_checkpoint(tmp_path):
    save({"w": np.arange(1000)}, tmp_path)
    with checkpoint.open(tmp_path) as view:
        save({"w": np.zeros(3)}, tmp_path)
        np.testing.assert_array_equal(view["w"][990:], np.arange(990, 1000))


def test_a_missing_data_file_is_corruption(tmp_path, weights):
    save(weights, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CorruptionError, match="names a file that is missing"):
        load(tmp_path)
    assert len(checkpoint.verify(tmp_path).damages) == 6


def test_a_training_state_survives_both_layouts(tmp_path):
    save(model(), tmp_path / "a")
    save(load(tmp_path / "a"), tmp_path / "b.safetensors")
    assert_same(load(tmp_path / "b.safetensors"), model())


# -------------------------------------------------------------------------------------- reading little


def bytes_read(monkeypatch, call):
    """How many bytes of data files `call` reads."""
    from eformer._engine.stores import local_files as files

    total, read_into = [0], files.read_into

    def counting(descriptor, memory, offset):
        total[0] += len(memory)
        return read_into(descriptor, memory, offset)

    monkeypatch.setattr(files, "read_into", counting)
    call()
    return total[0]


def test_rows_are_read_exactly_and_columns_by_whole_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr("eformer._engine.saving.commit.PIECE_BYTES", 4096)
    save({"w": np.zeros((1024, 1024), np.float32)}, tmp_path)  # a piece is one row
    view = checkpoint.open(tmp_path)
    assert bytes_read(monkeypatch, lambda: view["w"][10:20]) == 10 * 4096
    assert bytes_read(monkeypatch, lambda: view["w"][10:20, 3:5]) == 10 * 4096
    assert bytes_read(monkeypatch, lambda: view["w"][5, 7]) == 4096


def test_shards_of_one_leaf_are_read_once(tmp_path, monkeypatch):
    save({"w": np.zeros((1024, 1024), np.float32)}, tmp_path)
    for sharding in layouts().values():
        assert bytes_read(monkeypatch, lambda s=sharding: load(tmp_path, shardings=s)) == 4 * 2**20


def test_selected_leaves_alone_are_read(tmp_path, monkeypatch):
    save({f"w{i}": np.zeros(100, np.float32) for i in range(10)}, tmp_path)
    assert bytes_read(monkeypatch, lambda: load(tmp_path, keys=["w3", "w7"])) == 800


# ---------------------------------------------------------------------------------------------- meshes


def test_two_meshes_of_other_devices(tmp_path):
    """From four devices to eight and back."""
    four = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("x",))
    w = jnp.arange(64.0).reshape(8, 8)
    save(jax.device_put({"w": w}, NamedSharding(four, P("x"))), tmp_path)
    loaded = load(tmp_path, mesh=meshes()[0])
    assert loaded["w"].sharding == NamedSharding(meshes()[0], P("x"))
    save(loaded, tmp_path)
    np.testing.assert_array_equal(load(tmp_path, mesh=four)["w"], w)
    assert_same(load(tmp_path)["w"], w)


def test_shardings_on_abstract_meshes_say_nothing_about_devices(tmp_path):
    save({"w": np.arange(8.0, dtype=np.float32)}, tmp_path)
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
    abstract = jax.sharding.NamedSharding(mesh.abstract_mesh, jax.sharding.PartitionSpec("x"))
    like = {"w": jax.ShapeDtypeStruct((8,), np.float32, sharding=abstract)}
    loaded = load(tmp_path, like=like, mesh=mesh, shardings=jax.sharding.PartitionSpec("x"))
    assert len(loaded["w"].addressable_shards) == 8


def test_a_manifest_settles_which_format_a_directory_has(tmp_path, monkeypatch):
    """No other index is read, and the directory is not listed."""
    save({"w": np.arange(3.0)}, tmp_path)
    asked = []
    for call in ("read", "kinds", "kind", "is_file"):
        kept = getattr(LocalStore, call)
        monkeypatch.setattr(
            LocalStore, call, lambda s, name="", *more, kept=kept: asked.append(name) or kept(s, name, *more)
        )
    assert load(tmp_path)["w"].tolist() == [0.0, 1.0, 2.0]
    assert set(asked) == {"manifest.json"}


def test_an_index_of_arrays_goes_before_a_manifest(tmp_path):
    """Saves of arrays look at the index alone, so a load must follow the index, too."""
    save({"w": np.zeros(3)}, tmp_path / "a")
    save({"w": np.ones(3)}, tmp_path / "b", format="tensorstore")
    shutil.copy(tmp_path / "a" / "manifest.json", tmp_path / "b")
    assert load(tmp_path / "b")["w"].tolist() == [1.0, 1.0, 1.0]
    save({"w": np.full(3, 2.0)}, tmp_path / "b", format="tensorstore")
    flip(tmp_path / "b" / "manifest.json", -5)
    assert load(tmp_path / "b")["w"].tolist() == [2.0, 2.0, 2.0]


@pytest.mark.parametrize("first", ["safetensors", "tensorstore"])
def test_of_two_formats_in_one_new_directory_one_save_is_refused(tmp_path, monkeypatch, first):
    """The other save has made the directory after this one looked at it."""
    second = {"safetensors": "tensorstore", "tensorstore": "safetensors"}[first]
    save({"w": np.ones(3)}, tmp_path / "other", format=first)
    monkeypatch.setattr(Turn, "wait", lambda _: os.rename(tmp_path / "other", tmp_path / "new"))
    with pytest.raises(FileExistsError, match="checkpoint of another format"):
        save({"w": np.zeros(3)}, tmp_path / "new", format=second)
    assert load(tmp_path / "new")["w"].tolist() == [1.0, 1.0, 1.0]
