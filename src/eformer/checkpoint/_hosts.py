"""The processes that save or load one tree together: which one this is, how many there are, how they meet.

They meet in the key-value store of JAX's coordination service, which is there before any device is, answers in a
millisecond and needs no collective: what runs in a background thread must not take part in those. It is slow for
much (30 MB/s), so messages are short; bulk goes through the directory that is saved to.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

from eformer.checkpoint._codec import xxh3_128
from eformer.errors import ProcessError, ProcessTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

TIMEOUT = 600.0

# A message travels in pieces of this size. The service would take more, but keeps every one in memory.
_PIECE_BYTES = 2**18

# While a call of JAX waits, Python cannot be interrupted; so it waits a little at a time.
_PATIENCE_MS = 2000

# What was said at a meeting is forgotten when so many others have begun: by then everyone has read it.
_REMEMBERED = 64

# What a message begins with: something to say, or why there is nothing.
_WELL, _FAILED = b"\0", b"\1"
_MOST_TOLD = 4000  # characters of an error


class Hosts(Protocol):
    """The processes that take part. Every one makes the same calls in the same order."""

    @property
    def index(self) -> int: ...

    @property
    def count(self) -> int: ...

    def meet(self, message: bytes, answer: Callable[[Sequence[bytes]], bytes]) -> bytes:
        """One rendezvous: everyone's message reaches the first process, whose answer to them reaches everyone.

        If one has failed instead of coming, or the first fails to answer, that is a ProcessError of all others.
        """

    def fail(self, error: BaseException, *, after_all: bool = False) -> None:
        """This process does not come to the meeting that is next, and will come to no other: the others hear why.

        With `after_all` the first process lets them come before: what they are writing to is its own to remove.
        """

    def process_of(self, device: Any) -> int:
        """The index of the process that a device belongs to; -1 for one that takes no part."""

    def name(self, index: int) -> str:
        """What people call a process."""


class Alone:
    """One process, which is the whole world."""

    index = 0
    count = 1

    def meet(self, message: bytes, answer: Callable[[Sequence[bytes]], bytes]) -> bytes:
        return answer([message])

    def fail(self, error: BaseException, *, after_all: bool = False) -> None:
        """Nobody waits."""

    def process_of(self, device: Any) -> int:
        return 0

    def name(self, index: int) -> str:
        return f"process {index}"


def current(processes: Iterable[int] | None = None, timeout: float = TIMEOUT) -> Hosts:
    """Those of the running program that take part: all, or these. To be called in the order of the program."""
    import jax  # late: what only reads files starts without it

    count, me = jax.process_count(), jax.process_index()
    members = tuple(range(count)) if processes is None else tuple(sorted(set(processes)))
    if not members or members[0] < 0 or members[-1] >= count:
        raise ValueError(f"processes={list(members)}: there are {count}, counted from 0")
    if me not in members:
        raise ValueError(f"process {me} does not take part in what the processes {list(members)} do")
    return Alone() if count == 1 else _among(members, me, timeout)


def _among(members: tuple[int, ...], me: int, timeout: float) -> Hosts:
    if len(members) == 1:
        return _Single(me)
    client = _client()
    if client is None:
        raise ProcessError(
            "several processes find each other by JAX's coordination service, which was not started: call "
            "jax.distributed.initialize() at the beginning of the program"
        )
    return Together(client, members, members.index(me), timeout, _meetings.next_number(client, members))


def _client() -> Any:
    from jax._src import distributed  # noqa: TID251  JAX has no public name for the service that it documents

    return distributed.global_state.client


class _Single(Alone):
    """One of several processes, on its own: the devices of the others are none of its business."""

    def __init__(self, me: int) -> None:
        self._me = me

    def process_of(self, device: Any) -> int:
        return 0 if device.process_index == self._me else -1

    def name(self, index: int) -> str:
        return f"process {self._me}"


class _Meetings:
    """Numbers the meetings of each group of processes: alike in all of them, as they make the same calls."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._client: Any = None
        self._next: dict[tuple[int, ...], int] = {}

    def next_number(self, client: Any, members: tuple[int, ...]) -> int:
        with self._lock:
            if client is not self._client:  # JAX was started anew, and everyone begins to count again
                self._client, self._next = client, {}
            number = self._next.get(members, 0)
            self._next[members] = number + 1
            return number


_meetings = _Meetings()


class Together:
    """Several processes, as long as they do one thing: a save, or a load."""

    def __init__(
        self, client: Any, members: tuple[int, ...], index: int, timeout: float, number: int
    ) -> None:
        self.index, self.count = index, len(members)
        self._client, self._members, self._timeout = client, members, timeout
        self._indices = {process: index for index, process in enumerate(members)}
        group = xxh3_128(repr(members).encode())[:8]
        self._place = f"eformer/{group}/{number}"
        self._forgotten = f"eformer/{group}/{number - _REMEMBERED}"
        self._rounds = 0

    def process_of(self, device: Any) -> int:
        return self._indices.get(device.process_index, -1)

    def name(self, index: int) -> str:
        return f"process {self._members[index]}"

    def meet(self, message: bytes, answer: Callable[[Sequence[bytes]], bytes]) -> bytes:
        place = self._next_place()
        deadline = time.monotonic() + self._timeout
        if self.index:
            self._send(place, f"sent/{self.index}", _WELL + message)
            first = self._wait_for(f"{place}/answer", deadline, [0])
            return _unless_failed(self._whole(place, "answer", first, deadline, 0))
        try:
            answered = answer([message, *self._collect(place, deadline)])
        except BaseException as error:  # nobody shall wait for what will not come
            with suppress(ProcessError):
                self._send(place, "answer", _FAILED + self._told(error))
            raise
        with suppress(ProcessError):  # what was decided is done, also if nobody can be told any more
            self._send(place, "answer", _WELL + answered)
            for forgotten in (f"{place}/sent", f"{place}/more/sent", self._forgotten):
                self._ask(self._client.key_value_delete, forgotten)
        return answered

    def fail(self, error: BaseException, *, after_all: bool = False) -> None:
        place, told = self._next_place(), _FAILED + self._told(error)
        with suppress(ProcessError):  # the error at hand is the one to raise
            if self.index:
                self._send(place, f"sent/{self.index}", told)
                return
            if after_all and isinstance(error, Exception):
                with suppress(ProcessError):
                    self._collect(place, time.monotonic() + self._timeout)
            self._send(place, "answer", told)

    def _told(self, error: BaseException) -> bytes:
        text = str(error) if isinstance(error, ProcessError) else f"{self.name(self.index)}: {error!r}"
        return text[:_MOST_TOLD].encode(errors="replace")

    def _next_place(self) -> str:
        self._rounds += 1
        return f"{self._place}/{self._rounds}"

    def _collect(self, place: str, deadline: float) -> list[bytes]:
        """The messages of the others: those that are there by one call, the rest one by one as they come."""
        there = dict(self._ask(self._client.key_value_dir_get_bytes, f"{place}/sent/"))
        absent = [i for i in range(1, self.count) if f"{place}/sent/{i}" not in there]
        for number, index in enumerate(absent):
            key = f"{place}/sent/{index}"
            there[key] = self._wait_for(key, deadline, absent[number:])
        messages = [
            self._whole(place, f"sent/{index}", there[f"{place}/sent/{index}"], deadline, index)
            for index in range(1, self.count)
        ]
        failed = [message[1:].decode() for message in messages if message[:1] == _FAILED]
        if failed:
            raise ProcessError("; ".join(failed)[: 4 * _MOST_TOLD])
        return [message[1:] for message in messages]

    # ------------------------------------------------------------------------------------- messages

    def _send(self, place: str, name: str, message: bytes) -> None:
        """In pieces; the first says how many there are, and comes last."""
        pieces = [message[i : i + _PIECE_BYTES] for i in range(0, len(message), _PIECE_BYTES)]
        for number, piece in enumerate(pieces[1:], 1):
            self._ask(self._client.key_value_set_bytes, f"{place}/more/{name}/{number}", piece)
        counted = len(pieces).to_bytes(4, "little") + pieces[0]
        self._ask(self._client.key_value_set_bytes, f"{place}/{name}", counted)

    def _whole(self, place: str, name: str, first: bytes, deadline: float, sender: int) -> bytes:
        count = int.from_bytes(first[:4], "little")
        more = (f"{place}/more/{name}/{number}" for number in range(1, count))
        return b"".join([first[4:], *(self._wait_for(key, deadline, [sender]) for key in more)])

    def _wait_for(self, key: str, deadline: float, absent: Sequence[int]) -> bytes:
        while True:
            left = int(1000 * (deadline - time.monotonic()))
            if left <= 0:
                raise ProcessTimeoutError(
                    f"after {self._timeout:g} s {self.name(self.index)} still waits for "
                    f"{_listed(self._members[i] for i in absent)}. Every process has to make the same calls in the "
                    "same order; if they do and are only slower than that, allow more time (SaveOptions.timeout)"
                )
            try:
                return bytes(self._client.blocking_key_value_get_bytes(key, min(left, _PATIENCE_MS)))
            except RuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise _lost(error) from error

    def _ask(self, call: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return call(*arguments)
        except RuntimeError as error:
            raise _lost(error) from error


def _unless_failed(message: bytes) -> bytes:
    if message[:1] == _FAILED:
        raise ProcessError(message[1:].decode())
    return message[1:]


def _lost(error: RuntimeError) -> ProcessError:
    return ProcessError(f"another process has died, or JAX's coordination service cannot be reached: {error}")


def _listed(processes: Iterable[int]) -> str:
    numbers = [str(process) for process in processes]
    shown = ", ".join(numbers[:20]) + (f" and {len(numbers) - 20} more" if len(numbers) > 20 else "")
    return f"process {shown}" if len(numbers) == 1 else f"the processes {shown}"
