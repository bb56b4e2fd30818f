"""Files of tests as cases: of several processes, runs, buckets and hostile files."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from cases import OVER, PASSED, Outcome

from kinds.kind import Bench, Kind

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).resolve().parents[2]

_MARK = r"pytest\.mark\.(sample|thorough)\b|^from contracts\."  # by which `make test` leaves out cases


class Suite(Kind):
    """Each file is one case. How often its faults are tried is set by the variables that `make test` uses, too."""

    limit, expects = 1800.0, 30.0
    environment: ClassVar[dict[str, str]] = {"EFORMER_SAMPLE": "1"}
    arguments: Sequence[str] = ()

    def __init__(self, name: str, title: str, *patterns: str) -> None:
        self.name, self.title, self.patterns = name, title, patterns

    def files(self) -> list[Path]:
        return [path for pattern in self.patterns for path in sorted(ROOT.glob(f"tests/{pattern}"))]

    def layouts(self) -> list[str]:
        return [_title(path) for path in self.files()] or ["-"]

    def cannot(self, layout: str) -> str:
        return (
            f"there is no file {' or '.join(f'tests/{pattern}' for pattern in self.patterns)}"
            if layout == "-"
            else ""
        )

    def run(self, layout: str, seed: int, bench: Bench) -> Outcome:
        if seed > bench.first:
            return Outcome(OVER)
        (file,) = (path for path in self.files() if _title(path) == layout)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        done = subprocess.run(
            [*command, *self.arguments, f"--basetemp={bench.disk / 'pytest'}", str(file)],
            cwd=ROOT,
            env=os.environ | {"PYTHONUTF8": "1"} | self.environment,
            capture_output=True,
            text=True,
        )
        return read(done.stdout, done.returncode)


class Samples(Suite):
    """Each file with a mark that `make test` heeds is one case, unless another suite has the file."""

    def files(self) -> list[Path]:
        others = {path for suite in SUITES if suite is not self for path in suite.files()}
        return [path for path in marked() if path not in others]


def marked() -> list[Path]:
    """Return the files of tests with a mark `sample` or `thorough`, or with a contract, which may have one."""
    files = [path for path in ROOT.glob("tests/**/test_*.py") if path.parent.name != "cloud"]
    return sorted(path for path in files if re.search(_MARK, path.read_text("utf-8"), re.MULTILINE))


def read(said: str, status: int) -> Outcome:
    """Read the counts in the last line of pytest."""
    last = said.strip().splitlines()[-1] if said.strip() else "nothing was said"
    counts = {word: int(count) for count, word in re.findall(r"(\d+) (passed|failed|error|skipped)", last)}
    if status or not counts.get("passed"):
        failed = [line for line in said.splitlines() if line.startswith(("FAILED", "ERROR"))]
        if not status or status == 5:
            return Outcome(PASSED, f"nothing to run: {last}", 0)
        return Outcome("failed", "; ".join(failed)[:1000] or last)
    return Outcome(PASSED, last, counts["passed"])


def _title(path: Path) -> str:
    return str(path.relative_to(ROOT / "tests").with_suffix("")).replace("/", ".").replace("test_", "")


SUITES = (
    Suite("forks", "forks while threads save and load", "**/test_forks.py", "**/test_fork.py"),
    Suite("interrupts", "Ctrl-C at any line of a call, then a newer save", "faults/test_interrupts.py"),
    Suite(
        "cancels-buckets",
        "`Pending.cancel` before any request of a save to a bucket",
        "faults/test_cancel.py",
    ),
    Suite("processes", "one of several processes is killed or late", "multihost/test_*.py"),
    Suite(
        "runs",
        "a run is killed, damaged, signalled, or its disk is full",
        "faults/test_run*.py",
        "faults/test_small_disk.py",
        "engine/runs/test_signals.py",
    ),
    Suite(
        "buckets",
        "a save to a bucket dies, loses answers, meets another",
        "faults/test_bucket_*.py",
        "cloud/test_unquoted.py",
    ),
    Suite(
        "other-files",
        "hostile files, and tools that are killed or fail",
        "compat/test_files_hostile.py",
        "compat/test_torch.py",
        "faults/test_tools.py",
        "fuzz/test_*.py",
    ),
    Samples("samples", "all cases of tests of which `make test` runs a sample"),
)
