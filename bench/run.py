"""Saving and loading beside the machine's limits and all peers; a table, every number, and a picture of them.

    python bench/run.py [--quick] [--dir DIRECTORY] [--out DIRECTORY] [--name NAME] [--only WORKLOAD ...] [--rounds N]

Every cell (one system, one workload, one round) is a fresh process, and so are the limits: plain programs that write
and read the same bytes. They take turns, so that a busy machine slows them alike, and a ratio is taken within each
round. Of a few tries in one process the fastest counts, for limits as for systems. A save ends when all is on stable
storage; what a peer leaves unsynced is synced for it. A load ends when the arrays are ready and every page of them has
been touched; every bit is compared. Needs Linux, 20 GB of memory and 20 GB of disk; takes three quarters of an hour,
`--quick` three minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import machine
import plan
import report

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from plan import Cell, Workload

HERE = Path(__file__).resolve().parent

# ------------------------------------------------------------------------------------------- running


@dataclass(frozen=True, slots=True)
class Bench:
    pythons: Mapping[str, str]  # by environment
    scratch: Path
    timeout: float

    def measure(self, workload: Workload) -> Iterator[dict[str, Any]]:
        """All cells of a workload, in their order, each with what came of it."""
        values = self.scratch / "values"
        nbytes, leaves = sizes_of(workload).values()
        make = plan.Cell(
            workload.name, "values", "values", tree=workload.tree, size=workload.size, values=str(values)
        )
        if error := self.run(make).get("error"):
            sys.exit(f"{workload.name}: its values could not be made: {error}")
        cells = list(workload.cells())
        for number, cell in enumerate(cells, 1):
            start = time.monotonic()
            answer = self.run(replace(cell, values=str(values), nbytes=cell.nbytes or nbytes, leaves=leaves))
            outcome = answer.get("error") or answer.get("skipped") or "; ".join(shown(answer["values"]))
            say(
                f"{cell.workload} {number}/{len(cells)}, round {cell.round + 1}, {cell.system} ({cell.task}): "
                f"{outcome} [{time.monotonic() - start:.1f} s]"
            )
            yield {
                "workload": cell.workload,
                "system": cell.system,
                "task": cell.task,
                "round": cell.round,
                "nbytes": cell.nbytes or nbytes,
                **answer,
            }
        values.unlink()

    def run(self, cell: Cell) -> dict[str, Any]:
        """What a process of its own says of the cell, or why it says nothing."""
        directory = Path(tempfile.mkdtemp(dir=self.scratch))
        cell = replace(cell, directory=str(directory))
        command = [self.pythons[cell.environment], str(HERE / "worker.py"), json.dumps(asdict(cell))]
        environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONWARNINGS": "ignore"}
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=self.timeout
            )
        except subprocess.TimeoutExpired:
            return {"values": {}, "error": f"timeout after {self.timeout:.0f} s"}
        finally:
            shutil.rmtree(directory, ignore_errors=True)
        answer = json.loads(done.stdout or '{"values": {}}')
        if done.returncode or not done.stdout:
            answer["error"] = f"exit status {done.returncode}: {last_line(done.stderr)}"
        if "error" in answer:
            answer["error"] = self.without_paths(answer["error"])
            if cell.is_ours or cell.is_limit:
                say(done.stderr)
        return answer

    def without_paths(self, text: str) -> str:
        """Results are read on other machines, where our directories say nothing."""
        for path, name in ((self.scratch, "SCRATCH"), (HERE.parent, "."), (Path.home(), "~")):
            text = text.replace(str(path), name)
        return text


def sizes_of(workload: Workload) -> dict[str, int]:
    import jax  # late, because arguments should be refused at once
    import workloads

    shapes = workloads.TREES[workload.tree](workload.size)
    return {"nbytes": workloads.nbytes_of(shapes), "leaves": len(jax.tree.leaves(shapes))}


def shown(values: Mapping[str, float | None]) -> Iterator[str]:
    return (f"{name} {value:.4g}" for name, value in values.items() if value is not None)


def last_line(text: str) -> str:
    return (text.strip().splitlines() or ["it said nothing"])[-1][:500]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def make_environment(name: str) -> str:
    """The interpreter of peers' environment, which is made if it is not there or has other versions."""
    environment, wanted = HERE.parent / f".venv-{name}", HERE / f"requirements-{name}.txt"
    python, installed = environment / "bin" / "python", environment / "installed.txt"
    if not installed.exists() or installed.read_text() != wanted.read_text():
        say(f"making {environment.name}")
        subprocess.run([sys.executable, "-m", "venv", environment], check=True)
        (environment / ".gitignore").write_text("*\n")  # ruff goes by it, too
        pip = [python, "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
        subprocess.run([*pip, "-r", wanted], check=True)
        installed.write_text(wanted.read_text())
    return str(python)


# -------------------------------------------------------------------------------------------- command


def chosen(args: argparse.Namespace) -> list[Workload]:
    found = plan.workloads(quick=args.quick)
    names = [workload.name for workload in found]
    if unknown := set(args.only) - set(names):
        sys.exit(f"--only {', '.join(sorted(unknown))}: the workloads are {', '.join(names)}")
    rounds = {} if args.rounds is None else {"rounds": args.rounds}
    return [replace(w, **rounds) for w in found if not args.only or w.name in args.only]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="a fifth of the size; the bars are for the whole"
    )
    parser.add_argument("--dir", type=Path, default=HERE / ".scratch", help="on the disk to be measured")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="where the results go")
    parser.add_argument("--name", help="of the results; 'quick' or 'full' if not given")
    parser.add_argument("--only", nargs="+", default=[], metavar="WORKLOAD", help="leave out the others")
    parser.add_argument("--rounds", type=int, help="of every workload")
    parser.add_argument("--timeout", type=float, help="seconds that one cell may take")
    parser.add_argument("--peers-python", help="an interpreter that has requirements-peers.txt installed")
    parser.add_argument(
        "--original-python", help="an interpreter that has requirements-original.txt installed"
    )
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    workloads = chosen(args)
    pythons = {
        "own": sys.executable,
        "peers": args.peers_python or make_environment("peers"),
        "original": args.original_python or make_environment("original"),
    }
    args.dir.mkdir(parents=True, exist_ok=True)
    found = machine.describe(args.dir.resolve(), pythons)
    start = time.monotonic()
    with tempfile.TemporaryDirectory(dir=args.dir, ignore_cleanup_errors=True) as scratch:
        bench = Bench(pythons, Path(scratch).resolve(), args.timeout or (60 if args.quick else 180))
        cells = [cell for workload in workloads for cell in bench.measure(workload)]
    found |= {
        "quick": args.quick,
        "command": command(args),
        "minutes": (time.monotonic() - start) / 60,
    }

    results = report.Results(found, workload_facts(workloads), cells)
    write(results, args.out, args.name or ("quick" if args.quick else "full"))
    print(report.markdown(results))
    failed = [cell for cell in cells if cell["system"].startswith(("eformer", "limit")) and "error" in cell]
    if failed:
        sys.exit("\n".join(f"{c['workload']}, {c['system']}: {c['error']}" for c in failed))


def write(results: report.Results, directory: Path, name: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / f"{name}.md").write_text(report.markdown(results) + "\n")
    (directory / f"{name}.json").write_text(report.as_json(results))


def workload_facts(workloads: Sequence[Workload]) -> dict[str, dict[str, Any]]:
    return {w.name: {"about": w.about, "rounds": w.rounds, **sizes_of(w)} for w in workloads}


def command(args: argparse.Namespace) -> str:
    """What was asked for, without the directories of this machine."""
    only = ["--only", *(f'"{name}"' for name in args.only)] if args.only else []
    rounds = [f"--rounds {args.rounds}"] if args.rounds else []
    return " ".join(["python bench/run.py", *(["--quick"] if args.quick else []), *only, *rounds])


if __name__ == "__main__":
    main()
