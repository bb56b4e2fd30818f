"""What we save opens in transformers: a model from a flat dict of Hugging Face names, with equal logits."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from eformer.checkpoint import Run, SaveOptions, load, save, verify

LLAMA = LlamaConfig(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=60
)  # fmt: skip
GPT2 = GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=60, n_positions=32)  # its embeddings are tied
TOKENS = torch.arange(12).reshape(1, 12)


@pytest.fixture(params=[LLAMA, GPT2], ids=["llama", "gpt2"])
def model(request):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(request.param).eval()


@pytest.fixture
def path(model, tmp_path):
    model.config.save_pretrained(tmp_path)
    return tmp_path


def weights(model):
    """The state dict as numpy arrays; tied weights once, as transformers saves them."""
    tied = model.all_tied_weights_keys if model.config.tie_word_embeddings else ()
    return {name: t.numpy() for name, t in model.state_dict().items() if name not in tied}


def logits(model):
    with torch.no_grad():
        return model(TOKENS).logits.numpy()


def check(path, model):
    found, report = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    np.testing.assert_array_equal(logits(found.eval()), logits(model))
    assert verify(path).ok


def train(model, *names):
    """Change the parameters of these names, or all."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not names or name in names:
                parameter.add_(torch.randn_like(parameter))


def last(model):
    """The name of a parameter outside of the module that has nearly all others."""
    return "lm_head.weight" if "lm_head.weight" in weights(model) else "transformer.ln_f.weight"


@pytest.mark.parametrize("limit", [SaveOptions().max_shard_bytes, 20_000], ids=["one file", "shards"])
def test_a_model_opens_after_the_first_save_and_every_later_one(model, path, limit):
    for _ in range(3):
        save(weights(model), path, options=SaveOptions(max_shard_bytes=limit))
        check(path, model)
        train(model)


def test_a_model_opens_after_saves_that_use_files_again(path):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LLAMA).eval()
    model.config.save_pretrained(path)
    for _ in range(3):
        save(weights(model), path, options=SaveOptions(reuse=True))
        check(path, model)
        train(model, "lm_head.weight")


def test_a_model_opens_after_a_save_that_uses_all_of_another(model, path, tmp_path_factory):
    earlier = tmp_path_factory.mktemp("earlier")
    save(weights(model), earlier)
    save(weights(model), path, options=SaveOptions(reuse=earlier))
    check(path, model)


def test_of_files_that_are_used_again_in_part_transformers_finds_nothing_rather_than_old_weights(model, path):
    save(weights(model), path)
    train(model, last(model))
    save(weights(model), path, options=SaveOptions(reuse=True))
    np.testing.assert_array_equal(load(path)[last(model)], weights(model)[last(model)])
    with pytest.raises(OSError, match="no file named model"):
        AutoModelForCausalLM.from_pretrained(path)
    save(weights(model), path)
    check(path, model)


def test_every_step_of_a_run_opens_whichever_leaves_have_changed(model, tmp_path):
    parameters = [name for name, _ in model.named_parameters()]
    with Run(tmp_path, every=1) as run:
        for step, changed in enumerate([[], [last(model)], [last(model)], parameters[:1], parameters, []], 1):
            if changed:
                train(model, *changed)
            run.after(step, weights(model))
            run.wait()
            model.config.save_pretrained(tmp_path / f"step-{step}")
            check(tmp_path / f"step-{step}", model)


def test_a_model_on_devices_of_jax_opens(model, path):
    import jax

    save(jax.tree.map(jax.numpy.asarray, weights(model)), path)
    check(path, model)


def test_what_transformers_saves_loads_by_the_same_names(model, tmp_path):
    model.save_pretrained(tmp_path / "theirs")
    found = load(tmp_path / "theirs", keys=list(weights(model)))
    assert found.keys() == weights(model).keys()
    for name, array in weights(model).items():
        np.testing.assert_array_equal(found[name], array)
