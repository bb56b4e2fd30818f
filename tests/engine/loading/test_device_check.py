"""Digests of loads onto accelerators are checked on the devices. Here CPUs stand in for accelerators."""

import logging
import threading
from contextlib import contextmanager
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eformer._engine.loading import device_check, fetch, pinned_stream, placement
from eformer._engine.loading.pinned_stream import before_transfer
from eformer._engine.record.xxh3 import SHORTEST
from eformer._engine.saving import commit
from eformer._engine.trees import device_digests
from eformer._engine.trees.device_digests import Digester
from eformer.checkpoint import load, save
from eformer.errors import CorruptionError, TransferError
from support.damage import flip
from support.trees import assert_same

PIECE, SLOT = 2**14, 2**17


@pytest.fixture
def accelerators(monkeypatch):
    """CPUs count as accelerators, and their slots hold a few pieces."""

    def first(sharding):
        return jax.devices()[0] if sharding is None else next(iter(sharding.addressable_devices))

    monkeypatch.setattr(device_digests, "ENABLED", True)
    monkeypatch.setattr(commit, "PIECE_BYTES", PIECE)
    monkeypatch.setattr(pinned_stream, "_SLOT_BYTES", SLOT)
    monkeypatch.setattr(pinned_stream, "_WORTH_IT", 0)
    monkeypatch.setattr(placement, "_WORTH_READING_PARTS", 0)
    monkeypatch.setattr(
        pinned_stream, "accelerator_of", lambda target: None if target.as_numpy else first(target.sharding)
    )

    def unaligned(nbytes):  # XLA would alias aligned memory, which no accelerator does
        memory = np.empty(nbytes + 128, np.uint8)
        return memory[(16 - memory.__array_interface__["data"][0] % 64) % 64 :][:nbytes]

    monkeypatch.setattr(pinned_stream, "aligned", unaligned)


@pytest.fixture
def on_host(monkeypatch):
    """Counts the bytes that loads digest in host memory."""
    counted = mock.Mock(side_effect=fetch.xxh3_128)
    monkeypatch.setattr(fetch, "xxh3_128", counted)
    return counted


def tree_of(dtype=np.float32):
    numbers = np.random.default_rng(3).integers(0, 250, (8, 64, 640), np.uint8)
    layers = {f"layer_{n}": jnp.asarray(one.view(dtype)) for n, one in enumerate(numbers)}
    return {**layers, "large": jnp.asarray(np.random.default_rng(4).integers(0, 9, (400, 640), np.int32))}


def compiled(path, **arguments):
    """Load until all programs of this load are compiled, and return what the last load returned."""
    for _ in range(3):
        loaded = load(path, **arguments)
        for thread in threading.enumerate():
            if thread.name == "eformer-compile":
                thread.join()
    return loaded


@pytest.mark.sample(3)
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.int8])
def test_all_pieces_are_checked_on_the_device_once_programs_are_compiled(
    tmp_path, accelerators, on_host, dtype
):
    tree = tree_of(dtype)
    save(tree, tmp_path)
    assert_same(load(tmp_path), tree)
    compiled(tmp_path)
    on_host.reset_mock()
    assert_same(load(tmp_path), tree)
    assert not [call for call in on_host.call_args_list if len(call.args[0]) > SHORTEST]


@pytest.mark.sample(3)
@pytest.mark.parametrize("spec", [jax.P("x"), jax.P(), jax.P(None, "x")])
def test_every_device_is_checked(tmp_path, accelerators, on_host, spec, caplog):
    tree = tree_of()
    save(tree, tmp_path)
    sharding = jax.NamedSharding(jax.sharding.Mesh(np.array(jax.devices()[:2]), ("x",)), spec)
    compiled(tmp_path, shardings=sharding)
    on_host.reset_mock()
    assert_same(jax.tree.map(np.asarray, load(tmp_path, shardings=sharding)), jax.tree.map(np.asarray, tree))
    # The host checks the pieces that are cut. Columns cut all 91 pieces. Rows cut a piece of each of 8 leaves between two
    # devices, and the 5 parts of the large leaf on the second device begin or end inside of 10 pieces.
    assert on_host.call_count == {jax.P(): 0, jax.P("x"): 8 + 10, jax.P(None, "x"): 3 * 8 + 67}[spec]
    with transfers(Fault(times=1)), caplog.at_level(logging.WARNING, "eformer"):
        loaded = load(tmp_path, shardings=sharding)
    if spec != jax.P(None, "x"):
        assert_same(jax.tree.map(np.asarray, loaded), jax.tree.map(np.asarray, tree))
        assert "arrived damaged on" in caplog.text


@contextmanager
def transfers(function):
    """Call a function with the memory of each transfer."""
    token = before_transfer.set(function)
    try:
        yield
    finally:
        before_transfer.reset(token)


class Fault:
    """Damage a byte of the first transfers."""

    def __init__(self, times):
        self.left = times

    def __call__(self, memory):
        if self.left:
            self.left -= 1
            memory[len(memory) // 3] ^= 4


def test_a_damaged_transfer_is_repeated_and_reported(tmp_path, accelerators, caplog):
    tree = tree_of()
    save(tree, tmp_path)
    compiled(tmp_path)
    with transfers(Fault(times=1)), caplog.at_level(logging.WARNING, "eformer"):
        assert_same(load(tmp_path), tree)
    assert "arrived damaged on" in caplog.text
    assert "the file is undamaged, and the transfer is repeated" in caplog.text


def test_without_programs_a_damaged_transfer_is_not_seen(tmp_path, accelerators):
    """The control: it is the digest on the device that finds the damage."""
    tree = tree_of()
    save(tree, tmp_path)
    compiled(tmp_path)
    with transfers(Fault(times=1)):
        loaded = load(tmp_path, verify=False)
    differing = [
        name for name in tree if np.asarray(loaded[name]).tobytes() != np.asarray(tree[name]).tobytes()
    ]
    assert len(differing) == 1


def test_a_transfer_that_fails_twice_is_an_error_that_names_leaf_file_and_device(tmp_path, accelerators):
    save(tree_of(), tmp_path)
    compiled(tmp_path)
    message = r"leaf '.*': bytes \d+ to \d+ of model.safetensors arrived damaged on .*, twice; the file is undamaged"
    with transfers(Fault(times=10**6)), pytest.raises(TransferError, match=message):
        load(tmp_path)


def test_a_damaged_file_is_the_error_that_it_was(tmp_path, accelerators, caplog):
    tree = tree_of()
    save(tree, tmp_path)
    flip(tmp_path / "model.safetensors", -5)
    with pytest.raises(CorruptionError) as on_the_host:
        load(tmp_path)
    with pytest.raises(CorruptionError):
        compiled(tmp_path)
    save(tree, tmp_path / "whole")
    compiled(tmp_path / "whole")
    with pytest.raises(CorruptionError) as on_the_device:
        load(tmp_path)
    assert str(on_the_device.value) == str(on_the_host.value)
    assert "arrived damaged" not in caplog.text


@pytest.mark.parametrize("where", ["digest", "results"])
def test_a_device_that_has_no_memory_for_digests_leaves_the_check_to_the_host(
    tmp_path, accelerators, on_host, monkeypatch, where
):
    tree = tree_of()
    save(tree, tmp_path)
    compiled(tmp_path)

    def fail(*_):
        raise RuntimeError("RESOURCE_EXHAUSTED")

    monkeypatch.setattr(*{"digest": (Digester, "digest"), "results": (device_check, "results")}[where], fail)
    assert_same(load(tmp_path), tree)
    flip(tmp_path / "model.safetensors", -5)
    with pytest.raises(CorruptionError, match="are damaged"):
        load(tmp_path)
