"""Books for Tunix: its models give the logits of transformers, with weights that were loaded by a book."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from transformers import AutoModelForCausalLM

from eformer import checkpoint
from support.tiny_models import MODELS, config_of
from support.tunix_models import MODELS as NAMES
from support.tunix_models import model_for

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning"
)  # of Tunix, for names of old versions of JAX

TOKENS = np.arange(3, 15)[None]  # more than a window of the models with windows


def logits_of_tunix(model):
    length = TOKENS.shape[1]
    mask = jnp.tril(jnp.ones((1, length, length), bool))
    with jax.default_matmul_precision("highest"):
        found, _ = model(jnp.asarray(TOKENS), jnp.arange(length)[None], None, mask)
    return np.asarray(found, np.float32)


def logits_of_transformers(name):
    model = AutoModelForCausalLM.from_pretrained(
        MODELS / name, dtype=torch.float32, attn_implementation="eager"
    )
    if "moe" in name:
        model.set_experts_implementation("eager")  # the other one needs multiples of 16 bytes
    with torch.no_grad():
        return model(torch.asarray(TOKENS)).logits.numpy()


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_equal(name):
    model = model_for(config_of(name))
    state = nnx.state(model, nnx.Param)
    nnx.update(model, checkpoint.load(MODELS / name, like=state, rename="tunix", dtype="like"))
    ours, expected = logits_of_tunix(model), logits_of_transformers(name)
    assert np.abs(expected).max() > 0.1, "the logits of the model tell nothing"
    assert np.abs(ours - expected).max() < 1e-4


@pytest.mark.parametrize("name", NAMES)
def test_a_check_of_names_and_shapes_agrees(name):
    model = nnx.eval_shape(lambda: model_for(config_of(name)))
    found = checkpoint.rules("tunix").check(MODELS / name, nnx.state(model, nnx.Param))
    assert found.ok, str(found)


@pytest.mark.parametrize("name", ["qwen3", "gemma2"])
def test_an_abstract_model_is_filled_in_place_and_exported(tmp_path, name):
    model = nnx.eval_shape(lambda: model_for(config_of(name)))
    model = checkpoint.load(MODELS / name, into=model, rename="tunix", dtype="like")
    checkpoint.export(model, tmp_path / "back", like=MODELS / name, rename="tunix")
    assert checkpoint.diff(MODELS / name, tmp_path / "back").same
