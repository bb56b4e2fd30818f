"""Five merges whose bytes must not depend on the number of processes, each into two formats."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from eformer.checkpoint import save

if TYPE_CHECKING:
    from pathlib import Path

TARGETS: dict[str, dict[str, Any]] = {
    "shards": {"to": "safetensors", "max_shard_bytes": 3_000_000},
    "zarr": {"to": "zarr"},
}
MERGES: dict[str, tuple[list[str], dict[str, Any]]] = {
    "mean": (["run"], {"last": 3}),
    "wsm": (["run"], {"last": 3, "weights": "wsm"}),
    "ema": (["run"], {"last": 2, "ema": 0.9}),
    "numbers": (["run/step-3", "run/step-1"], {"weights": [0.3, 0.8], "dtype": "bf16"}),
    "lora": (["run/step-1"], {"lora": "lora", "lora_config": {"lora_alpha": 12}}),
}
CASES = [f"{merge} {target}" for merge in MERGES for target in TARGETS]


def make_sources(place: Path) -> None:
    for step in (1, 2, 3):
        save(state(step), place / f"run/step-{step}", format="zarr" if step == 2 else "safetensors")
    rng = np.random.default_rng(0)
    normal = rng.standard_normal
    pairs = {"large": (1500, 700), "layer2": (120, 1000)}
    save(
        {
            name: {"lora_a": normal((rows, 4), np.float32), "lora_b": normal((4, columns), np.float32)}
            for name, (rows, columns) in pairs.items()
        },
        place / "lora",
    )


def state(step: int) -> dict[str, Any]:
    rng = np.random.default_rng(step)
    layers = {f"layer{i}": {"w": rng.random((120, 1000), np.float32), "b": rng.random(10)} for i in range(5)}
    return layers | {
        "large": {"w": rng.random((1500, 700), np.float32)},
        "half": rng.random((300, 400)).astype(ml_dtypes.bfloat16),
        "four": rng.random((64, 64)).astype(ml_dtypes.float4_e2m1fn),
        "table": rng.integers(0, 9, (500, 600)),
        "empty": np.zeros((0, 3), np.float32),
        "step": step,
    }


def arguments_of(case: str, place: Path) -> tuple[list[Path], dict[str, Any]]:
    """Return the sources and the arguments of a merge."""
    merge, target = case.split()
    sources, given = MERGES[merge]
    arguments = given | TARGETS[target]
    if "lora" in arguments:
        arguments["lora"] = place / arguments["lora"]
    return [place / source for source in sources], arguments


def words_of(case: str, place: Path) -> tuple[list[Path], list[Any]]:
    """Return the same as words of the command line."""
    sources, arguments = arguments_of(case, place)
    words: list[Any] = []
    for key, value in arguments.items():
        if key == "lora_config":
            words += ["--config", *(f"{name}={number}" for name, number in value.items())]
        elif isinstance(value, list):
            words += [f"--{key}", ",".join(map(str, value))]
        else:
            words += [f"--{'max-shard-size' if key == 'max_shard_bytes' else key}", value]
    return sources, words
