"""Run the command `eformer` as a program."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

EFORMER = str(Path(sys.executable).with_name("eformer"))


def run(*arguments: Any, code: int = 0, **environment: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [EFORMER, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "NO_COLOR": "", **environment},
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done


def on_terminal(*arguments: Any, columns: int = 80) -> tuple[str, int]:
    """Run the command on a terminal of that width; return its output and its exit code."""
    master, slave = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(columns), "TERM": "xterm-256color"}
    process = subprocess.Popen(
        [EFORMER, *map(str, arguments)], stdout=slave, stderr=slave, stdin=slave, env=environment
    )
    os.close(slave)
    return all_of(master), process.wait(60)


def all_of(terminal: int) -> str:
    """Read everything that is written to a terminal until its last writer closes it."""
    written = b""
    while True:
        try:
            data = os.read(terminal, 65536)
        except OSError:  # the other end is closed
            break
        if not data:
            break
        written += data
    os.close(terminal)
    return written.decode()
