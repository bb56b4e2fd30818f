"""Exported models open in transformers: equal logits, tokenizers, templates, whole configurations."""

import json
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from eformer import checkpoint
from eformer.errors import MismatchError

TOKENS = torch.arange(12).reshape(1, 12)
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 60,
}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SMALL, tie_word_embeddings=False),
    "llama, tied": lambda: transformers.LlamaConfig(**SMALL, tie_word_embeddings=True),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **SMALL, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, decoder_sparse_step=1
    ),
    "gemma3": lambda: transformers.Gemma3TextConfig(**SMALL, sliding_window=8),
    "gpt_oss": lambda: transformers.GptOssConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2),
    "gpt2": lambda: transformers.GPT2Config(
        n_embd=32, n_layer=2, n_head=4, vocab_size=60, n_positions=32, bos_token_id=0, eos_token_id=1
    ),
}


def save_tokenizer(path):
    words = {word: number for number, word in enumerate(["<s>", "</s>", "hello", "world", "[UNK]"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    template = "{% for m in messages %}<s>{{ m.content }}</s>{% endfor %}"
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", chat_template=template
    )
    fast.save_pretrained(path)


@pytest.fixture(params=CONFIGS)
def theirs(request, tmp_path):
    """A model of random weights with its tokenizer, as transformers saves it."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[request.param]()).eval()
    model.save_pretrained(tmp_path / "theirs")
    save_tokenizer(tmp_path / "theirs")
    return SimpleNamespace(path=tmp_path / "theirs", model=model)


@pytest.fixture
def tree(theirs):
    """The weights as jax arrays in nested dicts."""
    return checkpoint.load(theirs.path)


def opened(path):
    found, report = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return found.eval()


def logits(model):
    with torch.no_grad():
        return model(TOKENS).logits.float().numpy()


@pytest.mark.parametrize("limit", ["5GB", "20kB"])
def test_an_exported_model_has_equal_logits(theirs, tree, tmp_path, limit):
    checkpoint.export(tree, tmp_path / "ours", like=theirs.path, max_shard_size=limit)
    np.testing.assert_array_equal(logits(opened(tmp_path / "ours")), logits(theirs.model))
    assert checkpoint.verify(tmp_path / "ours").ok


def test_transformers_reads_the_same_configuration(theirs, tree, tmp_path):
    checkpoint.export(tree, tmp_path / "ours", like=theirs.path)
    found, expected = (
        transformers.AutoConfig.from_pretrained(path).to_dict() for path in (tmp_path / "ours", theirs.path)
    )
    assert {**found, "_name_or_path": ""} == {**expected, "_name_or_path": ""}


def test_the_tokenizer_opens_with_its_template(theirs, tree, tmp_path):
    checkpoint.export(tree, tmp_path / "ours", like=theirs.path)
    found, expected = (AutoTokenizer.from_pretrained(path) for path in (tmp_path / "ours", theirs.path))
    assert found("hello world").input_ids == expected("hello world").input_ids
    chat = [{"role": "user", "content": "hello"}]
    assert found.apply_chat_template(chat, tokenize=False) == "<s>hello</s>"


def test_a_step_of_a_run_opens_in_another_dtype(theirs, tree, tmp_path):
    with checkpoint.Run(tmp_path / "run", every=1) as run:
        run.after(1, {"params": tree, "step": 1})
    checkpoint.export(tmp_path / "run", tmp_path / "ours", like=theirs.path, root="params", dtype="bf16")
    found = opened(tmp_path / "ours").state_dict()
    for name, parameter in theirs.model.state_dict().items():
        assert torch.equal(found[name], parameter.to(torch.bfloat16)), name


def test_transformers_saves_what_it_has_opened_with_the_same_names(theirs, tree, tmp_path):
    checkpoint.export(tree, tmp_path / "ours", like=theirs.path)
    opened(tmp_path / "ours").save_pretrained(tmp_path / "again")
    assert checkpoint.diff(tmp_path / "ours", tmp_path / "again").same


def test_an_index_is_the_one_that_transformers_writes(tmp_path):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS["llama"]())
    model.save_pretrained(tmp_path / "theirs", max_shard_size="20kB")
    tree = checkpoint.load(tmp_path / "theirs")
    checkpoint.export(tree, tmp_path / "ours", like=tmp_path / "theirs", max_shard_size="20kB")
    ours, theirs = (
        json.loads((tmp_path / one / "model.safetensors.index.json").read_text())
        for one in ("ours", "theirs")
    )
    assert list(ours["weight_map"]) == list(theirs["weight_map"])
    assert theirs["metadata"].items() <= ours["metadata"].items()


def test_a_larger_vocabulary_opens(tmp_path):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS["llama, tied"]())
    model.save_pretrained(tmp_path / "theirs")
    tree = checkpoint.load(tmp_path / "theirs")
    rows = tree["model"]["embed_tokens"]["weight"]
    tree["model"]["embed_tokens"]["weight"] = jnp.concatenate([rows, rows[:4]])
    with pytest.raises(MismatchError, match=r"\[64, 32\], and like has \[60, 32\]"):
        checkpoint.export(tree, tmp_path / "ours", like=tmp_path / "theirs")
    checkpoint.export(tree, tmp_path / "ours", like=tmp_path / "theirs", config={"vocab_size": 64})
    assert logits(opened(tmp_path / "ours")).shape == (1, 12, 64)


@pytest.mark.parametrize("layout", ["maxtext", "flax"])
@pytest.mark.parametrize("model", ["llama", "llama, tied", "qwen3_moe", "gpt_oss"])
def test_a_model_trained_in_another_layout_goes_back(tmp_path, model, layout):
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(CONFIGS[model]()).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    ours, report = checkpoint.load(tmp_path / "theirs", rename=layout, return_report=True)
    with checkpoint.Run(tmp_path / "run", every=1, origin=report.origin) as run:
        run.after(1, {"state": ours})
    checkpoint.export(tmp_path / "run", tmp_path / "ours", like=tmp_path / "theirs", root="state")
    np.testing.assert_allclose(logits(opened(tmp_path / "ours")), logits(theirs), atol=1e-5)
