"""Save in processes that are struck at a system call: forks of a server that has imported everything.

Run as a program, this module is the server behind `Savers`; it answers one line of JSON with another.
"""

from __future__ import annotations

import errno
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import seccomp

if TYPE_CHECKING:
    from collections.abc import Sequence

HERE = Path(__file__).resolve().parent
LIMIT = 40.0  # seconds that one save may take


@dataclass(frozen=True, slots=True)
class Strike:
    """What happens to a save: at its call number `at`, or `after` so many seconds; nothing if neither is given.

    `do` is "kill", "fail" (with `error`; all later calls too if `lasting`), "stop" for `seconds`, or "cut" the power of
    the ext4 that is mounted at `disk`.
    """

    do: str = "count"
    at: int = 0
    after: float = 0.0
    error: int = 0
    lasting: bool = False
    seconds: float = 0.0
    disk: str = ""


@dataclass(frozen=True, slots=True)
class Struck:
    """How a save ended: "returned", "raised", "killed", "crashed" or "hung"; and its calls, if they were counted."""

    ending: str
    calls: list[str] = field(default_factory=list)
    was_struck: bool = False
    said: str = ""
    seconds: float = 0.0


class Savers:
    """The client of a server, which is started when it is needed."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[str] | None = None

    def save(self, subject: str, folder: Path, generations: Sequence[int], strike: Strike) -> Struck:
        """Save one generation after another in a process of their own."""
        if self._server is None:
            one_thread = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"), "1")
            self._server = subprocess.Popen(
                [sys.executable, str(HERE / "savers.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=os.environ | one_thread,
            )
        assert self._server.stdin
        assert self._server.stdout
        request = {"subject": subject, "folder": str(folder), "generations": list(generations)}
        request["strike"] = {name: getattr(strike, name) for name in Strike.__slots__}
        print(json.dumps(request), file=self._server.stdin, flush=True)
        return Struck(**json.loads(self._server.stdout.readline()))

    def close(self) -> None:
        if self._server is not None:
            self._server.communicate()
            self._server = None


# -------------------------------------------------------------------------------------------- server


def serve() -> None:
    import subjects

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is not an answer
    subjects.prepare_to_fork()
    gc.freeze()
    for line in sys.stdin:
        request = json.loads(line)
        request["strike"] = Strike(**request["strike"])
        struck = _run(**request)
        print(
            json.dumps({name: getattr(struck, name) for name in Struck.__slots__}), file=answers, flush=True
        )


def _run(subject: str, folder: str, generations: list[int], strike: Strike) -> Struck:
    ours, theirs = socket.socketpair()
    child = os.fork()
    if not child:
        ours.close()
        _save(theirs, subject, folder, generations, is_filtered=bool(strike.at) or strike.do == "count")
    theirs.close()
    with ours:
        supervisor = _Supervisor(child, ours, folder, strike)
        try:
            return supervisor.watch()
        finally:
            supervisor.close()


def _save(
    theirs: socket.socket, subject: str, folder: str, generations: list[int], *, is_filtered: bool
) -> None:
    import subjects

    try:
        if is_filtered:
            listener = seccomp.install()
            socket.send_fds(theirs, [b"f"], [listener])
            os.close(listener)
        else:
            theirs.send(b"n")
        found = subjects.find(subject)
        for generation in generations:
            found.save(Path(folder), generation)
        theirs.send(b"")
        os._exit(0)
    except BaseException as error:  # noqa: BLE001  reported
        theirs.send(f"{type(error).__name__}: {error}".encode()[:2000])
    finally:
        os._exit(1)


class _Supervisor:
    """Answers the calls of one process until it has ended."""

    def __init__(self, child: int, ours: socket.socket, folder: str, strike: Strike) -> None:
        self.child, self.ours, self.folder, self.strike = child, ours, os.path.realpath(folder), strike
        self.calls: list[str] = []
        self.was_struck = False
        self.start = time.monotonic()
        self.stopped_until = 0.0
        _, descriptors, *_ = socket.recv_fds(ours, 1, 1)
        self.listener = descriptors[0] if descriptors else None
        self.pidfd = os.pidfd_open(child)

    def close(self) -> None:
        os.close(self.pidfd)
        if self.listener is not None:
            os.close(self.listener)

    def watch(self) -> Struck:
        waiting = [self.pidfd] if self.listener is None else [self.pidfd, self.listener]
        while True:
            ready, _, _ = select.select(waiting, [], [], self._patience())
            if self.pidfd in ready:
                return self._ended()
            if self.listener in ready:
                if (call := seccomp.Call.receive(self.listener)) is not None:
                    self._answer(call)
            elif self._is_late():
                os.kill(self.child, signal.SIGKILL)
                os.waitpid(self.child, 0)
                return self._struck("hung", "")

    def _patience(self) -> float:
        now = time.monotonic()
        if self.stopped_until:
            if now >= self.stopped_until:
                self.stopped_until = 0.0
                os.kill(self.child, signal.SIGCONT)
            return max(0.01, self.stopped_until - now)
        if self.strike.after and not self.was_struck:
            if now - self.start >= self.strike.after:
                self.was_struck = True
                os.kill(self.child, signal.SIGKILL)
            return max(0.0, self.start + self.strike.after - now)
        return 1.0

    def _is_late(self) -> bool:
        return time.monotonic() - self.start > LIMIT + self.strike.seconds

    def _answer(self, call: seccomp.Call) -> None:
        if not call.is_below(self.folder):
            return call.answer()
        self.calls.append(call.name)
        number, strike = len(self.calls), self.strike
        is_here = number == strike.at
        if strike.do == "fail" and (is_here or (strike.lasting and number > strike.at > 0)):
            if is_here and strike.error == errno.EMFILE and "open" not in call.name:
                return call.answer()  # it fails as no call of this name can
            if not is_here and call.name in ("unlink", "unlinkat", "rmdir"):
                return call.answer()  # of a full disk files can be removed
            self.was_struck = True
            return call.answer(strike.error)
        if is_here and strike.do in ("kill", "cut"):
            self.was_struck = True
            if strike.do == "cut":
                _cut(strike.disk)
            os.kill(self.child, signal.SIGKILL)
            return None
        if is_here and strike.do == "stop":
            self.was_struck = True
            os.kill(self.child, signal.SIGSTOP)
            self.stopped_until = time.monotonic() + strike.seconds
        return call.answer()

    def _ended(self) -> Struck:
        _, status = os.waitpid(self.child, 0)
        self.ours.setblocking(False)
        try:
            said = self.ours.recv(4096).decode(errors="replace")
        except OSError:
            said = ""
        if os.WIFSIGNALED(status):
            number = os.WTERMSIG(status)
            if number == signal.SIGKILL and self.was_struck:
                return self._struck("killed", said)
            return self._struck("crashed", f"signal {number} {said}")
        return self._struck("raised" if status else "returned", said)

    def _struck(self, ending: str, said: str) -> Struck:
        return Struck(ending, self.calls, self.was_struck, said, time.monotonic() - self.start)


def _cut(disk: str) -> None:
    from support.disks import cut_power

    cut_power(Path(disk))


if __name__ == "__main__":
    sys.path.insert(0, str(HERE.parent / "tests"))
    serve()
