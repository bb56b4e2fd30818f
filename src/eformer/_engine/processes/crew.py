"""Divide a tool's work among the processes of a launcher, or the workers of an executor.

The work is a function of a part and a progress: each process calls it with a part of its own, and the first one joins
the results. `launch.py` finds the processes of a launcher.

Tests: tests/multihost/test_crew.py, tests/engine/processes/test_crew.py.
"""

from __future__ import annotations

import os
import pickle
import threading
from concurrent.futures import Executor
from concurrent.futures import wait as wait_for
from contextlib import contextmanager, suppress
from time import monotonic as _now
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import msgspec

from eformer._engine.processes.coordination import Board, Hosts, LostError
from eformer._engine.record.division import WHOLE, Portion
from eformer._engine.tasks.progress import metered, progress_bar
from eformer.errors import ProcessError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from eformer._engine.tasks.progress import Progress

T = TypeVar("T")

BEAT = 1.0  # seconds between two signs of life of a process
SILENCE = 60.0  # seconds without a sign of life until a process counts as dead
_MOST_TRIES = 10
_PARTS_A_WORKER = 4  # so that all workers end at about the same time
_UNKNOWN_WORKERS = 16
_MOST_TEXT = 4000  # characters of an error
FAILED = "failed"  # the board of errors


class AgainError(Exception):
    """Raised by a `join` whose results do not belong together: all processes do their work again."""


def divided(
    work: Callable[[Portion, Progress], T],
    join: Callable[[Sequence[T]], T],
    kind: type[T],
    *,
    executor: Executor | Crew | None,
    progress: Progress = None,
    nbytes: Callable[[], int] = int,
    doing: str = "",
) -> T:
    """Do work alone, by the workers of an executor, or by all processes of a launcher; return the joined result.

    For an executor, `work` must be picklable; `nbytes` then computes the bytes of all parts for `progress`. In a crew,
    results travel as msgpack, and only the first process has the joined result: all others have a part.
    """
    if executor is None:
        return work(WHOLE, progress)
    if isinstance(executor, Crew):
        return executor.joined(work, join, kind, progress, doing)
    if not isinstance(executor, Executor):
        raise TypeError(f"executor={executor!r}: expected a concurrent.futures.Executor")
    for _ in range(_MOST_TRIES):
        with suppress(AgainError):
            return join(_by_executor(work, executor, progress, nbytes, doing))
    raise _never_the_same(doing)


def _never_the_same(doing: str) -> ProcessError:
    return ProcessError(
        f"{doing}: the processes do not see the same checkpoint. All of them need the same files, on a file system "
        "that they share, and no save may replace them meanwhile"
    )


def _by_executor(
    work: Callable[[Portion, Progress], T],
    executor: Executor,
    progress: Progress,
    nbytes: Callable[[], int],
    doing: str,
) -> list[T]:
    try:
        pickle.dumps(work)
    except Exception as error:
        raise ValueError(f"executor=: the arguments cannot be sent to other processes: {error}") from error
    workers = getattr(executor, "_max_workers", None)
    count = _PARTS_A_WORKER * (workers if isinstance(workers, int) and workers > 0 else _UNKNOWN_WORKERS)
    total = nbytes() if progress else 0
    with metered(progress, total, doing) as meter:
        futures = {
            executor.submit(work, Portion(n, count), None): Portion(n, count) for n in range(count)
        }  # in their order
        open_futures = set(futures)
        try:
            while open_futures:
                done, open_futures = wait_for(open_futures, return_when="FIRST_COMPLETED")
                for future in done:
                    _raise_error(future, futures[future], doing)
                    meter.add(len(futures[future].share(total)))
        finally:
            for future in open_futures:
                future.cancel()
        return [future.result() for future in futures]


def _raise_error(future: Any, part: Portion, doing: str) -> None:
    """Raise the error of a part; name the part if the worker died."""
    error = future.exception()
    if error is None:
        return
    if type(error).__name__ in ("BrokenProcessPool", "BrokenExecutor", "KilledWorker"):
        raise ProcessError(
            f"{doing}: the worker of part {part} has died: {error}. Nothing was changed; call it again"
        ) from error
    raise error


class Crew:
    """The processes that a launcher has started for one command; this class is a process alone.

    All of them make the same calls in the same order.
    """

    number = 0
    count = 1

    @property
    def part(self) -> Portion:
        return Portion(self.number, self.count)

    @property
    def is_first(self) -> bool:
        return self.number == 0

    def hosts(self, doing: str) -> Hosts:
        """Return the processes for a number of meetings."""
        return Hosts()

    def board(self, place: str) -> Board:
        """Return keys that any process may set and read."""
        return Board()

    def begin(self) -> int:
        """Return the number of the next task of all processes."""
        return 0

    def tell(self, error: BaseException) -> None:
        """Tell all processes that this one has failed, also outside of a meeting."""
        if self.count > 1:
            text = f"process {self.number}: {error!r}"[:_MOST_TEXT]
            with suppress(ProcessError):
                self.board(FAILED).post(str(self.number), text.encode(errors="replace"))

    def joined(
        self,
        work: Callable[[Portion, Progress], T],
        join: Callable[[Sequence[T]], T],
        kind: type[T],
        progress: Progress,
        doing: str,
    ) -> T:
        """Do the part of this process, and return the joined result in the first process, the part in all others."""
        for _ in range(_MOST_TRIES):
            hosts = self.hosts(doing)
            with announced(hosts), self.watched(hosts, progress, doing) as report:
                mine = work(self.part, report)
                whole = [mine]

                def answer(messages: Sequence[bytes], whole: list[T] = whole) -> bytes:
                    others = [_decode(message, kind) for message in messages[1:]]
                    try:
                        whole[:] = [join([whole[0], *others])]
                    except AgainError:
                        return b"again"
                    return b""

                again = hosts.meet(b"" if self.is_first else _encode(mine), answer)
            hosts.end()
            if not again:
                return whole[0]
        raise _never_the_same(doing)

    @contextmanager
    def watched(self, hosts: Hosts, progress: Progress, doing: str) -> Iterator[Progress]:
        """Show the progress of all processes in the first one, and notice processes that die. Yield the progress of
        this process."""
        if self.count == 1:
            yield progress
            return
        pulse = _Pulse(self, progress, doing)
        hosts.watch = pulse.check
        try:
            yield pulse.report
        finally:
            pulse.stop()
            hosts.watch = None


_encode = msgspec.msgpack.Encoder().encode


def _decode(message: bytes, kind: type[T]) -> T:
    return msgspec.msgpack.decode(message, type=kind)


@contextmanager
def announced(hosts: Hosts) -> Iterator[None]:
    """Announce an error in the block to all processes."""
    try:
        yield
    except BaseException as error:
        hosts.fail(error)
        raise


# --------------------------------------------------------------------------------------- signs of life


class _Sign(msgspec.Struct, array_like=True):
    """The sign of life of a process: a counter, the bytes done and the total."""

    beat: int = 0
    done: int = 0
    total: int = 0


class _Pulse:
    """Post the progress of this process every second. The first process adds up the progress of all.

    Each process looks for the first, and the first for all others: a process whose counter stands still for a minute is
    dead, and everybody who waits or reports progress raises an error that names it.
    """

    def __init__(self, crew: Crew, progress: Progress, doing: str) -> None:
        self._crew, self._progress, self._doing = crew, progress, doing
        self._board = crew.board(f"pulse/{crew.begin()}")
        self._mine, self._base = _Sign(), 0
        self._dead: ProcessError | None = None
        self._failed = crew.board(FAILED)
        self._seen: dict[int, tuple[int, float]] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="eformer-pulse", daemon=True)
        self._thread.start()

    def report(self, done: int, total: int) -> None:
        """Note the progress of this process. A smaller number than before begins another task."""
        self.check()
        mine = self._mine
        if done + self._base < mine.done:
            self._base = mine.done
        self._mine = _Sign(mine.beat, self._base + done, max(mine.total, self._base + total))

    def check(self) -> None:
        """Raise ProcessError if a process has died."""
        if self._dead:
            raise self._dead

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(5 * BEAT)

    def _run(self) -> None:
        is_shown = self._crew.is_first and self._progress
        bar = progress_bar(0, self._doing, "") if is_shown and not callable(self._progress) else None
        show: Any = bar.__enter__() if bar else self._progress if is_shown else None
        try:
            with suppress(ProcessError):  # the service is gone: the meeting raises
                while True:
                    is_last = self._stopped.wait(BEAT)
                    self._beat(show)
                    if is_last:
                        return
        finally:
            if bar:
                bar.__exit__(None, None, None)

    def _beat(self, show: Any) -> None:
        self._mine = _Sign(self._mine.beat + 1, self._mine.done, self._mine.total)
        self._board.set(f"{self._crew.number}", _encode(self._mine))
        watched = range(1, self._crew.count) if self._crew.is_first else (0,)
        found = self._board.all_named("") if self._crew.is_first else {"0": self._board.look("0")}
        signs = {int(n): _decode(sign, _Sign) for n, sign in found.items() if sign}
        self._look_for_failed()
        self._look_for_dead(signs, watched)
        if show and not self._dead:
            done, total = (sum(getattr(sign, of) for sign in signs.values()) for of in ("done", "total"))
            with suppress(Exception):
                show(done, max(total, done))

    def _look_for_failed(self) -> None:
        """Note an error outside of a meeting: of any process in the first, of the first in all others."""
        told = self._failed.all_below("") if self._crew.is_first else [self._failed.look("0")]
        if texts := [text.decode() for text in told if text]:
            self._dead = self._dead or ProcessError("; ".join(texts[:4]))

    def _look_for_dead(self, signs: dict[int, _Sign], watched: Sequence[int]) -> None:
        now = _now()
        silent = []
        for number in watched:
            beat = signs[number].beat if number in signs else 0
            if self._seen.get(number, (-1, 0.0))[0] != beat:
                self._seen[number] = beat, now
            elif now - self._seen[number][1] > SILENCE:
                silent.append(number)
        if silent:
            shown = ", ".join(map(str, silent[:20])) + (" and more" if len(silent) > 20 else "")
            word = "process" if len(silent) == 1 else "the processes"
            self._dead = LostError(
                f"{self._doing}: {word} {shown} of {self._crew.count} gave no sign of life for {SILENCE:g} s and "
                "has died or lost its connection; start the command again"
            )


_LEAVING_SECONDS = 10.0


def leave(crew: Crew, code: int) -> NoReturn:
    """End this process with the exit code of the first process, or its own error.

    JAX's shutdown would wait for dead processes. The first process has the service, so it waits until all others have
    heard its last answer.
    """
    with suppress(ProcessError):
        board, deadline = crew.board("leaving"), _now() + _LEAVING_SECONDS
        if crew.is_first:
            board.post("0", str(code).encode())
        while (told := board.look("0")) is None and _now() < deadline:
            _moment()
        code = code or int(told or b"1")
        board.post(f"gone/{crew.number}", b"1")
        while crew.is_first and len(board.all_below("gone/")) < crew.count and _now() < deadline:
            _moment()
    os._exit(code)


def _moment() -> None:
    threading.Event().wait(0.02)
