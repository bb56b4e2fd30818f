"""A save compares what it writes with the digests that the accelerator computed. Here CPUs stand in for accelerators."""

import threading

import jax.numpy as jnp
import numpy as np
import pytest

from eformer._engine.saving import commit, source_digests, staging
from eformer._engine.trees import device_digests, devices
from eformer.checkpoint import load, save, save_async, verify
from eformer.errors import NotFoundError, TransferError
from support.trees import assert_same

PIECE, TOGETHER = 2**14, 2**17


@pytest.fixture
def accelerators(monkeypatch):
    """CPUs count as accelerators, whose arrays are copied to the host."""
    monkeypatch.setattr(device_digests, "ENABLED", True)
    monkeypatch.setattr(devices, "has_accelerator", lambda: True)
    monkeypatch.setattr(source_digests, "is_accelerator", lambda device: True)
    monkeypatch.setattr("eformer._engine.saving.snapshot._Reader.look_at", _on_device)
    monkeypatch.setattr(commit, "PIECE_BYTES", PIECE)
    monkeypatch.setattr(source_digests, "_TOGETHER_BYTES", TOGETHER)


def _on_device(reader, sharding, where):
    return "device", 0, None


@pytest.fixture
def compared(monkeypatch):
    """The leaves that were compared, with the numbers of their pieces."""
    found = []

    def require(expected, name, first, digests, check=source_digests.BoxDigests.require):
        found.extend((name, first + number) for number in range(len(digests)))
        check(expected, name, first, digests)

    monkeypatch.setattr(source_digests.BoxDigests, "require", require)
    return found


def tree():
    numbers = np.random.default_rng(5).standard_normal((6, 64, 160), np.float32)
    return {
        **{f"layer_{n}": jnp.asarray(one) for n, one in enumerate(numbers)},
        "large": jnp.asarray(np.random.default_rng(4).integers(0, 9, (400, 640), np.int32)),
        "small": jnp.arange(5),
    }


def compiled(path, how=save, **arguments):
    for number in range(3):
        how(tree(), path / str(number), **arguments)
        for thread in threading.enumerate():
            if thread.name == "eformer-compile":
                thread.join()


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", ["safetensors", "zarr"])
def test_every_piece_is_compared_once_programs_are_compiled(tmp_path, accelerators, compared, kind):
    compiled(tmp_path, format=kind)
    compared.clear()
    save(tree(), tmp_path / "last", format=kind)
    pieces = {**{f"layer_{n}": 3 for n in range(6)}, "large": 67}
    assert sorted(compared) == sorted((name, n) for name, count in pieces.items() for n in range(count))
    assert_same(load(tmp_path / "last"), tree())
    assert verify(tmp_path / "last").ok


def damaged(array, box, original=staging.box_on_host):
    copy = np.array(original(array, box))
    copy.reshape(-1).view(np.uint8)[len(copy) // 3] ^= 16
    return copy


@pytest.mark.parametrize("how", [save, lambda *arguments: save_async(*arguments).result()])
def test_a_copy_that_arrives_damaged_is_an_error_of_the_save(tmp_path, accelerators, monkeypatch, how):
    compiled(tmp_path)
    save(tree(), tmp_path / "run")
    monkeypatch.setattr(staging, "box_on_host", damaged)
    with pytest.raises(
        TransferError, match=r"leaf '.*': bytes 0 to 1[56].* of its box on .* arrived damaged in host memory"
    ):
        how({name: leaf + 1 for name, leaf in tree().items()}, tmp_path / "run")
    assert_same(load(tmp_path / "run"), tree())
    with pytest.raises(TransferError):
        how(tree(), tmp_path / "new")
    with pytest.raises(NotFoundError):
        load(tmp_path / "new")


def test_without_the_check_the_damage_would_be_saved_and_confirmed(tmp_path, accelerators, monkeypatch):
    """The control: the digests of the host confirm the damaged bytes."""
    monkeypatch.setattr(devices, "has_accelerator", lambda: False)
    monkeypatch.setattr(staging, "box_on_host", damaged)
    save(tree(), tmp_path)
    assert verify(tmp_path).ok
    assert (np.asarray(load(tmp_path)["layer_0"]) != np.asarray(tree()["layer_0"])).any()
