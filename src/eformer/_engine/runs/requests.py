"""Requests for a save from outside the job: `eformer request` writes a file into the run, which the job looks for.

The file `request.json` in the directory of the run:

    id      the id of the request
    job     the id of the job that is asked, as in `run.json`
    step    the step that was saved, once it is; None before
    error   why it was not saved

The first process of the job looks for the file in a thread. Several processes then agree on a step that none of them
has reached, by keys of JAX's coordination service below eformer/requests/<number of the run>/<number of the request>:

    asked          a request came
    ready/<n>      process n has seen it, and looks for the next key all the time
    freeze         every process is ready
    at/<n>         the step of process n, which does not begin another step before it knows the agreed step
    step           the agreed step: the last step of all processes, plus one; -1 if the first process has closed its run

Tests: tests/engine/runs/test_requests.py, tests/multihost/test_requests.py.
"""

from __future__ import annotations

import datetime as dt
import itertools
import logging
import secrets
import threading
import time
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from eformer._engine.formats.run_steps import claim_of, path_to_step
from eformer._engine.processes.hosts import board
from eformer._engine.record.values import MALFORMED_JSON, json_decoder
from eformer._engine.stores.base import read_whole, update_file
from eformer._engine.stores.local import on_disk
from eformer._engine.stores.locate import store_at
from eformer._engine.tasks import interrupts
from eformer._engine.tasks.interrupts import uninterrupted
from eformer.errors import EformerError, NotFoundError, SaveRequestError

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

    from eformer._engine.stores.base import Store

logger = logging.getLogger("eformer")

REQUEST_FILE = "request.json"

# Seconds between two looks for the file. A look in a bucket is a request, which costs money.
_ON_DISK, _IN_BUCKET = 1.0, 10.0
_SOON = 0.01  # seconds between two looks for a key while other processes wait
_ASKING = 0.5  # seconds between two looks of the caller for the answer

_numbers = (
    itertools.count()
)  # of the runs of this process: all processes make the same runs in the same order


class SaveRequest(msgspec.Struct, frozen=True):
    id: str
    job: str
    since: str = ""
    step: int | None = None
    error: str | None = None

    @property
    def is_open(self) -> bool:
        return self.step is None and self.error is None


class Requests:
    """The requests to one run, seen from one of its processes. `reached` is called at every step."""

    def __init__(self, store: Store, job: str) -> None:
        self._store, self._job = store, job
        self._pause = _ON_DISK if on_disk(self._store) is not None else _IN_BUCKET
        self._board = board(f"requests/{next(_numbers)}")
        self._changed = threading.Condition()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._is_asked = self._is_frozen = self._is_closed = False
        self._at, self._agreed = (
            -1,
            -1,
        )  # the last step of this process, and the step at which all of them save
        self._seen: SaveRequest | None = None  # the request that waits for a save; only in the first process
        self._last = ""  # the id of the last request that was seen

    def ask(self) -> None:
        """Ask for a save at the next step that all processes can agree on. Call it in the first process."""
        self._is_asked = True
        self._wake.set()

    def watch(self) -> None:
        """Begin to look for requests, in a thread that does not keep the program from ending."""
        if self._thread is None and not self._is_closed:
            self._thread = threading.Thread(target=self._look, name="eformer-requests", daemon=True)
            self._thread.start()

    def reached(self, step: int) -> bool:
        """Tell whether to save at this step because of a request. All processes get the same answer."""
        if self._board.count == 1:
            return self._is_asked
        while self._is_frozen:
            interrupts.check()
            with self._changed:
                if self._is_frozen:
                    self._changed.wait(0.05)
        with self._changed:
            self._at = step
            return 0 <= self._agreed <= step

    def note_save(self, step: int) -> SaveRequest | None:
        """Note that a save has begun. If it answers the request, return the request, for `answer`.

        Several processes forget a request only at the step that they have agreed on, or after it: a process that does
        not know the step yet would save at it, and the others would not.
        """
        if self._board.count > 1 and not 0 <= self._agreed <= step:
            return None
        self._is_asked, self._agreed = False, -1
        seen, self._seen = self._seen, None
        return seen

    def answer(self, request: SaveRequest, step: int, error: BaseException | None) -> None:
        """Write down what became of a request, in the first process. Log a failure, and do not raise it."""
        text = None if error is None else f"{type(error).__name__}: {error}"
        done = msgspec.structs.replace(request, step=step if error is None else None, error=text)
        try:
            update_file(self._store, REQUEST_FILE, partial(_answered, done))
        except (EformerError, OSError) as failure:
            logger.warning("%s: the request could not be answered: %s", self._store.url, failure)

    def abandon(self) -> None:
        """Let the thread end. Any thread may call this."""
        self._is_closed = True
        self._wake.set()

    def close(self) -> None:
        """End the thread. Answer a request that no save has answered."""
        self.abandon()
        if self._thread is not None:
            self._thread.join(_PATIENCE)
        if self._seen is not None and self._board.number == 0:
            ended = SaveRequestError("the job has ended without another step")
            self.answer(self._seen, 0, ended)
            self._seen = None

    # ----------------------------------------------------------------------------------- the thread

    def _look(self) -> None:
        rounds = itertools.count(1)
        number = next(rounds)
        while not self._is_closed:
            try:
                if self._is_wanted(number):
                    if self._board.count > 1:
                        self._agree(number)
                    number = next(rounds)
            except Exception as error:
                logger.warning(
                    "%s: requests for a save are no longer seen: %s", self._store.url, error, exc_info=True
                )
                self._thaw(-1)
                return
            self._wake.wait(self._pause)
            self._wake.clear()

    def _is_wanted(self, number: int) -> bool:
        """Tell whether a save is asked for, by a file or in this program."""
        if self._board.number:  # not before it has saved at the step that was agreed on last, perhaps late
            return self._agreed < 0 and self._board.look(f"{number}/asked") is not None
        if self._seen is None and (found := self._open_request()):
            self._seen, self._last, self._is_asked = found, found.id, True
            logger.info("%s: a save was asked for by request", self._store.url)
        return self._is_asked and self._agreed < 0

    def _open_request(self) -> SaveRequest | None:
        try:
            found = _parsed(read_whole(self._store, REQUEST_FILE)[0])
        except (EformerError, OSError):  # none is there, or the next look finds it
            return None
        is_new = found is not None and found.id != self._last
        return found if found and is_new and found.is_open and found.job == self._job else None

    def _agree(self, number: int) -> None:
        """Agree with all processes on a step that none has reached.

        A process whose run is closed meanwhile does not wait, but posts its keys: the others may be frozen.
        """
        board, others = self._board, self._board.count - 1
        if board.number == 0:
            board.post(f"{number}/asked", b"1")
            self._wait_until(lambda: len(board.all_below(f"{number}/ready/")) == others)
            board.post(f"{number}/freeze", b"1")
        else:
            board.post(f"{number}/ready/{board.number}", b"1")
            self._wait_until(lambda: board.look(f"{number}/freeze") is not None)
        at = self._freeze()
        if board.number == 0:
            self._wait_until(lambda: len(board.all_below(f"{number}/at/")) == others)
            there = [*map(int, board.all_below(f"{number}/at/"))]
            step = 1 + max([at, *there]) if len(there) == others else -1
            board.post(f"{number}/step", b"%d" % step)
        else:
            board.post(f"{number}/at/{board.number}", b"%d" % at)
            self._wait_until(lambda: board.look(f"{number}/step") is not None)
            step = int(board.look(f"{number}/step") or -1)
        self._thaw(step)

    def _wait_until(self, is_so: Callable[[], bool]) -> None:
        while not self._is_closed and not is_so():
            time.sleep(_SOON)

    def _freeze(self) -> int:
        with self._changed:
            self._is_frozen = True
            return self._at

    def _thaw(self, step: int) -> None:
        with self._changed:
            self._is_frozen, self._agreed = False, step
            self._changed.notify_all()


_PATIENCE = 5.0  # seconds that `close` waits for a look that is under way


def _answered(done: SaveRequest, data: bytes | None) -> bytes | None:
    """Return the new content of the file; None to leave it to a request that has replaced this one."""
    there = _parsed(data)
    return msgspec.json.encode(done) if there is None or there.id == done.id else None


def _parsed(data: bytes | None) -> SaveRequest | None:
    try:
        return None if data is None else json_decoder(SaveRequest).decode(data)
    except MALFORMED_JSON:
        return None


# ------------------------------------------------------------------------------------------ the caller


@uninterrupted
def request_save(path: str | os.PathLike[str], *, timeout: float | None = 600.0) -> str:
    """Ask the job that writes the run at `path` to save at its next step. Return the path of the saved step.

    The job looks for requests every second, in a bucket every 10 seconds. Raise NotFoundError if no job has written the
    run, TimeoutError after `timeout` seconds without an answer, and SaveRequestError if the save failed or another job
    has taken over. The request stays after a TimeoutError: a job that is only slow still saves.

    Example:

        >>> checkpoint.request_save("runs/llama")  # doctest: +SKIP
        'runs/llama/step-1234'
    """
    store = store_at(path)
    if (claim := claim_of(store)) is None:
        raise NotFoundError(f"{store.url} has no run.json: no job has saved a run there")
    asked = _ask(store, claim.id)
    deadline = None if timeout is None else time.monotonic() + timeout
    while (found := _answer_to(store, asked)) is None:
        interrupts.check()
        if deadline is not None and time.monotonic() > deadline:
            raise TimeoutError(
                f"{store.url}: no answer after {timeout:g} s from the job that writes the run since {claim.since} "
                f"(process {claim.pid} on {claim.host}): it has ended, or its steps take longer"
            )
        time.sleep(_ASKING)
    if found.step is None:
        raise SaveRequestError(f"{store.url}: the request was not carried out: {found.error}")
    return path_to_step(store.url, found.step)


def _ask(store: Store, job: str) -> str:
    """Write a request, or join a request that is open. Return its id."""
    since = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
    new = SaveRequest(secrets.token_hex(8), job, since)
    chosen = [new.id]

    def asked(data: bytes | None) -> bytes | None:
        old = _parsed(data)
        is_joined = old is not None and old.is_open and old.job == job
        chosen[:] = [old.id if old and is_joined else new.id]
        return None if is_joined else msgspec.json.encode(new)

    update_file(store, REQUEST_FILE, asked)
    return chosen[0]


def _answer_to(store: Store, asked: str) -> SaveRequest | None:
    """Return the answered request; None while it is open."""
    found = _parsed(read_whole(store, REQUEST_FILE)[0])
    if found is None or found.id != asked:
        return SaveRequest(asked, "", error="another request has replaced it; ask again")
    claim = claim_of(store)
    if found.is_open and claim is not None and claim.id != found.job:
        return SaveRequest(asked, "", error=f"another job writes the run since {claim.since}; ask again")
    return None if found.is_open else found
