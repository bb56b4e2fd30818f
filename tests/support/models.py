"""A tiny model of Hugging Face in a directory, as tests of exports use it: weights, configuration, tokenizer, card."""

import json

import ml_dtypes
import numpy as np
import safetensors.numpy

ROWS = 12
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "tie_word_embeddings": False,
    "transformers_version": "5.0.0",
    "vocab_size": ROWS,
}
TOKENIZER = {
    "added_tokens": [{"id": 11, "content": "<s>"}],
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 10}},
}
CARD = "---\nlicense: other\nlicense_name: tiny\nlanguage:\n- en\n- fr\npipeline_tag: text-generation\n---\n# Theirs\n"


def weights(layers=12, *, head=True, dtype=ml_dtypes.bfloat16):
    """Return the tensors by name. A value says which layer it is of."""
    tensors = {"model.embed_tokens.weight": np.arange(ROWS * 4).reshape(ROWS, 4)}
    tensors |= {f"model.layers.{n}.mlp.weight": np.full((4, 4), n) for n in range(layers)}
    tensors["model.norm.weight"] = np.ones(4)
    if head:
        tensors["lm_head.weight"] = np.arange(ROWS * 4).reshape(ROWS, 4) + 1
    return {name: array.astype(dtype) for name, array in tensors.items()}


def write_model(path, tensors=None, config=CONFIG, **files):
    """Write a model and files beside it. Return the path."""
    path.mkdir()
    tensors = weights() if tensors is None else tensors
    if tensors:
        safetensors.numpy.save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    texts = {
        "config.json": json.dumps(config),
        "tokenizer.json": json.dumps(TOKENIZER),
        "tokenizer_config.json": '{"model_max_length":  512}\n',
        "generation_config.json": json.dumps({"bos_token_id": 1, "eos_token_id": [2, 11]}),
        "chat_template.jinja": "{{ messages }}",
        "README.md": CARD,
        "LICENSE": "free",
    }
    for name, text in (texts | {name.replace("__", "."): text for name, text in files.items()}).items():
        (path / name).write_text(text)
    return path
