"""Worker processes that run cases until the time is over."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cases import FAILURES, OVER, VOID

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from cases import Case
    from plan import Lane, Plan

HERE = Path(__file__).resolve().parent


class Worker:
    """A process of one environment with folders of its own. It is started again if a case has killed it."""

    def __init__(self, environment: str, python: str, disk: Path, *, quiet: bool = True) -> None:
        self.environment, self.python, self.disk, self.quiet = environment, python, disk, quiet
        self._process: subprocess.Popen[str] | None = None
        self._folders: list[Path] = []

    def ask(self, case: Case, first: int, limit: float) -> dict[str, Any]:
        """Run a case; one that does not end in time is killed with all its processes."""
        process = self._process or self._start()
        assert process.stdin
        assert process.stdout
        request = {"kind": case.kind, "layout": case.layout, "seed": case.seed, "first": first}
        with suppress(BrokenPipeError):
            print(json.dumps(request), file=process.stdin, flush=True)
        ready, _, _ = select.select([process.stdout], [], [], limit)
        line = process.stdout.readline() if ready else ""
        if line:
            return json.loads(line)
        self.close()
        word, note = ("crashed", f"exit status {process.returncode}") if ready else ("hung", f"{limit:.0f} s")
        return {"word": word, "note": note, "count": 1}

    def _start(self) -> subprocess.Popen[str]:
        memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else self.disk
        self._folders = [Path(tempfile.mkdtemp(prefix="eformer-faults-", dir=d)) for d in (memory, self.disk)]
        environment = os.environ | {
            "FAULTS_ENVIRONMENT": self.environment,
            "JAX_PLATFORMS": "cpu",
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "PYTHONWARNINGS": "ignore",
            "TMPDIR": str(self._folders[1]),
        }
        if self.environment != "own":
            environment.pop("PYTHONPATH", None)
        self._process = subprocess.Popen(
            [self.python, str(HERE / "worker.py"), *map(str, self._folders)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if self.quiet else None,
            text=True,
            env=environment,
            start_new_session=True,
        )
        return self._process

    def close(self) -> None:
        """End its processes, which are a session of their own, and remove what they leave."""
        if process := self._process:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            self._process = None
        for folder in self._folders:
            unmount_below(folder)
            shutil.rmtree(folder, ignore_errors=True)


def unmount_below(folder: Path) -> None:
    """Unmount what a worker that was killed has mounted."""
    with suppress(FileNotFoundError):
        mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
        for place in reversed(mounts):
            if place.startswith(f"{folder}/"):
                subprocess.run(["umount", "--lazy", place], capture_output=True, check=False)


class Crew:
    """Threads that each lead one worker of every environment."""

    def __init__(
        self,
        plan: Plan,
        pythons: Mapping[str, str],
        disk: Path,
        note: Callable[[dict[str, Any]], None],
    ) -> None:
        self.plan, self.pythons, self.disk, self.note = plan, pythons, disk, note
        self._lock = threading.Lock()
        self._errors: list[BaseException] = []

    def work(self, workers: int, seconds: float, cases: int | None = None) -> None:
        """Run cases until the time is over, or so many were run, or there are no more."""
        self.deadline = time.monotonic() + seconds
        self._cases_left = float("inf") if cases is None else cases
        threads = [threading.Thread(target=self._lead) for _ in range(workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._errors:
            raise self._errors[0]

    def _lead(self) -> None:
        workers = {name: Worker(name, python, self.disk) for name, python in self.pythons.items()}
        try:
            while (turn := self._next()) is not None:
                self._run(workers, *turn)
        except BaseException as error:  # noqa: BLE001  raised by `work`
            self._errors.append(error)
        finally:
            for worker in workers.values():
                worker.close()

    def _next(self) -> tuple[Lane, Case] | None:
        """Return the next case; wait for a while if all that are left are busy."""
        while (left := self.deadline - time.monotonic()) > 0 and not self._errors:
            with self._lock:
                if self._cases_left <= 0:
                    return None
                if (lane := self.plan.take(left)) is not None:
                    self._cases_left -= 1
                    return lane, self.plan.begin(lane)
                if not any(lane.is_busy for lane in self.plan.lanes):
                    return None
            time.sleep(0.2)
        return None

    def _run(self, workers: Mapping[str, Worker], lane: Lane, case: Case) -> None:
        start = time.monotonic()
        answer = workers[lane.environment].ask(case, self.plan.first, lane.kind.limit)
        seconds = time.monotonic() - start
        with self._lock:
            self.plan.end(lane, answer["word"], seconds)
            self.note(
                {
                    "kind": case.kind,
                    "layout": case.layout,
                    "seed": case.seed,
                    "seconds": round(seconds, 3),
                    **answer,
                }
            )


def is_counted(record: Mapping[str, Any]) -> bool:
    return record["word"] not in (VOID, OVER)


def is_failure(record: Mapping[str, Any]) -> bool:
    return record["word"] in FAILURES
