"""What a run costs: a step without a save, opening a run of many steps, and steps with saves in the background.

python bench/runs.py [--out bench/results]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp

from eformer import checkpoint

CODE = """
import sys, time
began = time.perf_counter()
from eformer import checkpoint
found = checkpoint.steps(sys.argv[1])
assert "jax" not in sys.modules and len(found) == int(sys.argv[2])
print(time.perf_counter() - began)
"""


def without_a_save(folder: Path) -> float:
    """Return the microseconds that `after` takes if nothing is due."""
    state = {"w": jnp.ones(8)}
    with checkpoint.Run(
        folder / "idle", every=[checkpoint.Every(10**9), checkpoint.Every(minutes=600)]
    ) as run:
        times = []
        for _ in range(5):
            began = time.perf_counter()
            for step in range(1, 20_001):
                run.after(step, state)
            times.append(time.perf_counter() - began)
    return min(times) / 20_000 * 1e6


def opening(folder: Path, number: int) -> float:
    """Return the seconds that a new process takes to list a run of so many steps, with the import."""
    checkpoint.save({"w": jnp.ones(8)}, folder / "many" / "step-1")
    manifest = (folder / "many" / "step-1" / "manifest.json").read_bytes()
    for step in range(2, number + 1):
        place = folder / "many" / f"step-{step}"
        place.mkdir()
        (place / "manifest.json").write_bytes(manifest)
    command = [sys.executable, "-c", CODE, str(folder / "many"), str(number)]
    return min(
        float(subprocess.run(command, check=True, capture_output=True, text=True).stdout) for _ in range(3)
    )


def with_saves(folder: Path, every: int | None) -> tuple[float, float]:
    """Return the median and the 99th percentile of a step, in milliseconds, with a save every so many steps."""
    step_of = jax.jit(lambda x: jnp.tanh(x @ x) * 0.5)
    weights = {f"w{n}": jnp.ones((512, 512)) for n in range(16)}
    x = jnp.ones((512, 512))
    times = []
    with checkpoint.Run(folder / f"busy-{every}", every=every, keep=2) as run:
        for step in range(1, 301):
            began = time.perf_counter()
            x = step_of(x)
            jax.block_until_ready(x)
            run.after(step, weights)
            times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times), statistics.quantiles(times, n=100)[98]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=10_000, help="of the run that is opened")
    parser.add_argument("--out", type=Path, help="a directory for runs.md")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plain, saving = with_saves(folder, None), with_saves(folder, 20)
        lines = [
            "# What a run costs",
            "",
            "| | measured | bar |",
            "|---|---|---|",
            f"| `after` without a save | {without_a_save(folder):.2f} us | 5 us |",
            f"| listing {arguments.steps:,} steps in a new process | {opening(folder, arguments.steps):.2f} s | 1 s |",
            f"| a step without saves, median and 99th percentile | {plain[0]:.2f}, {plain[1]:.2f} ms | |",
            f"| a step with a save of 16 MB every 20 | {saving[0]:.2f}, {saving[1]:.2f} ms | |",
        ]
    text = "\n".join(lines) + "\n"
    print(text)
    if arguments.out:
        (arguments.out / "runs.md").write_text(text)


if __name__ == "__main__":
    main()
