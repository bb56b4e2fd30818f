"""Run programs of tests in forks of an interpreter that has imported JAX and eformer: in a tenth of the time.

A test of how an interpreter starts or ends needs one of its own.
"""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from support import forkserver
from support.commands import all_of
from support.started_commands import carry_out

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerProcess


def run(code: str, *arguments: Any, cwd: Any = None) -> subprocess.CompletedProcess[str]:
    """Run a program; return its exit code and its output."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = (Path(folder, name) for name in ("out", "err"))
        process = _start(_run_code, [code, *arguments], out, err, cwd=cwd)
        process.join(120)
        assert process.exitcode is not None, "the program takes longer than two minutes"
        shown = [file.read_text("utf-8") if file.exists() else "" for file in (out, err)]
    return subprocess.CompletedProcess(["-c", *arguments], process.exitcode, *shown)


def with_errors_on_terminal(code: str, *arguments: Any, out: Any = os.devnull) -> tuple[str, int | None]:
    """Run a program whose standard error is a terminal; return what it shows there, and the exit code."""
    return _on_terminal(_run_code, [code, *arguments], out, columns=120)


def on_terminal(*command: Any, columns: int = 80) -> tuple[str, int | None]:
    """Run the command `eformer` on a terminal of that width; return its output and its exit code."""
    return _on_terminal(carry_out, command, None, columns=columns)


def start_command(*command: Any, out: Any, err: Any, **variables: str) -> ForkServerProcess:
    """Start the command `eformer`; its output goes into files or pipes that have names."""
    return _start(carry_out, command, out, err, **variables)


def _on_terminal(target: Any, arguments: Any, out: Any, *, columns: int) -> tuple[str, int | None]:
    master, slave = pty.openpty()
    name = os.ttyname(slave)
    variables = {"COLUMNS": str(columns), "TERM": "xterm-256color"}
    process = _start(target, arguments, out or name, name, **variables)

    def close_at_the_end() -> None:
        process.join(60)
        os.close(slave)

    threading.Thread(target=close_at_the_end).start()
    shown = all_of(master)
    process.join(60)
    return shown, process.exitcode


def _start(
    target: Any, arguments: Any, out: Any, err: Any, cwd: Any = None, **variables: str
) -> ForkServerProcess:
    words = [str(argument) for argument in arguments]
    directory = str(cwd or os.getcwd())
    process = forkserver.context().Process(
        target=target, args=(words, {**os.environ, **variables}, directory, str(out), str(err))
    )
    process.start()
    return process


def _run_code(words: list[str], variables: dict[str, str], directory: str, out: str, err: str) -> None:
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(directory)
    for path, descriptor in ((out, 1), (err, 2)):
        opened = os.open(path, os.O_WRONLY | os.O_CREAT)
        os.dup2(opened, descriptor)
        os.close(opened)
    sys.stdout, sys.stderr = os.fdopen(1, "w", encoding="utf-8"), os.fdopen(2, "w", 1, "utf-8")
    code, *arguments = words
    sys.argv = ["-c", *arguments]
    exec(compile(code, "<program>", "exec"), {"__name__": "__main__"})
