"""Break saves and loads of checkpoints in every way that is known, and say what was left: a table.

    python faults/run.py [--minutes 20] [--only KIND ...] [--peers] [--seed N] [--resume] [--workers 2]
    python faults/run.py --repeat KIND/LAYOUT/SEED

Every case is a kind of fault, a layout and a seed. Kinds take turns so that each gets the same time, so any number of
minutes covers all of them; more minutes are more seeds. Each result is a line of DIRECTORY/NAME.jsonl, from which
`--resume` goes on; at the end the tables are DIRECTORY/NAME.md and .json. With `--peers` the same faults happen to
other libraries, in environments of their own. The exit status is 1 if a fault did harm to a checkpoint of eformer.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import report  # noqa: E402
from cases import Case  # noqa: E402
from crew import Crew, Worker, is_counted, is_failure  # noqa: E402
from kinds import KINDS  # noqa: E402
from plan import Plan, environment_of  # noqa: E402


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=20.0, help="after which no case is begun (20)")
    parser.add_argument("--cases", type=int, help="after so many no case is begun, either")
    parser.add_argument("--only", nargs="+", default=[], metavar="KIND", help=f"of {', '.join(KINDS)}")
    parser.add_argument("--peers", action="store_true", help="compare eformer with other libraries")
    parser.add_argument("--seed", type=int, default=0, help="of the first case of each kind and layout (0)")
    parser.add_argument("--out", type=Path, default=HERE / "results", metavar="DIRECTORY")
    parser.add_argument("--name", help="of the results; 'ours' or 'peers' if not given")
    parser.add_argument("--resume", action="store_true", help="go on from DIRECTORY/NAME.jsonl")
    parser.add_argument("--workers", type=int, default=max(2, os.cpu_count() or 1))
    parser.add_argument(
        "--dir", type=Path, default=HERE / ".scratch", help="on a disk; mounts are made below"
    )
    parser.add_argument("--repeat", type=Case.parse, metavar="KIND/LAYOUT/SEED", help="run one case again")
    parser.add_argument(
        "--peers-python", help="an interpreter that has bench/requirements-peers.txt installed"
    )
    parser.add_argument("--original-python", help="one that has bench/requirements-original.txt installed")
    args = parser.parse_args()
    if unknown := {*args.only, *([args.repeat.kind] if args.repeat else [])} - set(KINDS):
        parser.error(f"no kind {', '.join(sorted(unknown))}; the kinds are {', '.join(KINDS)}")
    args.name = args.name or ("peers" if args.peers else "ours")
    return args


def pythons(args: argparse.Namespace, *names: str) -> dict[str, str]:
    """Return the interpreters of environments; those of peers are made as for the benchmarks."""
    found = {"own": sys.executable, "peers": args.peers_python, "original": args.original_python}
    return {name: found[name] or _made(name) for name in names}


def _made(name: str) -> str:
    code = f"import run; print(run.make_environment({name!r}))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=HERE.parent / "bench", check=True, stdout=subprocess.PIPE
    )
    return done.stdout.decode().strip()


def repeat(args: argparse.Namespace) -> None:
    """Run one case and print what came of it."""
    case = args.repeat
    name = environment_of(case)
    worker = Worker(name, pythons(args, name)[name], args.dir, quiet=False)
    try:
        answer = worker.ask(case, case.seed, KINDS[case.kind].limit)
    finally:
        worker.close()
    print(f"{case}: {answer['word']} {answer['note']}")
    sys.exit(int(is_failure(answer)))


class Notes:
    """The records so far: a file of lines, and what is said of them."""

    def __init__(self, file: Path, earlier: list[dict[str, Any]], *, peers: bool) -> None:
        self.records, self._peers = earlier, peers
        self._file = file.open("a" if earlier else "w")
        self._said = time.monotonic()

    def __call__(self, record: dict[str, Any]) -> None:
        self.records.append(record)
        print(json.dumps(record), file=self._file, flush=True)
        if is_failure(record) and (not self._peers or is_ours(record)):
            case = Case(record["kind"], record["layout"], record["seed"])
            say(
                f"{record['word']}: {record['note']}\n    python faults/run.py --repeat {shlex.quote(str(case))}"
            )
        if time.monotonic() - self._said > 30:
            self._said = time.monotonic()
            say(
                f"{sum(map(is_counted, self.records)):,} cases, {sum(map(is_failure, self.records)):,} failures"
            )


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def read_records(file: Path) -> list[dict[str, Any]]:
    """Read what an earlier run noted; its last line may be cut off."""
    records = []
    for line in file.read_text().splitlines() if file.exists() else []:
        try:
            records.append(json.loads(line))
        except ValueError:
            break
    return records


def is_ours(record: dict[str, Any]) -> bool:
    return record["layout"].startswith("eformer")


def main() -> None:
    args = parse_arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    args.dir.mkdir(parents=True, exist_ok=True)
    if args.repeat:
        repeat(args)
    kinds = [KINDS[name] for name in (args.only or KINDS) if not args.peers or KINDS[name].for_peers]
    plan = Plan.of(kinds, peers=args.peers, seed=args.seed)
    file = args.out / f"{args.name}.jsonl"
    notes = Notes(file, read_records(file) if args.resume else [], peers=args.peers)
    plan.resume(notes.records)
    with tempfile.TemporaryDirectory(dir=args.dir, ignore_cleanup_errors=True) as disk:
        names = dict.fromkeys(lane.environment for lane in plan.lanes)
        Crew(plan, pythons(args, *names), Path(disk), notes).work(args.workers, 60 * args.minutes, args.cases)
    titles = {kind.name: kind.title for kind in kinds}
    found = report.summary(notes.records, titles, **facts(args), cannot=plan.cannot)
    (args.out / f"{args.name}.json").write_text(json.dumps(found, indent=1) + "\n")
    (args.out / f"{args.name}.md").write_text(report.markdown(found) + "\n")
    print(report.markdown(found))
    sys.exit(int(any(is_failure(record) and (not args.peers or is_ours(record)) for record in notes.records)))


def facts(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "name": args.name,
        "peers": args.peers,
        "workers": args.workers,
        "command": command(args),
        "machine": machine(),
    }


def command(args: argparse.Namespace) -> str:
    """Return the command that gives these cases, whether in one run or in several."""
    words = ["python faults/run.py", *(["--peers"] if args.peers else [])]
    words += [f"--only {' '.join(args.only)}"] if args.only else []
    return " ".join([*words, *([f"--seed {args.seed}"] if args.seed else [])])


def machine() -> str:
    release = platform.release().partition("-")[0]
    return f"Linux {release}, {os.cpu_count()} cores, Python {platform.python_version()}"


if __name__ == "__main__":
    main()
