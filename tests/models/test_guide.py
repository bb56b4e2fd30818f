"""The blocks of the guide to frameworks do what it says; those of heavy frameworks are in tests/frameworks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from eformer import checkpoint
from support.guide import run, sections

HEAVY = {"Keras", "transformers", "PEFT"}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_every_section_has_a_test():
    here = {"flax linen", "flax NNX", "Equinox", "Haiku", "A class of your own"}
    assert sections().keys() == here | HEAVY


def test_linen():
    found = run("flax linen")
    body, expected = found["params"]["params"]["body"], found["state"].params["params"]["body"]
    np.testing.assert_array_equal(body["kernel"], expected["kernel"])
    assert found["params"]["params"]["head"]["kernel"].shape == (8, 5)


def test_nnx():
    found = run("flax NNX")
    np.testing.assert_array_equal(found["adapted"].kernel[...], found["base"].kernel[...])
    assert sorted(checkpoint.open("lora/100")) == ["lora.lora_a", "lora.lora_b"]
    assert found["linear"].kernel[...].sharding.spec == jax.P(None, "model")
    assert isinstance(found["optimizer"], nnx.Optimizer)


def test_equinox():
    model = run("Equinox")["model"]
    assert model(jnp.ones(4)).shape == (5,)


def test_haiku():
    found = run("Haiku")
    jax.tree.map(np.testing.assert_array_equal, found["run"]["params"], found["params"])
    assert checkpoint.open("run/100")["params.mlp/~/linear_0.w"].shape == (4, 8)


def test_a_class_of_ones_own():
    from eformer._engine.trees import modules

    before = dict(modules._registered.functions)
    try:
        run("A class of your own")
    finally:
        modules._registered.functions = before
        modules._framework_of.cache_clear()
