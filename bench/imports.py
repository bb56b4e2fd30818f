"""How much processor time it takes to import eformer, and to start its command, beside Python and numpy alone.

    python bench/imports.py [--rounds 15] > bench/results/imports.md

Every line is a process of its own; in a round all of them run one after the other. The median of the processor time
counts, which a busy machine changes less than the clock. Bytecode is compiled before.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

EFORMER = str(Path(sys.executable).with_name("eformer"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        commands = tasks(Path(folder))
        took: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(rounds + 1):
            for name, command in commands.items():
                took[name].append(processor_time(command, folder))
    show({name: statistics.median(times[1:]) for name, times in took.items()}, rounds)  # the first compiles


def tasks(folder: Path) -> dict[str, list[str]]:
    python = [sys.executable, "-c"]
    save = "import sys, numpy as np; from eformer import checkpoint; checkpoint.save({'w': np.ones(9)}, sys.argv[1])"
    subprocess.run([*python, save, str(folder / "small")], check=True)
    return {
        "python -c pass": [*python, "pass"],
        "import eformer.checkpoint": [*python, "import eformer.checkpoint"],
        "import numpy": [*python, "import numpy"],
        "checkpoint.inspect, to be called": [*python, "from eformer.checkpoint import inspect"],
        "eformer --help": [EFORMER, "--help"],
        "eformer inspect": [EFORMER, "inspect", str(folder / "small")],
        "import jax": [*python, "import jax"],
        "checkpoint.load, to be called": [*python, "from eformer.checkpoint import load"],
    }


def processor_time(command: list[str], cache: str) -> float:
    """Run a command, and return its user and system time in milliseconds."""
    own = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        command, check=True, stdout=subprocess.DEVNULL, env=own | {"PYTHONPYCACHEPREFIX": f"{cache}/pyc"}
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return 1000 * (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def show(times: dict[str, float], rounds: int) -> None:
    bare = times["python -c pass"]
    print(f"# Start-up\n\nProcessor time, the median of {rounds} rounds (`python bench/imports.py`).\n")
    print("| | ms | more than Python alone |\n|---|--:|--:|")
    for name, time in times.items():
        print(f"| {name} | {time:.0f} | {time - bare:.0f} |")


if __name__ == "__main__":
    main()
