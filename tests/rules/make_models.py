"""Make the tiny models of `tests/rules/models` with the classes of transformers: random weights, odd distinct sizes.

    .venv-frameworks/bin/python tests/rules/make_models.py [NAME ...]

Each model is a directory as `save_pretrained` writes it: config.json and model.safetensors, with the names of the files
on the Hub. Sizes are distinct, so that a rule that confuses two axes fails. Norms and biases are random, too.
"""

from __future__ import annotations

import shutil
import sys
import zlib
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

MODELS = Path(__file__).parent / "models"

DECODER = {
    "vocab_size": 37,
    "hidden_size": 8,
    "intermediate_size": 13,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WITHOUT_HEAD_DIM = {key: value for key, value in DECODER.items() if key != "head_dim"} | {
    "hidden_size": 12,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
# Tunix rotates by this number, whatever its config says.
ROPE = {"rope_parameters": {"rope_theta": 1_000_000.0, "rope_type": "default"}}
LAYERS_OF_GEMMA = {"num_hidden_layers": 4, "sliding_window": 8}
GLOBAL_OF_GEMMA4 = {
    "sliding_window": 8,
    "global_head_dim": 16,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "final_logit_softcapping": 30.0,
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
}
VISION = {
    "hidden_size": 10,
    "intermediate_size": 11,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 6,
    "patch_size": 2,
}
EXPERTS = {"moe_intermediate_size": 7, "num_experts_per_tok": 2}
DEEPSEEK = {
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 3,
    "first_k_dense_replace": 1,
    "q_lora_rank": 9,
    "kv_lora_rank": 11,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    **EXPERTS,
}
COMPRESSED = ("compressed_sparse_attention", "heavily_compressed_attention")
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 3,
    "linear_conv_kernel_dim": 4,
    "shared_expert_intermediate_size": 8,
}

# The name of a model, its class, and its config.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", DECODER | ROPE),
    "llama-tied": ("LlamaForCausalLM", DECODER | ROPE | {"tie_word_embeddings": True}),
    "mistral": ("MistralForCausalLM", DECODER),
    "qwen2": ("Qwen2ForCausalLM", WITHOUT_HEAD_DIM | ROPE),
    "qwen2-tied": ("Qwen2ForCausalLM", WITHOUT_HEAD_DIM | ROPE | {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", DECODER | ROPE),
    "qwen3-tied": ("Qwen3ForCausalLM", DECODER | ROPE | {"tie_word_embeddings": True}),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        DECODER | ROPE | EXPERTS | {"num_experts": 3, "norm_topk_prob": True},
    ),
    "mixtral": ("MixtralForCausalLM", DECODER | {"num_local_experts": 3}),
    "deepseek_v3": ("DeepseekV3ForCausalLM", DECODER | DEEPSEEK),
    "deepseek_v2": (
        "DeepseekV2ForCausalLM",
        DECODER | DEEPSEEK | {"q_lora_rank": None, "topk_method": "greedy", "head_dim": 4},
    ),
    "deepseek_v4": (
        "DeepseekV4ForCausalLM",
        {key: value for key, value in DECODER.items() if key not in ("head_dim", "intermediate_size")}
        | {
            "num_hidden_layers": 7,
            "layer_types": ["sliding_attention"] * 2 + [*COMPRESSED] * 2 + [COMPRESSED[0]],
            "compress_rates": dict(zip(COMPRESSED, (3, 5), strict=True)),
            "num_key_value_heads": 1,
            "head_dim": 12,
            "q_lora_rank": 9,
            "o_lora_rank": 5,
            "o_groups": 2,
            "index_n_heads": 3,
            "index_head_dim": 10,
            "hc_mult": 3,
            "n_routed_experts": 3,
            "n_shared_experts": 1,
            **EXPERTS,
        },
    ),
    "gpt_oss": (
        "GptOssForCausalLM",
        DECODER
        | {"num_hidden_layers": 4, "num_local_experts": 3, "num_experts_per_tok": 2, "sliding_window": 8},
    ),
    "olmo3": ("Olmo3ForCausalLM", DECODER | {"num_hidden_layers": 8, "sliding_window": 8}),
    "olmo2": ("Olmo2ForCausalLM", DECODER),
    "gemma": ("GemmaForCausalLM", DECODER | {"tie_word_embeddings": True}),
    "gemma2": (
        "Gemma2ForCausalLM",
        DECODER | LAYERS_OF_GEMMA | {"tie_word_embeddings": True, "query_pre_attn_scalar": 6},
    ),
    "gemma3_text": (
        "Gemma3ForCausalLM",
        DECODER
        | LAYERS_OF_GEMMA
        | {"tie_word_embeddings": True, "num_hidden_layers": 7, "query_pre_attn_scalar": 6},
    ),
    "gemma3": (
        "Gemma3ForConditionalGeneration",
        {
            "text_config": DECODER
            | {"num_hidden_layers": 13, "sliding_window": 8, "query_pre_attn_scalar": 6, "vocab_size": 41},
            "vision_config": VISION | {"model_type": "siglip_vision_model", "vision_use_head": False},
            "mm_tokens_per_image": 1,
            "tie_word_embeddings": True,
        },
    ),
    "phi3": ("Phi3ForCausalLM", WITHOUT_HEAD_DIM),
    "gpt2": (
        "GPT2LMHeadModel",
        {"vocab_size": 37, "n_embd": 12, "n_layer": 2, "n_head": 3, "n_inner": 13, "n_positions": 17},
    ),
    "gpt_neox": (
        "GPTNeoXForCausalLM",
        WITHOUT_HEAD_DIM | {"rotary_pct": 0.5},
    ),
    "whisper": (
        "WhisperForConditionalGeneration",
        {
            "vocab_size": 37,
            "d_model": 12,
            "encoder_layers": 2,
            "decoder_layers": 3,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "encoder_ffn_dim": 13,
            "decoder_ffn_dim": 14,
            "num_mel_bins": 5,
            "max_source_positions": 17,
            "max_target_positions": 19,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 1,
        },
    ),
    "t5": (
        "T5ForConditionalGeneration",
        {
            "vocab_size": 37,
            "d_model": 14,
            "d_kv": 3,
            "d_ff": 13,
            "num_layers": 2,
            "num_decoder_layers": 3,
            "num_heads": 4,
            "relative_attention_num_buckets": 9,
            "feed_forward_proj": "gated-gelu",
        },
    ),
    "bert": (
        "BertForMaskedLM",
        {
            "vocab_size": 37,
            "hidden_size": 12,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "intermediate_size": 13,
            "max_position_embeddings": 17,
        },
    ),
    "vit": ("ViTForImageClassification", VISION | {"num_labels": 5}),
    "siglip": (
        "SiglipModel",
        {
            "text_config": {
                "vocab_size": 37,
                "hidden_size": 12,
                "intermediate_size": 13,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "max_position_embeddings": 17,
                "projection_size": 12,
            },
            "vision_config": VISION | {"hidden_size": 12, "num_attention_heads": 3},
        },
    ),
    "clip": (
        "CLIPModel",
        {
            "text_config": {
                "vocab_size": 37,
                "hidden_size": 12,
                "intermediate_size": 13,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "max_position_embeddings": 17,
            },
            "vision_config": VISION,
            "projection_dim": 7,
        },
    ),
    "mamba2": (
        "Mamba2ForCausalLM",
        {
            "vocab_size": 37,
            "hidden_size": 10,
            "num_hidden_layers": 3,
            "num_heads": 4,
            "head_dim": 5,
            "expand": 2,
            "state_size": 7,
            "n_groups": 2,
            "conv_kernel": 4,
            "tie_word_embeddings": False,
        },
    ),
    "qwen3_next": (
        "Qwen3NextForCausalLM",
        DECODER | EXPERTS | LINEAR | {"num_hidden_layers": 8, "num_experts": 3, "partial_rotary_factor": 1.0},
    ),
    "qwen3_5_moe": (
        "Qwen3_5MoeForConditionalGeneration",
        {
            "text_config": DECODER
            | EXPERTS
            | LINEAR
            | {"num_hidden_layers": 8, "num_experts": 3, "partial_rotary_factor": 1.0},
            "vision_config": {
                "depth": 2,
                "hidden_size": 10,
                "intermediate_size": 11,
                "num_heads": 2,
                "patch_size": 2,
                "spatial_merge_size": 2,
                "temporal_patch_size": 2,
                "out_hidden_size": 8,
                "num_position_embeddings": 9,
                "deepstack_visual_indexes": [],
            },
            "tie_word_embeddings": False,
        },
    ),
    "gemma4": (
        "Gemma4ForConditionalGeneration",
        {
            "text_config": DECODER
            | GLOBAL_OF_GEMMA4
            | {
                "num_hidden_layers": 6,
                "enable_moe_block": True,
                "num_experts": 3,
                "top_k_experts": 2,
                "moe_intermediate_size": 7,
                "tie_word_embeddings": True,
            },
            "vision_config": VISION | {"num_key_value_heads": 2, "head_dim": 4, "position_embedding_size": 9},
            "audio_config": None,
            "tie_word_embeddings": True,
        },
    ),
    "gemma4_text": (
        "Gemma4ForCausalLM",
        DECODER
        | GLOBAL_OF_GEMMA4
        | {"enable_moe_block": False, "num_hidden_layers": 12, "tie_word_embeddings": True},
    ),
    "gemma3n": (
        "Gemma3nForCausalLM",
        DECODER
        | {
            "num_hidden_layers": 5,
            "sliding_window": 8,
            "hidden_size_per_layer_input": 7,
            "vocab_size_per_layer_input": 31,
            "altup_num_inputs": 3,
            "laurel_rank": 5,
            "num_kv_shared_layers": 0,
            "intermediate_size": [13] * 5,
            "activation_sparsity_pattern": [0.0] * 5,
            "tie_word_embeddings": True,
        },
    ),
    "llama4_text": (
        "Llama4ForCausalLM",
        DECODER
        | {
            "num_hidden_layers": 4,
            "intermediate_size_mlp": 11,
            "num_local_experts": 3,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2,
        },
    ),
}


def make(name: str) -> int:
    """Make one model; return its size in bytes."""
    class_name, settings = CASES[name]
    model_class = getattr(transformers, class_name)
    torch.manual_seed(zlib.crc32(name.encode()))
    model = model_class(model_class.config_class(**settings))
    with torch.no_grad():
        for leaf in model.parameters():
            leaf.normal_(0, 0.3)
        for leaf_name, buffer in model.named_buffers():
            if leaf_name.endswith(("e_score_correction_bias", "running_mean")):
                buffer.normal_(0, 0.3)
    dtype = {"float32": torch.float32}.get(DTYPES.get(name, ""), torch.bfloat16)
    where = MODELS / name
    shutil.rmtree(where, ignore_errors=True)
    model.to(dtype)
    for leaf_name, leaf in (*model.named_parameters(), *model.named_buffers()):
        if leaf_name.endswith(FLOAT32):
            leaf.data = torch.randn(leaf.shape)
    model.save_pretrained(where)
    if name in HUB:
        file = where / "model.safetensors"
        save_file(HUB[name](load_file(file)), file, {"format": "pt"})
    (where / "generation_config.json").unlink(missing_ok=True)
    return sum(file.stat().st_size for file in where.iterdir())


# The models whose logits are compared, and the leaves that real models store as float32.
DTYPES = {"gpt2": "float32"}
FLOAT32 = ("e_score_correction_bias", ".A_log", ".dt_bias")


def _tower_of_the_hub(leaves: dict[str, Any]) -> dict[str, Any]:
    """Name the vision tower as the files of Google do: with a level more than transformers 5 writes."""
    old, new = "vision_tower.", "vision_tower.vision_model."
    return {name.replace(old, new): leaf for name, leaf in leaves.items()}


def _fused_experts(leaves: dict[str, Any]) -> dict[str, Any]:
    """Fuse the experts as the files of Qwen3.5 do; transformers 5 writes each projection of each expert apart."""
    found: dict[str, dict[str, dict[int, Any]]] = {}
    for name in [name for name in leaves if ".experts." in name]:
        base, _, rest = name.partition(".experts.")
        expert, kind, _ = rest.split(".")
        found.setdefault(base, {}).setdefault(kind, {})[int(expert)] = leaves.pop(name)
    for base, kinds in found.items():
        gate, up, down = (
            [kinds[kind][e] for e in sorted(kinds[kind])] for kind in ("gate_proj", "up_proj", "down_proj")
        )
        leaves[f"{base}.experts.gate_up_proj"] = torch.cat([torch.stack(gate), torch.stack(up)], 1)
        leaves[f"{base}.experts.down_proj"] = torch.stack(down)
    return leaves


def _names_of_deepseek_v4(leaves: dict[str, Any]) -> dict[str, Any]:
    """Name the leaves as the files of DeepSeek V4 do; transformers 5.22.2 reads these names, and writes others."""
    old = ("model.", "embed_tokens.", "hc_head.hc_", ".attn.norm.")
    new = ("", "embed.", "hc_head_", ".attn.kv_norm.")
    for before, after in zip(old, new, strict=True):
        leaves = {name.replace(before, after): leaf for name, leaf in leaves.items()}
    return leaves


HUB = {"deepseek_v4": _names_of_deepseek_v4, "gemma3": _tower_of_the_hub, "qwen3_5_moe": _fused_experts}


if __name__ == "__main__":
    for each in sys.argv[1:] or CASES:
        sys.stdout.write(f"{each}: {make(each)} bytes\n")
