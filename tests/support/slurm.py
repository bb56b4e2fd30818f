"""A double of Slurm on this machine: it runs a job script with bash, and again if the script has itself requeued.

Like Slurm, `sbatch` reads the lines `#SBATCH` of the script and makes a task of each index of an array, `--signal=B:`
reaches the shell of the script alone, `srun` passes SIGUSR1 on to its program and turns SIGTERM into SIGKILL, and
`scontrol requeue` with the id of an array requeues all of its tasks.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

SRUN = f"""#!{sys.executable}
import signal, subprocess, sys
child = subprocess.Popen(sys.argv[1:])
signal.signal(signal.SIGUSR1, lambda *_: child.send_signal(signal.SIGUSR1))
signal.signal(signal.SIGTERM, lambda *_: child.kill())
code = child.wait()
sys.exit(code if code >= 0 else 128 - code)
"""
SCONTROL = """#!/bin/sh
[ "$1" = requeue ] && [ $# = 2 ] && echo "$2" >> "$FAKE_SLURM/requeued"
"""
ARRAY_ID = 41


class Slurm:
    """The commands of Slurm in a directory, and the jobs that were submitted there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "bin").mkdir()
        for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
            (folder / "bin" / name).write_text(text)
            (folder / "bin" / name).chmod(0o755)

    def sbatch(self, script: str) -> list[Task]:
        """Start the tasks of a script: those of its array, or one."""
        (self.folder / "job.sh").write_text(script)
        options = dict(re.findall(r"--([\w-]+)=(\S+)", " ".join(re.findall(r"^#SBATCH (.*)$", script, re.M))))
        if "array" not in options:
            return [Task(self, options, None)]
        first, last = map(int, options["array"].split("-"))
        return [Task(self, options, index) for index in range(first, last + 1)]

    def requeues(self, ids: set[str]) -> int:
        """Return how often one of these ids was requeued."""
        file = self.folder / "requeued"
        return sum(line in ids for line in file.read_text().splitlines()) if file.exists() else 0


class Task:
    """A job, or a task of an array. As in Slurm, one task of an array has the id of the array as its own."""

    def __init__(self, slurm: Slurm, options: dict[str, str], index: int | None) -> None:
        self.slurm, self.options, self.index = slurm, options, index
        self.starts, self.code = 0, None
        self.environment = {"SLURM_JOB_ID": str(ARRAY_ID + (index or 0))}
        self.ids = {str(ARRAY_ID), f"{ARRAY_ID}_{index}"}
        if index is not None:
            self.environment |= {"SLURM_ARRAY_JOB_ID": str(ARRAY_ID), "SLURM_ARRAY_TASK_ID": str(index)}
        self.log = slurm.folder / f"log-{index or 0}.txt"
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        done = False
        while not done:
            self._start()
            self.code = self.shell.wait()
            self._kill()  # whatever the job has left behind
            done = self.slurm.requeues(self.ids) < self.starts

    def _start(self) -> None:
        path = f"{self.slurm.folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        more = {"PATH": path, "FAKE_SLURM": str(self.slurm.folder), "SLURM_RESTART_COUNT": str(self.starts)}
        with self.log.open("a") as log:
            self.shell = subprocess.Popen(
                ["bash", "job.sh"],
                cwd=self.slurm.folder,
                env=os.environ | self.environment | more,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.starts += 1

    def near_limit(self) -> None:
        """Send the signal of `--signal=B:NAME@SECONDS` to the shell."""
        to_shell, name = re.fullmatch(r"(B:)(\w+)@\d+", self.options["signal"]).groups()
        assert to_shell
        os.kill(self.shell.pid, signal.Signals[f"SIG{name}"])

    def wait(self, limit: float = 60) -> int | None:
        """Wait until the job ends for good; return its exit code."""
        self.thread.join(limit)
        assert not self.thread.is_alive(), self.log.read_text()
        return self.code

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.shell.pid, signal.SIGKILL)


# `srun -N n` starts so many tasks on this machine, with the variables of a step, and returns the highest exit code.
SRUN_MANY = f"""#!{sys.executable}
import os, socket, subprocess, sys
assert sys.argv[1] == "-N", sys.argv
count = int(sys.argv[2])
with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = probe.getsockname()[1]
step = {{"SLURM_JOB_ID": "41", "SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_NUM_TASKS": str(count),
        "SLURM_NTASKS": str(count), "JAX_COORDINATOR_PORT": str(port)}}
tasks = [
    subprocess.Popen(sys.argv[3:], env=os.environ | step | {{"SLURM_PROCID": str(n), "SLURM_LOCALID": str(n)}})
    for n in range(count)
]
sys.exit(max(abs(task.wait()) for task in tasks))
"""
# `sbatch --wait` runs the tasks of an array, one after the other.
SBATCH = f"""#!{sys.executable}
import os, re, subprocess, sys
script = sys.argv[-1]
first, last = map(int, re.search(r"--array=(\\d+)-(\\d+)", open(script).read()).groups())
for n in range(first, last + 1):
    subprocess.run(["bash", "-e", script], check=True, env=os.environ | {{"SLURM_ARRAY_TASK_ID": str(n)}})
"""


def add_commands(folder: Path) -> None:
    """Put `srun -N` and `sbatch --wait` into a directory for programs."""
    folder.mkdir()
    for name, text in (("srun", SRUN_MANY), ("sbatch", SBATCH)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
