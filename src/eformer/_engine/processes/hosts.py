"""The processes that save or load one tree together: which one this is, how many there are, how they meet.

They meet in the key-value store of JAX's coordination service, which is there before any device is, answers in a
millisecond and needs no collective: what runs in a background thread must not take part in those. It is slow for
much (30 MB/s), so messages are short; bulk goes through the directory that is saved to.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from contextlib import suppress
from operator import index as as_number
from typing import TYPE_CHECKING, Any, Protocol

from eformer._engine.record.digests import xxh3_128
from eformer.errors import ProcessError, ProcessTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

TIMEOUT = 600.0

# A message travels in pieces of this size. The service would take more, but keeps every one in memory.
_PIECE_BYTES = 2**18

# While a call of JAX waits, Python cannot be interrupted; so it waits a little at a time.
_PATIENCE = 2.0  # seconds

# What was said at a meeting is forgotten when so many later ones have ended: by then everyone has read it.
_REMEMBERED = 64

# What a message begins with: something to say, or why there is nothing.
_WELL, _FAILED = b"\0", b"\1"
_MOST_TOLD = 4000  # characters of an error


class LostError(ProcessError):
    """The other processes cannot be reached any more."""


class Hosts(Protocol):
    """The processes that take part in a save or a load. Every one makes the same calls in the same order."""

    @property
    def index(self) -> int: ...

    @property
    def count(self) -> int: ...

    def meet(self, message: bytes, answer: Callable[[Sequence[bytes]], bytes]) -> bytes:
        """One rendezvous: everyone's message reaches the first process, whose answer to them reaches everyone.

        If one has failed instead of coming, or the first fails to answer, that is a ProcessError of all others.
        """

    def fail(self, error: BaseException, *, after_all: bool = False) -> str:
        """This process will come to no other meeting: the others hear why, unless it was the last one, or they know.

        With `after_all` the first process lets them come before: what they are writing to is its own to remove.
        Returns why the first process has failed, if it has.
        """

    def end(self) -> None:
        """There are no more meetings."""

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

    def fail(self, error: BaseException, *, after_all: bool = False) -> str:
        return ""

    def end(self) -> None:
        """There were none."""

    def process_of(self, device: Any) -> int:
        return 0

    def name(self, index: int) -> str:
        return f"process {index}"


def current(doing: str, processes: Iterable[int] | None = None, timeout: float = TIMEOUT) -> Hosts:
    """Those of the running program that take part: all, or these. To be called in the order of the program."""
    import jax  # late: what only reads files starts without it

    count, me = jax.process_count(), jax.process_index()
    members = tuple(range(count)) if processes is None else tuple(sorted({as_number(p) for p in processes}))
    if not members or members[0] < 0 or members[-1] >= count:
        raise ValueError(f"processes={list(members)}: there are {count}, counted from 0")
    if me not in members:
        raise ValueError(f"process {me} does not take part in what the processes {list(members)} do")
    return Alone() if count == 1 else _among(members, me, doing, timeout)


def _among(members: tuple[int, ...], me: int, doing: str, timeout: float) -> Hosts:
    if len(members) == 1:
        return _Single(me)
    client = _client()
    if client is None:
        raise ProcessError(
            "several processes find each other by JAX's coordination service, which was not started: call "
            "jax.distributed.initialize() at the beginning of the program"
        )
    return Together(client, members, members.index(me), doing, timeout)


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


class _Group:
    """What a group of processes does together is numbered: alike in all of them, as they make the same calls."""

    def __init__(self, members: tuple[int, ...]) -> None:
        self.place = f"eformer/{xxh3_128(repr(members).encode())[:8]}"
        self.begun = 0
        self.ended: deque[str] = deque()  # the places of meetings, in the first process


class _Groups:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._client: Any = None
        self._groups: dict[tuple[int, ...], _Group] = {}

    def begin(self, client: Any, members: tuple[int, ...]) -> tuple[_Group, int]:
        """The group, and the number of what it begins to do."""
        with self._lock:
            if client is not self._client:  # JAX was started anew, and everyone begins to count again
                self._client, self._groups = client, {}
            group = self._groups.setdefault(members, _Group(members))
            group.begun += 1
            return group, group.begun

    def ended(self, group: _Group, place: str) -> list[str]:
        """What may be forgotten now that one more meeting has ended."""
        with self._lock:
            group.ended.append(place)
            return [group.ended.popleft() for _ in range(len(group.ended) - _REMEMBERED)]


_groups = _Groups()


class Together:
    """Several processes, as long as they are `doing` one thing."""

    def __init__(self, client: Any, members: tuple[int, ...], index: int, doing: str, timeout: float) -> None:
        self.index, self.count = index, len(members)
        self._client, self._members, self._timeout = client, members, timeout
        self._indices = {process: index for index, process in enumerate(members)}
        self._doing = doing.encode() + b"\0"
        self._group, number = _groups.begin(client, members)
        self._place = f"{self._group.place}/{number}"
        self._rounds = 0
        self._is_over = False

    def process_of(self, device: Any) -> int:
        return self._indices.get(device.process_index, -1)

    def name(self, index: int) -> str:
        return f"process {self._members[index]}"

    def meet(self, message: bytes, answer: Callable[[Sequence[bytes]], bytes]) -> bytes:
        place = self._next_place()
        deadline = time.monotonic() + self._timeout
        if self.index:
            self._send(place, f"sent/{self.index}", _WELL + self._doing + message)
            first = self._wait_for(f"{place}/answer", deadline, [0])
            answered = self._whole(place, "answer", first, deadline, 0)
            if answered[:1] == _FAILED:
                self._is_over = True
                raise ProcessError(answered[1:].decode())
            return answered[1:]
        try:
            answered = answer([message, *self._collect(place, deadline)])
        except BaseException as error:  # nobody shall wait for what will not come
            self._is_over = True
            self._answer(place, _FAILED + self._told(error))
            raise
        self._answer(place, _WELL + answered)
        return answered

    def fail(self, error: BaseException, *, after_all: bool = False) -> str:
        if self._is_over:
            return ""
        self._is_over = True
        place, told = self._next_place(), _FAILED + self._told(error)
        with suppress(ProcessError):  # the error at hand is the one to raise
            if self.index:
                self._send(place, f"sent/{self.index}", told)
                return self._why_first_failed(place)
            if after_all and isinstance(error, Exception):
                with suppress(ProcessError):
                    self._collect(place, time.monotonic() + self._timeout)
            self._answer(place, told)
        return ""

    def end(self) -> None:
        self._is_over = True

    def _why_first_failed(self, place: str) -> str:
        try:
            answered = bytes(self._client.key_value_try_get_bytes(f"{place}/answer"))[4:]
        except RuntimeError:  # it has not answered
            return ""
        return answered[1:].decode(errors="replace") if answered[:1] == _FAILED else ""

    def _told(self, error: BaseException) -> bytes:
        try:
            text = str(error) if isinstance(error, ProcessError) else f"{self.name(self.index)}: {error!r}"
        except Exception:  # noqa: BLE001  an error that cannot even say what it is
            text = f"{self.name(self.index)}: {type(error).__name__}"
        return text[:_MOST_TOLD].encode(errors="replace")

    def _answer(self, place: str, message: bytes) -> None:
        """What was decided is done, also if nobody can be told any more."""
        with suppress(ProcessError):
            self._send(place, "answer", message)
            old = _groups.ended(self._group, place)
            for forgotten in (f"{place}/sent", f"{place}/more/sent", *old):
                self._ask(self._client.key_value_delete, forgotten)

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
        return [self._of_the_same(message[1:], index) for index, message in enumerate(messages, 1)]

    def _of_the_same(self, message: bytes, index: int) -> bytes:
        doing, end, rest = message.partition(b"\0")
        if doing + end != self._doing:
            raise ProcessError(
                f"the processes do different things: {self.name(0)} {self._doing[:-1].decode()}, {self.name(index)} "
                f"{doing.decode()}. Every process has to make the same calls in the same order"
            )
        return rest

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
            left = deadline - time.monotonic()
            if left <= 0:
                raise ProcessTimeoutError(
                    f"after {self._timeout:g} s {self.name(self.index)} still waits for "
                    f"{_listed(self._members[i] for i in absent)}. Every process has to make the same calls in the "
                    "same order; if they do and are only slower than that, allow more time: SaveOptions(timeout=) for "
                    "a save, load(timeout=) for a load"
                )
            try:
                patience = 1 + int(1000 * min(left, _PATIENCE))
                return bytes(self._client.blocking_key_value_get_bytes(key, patience))
            except RuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise _lost(error) from error

    def _ask(self, call: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return call(*arguments)
        except RuntimeError as error:
            raise _lost(error) from error


def _lost(error: RuntimeError) -> LostError:
    return LostError(f"another process has died, or JAX's coordination service cannot be reached: {error}")


def _listed(processes: Iterable[int]) -> str:
    numbers = [str(process) for process in processes]
    shown = ", ".join(numbers[:20]) + (f" and {len(numbers) - 20} more" if len(numbers) > 20 else "")
    return f"process {shown}" if len(numbers) == 1 else f"the processes {shown}"
