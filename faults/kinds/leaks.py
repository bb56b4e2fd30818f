"""A thousand saves and loads in one process: no descriptor, thread, file or memory is left behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from cases import PASSED, Outcome

from kinds.kind import Bench, Kind

SAVES, WARM = 1000, 200
MOST = 4096  # bytes of memory that a save and a load may leave
MOST_THREADS = 2  # one may not have ended yet, and libraries start some late; a leak has hundreds


class Leaks(Kind):
    name = "leaks"
    title = f"{SAVES:,} saves and loads in one process: descriptors, threads, files, memory"
    limit, expects = 300.0, 30.0

    def run(self, layout: str, seed: int, bench: Bench) -> Outcome:
        here = Path(__file__).resolve().parents[1]
        place = bench.memory / f"leaks {layout} {seed}"
        done = subprocess.run(
            [sys.executable, "-m", "kinds.leaks", layout, str(place)],
            cwd=here,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            return Outcome("failed", done.stdout.strip() or done.stderr[-500:])
        return Outcome(PASSED, done.stdout.strip(), SAVES)


def measure(place: Path) -> dict[str, int]:
    status = Path("/proc/self/status").read_text()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "files": sum(not _is_in_database(path) for path in place.rglob("*")),
        "memory": 1024 * int(status.partition("VmRSS:")[2].split()[0]),
    }


def _is_in_database(path: Path) -> bool:
    """Tell whether it is a data file of a database: TensorStore makes one or several for the same tree, by chance."""
    return path.parent.name == "d" and (path.parents[1] / "manifest.ocdbt").exists()


def main(layout: str, place: Path) -> None:
    import subjects

    subject = subjects.find(layout)
    folder = subject.begin(place)
    for turn in range(WARM + SAVES):
        if turn == WARM:
            before = measure(place)
        subject.save(folder, 1 + turn % 2)
        assert subject.look(folder) == 1 + turn % 2
    after = measure(place)
    subject.check_next_save(folder)  # nothing is there but what its manifest names
    grown = {name: after[name] - before[name] for name in after}
    print(", ".join(f"{name} {value:+,}" for name, value in grown.items()))
    memory, threads = grown.pop("memory"), grown.pop("threads")
    is_grown = any(value > 0 for value in grown.values())
    sys.exit(int(is_grown or threads > MOST_THREADS or memory > MOST * SAVES))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
