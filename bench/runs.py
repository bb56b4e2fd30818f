"""What a run costs: a step without a save, opening a run of many steps, and steps with saves in the background.

    python bench/runs.py [--out bench/results] [--rounds N]

Orbax's manager does the last one, too, in the environment of the peers, which is made if it is not there.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import jax.numpy as jnp
import machine
import run_steps
from run import make_environment

from eformer import checkpoint

HERE = Path(__file__).resolve().parent

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


def steps_of(python: str, system: str, folder: Path) -> list[float]:
    """Return the milliseconds of every step of a run, in a process of its own."""
    command = [python, str(HERE / "run_steps.py"), system, str(folder)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return [1e3 * second for second in json.loads(done.stdout.splitlines()[-1])]


@dataclass
class Steps:
    """The milliseconds of the steps of one system: half of them, and 99 of 100, are faster; and all together."""

    half: float
    most: float
    total: float

    @classmethod
    def of(cls, rounds: list[list[float]]) -> Steps:
        """Take the fastest round: what else the machine does can only make a run slower."""
        times = min(rounds, key=sum)
        percentiles = statistics.quantiles(times, n=100)
        return cls(percentiles[49], percentiles[98], sum(times))

    def row(self, name: str) -> str:
        return f"| {name} | {self.half:.1f} ms | {self.most:.1f} ms | {self.total / 1e3:.2f} s |"


def with_saves(folder: Path, peers: str, rounds: int) -> dict[str, Steps]:
    """Measure the steps of runs that save in the background. The systems take turns, so that a busy machine slows
    them alike."""
    pythons = {"none": sys.executable, "eformer": sys.executable, "orbax": peers}
    times: dict[str, list[list[float]]] = {system: [] for system in pythons}
    for number in range(rounds):
        for system, python in pythons.items():
            times[system].append(steps_of(python, system, folder / f"{system}-{number}"))
            shutil.rmtree(folder / f"{system}-{number}", ignore_errors=True)
    return {system: Steps.of(found) for system, found in times.items()}


def machine_of(folder: Path, peers: str) -> str:
    facts = machine.describe(folder, {"own": sys.executable, "peers": peers})
    here, versions = facts["machine"], facts["versions"]
    return (
        f"on {here['cores']} cores (load before: {here['load before']}) and {here['file system']}, "
        f"jax {versions['own']['jax']}, orbax-checkpoint {versions['peers']['orbax-checkpoint']}, {facts['date']}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=10_000, help="of the run that is opened")
    parser.add_argument("--rounds", type=int, default=7, help="of the runs with saves")
    parser.add_argument("--peers-python", help="an interpreter that has requirements-peers.txt installed")
    parser.add_argument("--out", type=Path, help="a directory for runs.md")
    arguments = parser.parse_args()
    peers = arguments.peers_python or make_environment("peers")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found = with_saves(folder, peers, arguments.rounds)
        lines = [
            "# What a run costs",
            "",
            "| | measured | bar |",
            "|---|---|---|",
            f"| `after` without a save | {without_a_save(folder):.2f} us | 5 us |",
            f"| listing {arguments.steps:,} steps in a new process | {opening(folder, arguments.steps):.2f} s | 1 s |",
            "",
            f"{run_steps.STEPS} steps with a save of 67 MB every {run_steps.EVERY}, all of which has changed, in the "
            f"background; the fastest of {arguments.rounds} rounds, {machine_of(folder, peers)}:",
            "",
            "| | p50 of a step | p99 | all steps |",
            "|---|---|---|---|",
            found["none"].row("no saves"),
            found["eformer"].row("`checkpoint.Run`, synced to the disk"),
            found["orbax"].row("Orbax `CheckpointManager`, not synced"),
        ]
    text = "\n".join(lines) + "\n"
    print(text)
    if arguments.out:
        (arguments.out / "runs.md").write_text(text)


if __name__ == "__main__":
    main()
