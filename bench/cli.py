"""The command `eformer` beside the machine's own tools: its start, and how fast it verifies, compares, converts.

    python bench/cli.py [--gib 2] [--leaves 100000] [--rounds 5] > bench/results/cli.md

Every command is a process of its own. In a round all of them run one after the other, so that a busy machine slows them
alike; the fastest round counts. Files are in the page cache when they are read; what is written is on the disk when the
time ends. This program itself stays small: a process begins with the memory of the one that starts it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

EFORMER = str(Path(sys.executable).with_name("eformer"))


@dataclass(frozen=True)
class Task:
    """A command, what it makes, and with how many others of its group it is compared."""

    group: str
    name: str
    command: list[str]
    makes: Path | None = None
    code: int = 0


def tasks(folder: Path, data: Path, many: Path) -> list[Task]:
    new = folder / "new"

    def convert(source: Path, name: str, *options: str) -> list[str]:
        return [EFORMER, "convert", str(source), str(folder / name), *options]

    read = [sys.executable, "-c", _READ, str(data)]
    copy = ["sh", "-c", f"cp -r {data} {new} && sync -f {new}"]
    rules = folder / "rules"
    rules.write_text("w0 -> w0 | transpose\n")
    return [
        Task("start", "python -c 'import numpy'", [sys.executable, "-c", "import numpy"]),
        Task("start", "eformer --help", [EFORMER, "--help"]),
        Task("start", "eformer inspect", [EFORMER, "inspect", str(folder / "small")]),
        Task("start", "eformer ls", [EFORMER, "ls", str(folder / "small")]),
        Task("read", "read the files, 2 threads", read),
        Task("read", "eformer verify", [EFORMER, "verify", "-q", str(data)]),
        Task("read", "eformer diff (reads twice as much)", [EFORMER, "diff", "-q", str(data), str(data)]),
        Task("write", "cp -r, sync", copy, new),
        Task("write", "to safetensors", convert(data, "new", "--to", "safetensors"), new),
        Task("write", "to tensorstore", convert(data, "new", "--to", "tensorstore"), new),
        Task("write", "to msgpack", convert(data, "new", "--to", "msgpack"), new),
        Task("write", "to npz", convert(data, "new", "--to", "npz"), new),
        Task(
            "write",
            "to safetensors, 300 MB",
            convert(data, "new", "--to", "safetensors", "--memory", "300MB"),
            new,
        ),
        Task(
            "write",
            "one leaf transposed",
            convert(data, "new", "--to", "safetensors", "--rename", str(rules)),
            new,
        ),
        Task("leaves", "eformer inspect", [EFORMER, "inspect", str(many)]),
        Task("leaves", "eformer verify", [EFORMER, "verify", "-q", str(many)]),
        Task("leaves", "eformer diff", [EFORMER, "diff", "-q", str(many), str(many)]),
        Task("leaves", "to safetensors", convert(many, "new", "--to", "safetensors"), new),
        Task("leaves", "to npz", convert(many, "new", "--to", "npz"), new),
    ]


_READ = """
import os, sys, threading
from pathlib import Path
files = [path for path in Path(sys.argv[1]).rglob("*") if path.is_file()]
jobs = [(path, start) for path in files for start in range(0, path.stat().st_size, 2**24)]
def work():
    buffer = bytearray(2**24)
    while jobs:
        try:
            path, start = jobs.pop()
        except IndexError:
            return
        descriptor = os.open(path, os.O_RDONLY)
        os.preadv(descriptor, [buffer], start)
        os.close(descriptor)
threads = [threading.Thread(target=work) for _ in range(2)]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""


def seconds(task: Task) -> tuple[float, int]:
    """How long it takes, and the most memory that it has."""
    start = time.perf_counter()
    process = subprocess.Popen(task.command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    took = time.perf_counter() - start
    if os.waitstatus_to_exitcode(status) != task.code:
        raise SystemExit(f"{task.command} ended with {status}")
    if task.makes:
        shutil.rmtree(task.makes) if task.makes.is_dir() else task.makes.unlink()
    return took, usage.ru_maxrss * 1024


_WRITE = """
import sys
import numpy as np
from eformer import checkpoint
folder, gib, leaves = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
rows = int(gib * 2**30 / 8 / 4 / 8192)
rng = np.random.default_rng(0)
checkpoint.save({f"w{i}": rng.integers(0, 2**32, (rows, 8192), np.uint32) for i in range(8)}, f"{folder}/data")
checkpoint.save({f"l{i}": {"w": np.full(16, i, np.float32)} for i in range(leaves)}, f"{folder}/many")
checkpoint.save({"w": np.ones(3)}, f"{folder}/small")
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=2)
    parser.add_argument("--leaves", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", default=None)
    asked = parser.parse_args()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed program has its bytecode
    with tempfile.TemporaryDirectory(dir=asked.directory) as name:
        folder = Path(name)
        data = [folder, asked.gib, asked.leaves]
        subprocess.run([sys.executable, "-c", _WRITE, *map(str, data)], check=True)
        all_tasks = tasks(folder, folder / "data", folder / "many")
        rounds = [[seconds(task) for task in all_tasks] for _ in range(asked.rounds)]
    titles = {
        "start": "A small checkpoint",
        "read": f"{asked.gib:g} GiB read",
        "write": f"{asked.gib:g} GiB written",
        "leaves": f"{asked.leaves:,} leaves",
    }
    how = f"`python bench/cli.py`, {os.cpu_count()} cores, the fastest of {asked.rounds} rounds."
    print(f"# The command line\n\n{how}\n")
    for group, title in titles.items():
        print(f"| {title} | seconds | beside the first | peak memory |\n|---|---|---|---|")
        of_group = [number for number, task in enumerate(all_tasks) if task.group == group]
        first = min(times[of_group[0]][0] for times in rounds)
        for number in of_group:
            best = min(times[number][0] for times in rounds)
            memory = max(times[number][1] for times in rounds)
            print(f"| {all_tasks[number].name} | {best:.3f} | {best / first:.2f} | {memory / 1e6:.0f} MB |")
        print()


if __name__ == "__main__":
    main()
