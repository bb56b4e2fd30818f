"""The safetensors layouts: the contract, what other readers see, and what other writers wrote."""

import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
import safetensors.flax
import safetensors.numpy
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from contracts.checkpoint import CheckpointContract, DirectoryContract, layouts, meshes, model
from eformer import checkpoint
from eformer._engine.saving import safetensors_writer as safetensors_format
from eformer._engine.stores.local import Scratch
from eformer.checkpoint import SaveOptions, load, save
from eformer.errors import CorruptionError, FormatError, MismatchError, NotFoundError
from support.trees import assert_same


class TestDirectory(DirectoryContract):
    def place(self, folder):
        return folder / "checkpoint"

    @pytest.fixture
    def path(self, tmp_path):
        return self.place(tmp_path / "inner")

    def data_file(self, path):
        (file,) = path.glob("*.safetensors")
        return file


class TestShardedDirectory(TestDirectory):
    """The same, over many files."""

    options = SaveOptions(max_shard_bytes=2000)

    def data_file(self, path):
        return max(path.glob("*.safetensors"), key=os.path.getsize)

    def test_there_really_are_many_files(self, path):
        save(model(), path)
        assert len(list(path.glob("*.safetensors"))) > 5


class TestOneFile(CheckpointContract):
    def place(self, folder):
        return folder / "checkpoint.safetensors"

    @pytest.fixture
    def path(self, tmp_path):
        return self.place(tmp_path / "inner")

    def data_file(self, path):
        return path


# ------------------------------------------------------------------------------------------- other readers


def read_by_index(folder):
    """What transformers does: the index says which file a tensor is in."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] > 0
    tensors = {}
    for name, file in index["weight_map"].items():
        with safetensors.safe_open(folder / file, "np") as opened:
            assert opened.metadata()["format"] == "pt"
            tensors[name] = opened.get_tensor(name)
    return tensors


@pytest.fixture
def weights():
    rng = np.random.default_rng(0)
    return {
        m: {n: rng.standard_normal((5, 7)).astype(np.float32) for n in ("w", "b")} for m in ("a", "c", "d")
    }


def flat(tree):
    return {f"{m}.{n}": x for m, inner in tree.items() for n, x in inner.items()}


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name in expected:
        np.testing.assert_array_equal(np.asarray(found[name]), expected[name])


def test_the_file_of_a_directory_is_what_hugging_face_looks_for(tmp_path, weights):
    save(weights, tmp_path)
    assert_equal(safetensors.numpy.load_file(tmp_path / "model.safetensors"), flat(weights))
    assert sorted(os.listdir(tmp_path)) == ["manifest.json", "model.safetensors"]


def test_one_file_is_read_by_everybody(tmp_path, weights):
    save(weights, tmp_path / "x.safetensors")
    assert_equal(safetensors.flax.load_file(tmp_path / "x.safetensors"), flat(weights))
    assert os.listdir(tmp_path) == ["x.safetensors"]


def test_shards_are_read_by_their_index(tmp_path, weights):
    save(weights, tmp_path, options=SaveOptions(max_shard_bytes=300))
    names = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert sorted(os.listdir(tmp_path)) == ["manifest.json", *names, "model.safetensors.index.json"]
    assert_equal(read_by_index(tmp_path), flat(weights))


def test_a_replaced_checkpoint_is_read_by_its_index(tmp_path, weights):
    save(weights, tmp_path)
    save({"z": {"w": np.ones(3)}}, tmp_path)
    assert_equal(read_by_index(tmp_path), {"z.w": np.ones(3)})
    save(weights, tmp_path)
    assert_equal(read_by_index(tmp_path), flat(weights))
    assert len(os.listdir(tmp_path)) == 3


@pytest.mark.parametrize(
    ("dtype", "tag", "seen"),
    [
        ("bfloat16", "BF16", None), ("float8_e4m3fn", "F8_E4M3", None), ("float8_e5m2", "F8_E5M2", None), ("bool", "BOOL", None),
        ("float8_e8m0fnu", "F8_E8M0", None), ("complex64", "C64", None), ("int4", "I8", None), ("uint4", "U8", None),
        ("float4_e2m1fn", "F4", None), ("complex128", "U64", [4, 2]), ("float8_e3m4", "U8", None), ("float64", "F64", None),
        ("datetime64[s]", "U64", None),
    ],
)  # fmt: skip
def test_other_readers_see_a_dtype_they_know(tmp_path, dtype, tag, seen):
    array = np.arange(4).astype(np.dtype(dtype) if dtype[0] != "d" else dtype)
    save({"x": array}, tmp_path / "x.safetensors")
    data = (tmp_path / "x.safetensors").read_bytes()
    ((name, tensor),) = safetensors.deserialize(data)
    assert (name, tensor["dtype"], tensor["shape"]) == ("x", tag, seen or [4])
    assert_same(load(tmp_path / "x.safetensors"), {"x": array})


def test_an_odd_number_of_four_bit_floats_is_kept_in_bytes(tmp_path):
    tree = {
        "odd": np.ones(3, jnp.float4_e2m1fn),
        "even": np.arange(6).reshape(2, 3).astype(jnp.float4_e2m1fn),
    }
    save(tree, tmp_path)
    tags = {
        name: t["dtype"] for name, t in safetensors.deserialize((tmp_path / "model.safetensors").read_bytes())
    }
    assert tags == {"odd": "U8", "even": "F4"}
    assert_same(load(tmp_path), tree)


def test_data_begins_where_xla_takes_it_and_large_leaves_are_not_copied(tmp_path):
    save({"a": jnp.ones(3, jnp.int8), "b": jnp.arange(2**20), "c": jnp.ones(64, jnp.int8)}, tmp_path)
    data = (tmp_path / "model.safetensors").read_bytes()
    assert (8 + int.from_bytes(data[:8], "little")) % 64 == 0
    with safetensors.safe_open(tmp_path / "model.safetensors", "np") as file:
        assert file.offset_keys() == ["b", "c", "a"]


# ------------------------------------------------------------------------------------------- other writers


def test_a_foreign_file_loads_as_nested_dicts(tmp_path, weights):
    safetensors.numpy.save_file(flat(weights), tmp_path / "x.safetensors", metadata={"format": "pt"})
    loaded = load(tmp_path / "x.safetensors")
    assert isinstance(loaded["a"]["w"], jax.Array)
    assert_same(jax.tree.map(np.asarray, loaded), {m: dict(sorted(weights[m].items())) for m in weights})
    assert checkpoint.inspect(tmp_path / "x.safetensors").trees[""].metadata == {"format": "pt"}


def test_a_foreign_file_loads_into_lists_with_like_and_onto_a_mesh(tmp_path):
    w = np.arange(64, dtype=np.float32).reshape(8, 8)
    safetensors.numpy.save_file({f"layers.{i}.w": w + i for i in range(12)}, tmp_path / "x.safetensors")
    rows = layouts()["rows"]
    loaded = load(tmp_path / "x.safetensors", like={"layers": [{"w": rows}] * 12})
    for i, layer in enumerate(loaded["layers"]):
        assert layer["w"].sharding == rows
        np.testing.assert_array_equal(layer["w"], w + i)


def foreign_shards(
    folder, weights, names=("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
):
    tensors = flat(weights)
    halves = [dict(list(tensors.items())[:3]), dict(list(tensors.items())[3:])]
    for name, half in zip(names, halves, strict=True):
        safetensors.numpy.save_file(half, folder / name)
    return {tensor: name for name, half in zip(names, halves, strict=True) for tensor in half}


def write_index(folder, weight_map):
    text = json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(text)


@pytest.mark.parametrize("with_index", [True, False])
def test_foreign_shards_load_with_and_without_their_index(tmp_path, weights, with_index):
    weight_map = foreign_shards(tmp_path, weights)
    if with_index:
        write_index(tmp_path, weight_map)
        assert_same(load(tmp_path / "model.safetensors.index.json"), load(tmp_path))
    assert_same(
        jax.tree.map(np.asarray, load(tmp_path)), {m: dict(sorted(weights[m].items())) for m in weights}
    )


def test_a_missing_foreign_shard_is_named(tmp_path, weights):
    weight_map = foreign_shards(tmp_path, weights)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(FormatError, match=r"of the 2 shards of 'model' these are missing: 2"):
        load(tmp_path)
    write_index(tmp_path, weight_map)
    with pytest.raises(FileNotFoundError, match="model-00002"):
        load(tmp_path)


def test_an_index_that_disagrees_with_its_files_is_refused(tmp_path, weights):
    weight_map = foreign_shards(tmp_path, weights)
    first, *_ = weight_map
    for change in (
        {k: v for k, v in weight_map.items() if k != first},
        weight_map | {"ghost": weight_map[first]},
    ):
        write_index(tmp_path, change)
        with pytest.raises(MismatchError, match=f"'({first}|ghost)'"):
            load(tmp_path)


@pytest.mark.parametrize(
    "name", ["../secret.safetensors", "/etc/passwd", "..", "link.safetensors", "a/b.safetensors", ""]
)
def test_an_index_never_leads_outside(tmp_path, weights, name):
    folder = tmp_path / "inner"
    folder.mkdir()
    safetensors.numpy.save_file({"a.w": np.full(3, 666)}, tmp_path / "secret.safetensors")
    (folder / "link.safetensors").symlink_to("../secret.safetensors")
    write_index(folder, {"a.w": name})
    with pytest.raises(FormatError, match=r"not the name of a file|link to"):
        load(folder / "model.safetensors.index.json")


def test_the_links_of_a_hugging_face_cache_are_followed(tmp_path, weights):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "1234"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    safetensors.numpy.save_file(flat(weights), blobs / "abcdef")
    (snapshot / "model.safetensors").symlink_to("../../blobs/abcdef")
    assert load(snapshot)["a"]["w"].shape == (5, 7)


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "model.safetensors")
    for path in (tmp_path, tmp_path / "model.safetensors"):
        with pytest.raises(FormatError, match="not a regular file"):
            load(path)


def test_several_foreign_files_are_several_trees(tmp_path, weights):
    for name in ("adapter", "model"):
        safetensors.numpy.save_file({name: np.ones(3)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(ValueError, match=r"pass prefix=, one of \['adapter', 'model'\]"):
        load(tmp_path)
    assert list(load(tmp_path, prefix="adapter")) == ["adapter"]


def test_names_that_are_leaf_and_branch_at_once_keep_their_dots(tmp_path):
    safetensors.numpy.save_file(
        {n: np.ones(1) for n in ("a", "a.b", "a.b.c", "..", "", "x.y")}, tmp_path / "x.safetensors"
    )
    loaded = load(tmp_path / "x.safetensors")
    assert set(loaded) == {"a", "a.b", "a.b.c", "", "..", "x"}


def header(tensors, data=b"", length=None):
    text = tensors if isinstance(tensors, bytes) else json.dumps(tensors).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


F32 = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}


@pytest.mark.parametrize(
    "data",
    [
        b"", b"1234567", header({}, length=2**63), header({}, length=200_000_000), header({}, length=99_999_999),
        header({"a": F32 | {"data_offsets": [-16, 0]}}, bytes(16)), header({"a": F32}, bytes(8)), header({"a": F32}, bytes(17)),
        header({"a": F32, "b": F32}, bytes(16)), header({"a": F32, "b": F32 | {"data_offsets": [20, 36]}}, bytes(36)),
        header({"a": F32 | {"data_offsets": [16, 0]}}, bytes(16)), header({"a": F32 | {"shape": [2**62, 4]}}, bytes(16)),
        header({"a": F32 | {"shape": [-4]}}, bytes(16)), header({"a": F32 | {"shape": [5]}}, bytes(16)),
        header({"a": F32 | {"dtype": "PICKLE"}}, bytes(16)), header({"a": F32 | {"dtype": "F6_E2M3", "shape": [4]}}, bytes(16)),
        header(b'{"a":%b,"a":%b}' % ((json.dumps(F32).encode(),) * 2), bytes(16)), header(b"[" * 100_000), header(b'{"a":' * 100_000),
        header(b"\xff\xfe"), header({"__metadata__": {"x": 1}}), header({"a": 3}), header({"a": F32 | {"shape": [4.5]}}, bytes(16)),
        header({"__metadata__": {"digest": "0" * 32, "manifest": '{"digest":"'}}), header(b"{} " * 3),
    ],
    ids=range(25),
)  # fmt: skip
def test_a_malformed_file_is_a_format_error(tmp_path, data):
    (tmp_path / "x.safetensors").write_bytes(data)
    for call in (load, checkpoint.inspect, checkpoint.verify, checkpoint.open):
        with pytest.raises(FormatError):
            call(tmp_path / "x.safetensors")


def test_a_name_of_very_many_dots_is_no_problem(tmp_path):
    safetensors.numpy.save_file({"." * 100_000: np.ones(1, np.float32)}, tmp_path / "x.safetensors")
    assert jax.tree.leaves(load(tmp_path / "x.safetensors"))[0] == 1


def test_sparse_files_that_claim_much_are_refused_at_once(tmp_path, weights):
    for name in ("manifest.json", "model.safetensors.index.json", "x.safetensors"):
        with (tmp_path / name).open("wb") as file:
            file.truncate(2**40)
    for path in (tmp_path / "model.safetensors.index.json", tmp_path / "x.safetensors"):
        with pytest.raises(FormatError):
            load(path)
    with pytest.raises((FormatError, NotFoundError)):
        load(tmp_path)


def test_an_absurd_empty_shape_is_no_crash(tmp_path):
    (tmp_path / "x.safetensors").write_bytes(
        header({"a": {"dtype": "F32", "shape": [0, 2**62], "data_offsets": [0, 0]}})
    )
    with pytest.raises(ValueError, match="larger than an array can be"):
        load(tmp_path / "x.safetensors")


def test_a_directory_that_holds_something_else_says_what_was_looked_for(tmp_path):
    for name in ("notes.txt", "weights.bin"):
        (tmp_path / name).write_text("x")
    with pytest.raises(NotFoundError, match=r"looked for .*manifest.json.*there is notes.txt, weights.bin"):
        load(tmp_path)


def test_foreign_files_are_not_replaced(tmp_path, weights):
    safetensors.numpy.save_file(flat(weights), tmp_path / "model.safetensors")
    with pytest.raises(FileExistsError, match=r"model.safetensors was not written by eformer"):
        save(weights, tmp_path)
    save(weights, tmp_path, prefix="mine")
    assert_equal(safetensors.numpy.load_file(tmp_path / "model.safetensors"), flat(weights))


# ------------------------------------------------------------------------------------------- directories


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


def test_a_file_that_the_caller_names_is_replaced_whatever_it_is(tmp_path):
    for data in (b"junk", header({"a": F32}, bytes(16))):
        (tmp_path / "x.safetensors").write_bytes(data)
        save({"w": 1}, tmp_path / "x.safetensors")
        assert load(tmp_path / "x.safetensors") == {"w": 1}


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


def test_what_lies_about_does_not_make_a_save_fail(tmp_path, weights):
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


def test_what_is_large_beside_the_memory_passes_the_page_cache_by(tmp_path, monkeypatch):
    passed = []
    monkeypatch.setattr(Scratch, "pass_by", lambda scratch: passed.append(scratch.path.name))
    tree = {"w": np.arange(2**18)}
    save(tree, tmp_path / "a")
    assert not passed
    monkeypatch.setattr(safetensors_format, "_LARGE_PART", 1e-6)
    save(tree, tmp_path / "b")
    assert len(passed) == 1
    assert_same(load(tmp_path / "b"), tree)


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
    then_replaced((_load, "read"))
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


# ------------------------------------------------------------------------------------------- reading little


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
    monkeypatch.setattr("eformer._engine.saving.save.PIECE_BYTES", 4096)
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


# ------------------------------------------------------------------------------------------- names


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


def test_a_training_state_survives_both_layouts(tmp_path):
    save(model(), tmp_path / "a")
    save(load(tmp_path / "a"), tmp_path / "b.safetensors")
    assert_same(load(tmp_path / "b.safetensors"), model())


def test_a_missing_data_file_is_corruption(tmp_path, weights):
    save(weights, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CorruptionError, match="names a file that is gone"):
        load(tmp_path)
    assert len(checkpoint.verify(tmp_path).damages) == 6


def test_shardings_on_abstract_meshes_say_nothing_about_devices(tmp_path):
    save({"w": np.arange(8.0, dtype=np.float32)}, tmp_path)
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
    abstract = jax.sharding.NamedSharding(mesh.abstract_mesh, jax.sharding.PartitionSpec("x"))
    like = {"w": jax.ShapeDtypeStruct((8,), np.float32, sharding=abstract)}
    loaded = load(tmp_path, like=like, mesh=mesh, shardings=jax.sharding.PartitionSpec("x"))
    assert len(loaded["w"].addressable_shards) == 8
