"""Adapters that `convert` writes open in PEFT and compute what they should; adapters that PEFT writes load here."""

import jax
import numpy as np
import peft
import pytest
import torch
import transformers

from eformer import checkpoint
from eformer.checkpoint import convert, inspect, load, merge, save, verify

RANK, ALPHA, LAYERS, WIDTH = 4, 12, 3, 16
TOKENS = torch.arange(10)[None]


def llama():
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=WIDTH,
        intermediate_size=24,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval()


def gpt2():
    """Its layers are Conv1D, whose weights are in x out."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=32, n_embd=WIDTH, n_layer=LAYERS, n_head=2, n_positions=16)
    return transformers.GPT2LMHeadModel(config).eval()


def lora_of(model, modules):
    """Random LoRA matrices for modules of the model, by name, as JAX has them: in x rank, and rank x out."""
    rng = np.random.default_rng(0)

    def matrix(*shape):
        return rng.normal(size=shape, scale=0.5).astype(np.float32)

    shapes = {name: in_out(model.get_submodule(name)) for name in modules}
    return {n: {"lora_a": matrix(i, RANK), "lora_b": matrix(RANK, o)} for n, (i, o) in shapes.items()}


def in_out(module):
    shape = tuple(module.weight.shape)
    return shape if isinstance(module, transformers.pytorch_utils.Conv1D) else shape[::-1]


def nested(flat):
    tree = {}
    for name, value in flat.items():
        holder = tree
        *outer, last = name.split(".")
        for part in outer:
            holder = holder.setdefault(part, {})
        holder[last] = value
    return tree


def merged_logits(model, matrices):
    """Add the product of each pair to the weight itself, W + A B * alpha / rank, and run the model."""
    with torch.no_grad():
        for name, pair in matrices.items():
            module = model.get_submodule(name)
            delta = torch.from_numpy(pair["lora_a"] @ pair["lora_b"]) * (ALPHA / RANK)
            is_in_out = isinstance(module, transformers.pytorch_utils.Conv1D)
            module.weight += delta if is_in_out else delta.T
        return model(TOKENS).logits.numpy()


def adapted_logits(model):
    with torch.no_grad():
        return model(TOKENS).logits.numpy()


MODELS = {
    "llama": (
        llama,
        [f"model.layers.{i}.{m}" for i in range(LAYERS) for m in ("self_attn.q_proj", "mlp.down_proj")],
    ),
    "some layers": (llama, ["model.layers.0.self_attn.v_proj", "model.layers.2.self_attn.v_proj", "lm_head"]),
    "gpt2": (gpt2, [f"transformer.h.{i}.attn.c_attn" for i in range(LAYERS)]),
}


@pytest.mark.parametrize("which", MODELS)
def test_peft_has_our_matrices_and_computes_the_merged_logits(tmp_path, which):
    make, modules = MODELS[which]
    matrices = lora_of(make(), modules)
    save(nested(matrices), tmp_path / "lora")
    fan = {"fan_in_fan_out": True} if which == "gpt2" else {}
    convert(tmp_path / "lora", tmp_path / "adapter", to="peft", config={"lora_alpha": ALPHA, **fan})

    model = peft.PeftModel.from_pretrained(make(), tmp_path / "adapter").eval()
    assert_equal(tensors_of(model), expected_tensors(matrices))
    np.testing.assert_allclose(adapted_logits(model), merged_logits(make(), matrices), atol=1e-5)
    assert not np.allclose(adapted_logits(model), adapted_logits(make()), atol=1e-2)


def tensors_of(model):
    state = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
    return {name: tensor.numpy() for name, tensor in state.items()}


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array)


def expected_tensors(matrices):
    return {
        f"base_model.model.{name}.lora_{half}.weight": pair[f"lora_{half.lower()}"].T
        for name, pair in matrices.items()
        for half in "AB"
    }


def test_stacked_layers_under_other_names_by_rules(tmp_path):
    modules = [f"model.layers.{i}.self_attn.q_proj" for i in range(LAYERS)]
    matrices = lora_of(llama(), modules)
    stacked = {half: np.stack([pair[half] for pair in matrices.values()]) for half in ("lora_a", "lora_b")}
    save(
        {"params": {"decoder": {"query": stacked}}, "mu": {"decoder": {"query": stacked}}}, tmp_path / "lora"
    )
    rules = tmp_path / "lora.rules"
    rules.write_text(
        "params.decoder.query.lora_(.) -> model.layers.{}.self_attn.q_proj.lora_\\1 | unstack\nmu.* ->\n"
    )
    config = {"r": RANK, "lora_alpha": ALPHA}
    convert(tmp_path / "lora", tmp_path / "adapter", to="peft", rename=rules, config=config)
    model = peft.PeftModel.from_pretrained(llama(), tmp_path / "adapter").eval()
    np.testing.assert_allclose(adapted_logits(model), merged_logits(llama(), matrices), atol=1e-5)


@pytest.fixture
def saved_by_peft(tmp_path):
    config = peft.LoraConfig(
        r=RANK,
        lora_alpha=ALPHA,
        target_modules=["q_proj", "v_proj"],
        modules_to_save=["lm_head"],
        rank_pattern={"v_proj": 2},
        init_lora_weights=False,  # both matrices random
    )
    model = peft.get_peft_model(llama(), config).eval()
    model.save_pretrained(tmp_path / "theirs")
    return model


def test_an_adapter_of_peft_loads_as_it_is(tmp_path, saved_by_peft):
    flat = jax.tree_util.tree_leaves_with_path(load(tmp_path / "theirs"))
    found = {".".join(step.key for step in path): leaf for path, leaf in flat}
    assert_equal(found, tensors_of(saved_by_peft))
    metadata = inspect(tmp_path / "theirs").trees[""].metadata
    assert (metadata["adapter_config"]["r"], metadata["adapter_config"]["lora_alpha"]) == (RANK, ALPHA)
    assert verify(tmp_path / "theirs").left_out == ()


def test_an_adapter_of_peft_comes_back_from_another_format(tmp_path, saved_by_peft):
    convert(tmp_path / "theirs", tmp_path / "ours", to="tensorstore")
    convert(tmp_path / "ours", tmp_path / "again", to="peft")
    model = peft.PeftModel.from_pretrained(llama(), tmp_path / "again").eval()
    np.testing.assert_array_equal(adapted_logits(model), adapted_logits(saved_by_peft))


@pytest.mark.parametrize(
    "settings", [{}, {"use_rslora": True, "rank_pattern": {"v_proj": 2}}, {"alpha_pattern": {"q_proj": 5}}]
)
def test_a_merged_lora_is_that_of_peft(tmp_path, settings):
    model = llama()
    model.save_pretrained(tmp_path / "base")
    modules = ["q_proj", "v_proj", "down_proj", "embed_tokens"]
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=modules, **settings)
    )
    randomize(adapted)
    adapted.save_pretrained(tmp_path / "adapter", save_embedding_layers=True)
    merge(tmp_path / "base", tmp_path / "merged", lora=tmp_path / "adapter", to="hf", like=tmp_path / "base")
    ours = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "merged")
    theirs = adapted.merge_and_unload()
    for (name, one), other in zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6, msg=name)
    torch.testing.assert_close(ours(TOKENS).logits, theirs(TOKENS).logits, rtol=1e-4, atol=1e-5)


def test_a_merged_lora_of_conv1d_is_that_of_peft(tmp_path):
    model = gpt2()
    model.save_pretrained(tmp_path / "base")
    config = peft.LoraConfig(
        r=RANK, lora_alpha=ALPHA, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True
    )
    adapted = peft.get_peft_model(model, config)
    randomize(adapted)
    adapted.save_pretrained(tmp_path / "adapter")
    merge(tmp_path / "base", tmp_path / "merged", lora=tmp_path / "adapter", to="safetensors")
    theirs = adapted.merge_and_unload().state_dict()
    with checkpoint.open(tmp_path / "merged") as view:
        for name in view:
            found = torch.tensor(view[name][...])
            torch.testing.assert_close(found, theirs[name], rtol=1e-6, atol=1e-6, msg=name)


def randomize(adapted):
    torch.manual_seed(1)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(0, 0.1)
