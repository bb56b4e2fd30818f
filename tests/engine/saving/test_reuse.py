"""Saves that do not write again what an earlier checkpoint holds."""

import errno
import json
import os
import shutil
import tempfile
import threading
from contextlib import closing
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from eformer import checkpoint
from eformer._engine.record.manifest import Manifest
from eformer._engine.saving import recheck
from eformer._engine.stores.local import LocalStore
from eformer._engine.stores.local_files import Medium, medium
from eformer._engine.stores.local_upload import LocalUpload
from eformer.checkpoint import SaveOptions, load, save, save_async
from eformer.errors import NotFoundError
from support.damage import flip
from support.trees import assert_same

FROZEN = 2**20  # bytes


def tree(step, **more):
    base = {f"l{n}": jnp.full((FROZEN // 16,), float(n)) for n in range(4)}
    return {
        "base": base,
        "lora": {"a": jnp.full(1000, float(step)), "b": np.arange(step + 1)},
        "step": step,
        **more,
    }


@pytest.fixture(params=["safetensors", "tensorstore"])
def kind(request, monkeypatch):
    for function in (save, save_async):
        monkeypatch.setattr(function, "__kwdefaults__", {**function.__kwdefaults__, "format": request.param})
    return request.param


@pytest.fixture
def written(monkeypatch):
    """Counts the bytes that are written into data files."""

    class Written(list):
        def since(self):
            total = sum(self)
            self.clear()
            return total

    found = Written()
    for name in ("pwrite", "write"):
        call = getattr(os, name)
        monkeypatch.setattr(
            os, name, lambda d, data, *at, call=call: found.append(n := call(d, data, *at)) or n
        )
    return found


def check(path, expected):
    assert_same(load(path), expected)
    assert checkpoint.verify(path).ok


def test_only_what_has_changed_is_written(tmp_path, kind, written):
    save(tree(0), tmp_path)
    assert written.since() > FROZEN
    for step in range(1, 5):
        save(tree(step), tmp_path, options=SaveOptions(reuse=True))
        assert written.since() < 30_000
        check(tmp_path, tree(step))


def test_without_being_asked_everything_is_written(tmp_path, kind, written):
    save(tree(0), tmp_path)
    written.since()
    save(tree(1), tmp_path)
    assert written.since() > FROZEN


@pytest.mark.parametrize("first_deleted", ["older", "newer"])
def test_of_two_checkpoints_that_share_files_either_may_be_deleted(tmp_path, kind, written, first_deleted):
    older, newer = tmp_path / "older", tmp_path / "newer"
    save(tree(0), older)
    written.since()
    save(tree(1), newer, options=SaveOptions(reuse=older))
    assert written.since() < 30_000
    shutil.rmtree(tmp_path / first_deleted)
    left, step = (newer, 1) if first_deleted == "older" else (older, 0)
    check(left, tree(step))
    save(tree(2), left)  # which removes what it replaces
    check(left, tree(2))


def test_a_chain_of_checkpoints_needs_none_of_its_links(tmp_path, kind, written):
    save(tree(0), tmp_path / "0")
    for step in range(1, 4):
        written.since()
        save(tree(step), tmp_path / str(step), options=SaveOptions(reuse=str(tmp_path / str(step - 1))))
        assert written.since() < 30_000
        shutil.rmtree(tmp_path / str(step - 1))
        check(tmp_path / str(step), tree(step))


def test_saves_in_the_background_reuse_what_is_there(tmp_path, kind):
    save(tree(0), tmp_path)
    pending = [save_async(tree(step), tmp_path, options=SaveOptions(reuse=True)) for step in (1, 2, 3)]
    for save_of_step in pending:
        save_of_step.result(60)
    check(tmp_path, tree(3))


def test_a_save_that_is_still_under_way_can_be_reused(tmp_path, kind, written):
    pending = []
    for step in range(4):
        reuse = tmp_path / str(step - 1) if step else True
        pending.append(save_async(tree(step), tmp_path / str(step), options=SaveOptions(reuse=reuse)))
    for step, save_of_step in enumerate(pending):
        save_of_step.result(60)
        check(tmp_path / str(step), tree(step))
    assert written.since() < 1.2 * FROZEN


def test_an_earlier_checkpoint_that_cannot_be_read_does_no_harm(tmp_path, kind, monkeypatch, caplog):
    from eformer._engine.saving import reuse as _reuse

    def refuse(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    save(tree(0), tmp_path / "a")
    monkeypatch.setattr(_reuse, "find", refuse)
    save(tree(1), tmp_path / "b", options=SaveOptions(reuse=tmp_path / "a"))
    assert "writing all leaves" in caplog.text
    check(tmp_path / "b", tree(1))


def test_another_size_of_pieces_is_no_reason_to_mix_them(tmp_path, kind, monkeypatch):
    save(tree(0), tmp_path)
    monkeypatch.setattr("eformer._engine.saving.commit.PIECE_BYTES", 2**14)
    save(tree(1), tmp_path, options=SaveOptions(reuse=True))
    check(tmp_path, tree(1))


def test_a_relative_path_means_where_it_was_called(tmp_path, kind, monkeypatch, written):
    (tmp_path / "x").mkdir()
    monkeypatch.chdir(tmp_path / "x")
    save(tree(0), "a")
    written.since()
    go, begin = threading.Event(), LocalStore.begin
    monkeypatch.setattr(
        LocalStore, "begin", lambda store, *how, **more: go.wait(60) and begin(store, *how, **more)
    )
    pending = save_async(tree(1), "b", options=SaveOptions(reuse="a"))
    monkeypatch.chdir(tmp_path)
    go.set()
    pending.result(60)
    assert written.since() < 30_000
    check(tmp_path / "x" / "b", tree(1))


def test_casts_and_checksums_go_along(tmp_path, kind, written):
    options = SaveOptions(dtype="bfloat16", checksums=True, reuse=True)
    save(tree(0), tmp_path, options=options)
    written.since()
    save(tree(1), tmp_path, options=options)
    assert written.since() < 30_000
    assert load(tmp_path)["base"]["l1"].dtype == jnp.bfloat16
    entries = checkpoint.inspect(tmp_path).trees[""].leaves
    assert all(entry.sha256 for entry in entries.values())


def test_a_tree_that_has_not_changed_at_all_writes_no_data(tmp_path, kind, written):
    save(tree(0), tmp_path)
    written.since()
    save(tree(0), tmp_path, options=SaveOptions(reuse=True))
    assert written.since() < 15_000
    check(tmp_path, tree(0))


def test_what_is_no_longer_there_and_what_is_new(tmp_path, kind):
    save(tree(0, gone=jnp.ones(50)), tmp_path)
    save(tree(1, new=jnp.ones(60)), tmp_path, options=SaveOptions(reuse=True))
    check(tmp_path, tree(1, new=jnp.ones(60)))


@pytest.mark.parametrize(
    "other",
    [
        lambda: jnp.zeros(FROZEN // 16, jnp.int32),
        lambda: jnp.zeros((2, FROZEN // 32)),
        lambda: jnp.zeros(FROZEN // 16).at[-1].set(1),
    ],
    ids=["dtype", "shape", "value"],
)
def test_another_dtype_shape_or_value_is_written(tmp_path, kind, other):
    save({"w": jnp.zeros(FROZEN // 16), "v": jnp.ones(FROZEN)}, tmp_path)
    expected = {"w": other(), "v": jnp.ones(FROZEN)}
    save(expected, tmp_path, options=SaveOptions(reuse=True))
    check(tmp_path, expected)


def test_shards_are_reused_if_they_are_cut_alike(tmp_path, kind, written):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y"))
    values = jnp.arange(2**18).reshape(512, 512)
    cut = {"w": jax.device_put(values, NamedSharding(mesh, P("x", "y")))}
    save(cut, tmp_path)
    written.since()
    save(cut, tmp_path, options=SaveOptions(reuse=True))
    assert written.since() < 15_000
    otherwise = {"w": jax.device_put(values, NamedSharding(mesh, P(None, "x")))}
    save(otherwise, tmp_path, options=SaveOptions(reuse=True))
    np.testing.assert_array_equal(load(tmp_path)["w"], values)


def test_prefixes_are_told_apart(tmp_path, kind, written):
    save(tree(0), tmp_path, prefix="model")
    save(tree(5), tmp_path, prefix="ema")
    written.since()
    save(tree(1), tmp_path, prefix="model", options=SaveOptions(reuse=True))
    assert written.since() < 30_000
    assert_same(load(tmp_path, prefix="ema"), tree(5))
    assert_same(load(tmp_path, prefix="model"), tree(1))


@pytest.mark.parametrize("code", [errno.EXDEV, errno.EPERM, errno.EMLINK])
def test_where_no_links_can_be_made_everything_is_written(tmp_path, kind, monkeypatch, caplog, code):
    def refuse(*_, **__):
        raise OSError(code, os.strerror(code))

    save(tree(0), tmp_path)
    monkeypatch.setattr(os, "link", refuse)
    save(tree(1), tmp_path, options=SaveOptions(reuse=True))
    check(tmp_path, tree(1))
    assert "cannot link" in caplog.text


def test_a_file_that_was_cut_short_is_not_linked(tmp_path, kind, caplog):
    save(tree(0), tmp_path)
    for file in tmp_path.rglob("*"):
        if file.is_file() and file.stat().st_size > 200_000:
            os.truncate(file, file.stat().st_size - 1)
    save(tree(1), tmp_path / "new", options=SaveOptions(reuse=tmp_path))
    check(tmp_path / "new", tree(1))
    assert "cannot link" in caplog.text


def test_a_link_in_the_place_of_a_file_is_not_followed(tmp_path, kind):
    save(tree(0), tmp_path / "a")
    for file in (tmp_path / "a").rglob("*"):
        if file.is_file() and file.stat().st_size > 200_000:
            moved = file.rename(tmp_path / f"{file.parent.name}-{file.name}")
            file.symlink_to(moved)
    save(tree(1), tmp_path / "b", options=SaveOptions(reuse=tmp_path / "a"))
    check(tmp_path / "b", tree(1))
    assert not any(file.is_symlink() for file in (tmp_path / "b").rglob("*"))


def test_what_cannot_be_done_is_refused_at_once(tmp_path):
    with pytest.raises(NotFoundError, match=r"no checkpoint at .*gone"):
        save_async(tree(0), tmp_path / "a", options=SaveOptions(reuse=tmp_path / "gone"))
    with pytest.raises(ValueError, match="one file"):
        save(tree(0), tmp_path / "a.safetensors", options=SaveOptions(reuse=True))
    with pytest.raises(TypeError, match="must be True, False or a path"):
        SaveOptions(reuse=1)
    with pytest.raises(ValueError, match="empty"):
        save(tree(0), tmp_path / "a", options=SaveOptions(reuse=""))
    with pytest.raises(ValueError, match="cannot be combined with ocdbt"):
        save(tree(0), tmp_path / "a", format="tensorstore", options=SaveOptions(reuse=True, ocdbt=True))
    assert not (tmp_path / "a").exists()


def test_a_checkpoint_that_is_no_use_does_no_harm(tmp_path, kind, caplog):
    elsewhere = tmp_path / "elsewhere"
    save(tree(0), elsewhere, format="tensorstore" if kind == "safetensors" else "safetensors")
    with caplog.at_level("INFO", "eformer"):
        save(tree(1), tmp_path / "a", options=SaveOptions(reuse=elsewhere))
    assert "writing all leaves" in caplog.text
    check(tmp_path / "a", tree(1))
    for file in elsewhere.glob("*.json"):
        file.write_bytes(b"{" + file.read_bytes()[:50])
    save(tree(2), tmp_path / "b", options=SaveOptions(reuse=elsewhere))
    check(tmp_path / "b", tree(2))


# ------------------------------------------------------------------------------------- safetensors alone


def test_a_file_of_which_little_is_needed_is_not_kept(tmp_path, written):
    save({"a": jnp.zeros(FROZEN), "b": jnp.ones(FROZEN // 4)}, tmp_path)
    (before,) = tmp_path.glob("*.safetensors")
    inode = before.stat().st_ino
    expected = {"a": jnp.ones(FROZEN), "b": jnp.ones(FROZEN // 4)}
    save(expected, tmp_path, options=SaveOptions(reuse=True))
    check(tmp_path, expected)
    assert inode not in {file.stat().st_ino for file in tmp_path.iterdir()}
    assert not list(tmp_path.glob("*.private"))


def test_other_readers_find_what_is_in_the_tree_and_nothing_else(tmp_path, written):
    for step in range(3):
        written.since()
        save(tree(step), tmp_path, options=SaveOptions(reuse=True))
    assert written.since() < 30_000
    save(tree(1), tmp_path, options=SaveOptions(reuse=True))
    assert not (tmp_path / "model.safetensors").exists()  # which they would take for everything
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    found = {}
    for file in tmp_path.glob("*.safetensors"):  # all of it, as some of them do
        tensors = safetensors.numpy.load_file(file)
        assert found.keys().isdisjoint(tensors)
        found |= tensors
    assert {name: file for name, file in index["weight_map"].items() if name not in found} == {}
    expected = {f"base.{n}": np.asarray(a) for n, a in tree(1)["base"].items()}
    expected |= {f"lora.{n}": np.asarray(a) for n, a in tree(1)["lora"].items()}
    assert found.keys() == expected.keys()
    for name in expected:
        np.testing.assert_array_equal(found[name], expected[name])
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in expected.values())


def test_a_file_with_more_in_it_than_belongs_to_the_tree_is_not_shown_to_other_readers(tmp_path, written):
    save(tree(0), tmp_path)
    written.since()
    for step in (1, 2):
        save(tree(step), tmp_path, options=SaveOptions(reuse=True))
        assert written.since() < 30_000
        check(tmp_path, tree(step))
        assert not list(tmp_path.glob("*.safetensors"))
        assert not list(tmp_path.glob("*.index.json"))
    save(tree(3), tmp_path)
    assert not list(tmp_path.glob("*.private"))
    assert (tmp_path / "model.safetensors.index.json").exists()
    check(tmp_path, tree(3))


def test_what_changes_is_written_apart_from_what_does_not(tmp_path, written):
    def mixed(step):
        return {f"layer{n}": {"w": jnp.full(FROZEN // 64, n), "lora": jnp.full(100, step)} for n in range(20)}

    save(mixed(0), tmp_path, options=SaveOptions(reuse=True))
    for step in (1, 2, 3):
        written.since()
        save(mixed(step), tmp_path, options=SaveOptions(reuse=True))
        assert written.since() < 60_000
        check(tmp_path, mixed(step))


def test_a_name_that_another_file_has_is_left_to_it(tmp_path, monkeypatch):
    """As in a copy of the directory that is reused."""
    older, copy = tmp_path / "older", tmp_path / "copy"
    save({"first": np.ones(3)}, older)
    save(tree(0), older, options=SaveOptions(reuse=True))
    shutil.copytree(older, copy)

    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(LocalUpload, "swap", fail)
        with pytest.raises(OSError, match="No space"):
            save(tree(1), copy, options=SaveOptions(reuse=older))
    check(copy, tree(0))
    before = set(copy.iterdir())
    save(tree(1), copy, options=SaveOptions(reuse=older))
    check(copy, tree(1))
    check(older, tree(0))
    assert before & set(copy.glob("*.safetensors*")) <= {copy / "model.safetensors.index.json"}


def test_a_manifest_that_names_a_file_elsewhere_gets_it_not(tmp_path, caplog):
    save(tree(0), tmp_path / "a")
    manifest = Manifest.from_json((tmp_path / "a" / "manifest.json").read_bytes(), "manifest.json")
    entry = manifest.trees[""]
    (tmp_path / "secret.safetensors").write_bytes((tmp_path / "a" / "model.safetensors").read_bytes())
    import msgspec

    files = (msgspec.structs.replace(entry.files[0], name="../secret.safetensors"),)
    forged = manifest.with_tree("", msgspec.structs.replace(entry, files=files))
    (tmp_path / "a" / "manifest.json").write_bytes(forged.to_json())
    save(tree(1), tmp_path / "b", options=SaveOptions(reuse=tmp_path / "a"))
    check(tmp_path / "b", tree(1))
    assert (tmp_path / "secret.safetensors").stat().st_nlink == 1
    assert "cannot link" in caplog.text or "writing all leaves" in caplog.text


def test_a_link_that_is_not_what_it_should_be_is_removed(tmp_path):
    (tmp_path / "file").write_bytes(b"123")
    store = LocalStore(tmp_path)
    entry = store.read("file")[1]
    (tmp_path / "file").write_bytes(b"1234")
    with closing(LocalUpload(tmp_path / "new")) as upload:
        assert not upload.link("other", store, entry)
        assert upload.names() == []


# ------------------------------------------------------------------------------------------ other file systems


@pytest.fixture
def in_memory():
    """A real tmpfs, which has no page cache to pass by."""
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("no /dev/shm to write to")
    path = Path(tempfile.mkdtemp(dir="/dev/shm"))
    yield path
    shutil.rmtree(path)


def test_a_file_system_in_memory(in_memory, tmp_path, kind, monkeypatch, caplog, written):
    monkeypatch.setattr("eformer._engine.stores.new_files._WARM_PART", 0)
    monkeypatch.setattr("eformer._engine.stores.new_files._SMALL_SAVE", 0)
    with caplog.at_level("DEBUG", "eformer"):
        save(tree(0), in_memory / "a", options=SaveOptions(reuse=True))
    assert ("cannot write past the page cache" in caplog.text) == (kind == "safetensors")
    written.since()
    save(tree(1), in_memory / "b", options=SaveOptions(reuse=in_memory / "a"))
    assert written.since() < 30_000
    assert_same(load(in_memory / "b", mmap=True), tree(1))
    save(tree(2), tmp_path, options=SaveOptions(reuse=in_memory / "b"))  # where no link leads to
    assert "cannot link" in caplog.text
    for path, step in ((in_memory / "b", 1), (tmp_path, 2)):
        check(path, tree(step))


# ------------------------------------------------------------------------------------------------- damage


def largest(path):
    return max((p for p in path.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def test_a_damaged_file_is_written_anew(tmp_path, kind, caplog):
    save(tree(0), tmp_path / "a")
    flip(largest(tmp_path / "a"), FROZEN // 16)
    save(tree(1), tmp_path / "b", options=SaveOptions(reuse=tmp_path / "a"))
    check(tmp_path / "b", tree(1))
    assert "is damaged, and its leaves are written anew: bytes " in caplog.text
    assert "Checkpoints with the same file are damaged, too: a. Remove them" in caplog.text


def test_a_file_whose_header_is_damaged_is_written_anew(tmp_path, caplog):
    save(tree(0), tmp_path / "a")
    flip(largest(tmp_path / "a"), 20)
    save(tree(1), tmp_path / "b", options=SaveOptions(reuse=tmp_path / "a"))
    check(tmp_path / "b", tree(1))
    assert "is damaged, and its leaves are written anew: bytes 0 to " in caplog.text
    assert "Checkpoints with the same file are damaged, too: a. Remove them" in caplog.text


def test_a_damaged_file_is_replaced_by_a_save_to_the_same_path(tmp_path, kind, caplog):
    path = tmp_path / "a"
    save(tree(0), path)
    flip(largest(path), FROZEN // 16)
    save_async(tree(1), path, options=SaveOptions(reuse=True)).result(60)
    check(path, tree(1))
    assert "is damaged, and its leaves are written anew: bytes " in caplog.text
    assert "Checkpoints with the same file" not in caplog.text


def test_only_the_damaged_chunk_is_written_anew(tmp_path, written):
    save(tree(0), tmp_path / "a", format="tensorstore")
    flip(largest(tmp_path / "a"), 100)
    written.since()
    save(tree(1), tmp_path / "b", format="tensorstore", options=SaveOptions(reuse=tmp_path / "a"))
    assert FROZEN // 4 < written.since() < FROZEN // 2
    check(tmp_path / "b", tree(1))


def test_a_file_that_cannot_be_read_is_written_anew(tmp_path, kind, monkeypatch, caplog):
    """As from a disk with a bad sector."""

    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    save(tree(0), tmp_path / "a")
    monkeypatch.setattr(Medium, "read", fail)
    save(tree(1), tmp_path / "b", options=SaveOptions(reuse=tmp_path / "a"))
    assert "Input/output error. Checkpoints with the same file are damaged" in caplog.text
    check(tmp_path / "b", tree(1))
    assert not largest(tmp_path / "a").samefile(largest(tmp_path / "b"))


def test_every_piece_of_a_large_leaf_and_every_small_leaf_is_checked(tmp_path):
    many = {"large": np.arange(5 * 2**17), **{f"small{n}": np.full(n, n) for n in range(200)}}
    save(many, tmp_path / "a")
    nbytes = largest(tmp_path / "a").stat().st_size
    for number, at in enumerate((5, nbytes // 3, nbytes // 2, nbytes - 700_000, nbytes - 1)):
        shutil.copytree(tmp_path / "a", tmp_path / f"{number}")
        flip(largest(tmp_path / f"{number}"), at)
        save(many, tmp_path / f"{number}-next", options=SaveOptions(reuse=tmp_path / f"{number}"))
        check(tmp_path / f"{number}-next", many)


def test_a_leaf_is_not_trusted_because_another_one_in_its_file_is_sound(tmp_path, caplog):
    def model(b):
        return {"m": {"a": np.ones(FROZEN // 4), "b": np.full(FROZEN // 8, b)}}

    save(model(2), tmp_path / "a")
    flip(largest(tmp_path / "a"), largest(tmp_path / "a").stat().st_size - 1)  # in b
    save(model(3), tmp_path / "b", options=SaveOptions(reuse=tmp_path / "a"))
    assert largest(tmp_path / "a").samefile(largest(tmp_path / "b"))
    save(model(2), tmp_path / "c", options=SaveOptions(reuse=tmp_path / "a"))
    check(tmp_path / "c", model(2))
    assert "leaf 'm.b', have the digest" in caplog.text


def test_leaves_without_elements_do_not_keep_a_file_from_being_linked(tmp_path, written):
    def with_empty(step):
        return {"frozen": {"w": jnp.ones(FROZEN // 4), "none": jnp.ones((0, 3))}, "lora": jnp.full(9, step)}

    with checkpoint.Run(tmp_path, every=1) as run:
        for step in (1, 2, 3):
            written.since()
            run.after(step, with_empty(step))
            run.wait()
            assert (written.since() < 30_000) == (step > 1)
    check(tmp_path / "step-3", with_empty(3))


def test_a_checkpoint_that_is_removed_while_it_is_checked_is_not_called_damaged(
    tmp_path, kind, monkeypatch, caplog
):
    def removed(*how):
        shutil.rmtree(tmp_path / "a", ignore_errors=True)
        return medium(*how)

    save(tree(0), tmp_path / "a")
    monkeypatch.setattr(recheck, "medium", removed)
    save(tree(1), tmp_path / "b", options=SaveOptions(reuse=tmp_path / "a"))
    check(tmp_path / "b", tree(1))
    assert "writing it again: it was removed" in caplog.text
    assert "damaged" not in caplog.text
