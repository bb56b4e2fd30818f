"""Ten conversions whose bytes must not depend on the number of processes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from eformer.checkpoint import save
from support.lora import state
from support.models import write_model

if TYPE_CHECKING:
    from pathlib import Path

EPOCH = "1700000000"
RULES = r"""
layer(\d+)\.w -> kernels | transpose | stack \1
large -> big | transpose
"""

CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "directory": ("tree", "new", {"to": "safetensors"}),
    "shards": ("tree", "new", {"to": "safetensors", "max_shard_bytes": 3_000_000}),
    "file": ("tree", "new.safetensors", {}),
    "zarr": ("tree", "new", {"to": "zarr"}),
    "cast": ("zarr", "new", {"to": "safetensors", "dtype": "bf16"}),
    "rules": ("tree", "new", {"to": "safetensors", "rename": RULES}),
    "trees": ("several", "new", {"to": "zarr"}),
    "hf": ("model", "new", {"to": "hf", "like": "model", "max_shard_bytes": 20_000}),
    "npz": ("plain", "new.npz", {}),
    "orbax": ("plain", "new", {"to": "orbax"}),
    "peft": ("lora", "new", {"to": "peft", "config": {"lora_alpha": 32}}),
    "msgpack": ("tree", "new.msgpack", {}),
}
DIVIDED = [name for name in CASES if name not in ("npz", "orbax", "msgpack")]


def make_sources(place: Path) -> None:
    rng = np.random.default_rng(0)
    tree: dict[str, Any] = {
        f"layer{i}": {"w": rng.random((120, 1000), np.float32), "b": rng.random(10, np.float32)}
        for i in range(5)
    }
    tree |= {
        "large": rng.random((1500, 700), np.float32),
        "four": rng.random((64, 64)).astype(ml_dtypes.float4_e2m1fn),
        "empty": np.zeros((0, 3), np.int32),
        "one": np.float64(3),
        "n": 7,
        "text": "as it is",
    }
    save(tree, place / "tree", metadata={"step": 9})
    save({name: leaf for name, leaf in tree.items() if name != "four"}, place / "plain")
    save(tree, place / "zarr", format="zarr")
    save(tree, place / "several")
    save({"ema": tree["large"]}, place / "several", prefix="ema")
    write_model(place / "model")
    save(state(), place / "lora")


def arguments_of(case: str, place: Path) -> tuple[Path, str, dict[str, Any]]:
    """Return the source, the name of the destination and the arguments of a conversion."""
    source, name, arguments = CASES[case]
    arguments = dict(arguments)
    if "like" in arguments:
        arguments["like"] = place / arguments["like"]
    return place / source, name, arguments


def words_of(case: str, place: Path) -> tuple[Path, str, list[str]]:
    """Return the same as words of the command line."""
    source, name, arguments = arguments_of(case, place)
    options = {"max_shard_bytes": "max-shard-size"}
    words = []
    for key, value in arguments.items():
        if key == "rename":
            (place / "rules.txt").write_text(value)
            value = place / "rules.txt"
        if key == "config":
            value = "lora_alpha=32"
        words += [f"--{options.get(key, key)}", str(value)]
    return source, name, words
