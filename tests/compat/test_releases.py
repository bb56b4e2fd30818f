"""Today's version reads the checkpoints of every release: samples by `make_samples/release.py`, which stay."""

import hashlib
import json
import runpy
import shutil
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from eformer import __version__, checkpoint
from eformer.pytree import from_compressed_bytes, load_from_file
from support.releases import Data, described

RELEASES = Path(__file__).parent / "releases"
EXAMPLES = Path(__file__).parents[2] / "examples"
BY_SPECIFICATION = [
    "directory",
    "file/model.safetensors",
    "shards",
    "checksums",
    "reuse/second",
    "zarr",
    "zarr-compressed",
]


@cache
def expected(release):
    return json.loads((RELEASES / release / "expected.json").read_text("utf-8"))


def releases():
    return sorted(path.name for path in RELEASES.iterdir())


def all_of(field, without="nothing"):
    return [
        pytest.param(release, each, id=f"{release}-{each['path']}-{each.get('prefix') or ''}")
        for release in releases()
        for each in expected(release)[field]
        if without not in each["path"]
    ]


def loaded(path, prefix):
    if path.name.endswith(".msgpack"):
        return load_from_file(None, str(path))
    if path.name.endswith(".gz"):
        return from_compressed_bytes(None, path.read_bytes())
    key = path.parent / "public.pem"
    return checkpoint.load(path, prefix=prefix, signed_by=key if key.exists() else None)


@pytest.mark.parametrize(("release", "tree"), all_of("trees"))
def test_every_tree_of_every_release_loads_bit_for_bit(release, tree):
    found = described(loaded(RELEASES / release / tree["path"], tree["prefix"]))
    assert json.loads(json.dumps(found)) == {name: tree[name] for name in found}


@pytest.mark.parametrize(("release", "tree"), all_of("trees", without="msgpack"))
def test_every_checkpoint_of_every_release_verifies(release, tree):
    report = checkpoint.verify(RELEASES / release / tree["path"])
    assert report.ok
    assert report.has_digests


@pytest.mark.parametrize("release", releases())
def test_the_metadata_of_every_release_are_read(release):
    saved = [tree for tree in expected(release)["trees"] if tree["metadata"]]
    for tree in saved:
        record = checkpoint.inspect(RELEASES / release / tree["path"])
        assert record.trees[tree["prefix"] or ""].metadata == tree["metadata"]
    assert saved


@pytest.mark.parametrize(("release", "run"), all_of("runs"))
def test_every_run_of_every_release_is_listed_and_resumed(release, run, tmp_path):
    path = shutil.copytree(RELEASES / release / run["path"], tmp_path / "run")
    steps = {str(step.number): step for step in checkpoint.steps(path)}
    assert {n: {"metrics": s.metrics, "metadata": s.metadata} for n, s in steps.items()} == run["steps"]
    data = Data()
    with checkpoint.Run(path) as again:
        assert again.resume(data=data).step == max(map(int, run["steps"]))
    assert data.taken == run["taken"]


@pytest.mark.parametrize("release", releases())
def test_todays_version_saves_over_checkpoints_of_every_release(release, tmp_path):
    for name in ("directory", "prefixes", "zarr", "zarr-database", "file/model.safetensors"):
        source, path = RELEASES / release / name, tmp_path / name
        path.parent.mkdir(exist_ok=True)
        (shutil.copytree if source.is_dir() else shutil.copy)(source, path)
        layout = "tensorstore" if name.startswith("zarr") else "safetensors"
        checkpoint.save({"new": 1}, path, format=layout)
        assert checkpoint.load(path) == {"new": 1}
        assert checkpoint.verify(path).ok


def test_this_version_has_its_samples():
    advice = "python tests/compat/make_samples/release.py writes them"
    assert (RELEASES / __version__).is_dir(), f"no samples of eformer {__version__}: {advice}"
    assert expected(__version__)["version"] == __version__


@pytest.mark.parametrize("release", releases())
def test_a_reader_written_by_the_specification_alone_reads_them(release):
    """`examples/read_format.py` knows the pages in docs/format, and nothing of eformer."""
    read = runpy.run_path(str(EXAMPLES / "read_format.py"))["read"]
    for name in BY_SPECIFICATION:
        (tree,) = [each for each in expected(release)["trees"] if each["path"] == name]
        found = read(RELEASES / release / name)[""]
        digests = {leaf: hashlib.sha256(array.tobytes()).hexdigest() for leaf, array in found.items()}
        arrays = {leaf: digest for leaf, (kind, *_, digest) in tree["leaves"].items() if kind != "scalar"}
        assert digests == arrays  # scalars are plain values


def test_that_reader_finds_damage(tmp_path):
    read = runpy.run_path(str(EXAMPLES / "read_format.py"))["read"]
    path = Path(shutil.copytree(RELEASES / __version__ / "directory", tmp_path / "copy"))
    data = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(ValueError, match="do not match their digest"):
        read(path)


def test_that_reader_cuts_large_arrays_into_the_same_pieces(tmp_path):
    read = runpy.run_path(str(EXAMPLES / "read_format.py"))["read"]
    tree = {"rows": np.arange(3 * 70_000, dtype=np.int64).reshape(3, 70_000), "flat": np.arange(300_000.0)}
    checkpoint.save(tree | {"deep": np.zeros((2, 3, 200, 1000))}, tmp_path / "saved")
    assert len(checkpoint.inspect(tmp_path / "saved").trees[""].leaves["deep"].extents[0].digests) > 32
    found = read(tmp_path / "saved")[""]
    assert all(np.array_equal(found[name], array) for name, array in tree.items())


@pytest.mark.parametrize("name", ["directory", "file/model.safetensors", "shards", "checksums", "zarr"])
def test_records_without_fingerprints_give_those_of_what_they_hold(name):
    path = RELEASES / "0.1.0" / name
    tree, recorded = checkpoint.load(path), checkpoint.inspect(path).trees[""].fingerprints
    columns = {"sharded": None} if name == "zarr" else {}  # in chunks of their own
    assert recorded == checkpoint.fingerprint(tree) | columns
    assert checkpoint.same(tree, path)
