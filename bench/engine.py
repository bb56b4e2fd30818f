"""Saving and loading beside a plain program, Orbax, safetensors and the original eFormer: the ratios that count.

    python bench/engine.py [--quick] [--dir DIRECTORY] [--json FILE] [--peers-python PYTHON] [--original-python PYTHON]

Every system has a process of its own (engine_worker.py), and they take turns: a busy machine slows them alike. A
ratio is taken within each round, and the median round counts. A save ends when all is on stable storage, a load when
the arrays are ready and every page has been touched; the page cache is warm. Peers run in their default settings.
Needs Linux, 20 GB of memory and 10 GB of disk; takes fifteen minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

HERE = Path(__file__).resolve().parent
PEERS = ("orbax", "safetensors")
PACKAGES = ("orbax-checkpoint", "safetensors", "jax")
PLAIN = ("plain, 2 threads", "plain, 4 threads")
SLOW = ("orbax", "original")
ARRAYS = ("eformer, arrays", "eformer, database")
FILES = ("eformer", *PLAIN, *PEERS)
AS_ARRAYS = (*ARRAYS, "orbax", "original")

# ---------------------------------------------------------------------------------- what is measured


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    tree: str
    size: int
    rounds: int
    systems: Sequence[str] = ("eformer",)
    commands: Sequence[str] = ("save", "load")
    slow_rounds: int = 5


def workloads(quick: bool) -> list[Workload]:
    width, leaves, rounds = (768, 2_000, 3) if quick else (2048, 10_000, 5)
    model, many = (*FILES, "eformer, no digests"), (*FILES, *ARRAYS, "original", "bare files")
    return [
        Workload("model", "llama", width, rounds, model, ("save", "save_async", "load")),
        Workload(
            "model as arrays", "llama", width, rounds, AS_ARRAYS
        ),  # not all at once: that takes too much memory
        Workload("small leaves", "small", leaves, rounds, many, slow_rounds=2),  # they take 25 s a round
        Workload("small numpy leaves", "small numpy", leaves, rounds),
        Workload("one of many leaves", "small numpy", 10 * leaves, rounds, commands=["open_one"]),
    ]


UNITS = {
    "x the time": ("<=", lambda ours, theirs, leaves: ours / theirs),
    "x as fast": (">=", lambda ours, theirs, leaves: theirs / ours),
    "% more time": ("<=", lambda ours, theirs, leaves: 100 * (ours / theirs - 1)),
    "ms": ("<=", lambda ours, theirs, leaves: 1e3 * ours),
    "µs a leaf": ("<=", lambda ours, theirs, leaves: 1e6 * ours / leaves),
    "MB beyond the state": ("<=", lambda ours, theirs, leaves: ours / 1e6),
}


@dataclass(frozen=True, slots=True)
class Bar:
    workload: str
    what: str
    limit: float
    unit: str
    beside: str = ""
    ours: str = "eformer"


BARS = [
    Bar("model", "save", 1.05, "x the time", "plain"),
    Bar("model", "save", 1.8, "x as fast", "orbax"),
    Bar("model", "save_async", 3, "ms"),
    Bar("model", "load", 1.25, "x the time", "plain"),
    Bar("model", "load", 6, "x as fast", "orbax"),
    Bar("model", "load", 5, "x as fast", "safetensors"),
    Bar("small leaves", "save", 20, "µs a leaf"),
    Bar("small leaves", "save", 20, "x as fast", "orbax"),
    Bar("small leaves", "load", 1, "x as fast", "safetensors"),
    Bar("small leaves", "load", 20, "x as fast", "orbax"),
    Bar("small numpy leaves", "load", 5, "µs a leaf"),
    Bar("one of many leaves", "open_one", 60, "ms"),
    Bar("model", "save", 5, "% more time", "eformer, no digests"),
    Bar("model", "load", 20, "% more time", "eformer, no digests"),
    Bar("model", "save_memory", 64, "MB beyond the state"),
    Bar("model", "load_memory", 64, "MB beyond the state"),
    Bar("model as arrays", "save", 1.4, "x as fast", "orbax", "eformer, arrays"),
    Bar("model as arrays", "save", 1.3, "x as fast", "original", "eformer, arrays"),
    Bar("model as arrays", "load", 3, "x as fast", "orbax", "eformer, arrays"),
    Bar("model as arrays", "load", 5, "x as fast", "original", "eformer, arrays"),
    Bar("small leaves", "save", 1.3, "x the time", "bare files", "eformer, arrays"),
    Bar("small leaves", "load", 4, "x as fast", "orbax", "eformer, arrays"),
    Bar("small leaves", "load", 4, "x as fast", "original", "eformer, arrays"),
    Bar("small leaves", "save", 4, "x as fast", "orbax", "eformer, database"),
    Bar("small leaves", "load", 4, "x as fast", "orbax", "eformer, database"),
    Bar("model as arrays", "save_memory", 128, "MB beyond the state", ours="eformer, arrays"),
    Bar("model as arrays", "load_memory", 128, "MB beyond the state", ours="eformer, arrays"),
]

# ------------------------------------------------------------------------------------------- running

Process = subprocess.Popen  # of engine_worker.py
Values = dict[str, dict[str, list[float]]]
"""By system and by what was measured: seconds, one for each round, or bytes."""


@dataclass(frozen=True, slots=True)
class Bench:
    peers_python: str
    original_python: str
    directory: Path

    def worker(self, workload: Workload, system: str) -> Process[str]:
        elsewhere = {"original": self.original_python, **dict.fromkeys(PEERS, self.peers_python)}
        python = elsewhere.get(system, sys.executable)
        arguments = [system, workload.tree, str(workload.size), str(self.directory)]
        return Process(
            [python, str(HERE / "engine_worker.py"), *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
        )  # fmt: skip

    def times(self, workload: Workload) -> Values:
        values: Values = {system: {} for system in workload.systems}
        with ExitStack() as stack:
            workers = {s: stack.enter_context(self.worker(workload, s)) for s in workload.systems}
            build(workers)
            for number in range(workload.rounds):
                for command in workload.commands:
                    for system in turns(workload, command, number):
                        say(f"{workload.name}, round {number + 1}: {command}, {system}")
                        for what, seconds in ask(workers[system], command).items():
                            values[system].setdefault(what, []).append(seconds)
        for system in workload.systems:  # no need for their pages to stay in memory
            shutil.rmtree(self.directory / system, ignore_errors=True)
        return with_best_plain(values)

    def memory(self, workload: Workload) -> Values:
        """In fresh processes: one that has worked before has memory to spare."""
        values: Values = {system: {} for system in workload.systems if system not in PLAIN}
        for system in values:
            for command in ("save_memory", "load_memory"):
                say(f"{workload.name}: {command}, {system}")
                with self.worker(workload, system) as worker:
                    values[system] |= {what: [nbytes] for what, nbytes in ask(worker, command).items()}
        return values


def build(workers: Mapping[str, Process[str]]) -> None:
    """All have their trees, have saved and loaded them once, and found every bit as it was."""
    for worker in workers.values():
        send(worker, "build")
    for worker in workers.values():
        receive(worker)
    for system, worker in workers.items():
        say(f"check, {system}")
        ask(worker, "check")


def turns(workload: Workload, command: str, number: int) -> list[str]:
    """Who is measured in this round; each time another one is first."""
    systems = [s for s in workload.systems if s == "eformer" or command in ("save", "load")]
    first = number % len(systems)
    is_out = {"bare files"} if command == "load" else set()
    if number >= workload.slow_rounds:
        is_out |= set(SLOW)
    return [s for s in systems[first:] + systems[:first] if s not in is_out]


def with_best_plain(values: Values) -> Values:
    """The plain program with as many threads as are best for it, which need not be the same for both ways."""
    if PLAIN[0] not in values:
        return values
    two, four = (values[system] for system in PLAIN)
    return {**values, "plain": {what: min(two[what], four[what], key=statistics.median) for what in two}}


def ask(worker: Process[str], command: str) -> dict[str, Any]:
    send(worker, command)
    return receive(worker)


def send(worker: Process[str], command: str) -> None:
    worker.stdin.write(command + "\n")


def receive(worker: Process[str]) -> dict[str, Any]:
    line = worker.stdout.readline()
    return json.loads(line) if line else sys.exit(f"{worker.args}: failed, see above")


def say(text: str) -> None:
    print(text, file=sys.stderr)


def make_environment(name: str) -> str:
    """The interpreter of peers' environment, which is made if it is not there or has other versions."""
    environment, wanted = HERE.parent / f".venv-{name}", HERE / f"requirements-{name}.txt"
    python, installed = environment / "bin" / "python", environment / "installed.txt"
    if not installed.exists() or installed.read_text() != wanted.read_text():
        subprocess.run([sys.executable, "-m", "venv", environment], check=True)
        (environment / ".gitignore").write_text("*\n")  # ruff goes by it, too
        pip = [python, "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
        subprocess.run([*pip, "-r", wanted], check=True)
        installed.write_text(wanted.read_text())
    return str(python)


# ----------------------------------------------------------------------------------------- reporting


def print_table(rows: Sequence[Mapping[str, str]]) -> None:
    for cells in (list(rows[0]), ["---"] * len(rows[0]), *(row.values() for row in rows)):
        print(f"| {' | '.join(cells)} |")


def verdict(bar: Bar, values: Values, leaves: int) -> dict[str, str]:
    found = in_unit_of(bar, values, leaves)
    middle, sign = statistics.median(found), UNITS[bar.unit][0]
    is_met = middle <= bar.limit if sign == "<=" else middle >= bar.limit
    return {
        "workload": bar.workload,
        "ours": bar.ours,
        "what": bar.what,
        "beside": bar.beside,
        "median round": f"{middle:.2f} {bar.unit}",
        "all rounds": f"{min(found):.2f} to {max(found):.2f}",
        "bar": f"{sign} {bar.limit:g}",
        "met": "yes" if is_met else "**no**",
    }


def in_unit_of(bar: Bar, values: Values, leaves: int) -> list[float]:
    """One number for each round in which both took part."""
    ours, theirs = values[bar.ours][bar.what], values[bar.beside or bar.ours][bar.what]
    return [UNITS[bar.unit][1](a, b, leaves) for a, b in zip(ours, theirs, strict=False)]


def medians(workload: str, what: str, results: Mapping[str, Values]) -> dict[str, str]:
    scale = 1e-6 if "memory" in what else 1e3
    row = {"median, in ms or MB": f"{workload}: {what}"}
    for system in (*FILES, "eformer, no digests", *ARRAYS, "original", "bare files"):
        found = results[workload].get(system, {}).get(what)
        row[system] = f"{scale * statistics.median(found):.1f}" if found else ""
    return row


def versions(python: str, *packages: str) -> str:
    code = "import importlib.metadata, sys; print(*(f'{p} {importlib.metadata.version(p)}' for p in sys.argv[1:]))"
    return subprocess.run(
        [python, "-c", code, *packages], check=True, capture_output=True, text=True
    ).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="a fifth of the size; the bars are for the whole"
    )
    parser.add_argument("--dir", type=Path, default=HERE / ".scratch", help="on the disk to be measured")
    parser.add_argument("--json", type=Path, help="a file for every number of every round")
    parser.add_argument("--peers-python", help="an interpreter that has requirements-peers.txt installed")
    parser.add_argument(
        "--original-python", help="an interpreter that has requirements-original.txt installed"
    )
    args = parser.parse_args()

    plan = workloads(args.quick)
    args.dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.dir) as directory:
        peers = args.peers_python or make_environment("peers")
        original = args.original_python or make_environment("original")
        bench = Bench(peers, original, Path(directory).resolve())
        results = {workload.name: bench.times(workload) for workload in plan}
        for workload in plan[:2]:
            for system, values in bench.memory(workload).items():
                results[workload.name][system] |= values

    leaves = {workload.name: workload.size for workload in plan}
    bars = [verdict(bar, results[bar.workload], leaves[bar.workload]) for bar in BARS]
    measured = {(w, what): None for w in results for values in results[w].values() for what in values}
    ours = versions(sys.executable, "eformer", "jax", "tensorstore")
    peers = versions(bench.peers_python, *PACKAGES)
    original = versions(bench.original_python, "eformer", "jax", "tensorstore")
    print(
        f"{os.cpu_count()} cores, load {os.getloadavg()[2]:.1f}; {ours}; peers: {peers}; original: {original}\n"
    )
    print_table(bars)
    print()
    print_table([medians(workload, what, results) for workload, what in measured])
    if args.json:
        args.json.write_text(json.dumps({"bars": bars, "values": results}, indent=1))


if __name__ == "__main__":
    main()
