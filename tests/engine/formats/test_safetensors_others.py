"""Safetensors files of other programs, and eformer's files as other programs see them."""

import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
import safetensors.flax
import safetensors.numpy

from contracts.checkpoint import layouts
from eformer import checkpoint
from eformer.checkpoint import SaveOptions, load, save
from eformer.errors import FormatError, MismatchError, NotFoundError
from support.safetensors_files import F32, assert_equal, header, read_by_index
from support.states import flat
from support.trees import assert_same

# --------------------------------------------------------------------------------------- other readers


def test_the_file_of_a_directory_has_the_name_that_hugging_face_looks_for(tmp_path, weights):
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


# --------------------------------------------------------------------------------------- other writers


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
    second = "missing: model-00002-of-00002.safetensors. Copy them"
    for path in (tmp_path, tmp_path / "model"):
        with pytest.raises(FormatError, match=f"does not have all 2 shards of 'model'; {second}"):
            load(path)
    write_index(tmp_path, weight_map)
    for path in (tmp_path, *tmp_path.iterdir()):
        with pytest.raises(FileNotFoundError, match=f"model.safetensors.index.json lists 2 files; {second}"):
            load(path)


def test_any_foreign_shard_leads_to_the_whole_model(tmp_path, weights):
    names = ["model-1-of-2.safetensors", "model-2-of-2.safetensors"]  # some writers count like this
    write_index(tmp_path, foreign_shards(tmp_path, weights, names))
    whole = {m: dict(sorted(weights[m].items())) for m in weights}
    for name in names:
        shard = tmp_path / name
        assert_same(jax.tree.map(np.asarray, load(shard)), whole)
        assert_same(dict(checkpoint.open(shard).items()), dict(checkpoint.open(tmp_path).items()))
        assert checkpoint.verify(shard).leaves == len(flat(weights))
        checkpoint.convert(shard, tmp_path / "new" / name)
        assert_same(jax.tree.map(np.asarray, load(tmp_path / "new" / name)), whole)
        assert checkpoint.inspect(shard).trees.keys() == {""}


def test_a_shard_in_a_hugging_face_cache_leads_to_the_whole_model(tmp_path, weights):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "1234"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    weight_map = foreign_shards(blobs, weights)
    write_index(snapshot, weight_map)
    for number, name in enumerate(sorted(set(weight_map.values()))):
        (blobs / name).rename(blobs / f"abc{number}")
        (snapshot / name).symlink_to(f"../../blobs/abc{number}")
    assert_same(load(snapshot / name), load(snapshot))


def test_a_link_to_a_shard_leads_to_the_model_beside_the_shard(tmp_path, weights):
    (tmp_path / "model").mkdir()
    write_index(tmp_path / "model", foreign_shards(tmp_path / "model", weights))
    (tmp_path / "x.safetensors").symlink_to("model/model-00001-of-00002.safetensors")
    assert_same(load(tmp_path / "x.safetensors"), load(tmp_path / "model"))


def test_a_file_that_no_index_lists_is_read_alone(tmp_path, weights):
    weight_map = foreign_shards(tmp_path, weights)
    safetensors.numpy.save_file({"other": np.ones(3)}, tmp_path / "other.safetensors")
    write_index(tmp_path, weight_map)
    assert list(load(tmp_path / "other.safetensors")) == ["other"]
    assert checkpoint.verify(tmp_path / "other.safetensors").ok


def test_shards_without_an_index_are_read_alone_and_whole_by_their_base_name(tmp_path, weights, caplog):
    weight_map = foreign_shards(tmp_path, weights)
    first, second = sorted(set(weight_map.values()))
    alone = [tensor for tensor, name in weight_map.items() if name == first]
    assert sorted(checkpoint.open(tmp_path / first)) == sorted(alone)
    load(tmp_path / first)
    assert second in caplog.text
    assert checkpoint.verify(tmp_path / first).left_out == (second,)
    assert_same(load(tmp_path / "model"), load(tmp_path))


def test_an_index_that_cannot_be_read_is_an_error_for_its_shards_alone(tmp_path, weights):
    foreign_shards(tmp_path, weights)
    safetensors.numpy.save_file({"other": np.ones(3)}, tmp_path / "other.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map"')
    with pytest.raises(FormatError, match=r"model\.safetensors\.index\.json is not an index"):
        load(tmp_path / "model-00002-of-00002.safetensors")
    assert list(load(tmp_path / "other.safetensors")) == ["other"]


def test_foreign_shards_beside_a_checkpoint_lead_to_their_own_model(tmp_path, weights):
    weight_map = foreign_shards(tmp_path, weights)
    write_index(tmp_path, weight_map)
    expected = load(tmp_path)
    save({"mine": np.ones(3)}, tmp_path, prefix="mine")
    for name in ("model", "model.safetensors.index.json", *weight_map.values()):
        assert_same(load(tmp_path / name), expected)


def test_a_shard_of_a_foreign_model_is_not_saved_over(tmp_path, weights):
    weight_map = foreign_shards(tmp_path, weights)
    write_index(tmp_path, weight_map)
    expected = load(tmp_path)
    for name in set(weight_map.values()):
        with pytest.raises(ValueError, match=r"belongs to the checkpoint .*index.json; save to another file"):
            save({"mine": np.ones(3)}, tmp_path / name)
    assert_same(load(tmp_path), expected)


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


def test_a_directory_of_other_files_is_an_error_that_names_the_known_files(tmp_path):
    for name in ("notes.txt", "weights.bin"):
        (tmp_path / name).write_text("x")
    with pytest.raises(NotFoundError, match=r"looked for .*manifest.json.*found notes.txt, weights.bin"):
        load(tmp_path)


def test_foreign_files_are_not_replaced(tmp_path, weights):
    safetensors.numpy.save_file(flat(weights), tmp_path / "model.safetensors")
    with pytest.raises(FileExistsError, match=r"model.safetensors was not written by eformer"):
        save(weights, tmp_path)
    save(weights, tmp_path, prefix="mine")
    assert_equal(safetensors.numpy.load_file(tmp_path / "model.safetensors"), flat(weights))
