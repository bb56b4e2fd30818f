"""Layers of Hugging Face files, transposed and stacked while they are loaded, beside programs that do it by hand.

python bench/rename.py [--out bench/results]
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from eformer import checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable

LAYERS = 24
LAYER = r"model\.layers\.(\d+)\.mlp\.weight"
EMBED = {r"model\.embed\.weight": "embed"}


def write(file: Path) -> int:
    """Write weights as another program does; return their bytes."""
    random = np.random.default_rng(0)
    weights = {
        f"model.layers.{n}.mlp.weight": random.random((4096, 1024), np.float32).astype(ml_dtypes.bfloat16)
        for n in range(LAYERS)
    }
    weights["model.embed.weight"] = np.ones((32_000, 1024), ml_dtypes.bfloat16)
    save_file(weights, file)
    return sum(array.nbytes for array in weights.values())


def by_hand(file: Path) -> Any:
    with safe_open(file, "numpy") as opened:
        layers = [jnp.asarray(opened.get_tensor(f"model.layers.{n}.mlp.weight").T) for n in range(LAYERS)]
        return {"layers": jnp.stack(layers), "embed": jnp.asarray(opened.get_tensor("model.embed.weight"))}


# A Llama for MaxText, by a book: heads, rotary order, layers along the second axis, queries scaled in float32.
HEADS, KV_HEADS, HEAD_DIM, WIDTH, INNER, DEPTH, ROWS = 16, 8, 64, 1024, 2816, 12, 16_000
CONFIG = {
    "model_type": "llama",
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
}
MLP = {"wi_0": "gate", "wi_1": "up", "wo": "down"}
BY_REGEX = {
    r"model\.layers\.(\d+)\.(.*_proj)\.weight": r"layers.\2 | transpose | stack \1 1",
    r"model\.layers\.(\d+)\.(.*norm)\.weight": r"layers.\2 | stack \1 1",
    r"lm_head\.weight": "head | transpose",
}


def write_llama(folder: Path) -> int:
    """Write a model as transformers does; return the bytes of its weights."""
    random = np.random.default_rng(0)
    shapes = {"self_attn.q_proj": (HEADS * HEAD_DIM, WIDTH), "self_attn.o_proj": (WIDTH, HEADS * HEAD_DIM)}
    shapes |= {f"self_attn.{c}_proj": (KV_HEADS * HEAD_DIM, WIDTH) for c in "kv"}
    shapes |= {
        "mlp.gate_proj": (INNER, WIDTH),
        "mlp.up_proj": (INNER, WIDTH),
        "mlp.down_proj": (WIDTH, INNER),
    }
    shapes |= {"input_layernorm": (WIDTH,), "post_attention_layernorm": (WIDTH,)}
    every = {f"model.layers.{n}.{name}": shape for n in range(DEPTH) for name, shape in shapes.items()}
    every |= {"model.embed_tokens": (ROWS, WIDTH), "model.norm": (WIDTH,), "lm_head": (ROWS, WIDTH)}
    weights = {
        f"{name}.weight": random.random(shape, np.float32).astype(ml_dtypes.bfloat16)
        for name, shape in every.items()
    }
    folder.mkdir()
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return sum(array.nbytes for array in weights.values())


def llama_by_hand(folder: Path) -> Any:
    """Return the leaves of MaxText, made by a program of numpy."""
    with safe_open(folder / "model.safetensors", "numpy") as opened:

        def layers(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Any:
            names = [f"model.layers.{n}.{name}.weight" for n in range(DEPTH)]
            return jnp.asarray(np.stack([change(opened.get_tensor(each)) for each in names], 1))

        def turned(heads: np.ndarray) -> np.ndarray:
            halves = heads.reshape(-1, 2, HEAD_DIM // 2, WIDTH)
            return halves.transpose(3, 0, 2, 1).reshape(WIDTH, -1, HEAD_DIM)

        def scaled(heads: np.ndarray) -> np.ndarray:
            return turned(heads).astype(np.float32) / np.float32(np.sqrt(HEAD_DIM))

        return {
            "query": layers("self_attn.q_proj", scaled),
            "key": layers("self_attn.k_proj", turned),
            "value": layers("self_attn.v_proj", lambda w: w.reshape(-1, HEAD_DIM, WIDTH).transpose(2, 0, 1)),
            "out": layers("self_attn.o_proj", lambda w: w.reshape(WIDTH, -1, HEAD_DIM).transpose(1, 2, 0)),
            **{new: layers(f"mlp.{old}_proj", np.transpose) for new, old in MLP.items()},
            "norms": [layers(f"{name}_layernorm", lambda w: w) for name in ("input", "post_attention")],
            "head": jnp.asarray(opened.get_tensor("lm_head.weight").T),
            **{
                name: jnp.asarray(opened.get_tensor(f"model.{name}.weight"))
                for name in ("embed_tokens", "norm")
            },
        }


def of_llama(folder: Path) -> dict[str, Callable[[], Any]]:
    return {
        "a Llama, `load`": lambda: checkpoint.load(folder),
        "a Llama, regular expressions: transposed and stacked": lambda: checkpoint.load(
            folder, rename=BY_REGEX
        ),
        'a Llama, rules with axes: `rename="maxtext"`': lambda: checkpoint.load(folder, rename="maxtext"),
        "a Llama for MaxText, by hand with numpy": lambda: llama_by_hand(folder),
    }


def fastest(call: Callable[[], Any]) -> float:
    """Return the seconds of the fastest of four calls."""
    times = []
    for _ in range(4):
        began = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - began)
    return min(times)


def rows(calls: dict[str, Callable[[], Any]], nbytes: int) -> list[str]:
    """Measure some calls; return a row for each."""
    seconds = {name: fastest(call) for name, call in calls.items()}
    return [f"| {name} | {1e3 * s:.0f} | {nbytes / s / 1e9:.2f} |" for name, s in seconds.items()]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="a directory for rename.md")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "model.safetensors"
        nbytes = write(file)
        calls: dict[str, Callable[[], Any]] = {
            "`load`": lambda: checkpoint.load(file),
            "`load(rename=)`, names only": lambda: checkpoint.load(file, rename={r"model\.(.*)": r"m.\1"}),
            "`load(rename=)`, transposed": lambda: checkpoint.load(
                file, rename={LAYER: r"layers.\1 | transpose", **EMBED}
            ),
            "`load(rename=)`, transposed and stacked": lambda: checkpoint.load(
                file, rename={LAYER: r"layers | transpose | stack \1", **EMBED}
            ),
            "by hand: safetensors, `.T`, `jnp.stack`": lambda: by_hand(file),
        }
        layers = rows(calls, nbytes)
        nbytes_of_llama = write_llama(Path(name) / "llama")
        llama = rows(of_llama(Path(name) / "llama"), nbytes_of_llama)
    sizes = f"{nbytes / 1e6:.0f} MB of bfloat16, and a Llama of {nbytes_of_llama / 1e6:.0f} MB; the fastest of four."
    head = ["# Renaming while loading", "", sizes, "", "| | ms | GB/s |", "|---|---|---|"]
    text = "\n".join([*head, *layers, *llama]) + "\n"
    print(text)
    if arguments.out:
        (arguments.out / "rename.md").write_text(text)


if __name__ == "__main__":
    main()
