"""Run a command in several real processes on loopback, as a launcher would start them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from support.processes import _free_port

LIMIT = 90  # seconds
QUICK = "import eformer._engine.processes.crew as c\nc.SILENCE = 3.0; c.BEAT = 0.2\n"


def dying_at(number: int) -> str:
    """Return the beginning of a program that is killed before this call, counted from 1, that changes a disk."""
    return f"""
import os, sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from support.faults import hooked
hooks = hooked(before=lambda number, name: os.kill(os.getpid(), 9) if number == {number} else None)
hooks.__enter__()  # they end with the last reference to them
"""


class Outcome:
    """The exit codes and the outputs of all processes."""

    def __init__(self, codes: list[int], outputs: list[str], errors: list[str]) -> None:
        self.codes, self.outputs, self.errors = codes, outputs, errors

    def __repr__(self) -> str:
        return f"{self.codes}\n" + "\n".join(
            f"{o}\n{e}" for o, e in zip(self.outputs, self.errors, strict=True)
        )


class Launched:
    """Processes of `eformer WORDS`, with `--coordinator` and `--process`, or with the variables of a launcher."""

    def __init__(
        self,
        count: int,
        *words: Any,
        variables: Any = None,
        programs: dict[int, str] | None = None,
        **environ: str,
    ) -> None:
        port = _free_port()
        self.processes = []
        for number in range(count):
            own = ["--coordinator", f"127.0.0.1:{port}", "--process", f"{number}/{count}"]
            more = dict(environ) | {"JAX_COORDINATOR_PORT": str(port)}
            if variables is not None:
                own, more = [], more | variables(number, count)
            program = ["-m", "eformer.cli"]
            if number in (programs or {}):
                program = ["-c", f"{programs[number]}\nfrom eformer.cli.commands import main; main()"]
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, *program, *map(str, words), *own],
                    env=os.environ | more,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )

    def kill(self, number: int) -> None:
        os.kill(self.processes[number].pid, signal.SIGKILL)

    def wait(self, limit: float = LIMIT) -> Outcome:
        try:
            said = [process.communicate(timeout=limit) for process in self.processes]
        finally:
            for process in self.processes:
                if process.poll() is None:
                    process.kill()
        codes = [process.returncode for process in self.processes]
        return Outcome(codes, [out for out, _ in said], [err for _, err in said])


def launched(count: int, *words: Any, **options: Any) -> Outcome:
    """Run a command in so many processes, and return their outcome."""
    return Launched(count, *words, **options).wait()


def files_below(path: Path) -> dict[str, bytes]:
    """Return all files by their paths."""
    if path.is_file():
        return {"": path.read_bytes()}
    return {
        str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()
    }
