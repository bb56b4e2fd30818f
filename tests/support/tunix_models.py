"""Models of Tunix with random weights, with the sizes of a config.json of transformers."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from typing import Any

import jax.numpy as jnp
from flax import nnx

# Tunix has no vision tower for Gemma 4, and its Gemma 3 is compared as a text model.
MODELS = (
    "llama", "llama-tied", "qwen2", "qwen2-tied", "qwen3", "qwen3-tied", "qwen3_moe",
    "gemma", "gemma2", "gemma3_text", "gemma4_text",
)  # fmt: skip


def _model_module(name: str) -> Any:
    """Import a module of Tunix. Its `__init__`, which imports trainers and samplers, is left out."""
    if "tunix" not in sys.modules:
        spec = importlib.util.find_spec("tunix")
        assert spec, "tunix is not installed: see tests/frameworks/no-deps.txt"
        assert spec.submodule_search_locations
        package = types.ModuleType("tunix")
        package.__path__ = list(spec.submodule_search_locations)
        sys.modules["tunix"] = package
    return importlib.import_module(f"tunix.models.{name}.model")


def model_for(config: dict[str, Any]) -> nnx.Module:
    """Return the model of Tunix with these sizes."""
    kind = config["model_type"]
    makers = {
        "llama": _llama, "qwen2": _qwen, "qwen3": _qwen, "qwen3_moe": _qwen, "gemma": _gemma, "gemma2": _gemma,
        "gemma3_text": _gemma3, "gemma4_text": _gemma4,
    }  # fmt: skip
    model: nnx.Module = makers[kind](config)
    return model


def _sizes(config: dict[str, Any]) -> dict[str, Any]:
    return {
        "num_layers": config["num_hidden_layers"],
        "embed_dim": config["hidden_size"],
        "hidden_dim": config["intermediate_size"],
        "num_heads": config["num_attention_heads"],
        "head_dim": config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
        "num_kv_heads": config["num_key_value_heads"],
    }


def _llama(config: dict[str, Any]) -> Any:
    llama = _model_module("llama3")
    settings = llama.ModelConfig(
        **_sizes(config),
        vocab_size=config["vocab_size"],
        rope_theta=config["rope_parameters"]["rope_theta"],
        norm_eps=config["rms_norm_eps"],
        weight_tying=config["tie_word_embeddings"],
    )
    return llama.Llama3(settings, rngs=nnx.Rngs(0))


def _qwen(config: dict[str, Any]) -> Any:
    name = config["model_type"].removesuffix("_moe")
    qwen, sizes = _model_module(name), _sizes(config)
    if config["model_type"] == "qwen3_moe":
        sizes["hidden_dim"] = config["moe_intermediate_size"]
        sizes["num_experts"] = config.get("num_experts") or config["num_local_experts"]
        sizes["num_experts_per_tok"] = config["num_experts_per_tok"]
    settings = qwen.ModelConfig(
        **sizes,
        vocab_size=config["vocab_size"],
        rope_theta=config["rope_parameters"]["rope_theta"],
        norm_eps=config["rms_norm_eps"],
        use_tied_embedding=config["tie_word_embeddings"],
    )
    return getattr(qwen, name.title())(settings, rngs=nnx.Rngs(0))


def _gemma(config: dict[str, Any]) -> Any:
    gemma, is_second = _model_module("gemma"), config["model_type"] == "gemma2"
    kinds = {
        "sliding_attention": gemma.AttentionType.LOCAL_SLIDING,
        "full_attention": gemma.AttentionType.GLOBAL,
    }
    layers = config.get("layer_types") or ["full_attention"] * config["num_hidden_layers"]
    settings = gemma.ModelConfig(
        **_sizes(config),
        num_embed=config["vocab_size"],
        final_logit_softcap=config.get("final_logit_softcapping"),
        attn_logits_soft_cap=config.get("attn_logit_softcapping"),
        use_post_attn_norm=is_second,
        use_post_ffw_norm=is_second,
        attention_types=[kinds[layer] for layer in layers],
        sliding_window_size=config.get("sliding_window"),
    )
    return gemma.Gemma(settings, rngs=nnx.Rngs(0))


def _gemma3(config: dict[str, Any]) -> Any:
    gemma, rope = _model_module("gemma3"), config["rope_parameters"]
    settings = gemma.ModelConfig(
        **_sizes(config),
        num_embed=config["vocab_size"],
        sliding_window_size=config["sliding_window"],
        local_base_frequency=rope["sliding_attention"]["rope_theta"],
        global_base_frequency=rope["full_attention"]["rope_theta"],
        param_dtype=jnp.float32,
    )
    return gemma.Gemma3(settings, rngs=nnx.Rngs(0))


def _gemma4(config: dict[str, Any]) -> Any:
    gemma, whole = _model_module("gemma4"), config["per_layer_config"]["05"]
    settings = gemma.ModelConfig(
        **_sizes(config),
        num_embed=config["vocab_size"],
        sliding_window_size=config["sliding_window"],
        final_logit_softcap=config["final_logit_softcapping"],
        num_global_kv_heads=whole["num_key_value_heads"],
        global_key_size=whole["head_dim"],
        k_eq_v_global=config["attention_k_eq_v"],
    )
    return gemma.Gemma4(settings, rngs=nnx.Rngs(0))
