"""Checkpoints that Orbax 0.12.8 wrote come back, without Orbax: all of its layouts, through TensorStore alone."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore

from eformer import checkpoint
from eformer._engine.formats.others import orbax, orbax_reader
from eformer._engine.formats.others.orbax_arrays import split_into_chunks
from eformer._engine.formats.others.orbax_metadata import (
    KeyMetadata,
    LeafMetadata,
    ValueMetadata,
    build_structure,
)
from eformer._engine.trees.flatten import flatten
from eformer.errors import CorruptionError, FormatError, NotFoundError
from support.trees import assert_same

DATA = Path(__file__).parent / "orbax"
EXPECTED = json.loads((DATA / "manifest.json").read_text("utf-8"))
LAYOUTS = [*EXPECTED["samples"], "manager/2"]


def described(leaf):
    array = np.asarray(leaf)
    digest = hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()
    return {"shape": list(array.shape), "dtype": array.dtype.name, "sha256": digest}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_arrays_are_as_the_manifest_says(layout):
    found = {name: described(leaf) for name, leaf in flatten(checkpoint.load(DATA / layout))[0].items()}
    expected = dict(EXPECTED["arrays"])
    if "manager" in layout:  # where each step has another
        step = np.int32(2 if layout == "manager/2" else 3)
        expected["step"] = described(step)
    assert found == expected


@pytest.mark.parametrize("layout", ["v0_plain", "v0_standard", "v0_zarr3", "bare_database"])
def test_a_path_with_dots_leads_to_the_arrays(layout, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = os.path.relpath(DATA / layout)
    assert path.startswith("..")
    assert checkpoint.diff(path, DATA / layout).same


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_tree_has_the_structure_that_orbax_records(layout):
    tree = checkpoint.load(DATA / layout)
    assert type(tree["opt"]) is list
    assert tree["opt"][1:] == [None, None]
    assert type(tree["seq"][1]) is list
    assert type(tree["lr"]) is float
    assert type(tree["flag"]) is np.ndarray
    assert isinstance(tree["params"]["emb"], jax.Array)


def test_texts_keys_numbers_and_empty_containers_come_back():
    expected = {
        "s": "hello", "k": jax.random.key(3), "e": {}, "l": [], "t": (), "n": None, "i": 3, "f": 2.5, "b": True,
        "a.b": jnp.arange(3), "c": 2.0, "x": {"y/z": jnp.ones(2)}, "i4": jnp.arange(4, dtype=jnp.int4),
        "f8": jnp.ones(3, jnp.float8_e4m3fn),
    }  # fmt: skip
    assert_same(checkpoint.load(DATA / "v0_mixed"), dict(sorted(expected.items())))


def test_numbers_become_arrays_without_axes_if_like_has_such_arrays():
    like = {"b": np.False_, "f": jnp.bfloat16(0), "i": jnp.int32(0)}
    loaded = checkpoint.load(DATA / "v0_mixed", keys=list(like), like=like)
    assert_same(loaded, {"b": np.True_, "f": jnp.bfloat16(2.5), "i": jnp.int32(3)})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_view_reads_only_the_wanted_box(layout):
    whole = np.asarray(checkpoint.load(DATA / layout)["params"]["dense"]["kernel"])
    with checkpoint.open(DATA / layout) as view:
        np.testing.assert_array_equal(view["params.dense.kernel"][3:6, 1:], whole[3:6, 1:])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_inspect_and_verify_report_the_known_facts(layout):
    manifest = checkpoint.inspect(DATA / layout)
    (tree,) = manifest.trees.values()
    assert manifest.format == "orbax"
    assert tree.saved_at.startswith("2026-")
    assert tree.leaves["params.emb"].dtype == "bfloat16"
    report = checkpoint.verify(DATA / layout)
    assert report.ok
    assert not report.has_digests


def test_arrays_lie_as_they_were_saved_if_there_is_a_mesh():
    mesh = jax.make_mesh((2, 2), ("x", "y"), devices=jax.devices()[:4])
    (kernel,) = checkpoint.load(DATA / "v0_standard", mesh=mesh, keys="params.dense.kernel").values()
    assert kernel.sharding.spec == jax.sharding.PartitionSpec("x", "y")
    assert kernel.addressable_shards[0].data.shape == (4, 2)


def test_a_tree_like_mine_is_filled():
    like = {"params": {"dense": {"kernel": jax.ShapeDtypeStruct((8, 4), jnp.bfloat16)}}}
    loaded = checkpoint.load(DATA / "v1", like=like, dtype="bfloat16", keys="params.dense.kernel")
    assert loaded["params"]["dense"]["kernel"].dtype == jnp.bfloat16


def test_items_are_prefixes():
    assert set(checkpoint.inspect(DATA / "v1").trees) == {"state"}
    assert_same(checkpoint.load(DATA / "v1", prefix="state"), checkpoint.load(DATA / "v1"))


def test_nothing_of_it_needs_jax_or_orbax():
    code = (
        f"import sys; from eformer import checkpoint; checkpoint.inspect({str(DATA / 'v1')!r}).trees['state'];"
        "assert 'jax' not in sys.modules and 'orbax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# ------------------------------------------------------------------------------------------ bad luck


@pytest.fixture
def copy(tmp_path):
    def make(layout):
        return Path(shutil.copytree(DATA / layout, tmp_path / "checkpoint"))

    return make


def test_a_chunk_that_is_gone_is_not_taken_for_zeros(copy):
    path = copy("v0_plain")
    (path / "params.dense.kernel" / "1.0").unlink()
    with pytest.raises(CorruptionError, match=r"params.dense.kernel/1.0"):
        checkpoint.load(path)
    damages = checkpoint.verify(path).damages
    assert [damage.leaf for damage in damages] == ["params.dense.kernel"]


def test_an_array_that_is_gone_is_named(copy):
    path = copy("v0_plain")
    shutil.rmtree(path / "params.emb")
    with pytest.raises(CorruptionError, match=r"params.emb"):
        checkpoint.load(path)


def test_a_damaged_chunk_is_an_error(copy):
    path = copy("v0_plain")
    (path / "params.emb" / "0.0").write_bytes(b"no zstd")
    with pytest.raises(CorruptionError, match=r"params.emb/0.0"):
        checkpoint.load(path)


def test_a_database_without_its_manifest_is_an_error(copy):
    path = copy("v0_standard")
    (path / "manifest.ocdbt").unlink()
    with pytest.raises(CorruptionError, match=r"manifest.ocdbt is missing"):
        checkpoint.load(path)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"tree_metadata": 3}', "null", "[" * 10_000])
def test_damaged_metadata_is_an_error(copy, text):
    path = copy("v0_plain")
    (path / "_METADATA").write_text(text)
    with pytest.raises(FormatError, match="_METADATA"):
        checkpoint.load(path)


def metadata(*leaves):
    """As Orbax writes it, of leaves that are (key, whether it is an index) pairs."""
    tree = {
        str(number): {
            "key_metadata": [{"key": key, "key_type": 1 if is_index else 2} for key, is_index in keys],
            "value_metadata": {"value_type": "jax.Array"},
        }
        for number, keys in enumerate(leaves)
    }
    return json.dumps({"tree_metadata": tree, "use_ocdbt": False, "use_zarr3": False})


@pytest.mark.parametrize("key", ["../outside", "/etc/passwd", "..", "a/../../b"])
def test_a_leaf_that_leads_out_of_the_directory_is_refused(copy, key):
    path = copy("v0_plain")
    (path / "_METADATA").write_text(metadata([(key, False)]))
    with pytest.raises(FormatError, match="leads out"):
        checkpoint.load(path)


@pytest.mark.parametrize(
    ("leaves", "problem"),
    [
        ([[("step", False)], [("step", False)]], "'step' is listed twice"),
        ([[("opt.0.count", False)], [("opt", False), ("0", True), ("count", False)]], "are both the array"),
        ([[("step", False)], [("step", False), ("x", False)]], "inside another|no such array"),
        ([[("x", False)] * 200], "deep|no such array"),
    ],
)
def test_metadata_that_makes_no_tree_is_refused(copy, leaves, problem):
    path = copy("v0_plain")
    (path / "_METADATA").write_text(metadata(*leaves))
    with pytest.raises(FormatError, match=problem):
        checkpoint.load(path)


@pytest.mark.parametrize(
    ("keys", "document"),
    [
        (["0", "1", "2"], {"list": ["0", "1", "2"]}),
        (["1", "0"], {"list": ["0", "1"]}),
        (["0", "2"], {"dict": {"0": "0", "2": "2"}}),
        (["9" * 5000], {"dict": {"9" * 5000: "9" * 5000}}),
    ],
)
def test_only_indices_that_count_make_a_list(keys, document):
    leaves = [LeafMetadata([KeyMetadata(key, 1)], ValueMetadata()) for key in keys]
    assert build_structure(leaves, "") == document


@pytest.mark.parametrize("layout", ["bare_plain", "bare_database"])
def test_a_tree_that_is_one_array_comes_back(layout):
    assert_same(checkpoint.load(DATA / layout), jnp.arange(5))


def test_a_link_to_a_checkpoint_is_followed(tmp_path):
    (tmp_path / "latest").symlink_to(DATA / "v0_standard")
    assert "params" in checkpoint.load(tmp_path / "latest")


def test_chunks_that_are_far_larger_than_their_array_are_refused(copy):
    """TensorStore would allocate one, and end the process."""
    path = copy("v0_plain")
    described = json.loads((path / "seq.0" / ".zarray").read_text())
    (path / "seq.0" / ".zarray").write_text(json.dumps(described | {"chunks": [10**12]}))
    with pytest.raises(FormatError, match=r"seq.0.*would take 4000000000000 bytes of memory"):
        checkpoint.load(path)


LITTLE = {"name": "bytes", "configuration": {"endian": "little"}}
BLOSC = {"name": "blosc", "configuration": {"cname": "lz4", "clevel": 5, "shuffle": "shuffle", "typesize": 4}}
SHARDS = {
    "name": "sharding_indexed",
    "configuration": {"chunk_shape": [2], "codecs": [LITTLE, BLOSC], "index_codecs": [LITTLE]},
}


def compressed_by_blosc(path, shape, **described):
    """An Orbax checkpoint of one array, which blosc compressed."""
    path.mkdir()
    is_zarr3 = "codecs" in described
    about = json.loads(metadata([("w", False)])) | {"use_zarr3": is_zarr3}
    (path / "_METADATA").write_text(json.dumps(about))
    spec = {
        "driver": "zarr3" if is_zarr3 else "zarr",
        "kvstore": {"driver": "file", "path": f"{path}/w/"},
        "metadata": {"shape": shape} | described,
    }
    array = np.arange(1, 1 + np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)
    tensorstore.open(spec, create=True, dtype="float32").result().write(array).result()
    return array


def in_version_3(shape, codecs, **encoding):
    grid = {"name": "regular", "configuration": {"chunk_shape": [2 for _ in shape]}}
    return {"codecs": codecs, "chunk_grid": grid, "chunk_key_encoding": encoding or {"name": "default"}}


@pytest.mark.parametrize("described", [
    {"chunks": [2, 2], "compressor": {"id": "blosc"}, "dimension_separator": "."},
    {"chunks": [2, 2], "compressor": {"id": "blosc"}, "dimension_separator": "/"},
    in_version_3((5, 3), [LITTLE, BLOSC]),
    in_version_3((5, 3), [LITTLE, BLOSC, {"name": "crc32c"}], name="v2"),
    in_version_3((5, 3), [LITTLE, BLOSC], name="default", configuration={"separator": "."}),
], ids=str)  # fmt: skip
def test_chunks_of_blosc_are_read_unless_they_claim_to_be_larger(tmp_path, described):
    array = compressed_by_blosc(tmp_path / "it", (5, 3), **described)
    np.testing.assert_array_equal(checkpoint.load(tmp_path / "it")["w"], array)
    files = [
        file for file in (tmp_path / "it" / "w").rglob("*") if file.is_file() and "zarr" not in file.name
    ]
    assert len(files) == 6
    for file in files:
        data = bytearray(file.read_bytes())
        data[4:8] = (10**9).to_bytes(4, "little")
        file.write_bytes(data)
    with pytest.raises(CorruptionError, match="claims to decode to 1000000000 bytes"):
        checkpoint.load(tmp_path / "it")
    assert "claims to decode" in str(checkpoint.verify(tmp_path / "it"))


@pytest.mark.parametrize(
    "described", [{"compressor": {"id": "blosc"}}, in_version_3((), [LITTLE, BLOSC])], ids=str
)
def test_numbers_of_blosc_are_read_unless_they_claim_to_be_larger(tmp_path, described):
    compressed_by_blosc(tmp_path / "it", (), **described)
    about = (tmp_path / "it" / "_METADATA").read_text()
    (tmp_path / "it" / "_METADATA").write_text(about.replace("jax.Array", "scalar"))
    assert checkpoint.load(tmp_path / "it") == {"w": 1.0}
    file = tmp_path / "it" / "w" / ("c" if "codecs" in described else "0")
    file.write_bytes(file.read_bytes()[:4] + (10**9).to_bytes(4, "little") + file.read_bytes()[8:])
    with pytest.raises(FormatError, match="claims to decode to 1000000000 bytes"):
        checkpoint.load(tmp_path / "it")


def test_blosc_inside_of_shards_is_refused(tmp_path):
    described = in_version_3((4,), [SHARDS])
    compressed_by_blosc(tmp_path / "it", (4,), **described)
    with pytest.raises(FormatError, match="leaf 'w': blosc inside sharding_indexed is not supported"):
        checkpoint.load(tmp_path / "it")


def test_an_array_of_very_many_chunks_is_read_in_larger_boxes():
    layout = SimpleNamespace(read_chunk=SimpleNamespace(shape=(1, 4)))
    codec = SimpleNamespace(to_json=lambda: {"driver": "zarr", "compressor": None})
    array = SimpleNamespace(shape=(2**18, 4), chunk_layout=layout, codec=codec)
    chunks = split_into_chunks("w", array, itemsize=2)
    assert len(chunks) == 2**16
    assert {chunk.box.shape for chunk in chunks} == {(4, 4)}
    assert sum(chunk.nbytes for chunk in chunks) == 2**18 * 4 * 2


def test_numbers_that_json_has_not_are_metadata_too(copy):
    path = copy("v0_plain")
    about = json.loads((path / "_CHECKPOINT_METADATA").read_text())
    (path / "_CHECKPOINT_METADATA").write_text(
        json.dumps(about | {"custom_metadata": {"loss": float("inf")}})
    )
    assert checkpoint.inspect(path).trees[""].metadata == {"loss": float("inf")}


def test_keys_of_an_unknown_generator_are_an_error(copy):
    path = copy("v0_mixed")
    file = path / "array_metadatas" / "process_0"
    file.write_text(file.read_text().replace("threefry2x32", "nobody's"))
    with pytest.raises(FormatError, match="leaf 'k'"):
        checkpoint.load(path)


def test_steps_of_a_plain_checkpointer_are_steps(tmp_path):
    for step in ("9", "10"):
        shutil.copytree(DATA / "v0_plain", tmp_path / step)
    shutil.copytree(DATA / "v0_plain", tmp_path / "11.orbax-checkpoint-tmp-1")
    assert checkpoint.inspect(tmp_path)
    assert orbax.in_local_directory(tmp_path, [p.name for p in tmp_path.iterdir()]).path == str(
        tmp_path / "10"
    )


@pytest.mark.thorough
def test_absurdly_many_chunks_are_read_many_at_a_time(copy):
    path = copy("v0_plain")
    described = json.loads((path / "seq.0" / ".zarray").read_text())
    (path / "seq.0" / ".zarray").write_text(json.dumps(described | {"shape": [2**21], "chunks": [1]}))
    tree = checkpoint.inspect(path).trees[""]
    assert len(tree.leaves["seq.0"].extents) <= 2**16


@pytest.mark.parametrize(
    ("shape", "chunks"), [([2**33], [1]), ([2, 2**32], [2, 3]), ([2, 2**30], [2, 2**28])]
)
def test_far_more_chunks_than_there_are_bytes_are_told_at_once(copy, shape, chunks):
    """Every chunk is stored, by the metadata; the last case has few, which are missing."""
    path = copy("v0_plain")
    metadata = json.loads((path / "_METADATA").read_text())
    (path / "_METADATA").write_text(json.dumps(metadata | {"store_array_data_equal_to_fill_value": True}))
    described = json.loads((path / "seq.0" / ".zarray").read_text())
    (path / "seq.0" / ".zarray").write_text(json.dumps(described | {"shape": shape, "chunks": chunks}))
    for call in (checkpoint.load, checkpoint.verify, checkpoint.inspect):
        with pytest.raises(FormatError, match=r"cannot hold its arrays, of \d+ bytes in \d+ chunks.*'seq.0'"):
            call(path)


@pytest.mark.parametrize("chunks", [[2**20, 2**20], [2**10, 2**10], [1, 1]])
@pytest.mark.parametrize("fill", [None, 0])
def test_an_array_of_terabytes_without_its_chunks_is_told_at_once(copy, chunks, fill, monkeypatch):
    path = copy("v0_plain")
    described = json.loads((path / "params.emb" / ".zarray").read_text())
    changed = described | {"shape": [2**20, 2**20], "chunks": chunks, "fill_value": fill}
    (path / "params.emb" / ".zarray").write_text(json.dumps(changed))
    monkeypatch.setattr(orbax_reader, "describe_leaf", None)  # chunks are not gone through
    for call in (checkpoint.load, checkpoint.verify, checkpoint.inspect, checkpoint.open):
        with pytest.raises(FormatError, match=r"cannot hold its arrays, of \d{13} bytes.*'params.emb'"):
            call(path)


def test_an_array_of_fill_values_alone_is_read(copy):
    path = copy("v0_plain")
    described = json.loads((path / "params.emb" / ".zarray").read_text())
    changed = described | {"shape": [2**9, 2**10], "chunks": [2**9, 2**10], "fill_value": 0}
    (path / "params.emb" / ".zarray").write_text(json.dumps(changed))
    (path / "params.emb" / "0.0").unlink()
    about = json.loads((path / "_METADATA").read_text())
    (path / "_METADATA").write_text(json.dumps(about | {"store_array_data_equal_to_fill_value": False}))
    assert not np.any(checkpoint.load(path)["params"]["emb"])


def test_steps_that_have_not_finished_are_no_steps(copy):
    path = copy("manager")
    shutil.copytree(path / "3", path / "10.orbax-checkpoint-tmp-1794726675")
    assert orbax.step_names_in(path, [p.name for p in path.iterdir()]) == ["2", "3"]
    shutil.copytree(path / "3", path / "10")
    assert orbax.step_names_in(path, [p.name for p in path.iterdir()]) == ["2", "3", "10"]


@pytest.mark.parametrize("form", ["safetensors", "tensorstore"])
def test_it_is_not_mixed_with_one_of_ours(copy, form):
    path = copy("v0_plain")
    before = sorted(path.rglob("*"))
    with pytest.raises(FileExistsError, match="another directory"):
        checkpoint.save({"a": np.ones(3)}, path, format=form)
    assert sorted(path.rglob("*")) == before


def test_a_checkpoint_without_a_tree_says_so(copy):
    path = copy("v1")
    shutil.rmtree(path / "state")
    with pytest.raises(NotFoundError, match="no item in it has _METADATA"):
        checkpoint.load(path)
