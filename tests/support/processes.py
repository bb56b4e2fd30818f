"""Run real processes on JAX's distributed runtime: on this machine, over loopback, each with devices of its own.

They are forked from one server that has imported JAX and started nothing, so that a job starts within a second. Every
wait has a limit; after it the processes are killed by pid.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
import traceback
from typing import TYPE_CHECKING, Any, Self

from support import forkserver

if TYPE_CHECKING:
    from pathlib import Path

LIMIT = 90  # seconds


class Failed(Exception):
    """An error that a scene raised in a process: the name of its type, and its text."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(kind, text)
        self.kind, self.text = kind, text

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


class Job:
    """Ranks that play scenes (functions of `multihost.scenes`), all of them the same scene at a time."""

    def __init__(
        self, processes: int, devices: int, log: Path, heartbeat: int = 60, *, preemption: bool = True
    ) -> None:
        self.count, self.log = processes, log
        self.is_open = True
        log.mkdir(parents=True, exist_ok=True)
        port, context = _free_port(), forkserver.context()
        self.pipes, self.ranks = [], []
        for rank in range(processes):
            ours, theirs = context.Pipe()
            arguments = (rank, processes, devices, port, heartbeat, str(log / f"rank-{rank}.log"), theirs)
            process = context.Process(target=_play, args=(*arguments, preemption), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.ranks.append(process)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(
        self, scene: str, *arguments: Any, limit: float = LIMIT, ranks: list[int] | None = None
    ) -> list[Any]:
        """Play a scene; return the result of every rank, or its `Failed`. Raise if a rank does not answer in time."""
        self.start(scene, *arguments, ranks=ranks)
        deadline = time.monotonic() + limit
        return [self.answer(rank, deadline) for rank in (ranks or range(self.count))]

    def start(self, scene: str, *arguments: Any, ranks: list[int] | None = None) -> None:
        for rank in ranks or range(self.count):
            self.pipes[rank].send((scene, arguments))

    def answer(self, rank: int, deadline: float) -> Any:
        pipe = self.pipes[rank]
        if not pipe.poll(max(0, deadline - time.monotonic())):
            self.close()
            raise TimeoutError(f"rank {rank} does not answer:\n{self.told(rank)}")
        try:
            return pipe.recv()
        except EOFError:
            self.ranks[rank].join(5)
            code = self.ranks[rank].exitcode
            self.close()
            raise AssertionError(f"rank {rank} has ended with {code}:\n{self.told(rank)}") from None

    def told(self, rank: int) -> str:
        with contextlib.suppress(FileNotFoundError):
            return (self.log / f"rank-{rank}.log").read_text(errors="replace")[-4000:]
        return ""

    def kill(self, rank: int) -> None:
        os.kill(self.ranks[rank].pid, signal.SIGKILL)

    def wait(self, rank: int, limit: float) -> int | None:
        """Wait for a rank and return its exit code; None if it is still running after the limit."""
        self.ranks[rank].join(limit)
        return self.ranks[rank].exitcode

    def close(self) -> None:
        self.is_open = False
        for pipe in self.pipes:
            with contextlib.suppress(OSError):
                pipe.close()
        for process in self.ranks:  # killed, because they may wait for each other forever
            if process.is_alive():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
            process.join()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _play(
    rank: int, processes: int, devices: int, port: int, heartbeat: int, log: str, pipe: Any, preemption: bool
) -> None:
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)
    jax.config.update("jax_enable_preemption_service", preemption)
    if processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(
            f"127.0.0.1:{port}",
            processes,
            rank,
            heartbeat_timeout_seconds=heartbeat,
            initialization_timeout=60,
        )
    jax.devices()  # this needs all processes
    from multihost import scenes

    while True:
        try:
            scene, arguments = pipe.recv()
        except (EOFError, ConnectionError):
            os._exit(0)  # without the shutdown of JAX, which needs the other processes
        try:
            answer = getattr(scenes, scene)(*arguments)
        except Exception as error:  # noqa: BLE001  sent to the test
            traceback.print_exc()
            sys.stderr.flush()
            answer = Failed(type(error).__name__, str(error))
        pipe.send(answer)
