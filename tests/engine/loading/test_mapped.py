"""Loads that map the files instead of reading them."""

import gc
import os
import resource
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from eformer._engine.loading.read import Reading
from eformer._engine.stores import local_files as files
from eformer.checkpoint import SaveOptions, load, save
from eformer.errors import CorruptionError
from support.damage import flip
from support.trees import assert_same


@pytest.fixture
def tree():
    big = jax.random.normal(jax.random.key(0), (1024, 512))
    return {
        "big": big,
        "half": big.astype(jnp.bfloat16),
        "host": np.arange(10000.0),
        "odd": jnp.arange(3),
        "step": 4,
    }


@pytest.fixture
def is_read(monkeypatch):
    """The names of the leaves that are read."""
    names = []
    tasks = Reading.tasks
    monkeypatch.setattr(
        Reading,
        "tasks",
        lambda self, targets, *more, **how: (
            names.extend(t.name for t in targets) or tasks(self, targets, *more, **how)
        ),
    )
    return names


def address(array):
    return (
        array.unsafe_buffer_pointer()
        if isinstance(array, jax.Array)
        else array.__array_interface__["data"][0]
    )


def mapped_files(array):
    """The files that the array's memory belongs to."""
    start = address(array)
    for line in Path("/proc/self/maps").read_text().splitlines():
        low, high = (int(text, 16) for text in line.split()[0].split("-"))
        if low <= start < high:
            return line.split()[-1]
    return None


@pytest.mark.parametrize("kind", ["safetensors", "tensorstore"])
def test_arrays_are_the_files_themselves(tmp_path, tree, kind, is_read):
    save(tree, tmp_path, format=kind)
    loaded = load(tmp_path, mmap=True)
    assert_same(loaded, tree)
    for name in ("big", "half", "host"):
        assert str(tmp_path) in mapped_files(loaded[name]), name
    assert not loaded["host"].flags.writeable
    assert set(is_read) <= {"odd"}


def test_they_outlive_the_checkpoint_and_donation_does_not_write_to_it(tmp_path, tree):
    save(tree, tmp_path)
    loaded = load(tmp_path, mmap=True)
    jax.jit(lambda x: x * 0, donate_argnums=0)(loaded["big"]).block_until_ready()
    assert_same(load(tmp_path), tree)
    save({"other": np.zeros(3)}, tmp_path)
    assert_same(loaded["half"], tree["half"])


def test_rows_are_mapped_and_columns_are_read(tmp_path, tree, is_read):
    save(tree, tmp_path)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("x",))
    shardings = {"big": NamedSharding(mesh, P("x")), "half": NamedSharding(mesh, P(None, "x"))}
    loaded = load(tmp_path, mmap=True, shardings=shardings)
    assert_same(np.asarray(loaded["big"]), np.asarray(tree["big"]))
    assert_same(np.asarray(loaded["half"]), np.asarray(tree["half"]))
    assert all(str(tmp_path) in mapped_files(shard.data) for shard in loaded["big"].addressable_shards)
    assert set(is_read) == {"half"}


@pytest.mark.parametrize("options", [SaveOptions(ocdbt=True), SaveOptions(compression="zstd")])
def test_what_cannot_be_mapped_is_read(tmp_path, tree, options):
    save(tree, tmp_path, format="tensorstore", options=options)
    assert_same(load(tmp_path, mmap=True), tree)


def test_a_cast_is_read(tmp_path, tree, is_read):
    save(tree, tmp_path)
    loaded = load(tmp_path, mmap=True, dtype="float16", keys=["big"])
    assert_same(loaded["big"], tree["big"].astype(jnp.float16))
    assert is_read == ["big"]


def test_a_file_system_that_cannot_map_is_read(tmp_path, tree, monkeypatch, is_read):
    def refuse(*_, **__):
        raise OSError("no such thing here")

    save(tree, tmp_path)
    monkeypatch.setattr(files.mmap, "mmap", refuse)
    assert_same(load(tmp_path, mmap=True), tree)
    assert set(is_read) == {"big", "half", "host", "odd"}


def test_digests_are_checked_if_asked_for(tmp_path, tree):
    save(tree, tmp_path)
    assert_same(load(tmp_path, mmap=True, verify=True), tree)
    flip(tmp_path / "model.safetensors", -2_000_000)
    load(tmp_path, mmap=True)
    with pytest.raises(CorruptionError, match="damaged"):
        load(tmp_path, mmap=True, verify=True)


@pytest.mark.parametrize("size", [200_000, 100])
def test_a_file_that_was_cut_short_is_refused_and_not_mapped(tmp_path, size):
    save({"w": np.arange(size), "x": np.arange(10)}, tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CorruptionError, match="cut short"):
        load(tmp_path, mmap=True)


def test_descriptors_are_not_used_up(tmp_path):
    tree = {f"l{n}": np.full(2**14, n) for n in range(40)}
    save(tree, tmp_path, format="tensorstore")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    load(tmp_path, mmap=True)  # whatever is opened once, by whomever
    there = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (2 * there, before[1]))  # of which a load takes a part
    try:
        kept = [load(tmp_path, mmap=True) for _ in range(3)]
        assert len(os.listdir("/proc/self/fd")) <= there + there // 2 + 2
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    for loaded in kept:
        assert_same(loaded, tree)
    del kept, loaded
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= there + 2


def test_empty_leaves_and_trees_come_back(tmp_path):
    tree = {"none": np.zeros((0, 3)), "scalar": jnp.float32(2), "key": jax.random.key(1)}
    save(tree, tmp_path / "a")
    assert_same(load(tmp_path / "a", mmap=True), tree)
    save({}, tmp_path / "b")
    assert load(tmp_path / "b", mmap=True) == {}
