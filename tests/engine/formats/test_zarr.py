"""The layouts of zarr arrays: the contract, files for other readers, and files of other writers."""

import fcntl
import json
import os
from contextlib import closing

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
import tensorstore as ts
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from contracts.checkpoint import DirectoryContract, OnDisk, TargetContract, layouts, meshes, model
from eformer import checkpoint
from eformer._engine.stores.directory import Directory
from eformer._engine.stores.journal import Journal
from eformer._engine.stores.local_upload import LocalUpload
from eformer._engine.stores.ocdbt import DatabaseUpload
from eformer._engine.stores.removal import Moved
from eformer.checkpoint import SaveOptions, load, save
from eformer.errors import CorruptionError, FormatError, NotFoundError
from eformer.serialization.serialization import tree_serialize_leaves
from support.arrays import opened, write_array
from support.damage import flip
from support.trees import assert_same


class InArrays:
    format = "tensorstore"

    def place(self, folder):
        return folder / "checkpoint"

    def data_file(self, path):
        return max((p for p in path.rglob("*") if p.is_file() and p.parent != path), key=os.path.getsize)


class TestArrays(InArrays, OnDisk, TargetContract, DirectoryContract):
    """One file for each array."""


@pytest.mark.sample(5)
class TestArraysInChunks(InArrays, OnDisk, DirectoryContract):
    """The same, with many chunks to a leaf."""

    options = SaveOptions(max_chunk_bytes=1000)

    def test_there_really_are_many_chunks(self, path):
        save(model(), path)
        assert len(list((path / "params" / "embed").iterdir())) == 4

    @pytest.mark.thorough  # more files than elsewhere, and the same commit
    def test_a_reader_always_sees_one_whole_checkpoint(self, path):
        super().test_a_reader_always_sees_one_whole_checkpoint(path)

    @pytest.mark.thorough
    def test_saves_to_one_path_commit_in_the_order_they_were_called(self, path):
        super().test_saves_to_one_path_commit_in_the_order_they_were_called(path)

    def data_file(self, path):
        """The chunk whose bytes the contract goes looking for."""
        wanted = np.arange(700.0, 740.0, dtype=np.float32).tobytes()
        files = [p for p in path.rglob("*") if p.is_file() and p.parent != path]
        return next((p for p in files if wanted in p.read_bytes()), max(files, key=lambda p: p.name))


@pytest.mark.sample(5)
class TestDatabase(InArrays, OnDisk, DirectoryContract):
    """The same, in an OCDBT database."""

    upload = DatabaseUpload
    options = SaveOptions(ocdbt=True)

    def name_in_errors(self, file):
        return "tree.ocdbt/bad/0"

    def position_in_errors(self, at):
        return 700 * 4


@pytest.mark.sample(5)
class TestCompressedArrays(InArrays, OnDisk, DirectoryContract):
    options = SaveOptions(compression="zstd")

    def test_a_flipped_bit_in_the_data_is_found_and_named(self, path):
        save({"good": jnp.ones(96), "bad": jnp.arange(1000.0)}, path)
        flip(path / "bad" / "0", (path / "bad" / "0").stat().st_size // 2)
        for call in (lambda: load(path), lambda: checkpoint.open(path)["bad"][699:701]):
            with pytest.raises(CorruptionError, match=r"'bad': bytes 0 to \d+ of bad/0 are damaged"):
                call()
        np.testing.assert_array_equal(load(path, keys="good")["good"], np.ones(96))
        assert [damage.leaf for damage in checkpoint.verify(path).damages] == ["bad"]


# ------------------------------------------------------------------------------------------- other readers


@pytest.fixture
def weights():
    rng = np.random.default_rng(0)
    return {m: {n: rng.standard_normal((6, 10)).astype(np.float32) for n in ("w", "b")} for m in ("a", "c")}


def arrays_save(tree, path, prefix=None, **options):
    return save(tree, path, prefix=prefix, format="tensorstore", options=SaveOptions(**options))


@pytest.mark.parametrize("options", [{}, {"compression": "zstd"}, {"max_chunk_bytes": 100}], ids=str)
def test_plain_tensorstore_reads_the_arrays(tmp_path, weights, options):
    arrays_save(weights, tmp_path, "model", **options)
    arrays_save(weights, tmp_path, **options)
    for parts in (("model", "a", "w"), ("a", "w")):
        np.testing.assert_array_equal(opened(tmp_path.joinpath(*parts)).read().result(), weights["a"]["w"])


def test_plain_tensorstore_reads_the_database(tmp_path, weights):
    arrays_save(weights, tmp_path, "model", ocdbt=True, compression="zstd")
    base = f"file://{tmp_path}/model.ocdbt/"
    spec = {"driver": "zarr", "kvstore": {"driver": "ocdbt", "base": base, "path": "c/b/"}}
    np.testing.assert_array_equal(ts.open(spec).result().read().result(), weights["c"]["b"])
    assert sum(p.is_file() for p in tmp_path.rglob("*")) < 8


TAGS = [
    ("bfloat16", "bfloat16"), ("float32", "<f4"), ("bool", "|b1"), ("int8", "|i1"), ("complex128", "<c16"), ("int4", "int4"),
    ("float8_e4m3fn", "float8_e4m3fn"), ("uint4", "|u1"), ("float6_e2m3fn", "|u1"), ("datetime64[s]", "<i8"), ("uint64", "<u8"),
]  # fmt: skip


@pytest.mark.parametrize(("dtype", "tag"), TAGS)
def test_other_readers_see_a_dtype_they_know(tmp_path, dtype, tag):
    array = np.arange(4).astype(dtype if dtype[0] == "d" else np.dtype(dtype))
    arrays_save({"x": array}, tmp_path)
    assert json.loads((tmp_path / "x" / ".zarray").read_text())["dtype"] == tag
    found = opened(tmp_path / "x").read().result()
    np.testing.assert_array_equal(found.view(array.dtype), array)


def test_the_index_lists_every_array_by_prefix(tmp_path, weights):
    arrays_save(weights, tmp_path, "model")
    arrays_save({"step": jnp.int32(3), "note": "x"}, tmp_path)
    index = json.loads((tmp_path / "tensorstore_index.json").read_text())
    assert (index["format"], index["version"]) == ("tensorstore", "2.0")
    expected = [{"path": f"model/{m}/{n}", "shape": [6, 10], "dtype": "float32"} for m in "ac" for n in "bw"]
    assert index["prefixes"] == {"model": expected}
    assert index["arrays"] == [{"path": "step", "shape": [], "dtype": "int32"}]


def test_a_chunk_is_a_shard(tmp_path):
    array = jax.device_put(jnp.arange(16 * 24.0).reshape(16, 24), layouts()["2x4"])
    arrays_save({"w": array}, tmp_path)
    assert opened(tmp_path / "w").chunk_layout.read_chunk.shape == (8, 6)
    assert len(list((tmp_path / "w").iterdir())) == 9
    np.testing.assert_array_equal(opened(tmp_path / "w").read().result(), array)


def test_a_chunk_is_capped_by_rows_that_divide_a_shard(tmp_path):
    array = jax.device_put(jnp.arange(48 * 8.0).reshape(48, 8), layouts()["2x4"])
    arrays_save({"w": array}, tmp_path, max_chunk_bytes=9 * 2 * 4)
    assert opened(tmp_path / "w").chunk_layout.read_chunk.shape == (8, 2)
    np.testing.assert_array_equal(load(tmp_path)["w"], array)


def test_the_last_chunk_is_padded_and_read_without_the_padding(tmp_path):
    array = np.arange(70.0).reshape(7, 10)
    arrays_save({"w": array}, tmp_path, max_chunk_bytes=240)
    assert opened(tmp_path / "w").chunk_layout.read_chunk.shape == (3, 10)
    assert (tmp_path / "w" / "2.0").stat().st_size == 240
    np.testing.assert_array_equal(opened(tmp_path / "w").read().result(), array)
    np.testing.assert_array_equal(load(tmp_path)["w"], array)


def test_compressed_arrays_are_smaller(tmp_path):
    arrays_save({"w": np.zeros(100_000)}, tmp_path, compression="zstd")
    assert sum(p.stat().st_size for p in tmp_path.rglob("*") if p.is_file()) < 10_000
    assert checkpoint.verify(tmp_path).ok


@pytest.mark.parametrize(
    "option", [{"compression": "zstd"}, {"ocdbt": True}, {"max_chunk_bytes": 3}], ids=str
)
def test_options_of_arrays_are_refused_by_the_other_format(tmp_path, option):
    with pytest.raises(ValueError, match=rf"SaveOptions.{next(iter(option))} is for the format zarr"):
        save({}, tmp_path / "x", options=SaveOptions(**option))
    assert not (tmp_path / "x").exists()


# ------------------------------------------------------------------------------------------------- commit


def contents(path):
    return {p: p.read_bytes() for p in path.rglob("*") if p.is_file()}


@pytest.mark.parametrize("prefix", [None, "model"])
def test_a_file_is_never_written_again_once_the_index_names_it(tmp_path, weights, monkeypatch, prefix):
    arrays_save(weights, tmp_path, prefix)
    before = contents(tmp_path)
    monkeypatch.setattr("eformer._engine.stores.journal.remove_moved", lambda *_: None)
    arrays_save(jax.tree.map(lambda x: x + 1, weights), tmp_path, prefix)
    after = contents(tmp_path)
    changed = {path for path, data in before.items() if after.get(path) != data}
    assert changed == {tmp_path / "tensorstore_index.json"}


def test_saves_replace_their_directories_and_leave_nothing_behind(tmp_path, weights):
    for _ in range(3):
        arrays_save(weights, tmp_path)
        arrays_save(weights, tmp_path, "model", ocdbt=True)
        arrays_save(weights, tmp_path, "model")
    names = sorted(os.listdir(tmp_path))
    assert [name.split(".")[0] for name in names] == ["model", "tensorstore_index", "tree"]
    assert_same(load(tmp_path, prefix=""), weights)
    assert_same(load(tmp_path, prefix="model"), weights)


def test_a_file_of_the_user_in_a_directory_that_is_replaced_stays(tmp_path, weights):
    arrays_save(weights, tmp_path, "model")
    (tmp_path / "model" / "notes.txt").write_text("mine")
    arrays_save(weights, tmp_path, "model")
    assert (tmp_path / "model" / "notes.txt").read_text() == "mine"
    assert [p.name for p in (tmp_path / "model").iterdir()] == ["notes.txt"]


def test_a_directory_that_is_in_the_way_is_left_alone(tmp_path, weights):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "0").write_text("mine")
    arrays_save(weights, tmp_path)
    assert (tmp_path / "a" / "0").read_text() == "mine"
    assert_same(load(tmp_path), weights)


def test_two_formats_do_not_share_a_directory(tmp_path, weights):
    save(weights, tmp_path / "s")
    with pytest.raises(FileExistsError, match=r"manifest.json exists.*another format"):
        arrays_save(weights, tmp_path / "s")
    arrays_save(weights, tmp_path / "t")
    with pytest.raises(FileExistsError, match=r"tensorstore_index.json exists.*another format"):
        save(weights, tmp_path / "t")
    assert_same(load(tmp_path / "s"), weights)
    assert_same(load(tmp_path / "t"), weights)


def test_arrays_of_a_save_that_died_are_no_checkpoint_and_go_with_the_next(tmp_path, weights, monkeypatch):
    def die(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(LocalUpload, "swap", die)
        patch.setattr(LocalUpload, "_withdraw", lambda upload: None)
        patch.setattr(LocalUpload, "close", LocalUpload.abandon)
        with pytest.raises(KeyboardInterrupt):
            arrays_save(weights, tmp_path)
    assert (tmp_path / "a" / "w" / ".zarray").exists()
    with pytest.raises(NotFoundError, match="a save that has not finished"):
        load(tmp_path)
    arrays_save({"z": np.ones(2)}, tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["tensorstore_index.json", "z"]


@pytest.mark.parametrize(("inode", "mark"), [(1, ""), (0, "another")])
def test_a_directory_that_took_the_place_of_a_dead_saves_is_not_removed(tmp_path, weights, inode, mark):
    arrays_save({"w": np.ones(3)}, tmp_path / "x")
    scratch = tmp_path / ".eformer-0123456789abcdef.tmp"
    scratch.mkdir()
    there = Moved("x", (tmp_path / "x").stat().st_ino + inode, mark)
    (scratch / "journal.json").write_bytes(msgspec.json.encode(Journal("id", (there,), ())))
    arrays_save(weights, tmp_path)
    assert (tmp_path / "x" / "w" / "0").exists()
    assert not scratch.exists()


def test_a_save_without_an_index_that_fails_leaves_no_half(tmp_path, weights, monkeypatch):
    calls = iter([Directory.rename, lambda *_: 1 / 0])
    monkeypatch.setattr(Directory, "rename", lambda *names: next(calls)(*names))
    with pytest.raises(ZeroDivisionError):
        tree_serialize_leaves(tmp_path, weights, write_index=False)
    assert os.listdir(tmp_path) == []


# -------------------------------------------------------------------------------------------- other writers


ODD = {
    "raw": {"compressor": None},
    "zstd": {"compressor": {"id": "zstd", "level": 3}},
    "blosc": {"compressor": {"id": "blosc", "cname": "lz4", "clevel": 5, "shuffle": 1}},
    "gzip": {"compressor": {"id": "gzip", "level": 1}},
    "columns first": {"compressor": None, "order": "F"},
    "columns first, blosc": {"compressor": {"id": "blosc"}, "order": "F"},
    "big endian": {"compressor": None, "dtype": ">f4"},
    "nested": {"compressor": None, "dimension_separator": "/"},
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("chunks", [[7, 5], [3, 5], [2, 2], [10, 10]], ids=str)
def test_arrays_of_any_kind_are_read(tmp_path, kind, chunks):
    array = np.arange(1, 36, dtype=np.float32).reshape(7, 5)
    write_array(tmp_path / "m" / "w", array, chunks=chunks, **ODD[kind])
    assert_same(np.asarray(load(tmp_path)["m"]["w"]), array)
    assert_same(np.asarray(load(tmp_path, prefix="m")["w"]), array)
    np.testing.assert_array_equal(checkpoint.open(tmp_path)["m.w"][2:5, 1:3], array[2:5, 1:3])
    loaded = load(tmp_path, shardings=NamedSharding(meshes()[0], P()))["m"]["w"]
    np.testing.assert_array_equal(loaded, array)
    assert checkpoint.verify(tmp_path).ok


@pytest.mark.parametrize("kind", ODD)
def test_a_missing_chunk_of_any_kind_is_an_error(tmp_path, kind):
    write_array(tmp_path / "w", np.ones((4, 4), np.float32), chunks=[2, 4], **ODD[kind])
    chunk = next(p for p in sorted((tmp_path / "w").rglob("*")) if p.is_file() and p.name != ".zarray")
    chunk.unlink()
    with pytest.raises(CorruptionError, match=r"'w'.*1 of 2 chunks are missing"):
        load(tmp_path)


@pytest.mark.parametrize("version", ["1.0", "2.0", "0.0.101"])
def test_indexes_of_every_version_are_read(tmp_path, version):
    array = np.arange(6, dtype=np.float32)
    for name in ("model/w", "w"):
        write_array(tmp_path / name, array, chunks=[6], compressor=None)
    entries = [{"path": name, "shape": [6], "dtype": "float32"} for name in ("w", "model/w")]
    index = {
        "format": "tensorstore",
        "version": version,
        "arrays": entries[:1],
        "prefixes": {"model": entries[1:]},
    }
    if version == "1.0":
        index = {"format": "tensorstore", "version": version, "arrays": entries}
    (tmp_path / "tensorstore_index.json").write_text(json.dumps(index, indent=2))
    tree = load(tmp_path)
    np.testing.assert_array_equal(tree["w"], array)
    inner = tree["model"] if version == "1.0" else load(tmp_path, prefix="model")
    np.testing.assert_array_equal(inner["w"], array)


def test_arrays_whose_index_is_lost_are_no_checkpoint(tmp_path, weights):
    arrays_save(weights, tmp_path)
    (tmp_path / "tensorstore_index.json").unlink()
    with pytest.raises(
        NotFoundError, match=r"belongs to a save that has not finished, or whose .*json is missing"
    ):
        load(tmp_path)


def test_arrays_that_were_saved_without_an_index_are_found(tmp_path, weights):
    tree_serialize_leaves(tmp_path, weights, write_index=False)
    loaded = load(tmp_path)
    assert_same(jax.tree.map(np.asarray, loaded), jax.tree.map(np.asarray, weights))  # sorted
    assert not checkpoint.verify(tmp_path).has_digests


def test_arrays_without_an_index_stay_when_their_save_dies_after_its_commit(tmp_path, weights, monkeypatch):
    """As after a power cut, which may bring back all that is not synced: the scratch directory, but not its journal."""
    monkeypatch.setattr(LocalUpload, "close", LocalUpload.abandon)
    tree_serialize_leaves(tmp_path, weights, write_index=False)
    assert any(path.name.startswith(".eformer-") for path in tmp_path.iterdir())
    assert not list(tmp_path.rglob("journal.json"))
    assert set(load(tmp_path)) == set(weights)
    monkeypatch.undo()
    tree_serialize_leaves(tmp_path, {"w": np.ones(2)}, prefix="other", write_index=False)
    assert {path.name for path in tmp_path.iterdir()} == {*weights, "other"}


def test_arrays_without_an_index_load_beside_another_save(tmp_path, weights):
    tree_serialize_leaves(tmp_path, weights, write_index=False)
    with closing(LocalUpload(tmp_path)):
        assert set(load(tmp_path)) == set(weights)


# ---------------------------------------------------------------------------------------------- bad input


def write_index(path, **changes):
    index = {"format": "tensorstore", "version": "2.0", "prefixes": {}, "arrays": [{"path": "w", "shape": [4], "dtype": "float32"}]}  # fmt: skip
    (path / "tensorstore_index.json").write_text(json.dumps(index | changes))


@pytest.fixture
def one(tmp_path):
    """A directory of another writer with one array."""
    write_array(tmp_path / "w", np.ones(4, np.float32), chunks=[2], compressor=None)
    return tmp_path


@pytest.mark.parametrize("path", ["/etc", "../w", "w/../../w", "", ".", "a//b", "nul\0"])
def test_an_index_that_leads_out_of_the_directory_is_refused(one, path):
    write_index(one, arrays=[{"path": path, "shape": [4], "dtype": "float32"}])
    with pytest.raises(FormatError, match="leads out of the directory"):
        load(one)


@pytest.mark.parametrize("where", ["link", "inner/link"])
def test_a_link_that_leads_out_is_refused(tmp_path_factory, one, where):
    outside = tmp_path_factory.mktemp("outside")
    write_array(outside / "w", np.ones(4, np.float32), chunks=[4], compressor=None)
    (one / where).parent.mkdir(exist_ok=True)
    (one / where).symlink_to(outside / "w")
    write_index(one, arrays=[{"path": where, "shape": [4], "dtype": "float32"}])
    with pytest.raises(FormatError, match="outside of the checkpoint"):
        load(one)


def test_a_chunk_that_is_a_link_out_is_refused(tmp_path_factory, one):
    secret = tmp_path_factory.mktemp("outside") / "secret"
    secret.write_bytes(b"12345678")
    (one / "w" / "1").unlink()
    (one / "w" / "1").symlink_to(secret)
    with pytest.raises(FormatError):
        load(one)


def test_a_chunk_that_is_a_pipe_or_a_device_is_refused_at_once(one):
    (one / "w" / "1").unlink()
    os.mkfifo(one / "w" / "1")
    with pytest.raises(FormatError):
        load(one)
    (one / "w" / "1").unlink()
    (one / "w" / "1").symlink_to("/dev/zero")
    with pytest.raises(FormatError):
        load(one)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "change",
    [
        {"shape": [2**61], "chunks": [2**61]}, {"shape": [2**40], "chunks": [2]}, {"shape": [4], "chunks": [2**40]}, {"chunks": [0]},
        {"shape": [-1]}, {"chunks": [2, 2]}, {"shape": [2**62] * 20, "chunks": [1] * 20}, {"dtype": "|O"}, {"dtype": [["a", "<f4"]]},
        {"dtype": "nonsense"}, {"zarr_format": 3}, {"order": "X"}, {"compressor": {"id": "nonsense"}}, {"compressor": "zstd"},
        {"filters": [{"id": "delta"}]}, {"dimension_separator": ":"}, {"shape": "4"}, {"shape": [1] * 99, "chunks": [1] * 99},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("compressor", [None, {"id": "zstd"}], ids=str)
def test_a_description_with_impossible_claims_is_refused_quickly(one, change, compressor):
    file = one / "w" / ".zarray"
    described = json.loads(file.read_text()) | {"compressor": compressor} | change
    file.write_text(json.dumps(described))
    with pytest.raises(FormatError, match=r"w|'w'"):
        load(one)


def test_a_bomb_of_zeros_is_refused_before_it_is_unpacked(tmp_path):
    array = np.zeros(2**20, np.float32)
    write_array(tmp_path / "w", array, chunks=[2**20], compressor={"id": "zstd"})
    file = tmp_path / "w" / ".zarray"
    file.write_text(file.read_text().replace(str(2**20), str(2**50)))
    with pytest.raises(FormatError, match="cannot decode to a chunk"):
        load(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", "null", "3", '"x"', '{"format": "other"}', '{"format": 3}', '{"format": "tensorstore", "arrays": 3}', "\ufeff{}",
        '{"format": "tensorstore", "prefixes": {"m": [{"shape": []}]}}', "[" * 100_000, '{"format": "tensorstore", "arrays": [{"path": 1}]}',
    ],
    ids=lambda text: text[:40],
)  # fmt: skip
def test_an_index_that_is_none_is_refused(one, text):
    (one / "tensorstore_index.json").write_text(text)
    with pytest.raises(FormatError, match=r"tensorstore_index.json"):
        load(one)


def test_a_flipped_bit_anywhere_in_the_index_is_an_error(tmp_path):
    arrays_save({"w": np.ones(3), "n": 5, "s": "text"}, tmp_path)
    index = tmp_path / "tensorstore_index.json"
    data = index.read_bytes()
    for at in range(len(data)):
        index.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(FormatError):
            load(tmp_path)


@pytest.mark.parametrize("name", ["manifest.ocdbt", "d"])
def test_a_database_that_is_damaged_is_an_error(tmp_path, weights, name):
    arrays_save(weights, tmp_path, ocdbt=True)
    for file in list((tmp_path / "tree.ocdbt").rglob("*")):
        if file.is_file() and (file.name == name or file.parent.name == name):
            file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(FormatError, match=r"tree.ocdbt"):
        load(tmp_path)
    (tmp_path / "tree.ocdbt" / "manifest.ocdbt").unlink()
    with pytest.raises(CorruptionError, match=r"manifest.ocdbt is missing"):
        load(tmp_path)


def test_remains_of_a_dead_save_are_removed_after_later_commits(tmp_path, monkeypatch):
    """Its lock may outlive it for a while; by then the index has forgotten it."""
    save({"a": np.ones(3)}, tmp_path, format="tensorstore")
    with monkeypatch.context() as patch:  # it dies right after its commit
        patch.setattr(LocalUpload, "_finish", lambda *_: None)
        patch.setattr(LocalUpload, "close", LocalUpload.abandon)
        save({"b": np.ones(3)}, tmp_path, format="tensorstore")
    (scratch,) = tmp_path.glob(".eformer-*.tmp")
    holder = os.open(scratch, os.O_RDONLY)
    fcntl.flock(holder, fcntl.LOCK_SH)
    save({"c": np.ones(3)}, tmp_path, format="tensorstore")
    assert (tmp_path / "a").exists()
    os.close(holder)
    save({"d": np.ones(3)}, tmp_path, format="tensorstore")
    assert_same(load(tmp_path), {"d": np.ones(3)})
    root = checkpoint.inspect(tmp_path).trees[""].root
    assert {path.name for path in tmp_path.iterdir()} == {"tensorstore_index.json", root}


@pytest.mark.parametrize("ocdbt", [False, True])
def test_arrays_that_the_file_system_does_not_list_are_not_committed(tmp_path, monkeypatch, ocdbt):
    options = SaveOptions(ocdbt=ocdbt)
    save({"w": np.ones(3)}, tmp_path / "run", format="tensorstore", options=options)
    monkeypatch.setattr(LocalUpload, "names", lambda upload: [])
    with pytest.raises(OSError, match="the file system does not list w, which were just written"):
        save({"w": np.zeros(3)}, tmp_path / "run", format="tensorstore", options=options)
    assert load(tmp_path / "run")["w"].tolist() == [1, 1, 1]
