"""Fuzz every reader, on all cores.

    python tests/fuzz/run.py [--minutes M] [--only READER[,READER]] [--seed N] [--workers W] [--add-to FILE]
    python tests/fuzz/run.py --repeat FILE

Inputs are the checkpoints of the corpus, changed at random within their formats and sealed again. A finding is an error
that is not documented, a process that ends or takes ten seconds or 1.5 GB, and anything opened, changed or started
outside of the input's directory. Each is saved under tests/fuzz/findings with the command that repeats it. `--add-to`
adds the numbers of inputs and findings to those in a file, such as faults/results/fuzz.json.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from fuzz.cases import Case, with_open_databases  # noqa: E402
from fuzz.readers import READERS  # noqa: E402
from fuzz.worker import STATE, save_finding  # noqa: E402

FINDINGS = HERE / "findings"
HANG = 10.0  # seconds of its own processor time, or six times as long by the clock
START = 120.0
_TICK = 1.0
_TOLD = 30.0


class Child:
    """A worker process, and what is known of it."""

    def __init__(self, root: Path, seed: int, stop: float, names: list[str]) -> None:
        self.root, self.seed, self.stop, self.names = root, seed, stop, names
        self.ended: list[dict[str, Any]] = []
        self.starts = 0
        self.start()

    def start(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)
        self.root.mkdir(parents=True)
        seed = self.seed + 1000 * self.starts
        self.starts += 1
        command = [
            sys.executable,
            str(HERE / "worker.py"),
            str(self.root),
            str(FINDINGS),
            str(seed),
            str(self.stop),
        ]
        with (self.root / "log").open("wb") as log:
            self.process = subprocess.Popen([*command, ",".join(self.names)], stdout=log, stderr=log)
        self.count, self.since, self.cpu_then = 0, time.monotonic(), 0.0

    def look(self) -> str | None:
        """Say what is wrong with the process, or return None. One that has ended well is not started again."""
        status = self.process.poll()
        if status is not None:
            return None if status == 0 else f"ended with status {status}"
        count, cpu, now = self._count(), self._cpu(), time.monotonic()
        if count != self.count:
            self.count, self.since, self.cpu_then = count, now, cpu
        limit = HANG if count else START
        if cpu - self.cpu_then > limit or now - self.since > 6 * limit:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
            return (
                f"took {now - self.since:.0f} s for one input, {cpu - self.cpu_then:.0f} s of them computing"
            )
        return None

    def _count(self) -> int:
        try:
            return int.from_bytes((self.root / "state").read_bytes()[:8], "little")
        except FileNotFoundError:
            return 0

    def _cpu(self) -> float:
        try:
            fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return 0.0
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def is_running(self) -> bool:
        return self.process.poll() is None

    def restart(self, problem: str) -> None:
        """Save the input that was in work, and go on with the next seed."""
        name, case = self._in_work()
        log = (self.root / "log").read_bytes()[-4000:].decode(errors="replace")
        save_finding(FINDINGS, name, f"the process {problem}", log, case)
        said = self.said() | {"keys": {**self.said()["keys"], f"{name}: the process {problem}": 1}}
        self.ended.append(said)
        self.start()

    def _in_work(self) -> tuple[str, Case]:
        data = (self.root / "state").read_bytes() if (self.root / "state").exists() else bytes(STATE)
        length = int.from_bytes(data[8:16], "little")
        name, target, content = (*data[16 : 16 + length].split(b"\n", 2), b"", b"")[:3]
        if name and READERS[name.decode()].in_memory:
            return name.decode(), Case({target.decode(): content})
        case = Case.of_directory(self.root / "in", target.decode(errors="replace"))
        return name.decode() or "start", _with_keys(case, self.root / "in", name.decode())

    def said(self) -> dict[str, Any]:
        try:
            return dict(json.loads((self.root / "said.json").read_text()))
        except FileNotFoundError:
            return {"totals": {}, "seconds": {}, "keys": {}, "outcomes": {}}

    def sums(self) -> list[dict[str, Any]]:
        return [*self.ended, self.said()]


def _with_keys(case: Case, directory: Path, reader: str) -> Case:
    """Return an input of a database as it was made: by its keys."""
    if reader not in ("database", "orbax_keys", "processes"):
        return case
    try:
        return with_open_databases(case, directory)
    except ValueError:
        return case


def total(children: list[Child], what: str) -> Counter[str]:
    found: Counter[str] = Counter()
    for child in children:
        for said in child.sums():
            found.update(said[what])
    return found


def watch(children: list[Child], stop: float) -> None:
    told = began = time.monotonic()
    while any(child.is_running() for child in children):
        time.sleep(_TICK)
        for child in children:
            if (problem := child.look()) and time.time() < stop:
                child.restart(problem)
        if time.time() > stop + 30:
            for child in children:
                child.process.kill()
        if time.monotonic() - told > _TOLD:
            told = time.monotonic()
            inputs = total(children, "totals").total()
            keys = len(total(children, "keys"))
            say(
                f"{told - began:6.0f} s: {inputs:,} inputs, {inputs / (told - began):,.0f} a second, {keys} findings"
            )


def table(children: list[Child]) -> str:
    inputs, seconds = total(children, "totals"), total(children, "seconds")
    lines = [f"{'reader':<16}{'inputs':>12}{'a second':>10}"]
    for name, count in inputs.items():
        lines.append(f"{name:<16}{count:>12,}{count / max(seconds[name], 0.001):>10,.0f}")
    lines.append(f"{'all':<16}{inputs.total():>12,}")
    outcomes = ", ".join(f"{name} {count:,}" for name, count in total(children, "outcomes").most_common())
    return "\n".join([*lines, f"calls: {outcomes}"])


def add_to(file: Path, inputs: Counter[str], findings: int) -> None:
    """Add the numbers of this run to those of earlier ones."""
    before = json.loads(file.read_text()) if file.exists() else {"inputs": {}, "findings": 0}
    sums = inputs + Counter(before["inputs"])
    added = {
        "inputs": {name: sums[name] for name in READERS if sums[name]},
        "findings": before["findings"] + findings,
    }
    file.write_text(json.dumps(added, indent=1) + "\n")


def repeat(path: Path) -> int:
    """Run one input in a process of its own."""
    with tempfile.TemporaryDirectory(dir=_memory()) as scratch:
        command = [sys.executable, str(HERE / "worker.py"), scratch, "--repeat", str(path.absolute())]
        try:
            status = subprocess.run(command, timeout=START, check=False).returncode
        except subprocess.TimeoutExpired:
            status = 124
    say(f"{path}: {'nothing is wrong' if status == 0 else f'status {status}'}")
    return status


def _memory() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--only", help=f"readers, with commas: {', '.join(READERS)}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeat", type=Path, metavar="FILE")
    parser.add_argument("--add-to", type=Path, metavar="FILE")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    return parser.parse_args()


def main() -> int:
    asked = arguments()
    if asked.repeat:
        return repeat(asked.repeat)
    names = asked.only.split(",") if asked.only else list(READERS)
    stop = time.time() + 60 * asked.minutes
    with tempfile.TemporaryDirectory(dir=_memory()) as scratch:
        roots = [Path(scratch) / str(number) for number in range(asked.workers)]
        children = [
            Child(root, asked.seed + 10**6 * number, stop, names) for number, root in enumerate(roots)
        ]
        try:
            watch(children, stop)
        finally:
            for child in children:
                child.process.kill()
        keys = total(children, "keys")
        say(table(children))
        if asked.add_to:
            add_to(asked.add_to, total(children, "totals"), keys.total())
        for key, count in keys.most_common():
            say(f"finding, {count} times: {key}")
        say(f"{len(keys)} findings, in {FINDINGS}" if keys else "no findings")
    return 1 if keys else 0


if __name__ == "__main__":
    sys.exit(main())
