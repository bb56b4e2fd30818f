"""The blocks of the guide to frameworks that need torch, transformers, peft or Keras do what it says."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from support.guide import run
from support.pages import blocks


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def logits(model):
    with torch.no_grad():
        return model.eval()(torch.arange(10)[None]).logits.numpy()


def test_keras():
    found = run("Keras")
    assert found["model"].layers[-1].kernel.shape == (8, 5)


def test_transformers():
    found = run("transformers")
    assert found["params"]["layers"]["self_attn"]["q_proj"].shape == (2, 16, 16)
    assert found["params"]["layers"]["self_attn"]["q_proj"].sharding.mesh == found["mesh"]
    np.testing.assert_array_equal(logits(found["model"]), logits(AutoModelForCausalLM.from_pretrained("hf")))


def test_peft():
    found = run("PEFT")
    pair = found["lora"]["model"]["layers"]["1"]["self_attn"]["q_proj"]
    np.testing.assert_array_equal(pair["lora_A"], np.ones((16, 4)))
    assert found["model"].peft_config["default"].lora_alpha == 32


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_the_loop_of_pytorch_goes_on_and_comes_back():
    page = "docs/guides/from-pytorch.md"
    variables = {"__name__": "__main__"}
    for block in [block for block in blocks(page) if "test_guide.py" in block.not_run]:
        exec(compile(block.text, page, "exec", dont_inherit=True), variables)
    back = {"w": torch.zeros(4, 4), "step": torch.tensor(0, dtype=torch.int32)}
    variables["dcp"].load(back, checkpoint_id="dcp/80")
    assert back["step"] == back["w"][0, 0] == 80
