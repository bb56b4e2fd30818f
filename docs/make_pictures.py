"""Make the pictures of a report for the README: `python docs/make_pictures.py` (needs Chromium).

The checkpoint is a small model of the shape of Llama, with values as training leaves them, and a later step of it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import jax

jax.config.update("jax_num_cpu_devices", 8)  # before any backend starts

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import NamedSharding, PartitionSpec  # noqa: E402

from eformer import checkpoint  # noqa: E402

WIDTH, HIDDEN, VOCABULARY, LAYERS = 512, 1376, 12_000, 24
HERE = Path(__file__).parent
# As wide as a README shows it, with two pixels for each, so that every word can be read.
PICTURES = {"report.png": [], "report-dark.png": ["--force-dark-mode"]}
BROWSERS = ("chromium", "chromium-browser", "google-chrome")

KERNELS = {
    "self_attn.q_proj": (WIDTH, WIDTH),
    "self_attn.k_proj": (WIDTH, WIDTH // 4),
    "self_attn.v_proj": (WIDTH, WIDTH // 4),
    "self_attn.o_proj": (WIDTH, WIDTH),
    "mlp.gate_proj": (WIDTH, HIDDEN),
    "mlp.up_proj": (WIDTH, HIDDEN),
    "mlp.down_proj": (HIDDEN, WIDTH),
}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        save_steps(np.random.default_rng(0))
        page = checkpoint.report("llama/step-2000", "llama/step-1000").save(
            "report.html"
        )
        for name, flags in PICTURES.items():
            take_picture(Path(folder) / page, HERE / name, flags)
            print(f"{HERE / name}: {(HERE / name).stat().st_size:,} bytes")


def save_steps(rng: np.random.Generator) -> None:
    mesh = jax.make_mesh((2, 4), ("data", "model"))
    model = {
        name: trained(rng, name, shape) for name, shape in shapes().items()
    }
    for step in (1000, 2000):
        placed = {
            name: place(name, value, mesh) for name, value in model.items()
        }
        checkpoint.save(
            nested(placed),
            f"llama/step-{step}",
            metadata={"step": step, "learning_rate": 3e-4},
        )
        model = {
            name: value + moved(rng, name, value)
            for name, value in model.items()
        }


def shapes() -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.embedding": (VOCABULARY, WIDTH)
    }
    for layer in range(LAYERS):
        found |= {
            f"model.layers.{layer}.{name}.kernel": shape
            for name, shape in KERNELS.items()
        }
        found |= {
            f"model.layers.{layer}.{name}.scale": (WIDTH,)
            for name in ("input_norm", "post_norm")
        }
    return found | {
        "model.norm.scale": (WIDTH,),
        "lm_head.kernel": (WIDTH, VOCABULARY),
    }


def trained(
    rng: np.random.Generator, name: str, shape: tuple[int, ...]
) -> np.ndarray:
    """Return values like those of trained models: rows of different sizes, a few large elements, scales around one."""
    if name.endswith("scale"):
        return 1 + 0.2 * rng.standard_normal(shape) * rng.random(shape)
    rows = np.exp(0.25 * rng.standard_normal((shape[0], 1)))
    return (
        0.02
        * rows
        * rng.standard_normal(shape)
        * np.where(rng.random(shape) < 0.01, 2.5, 1)
    )


def moved(rng: np.random.Generator, name: str, value: np.ndarray) -> np.ndarray:
    """Return what a thousand steps change: the middle layers most, and some modules more than others."""
    parts = name.split(".")
    depth = int(parts[2]) / (LAYERS - 1) if parts[1] == "layers" else 0.3
    of_module = {
        "v_proj": 2.2,
        "o_proj": 1.6,
        "gate_proj": 1.2,
        "k_proj": 0.5,
        "input_norm": 2.0,
        "post_norm": 3.0,
    }
    amount = (
        0.015
        * of_module.get(parts[-2], 1.0)
        * (0.25 + np.sin(np.pi * depth**0.7) ** 2)
        * rng.uniform(0.8, 1.2)
    )
    return amount * value.std() * rng.standard_normal(value.shape)


def place(name: str, value: np.ndarray, mesh: jax.sharding.Mesh) -> jax.Array:
    if name.endswith("scale"):
        return jax.device_put(
            jnp.asarray(value, jnp.float32),
            NamedSharding(mesh, PartitionSpec(None)),
        )
    is_output = any(part in name for part in ("o_proj", "down_proj", "embed"))
    spec = (
        PartitionSpec("model", "data")
        if is_output
        else PartitionSpec("data", "model")
    )
    return jax.device_put(
        jnp.asarray(value, jnp.bfloat16), NamedSharding(mesh, spec)
    )


def nested(flat: dict[str, jax.Array]) -> dict:
    tree: dict = {}
    for name, value in flat.items():
        *above, last = name.split(".")
        node = tree
        for part in above:
            node = node.setdefault(part, {})
        node[last] = value
    return tree


def take_picture(page: Path, picture: Path, more: list[str]) -> None:
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        sys.exit(f"no browser found: install one of {', '.join(BROWSERS)}")
    flags = [
        "--headless",
        "--disable-gpu",
        "--no-first-run",
        "--hide-scrollbars",
        "--virtual-time-budget=5000",
    ]
    flags += [
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--disable-quic",
    ]
    flags += (
        ["--no-sandbox"] if os.geteuid() == 0 else []
    )  # which a browser that root runs does not have
    profile = f"--user-data-dir={page.parent / 'profile'}"
    size = ["--window-size=1000,690", "--force-device-scale-factor=2"]
    command = [
        browser,
        *flags,
        *more,
        profile,
        *size,
        f"--screenshot={picture}",
        page.as_uri(),
    ]
    subprocess.run(command, check=True, capture_output=True, timeout=120)


if __name__ == "__main__":
    main()
