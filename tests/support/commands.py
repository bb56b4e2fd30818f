"""Run the command `eformer` as a program."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from support import forkserver

EFORMER = str(Path(sys.executable).with_name("eformer"))


def run(*arguments: Any, code: int = 0, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own. One with another environment gets an interpreter of its own, too."""
    command = [str(argument) for argument in arguments]
    done = run_anew(command, environment) if environment else run_forked(command)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done


def run_anew(command: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "NO_COLOR": "", **environment}
    return subprocess.run([EFORMER, *command], capture_output=True, text=True, timeout=300, env=environment)


def run_forked(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run the command in a fork of an interpreter that has imported what commands import: in a tenth of the time."""
    from support.started_commands import carry_out

    with tempfile.TemporaryDirectory() as folder:
        outputs = [os.path.join(folder, name) for name in ("out", "err")]
        variables = {**os.environ, "NO_COLOR": ""}
        process = forkserver.context().Process(
            target=carry_out, args=(command, variables, os.getcwd(), *outputs)
        )
        process.start()
        process.join(300)
        assert process.exitcode is not None, f"{command} takes longer than five minutes"
        with open(outputs[0], encoding="utf-8") as out, open(outputs[1], encoding="utf-8") as err:
            return subprocess.CompletedProcess(command, process.exitcode, out.read(), err.read())


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
