"""Layers of a Hugging Face file, transposed and stacked while they are loaded, beside a program that does it by hand.

python bench/rename.py [--out bench/results]
"""

from __future__ import annotations

import argparse
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


def fastest(call: Callable[[], Any]) -> float:
    """Return the seconds of the fastest of four calls."""
    times = []
    for _ in range(4):
        began = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - began)
    return min(times)


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
        seconds = {what: fastest(call) for what, call in calls.items()}
    lines = ["# Renaming while loading", "", f"{nbytes / 1e6:.0f} MB of bfloat16, the fastest of four.", ""]
    lines += ["| | ms | GB/s |", "|---|---|---|"]
    lines += [f"| {what} | {1e3 * s:.0f} | {nbytes / s / 1e9:.2f} |" for what, s in seconds.items()]
    text = "\n".join(lines) + "\n"
    print(text)
    if arguments.out:
        (arguments.out / "rename.md").write_text(text)


if __name__ == "__main__":
    main()
