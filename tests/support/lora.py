"""Trees with LoRA leaves, as JAX has them: in x rank, and rank x out."""

import numpy as np

RANK, IN, OUT = 2, 4, 6


def pair(seed=0, rank=RANK):
    rng = np.random.default_rng(seed)
    return {
        "lora_a": rng.normal(size=(IN, rank)).astype(np.float32),
        "lora_b": rng.normal(size=(rank, OUT)).astype(np.float32),
    }


def state(layers=2):
    """A model with LoRA in each layer, named as Hugging Face names its modules."""
    blocks = [
        {"q_proj": {"kernel": np.ones((IN, OUT), np.float32), **pair(i)}, "norm": np.ones(IN)}
        for i in range(layers)
    ]
    return {"model": {"layers": blocks}, "step": 7}
