"""The tiny models of `tests/rules` are models of the Hub: transformers finds every leaf, and no other."""

import pytest
import torch
import transformers

from support.tiny_models import MODELS, NAMES, config_of


@pytest.mark.parametrize("name", NAMES)
def test_transformers_finds_every_leaf(name):
    model = getattr(transformers, config_of(name)["architectures"][0])
    _, found = model.from_pretrained(MODELS / name, dtype=torch.bfloat16, output_loading_info=True)
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not found[problem], f"{problem}: {found[problem]}"
