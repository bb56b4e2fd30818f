"""Meetings of several processes by the key-value store of the coordination service of JAX.

The service starts before any device, answers in a millisecond, and needs no collectives: a background thread must not
begin one, because all processes have to begin their collectives in the same order. The service is slow for large data
(30 MB/s), so messages are short, and bulk data goes through the directory that is saved to.

A meeting uses keys below eformer/<group>/<number of the save or load>/<number of the meeting>:

    sent/<number>                  the message of a process
    answer                         the answer of the first process
    more/<one of these>/<n>        further parts of a long message

Tests: tests/multihost/test_processes.py, tests/multihost/test_kills.py.
"""

from __future__ import annotations

import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from eformer._engine.record.digests import xxh3_128
from eformer._engine.tasks import interrupts
from eformer._engine.tasks.deadline import clearing_up
from eformer._engine.tasks.forks import Lock
from eformer.errors import ProcessError, ProcessTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

# The service takes longer messages, too, but keeps each whole in memory.
_MESSAGE_BYTES = 2**18

# Python handles no Ctrl-C while a call of JAX waits, so each call waits only for a short time.
_WAIT_SECONDS = 2.0

# The keys of a meeting are deleted when so many later meetings have ended: by then all processes have read them. The
# service would keep them until the program ends.
_KEPT_MEETINGS = 64

# The first byte of a message: it has content, or says why the process has failed.
_CONTENT, _FAILURE = b"\0", b"\1"
_MAX_REASON = 4000  # characters of an error


class LostError(ProcessError):
    """Raised if the other processes cannot be reached."""


class Hosts:
    """The processes that take part in a save or a load: the `number` of this one, their `count`, and how they meet.

    All of them make the same calls in the same order: `meet` any number of times, then either `end` or `fail`. This
    class is a single process, to which every device belongs.
    """

    number = 0
    count = 1
    watch: Callable[[], None] | None = None  # called now and then in a meeting; raises if a process has died

    def meet(self, message: bytes, answer: Callable[[Sequence[bytes]], bytes]) -> bytes:
        """Send this process's message, and return the first process's answer to the messages of all.

        Only the first process calls `answer`. If a process has failed, or `answer` raises, every other process raises a
        ProcessError that says why. Blocks until all processes have come.
        """
        return answer([message])

    def fail(self, error: BaseException, *, after_all: bool = False) -> str:
        """Announce that this process has failed and comes to no further meeting. No-op if that is known.

        With `after_all`, the first process announces it when all processes have come to the next meeting: then none of
        them writes to the upload, and it can be removed. Return the reason why the first process has failed, or "".
        """
        return ""

    def end(self) -> None:
        """Note that the last meeting is over: no process waits for an announcement by `fail`."""

    def process_of(self, device: Any) -> int:
        """Return the number of the process that a device belongs to, or -1 if that process takes no part."""
        return 0

    def name(self, number: int) -> str:
        """Return the name of a process for messages."""
        return f"process {number}"


# ------------------------------------------------------------------------------------------------ groups


class _Group:
    """A group of processes. Each process counts the saves and loads of the group, and all counts agree, because all
    processes make the same calls."""

    def __init__(self, processes: tuple[int, ...]) -> None:
        self.place = f"eformer/{xxh3_128(repr(processes).encode())[:8]}"
        self.begun = 0
        self.ended: deque[str] = deque()  # the places of meetings, in the first process


class _Groups:
    """The groups that this process belongs to."""

    def __init__(self) -> None:
        self._lock = Lock()  # saves in the background and loads begin in several threads
        self._client: Any = None
        self._groups: dict[tuple[int, ...], _Group] = {}

    def begin(self, client: Any, processes: tuple[int, ...]) -> tuple[_Group, int]:
        """Return the group, and the number of the save or load that it begins."""
        with self._lock:
            if (
                client is not self._client
            ):  # JAX was started again, and all processes count from the beginning
                self._client, self._groups = client, {}
            group = self._groups.setdefault(processes, _Group(processes))
            group.begun += 1
            return group, group.begun

    def end_meeting(self, group: _Group, place: str) -> list[str]:
        """Note that a meeting has ended, and return the places of old meetings to delete."""
        with self._lock:
            group.ended.append(place)
            return [group.ended.popleft() for _ in range(len(group.ended) - _KEPT_MEETINGS)]


_groups = _Groups()


# ------------------------------------------------------------------------------------------------- board


class Board:
    """Keys that any process may set and read at any time, without a meeting: for threads that wait for events.

    This class is a single process, which reads its own keys.
    """

    number = 0
    count = 1

    def __init__(self) -> None:
        self._keys: dict[str, bytes] = {}

    def post(self, key: str, value: bytes) -> None:
        """Set a key that has no value yet."""
        self._keys[key] = value

    def set(self, key: str, value: bytes) -> None:
        """Set a key, which may have a value."""
        self._keys[key] = value

    def look(self, key: str) -> bytes | None:
        """Return the value of a key, or None if no process has set it."""
        return self._keys.get(key)

    def all_named(self, start: str) -> dict[str, bytes]:
        """Return all keys that begin with this text, by the rest of their names."""
        return {key.removeprefix(start): value for key, value in self._keys.items() if key.startswith(start)}

    def all_below(self, start: str) -> list[bytes]:
        """Return the values of all keys that begin with this text, which ends in a slash."""
        return [value for key, value in self._keys.items() if key.startswith(start)]


class BoardOfSeveral(Board):
    """The same in the service of JAX, below eformer/<place>."""

    def __init__(self, client: Any, place: str, number: int, count: int) -> None:
        self._client, self._place = client, f"eformer/{place}"
        self.number, self.count = number, count

    def post(self, key: str, value: bytes) -> None:
        self._call(self._client.key_value_set_bytes, f"{self._place}/{key}", value)

    def set(self, key: str, value: bytes) -> None:
        self._call(self._client.key_value_set_bytes, f"{self._place}/{key}", value, True)

    def look(self, key: str) -> bytes | None:
        try:
            return bytes(self._client.key_value_try_get_bytes(f"{self._place}/{key}"))
        except RuntimeError as error:
            if "NOT_FOUND" in str(error):
                return None
            raise _lost(error) from error

    def all_below(self, start: str) -> list[bytes]:
        return list(self.all_named(start).values())

    def all_named(self, start: str) -> dict[str, bytes]:
        below = f"{self._place}/{start}"
        found = self._call(self._client.key_value_dir_get_bytes, below)
        return {key.removeprefix(below): bytes(value) for key, value in found}

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except RuntimeError as error:
            raise _lost(error) from error


# ---------------------------------------------------------------------------------------------- meetings


class Together(Hosts):
    """Several processes that are `doing` one thing together."""

    def __init__(
        self, client: Any, processes: tuple[int, ...], number: int, doing: str, timeout: float
    ) -> None:
        self.number, self.count = number, len(processes)
        self._client, self._processes, self._timeout = client, processes, timeout
        self._numbers = {process: number for number, process in enumerate(processes)}
        self._doing = doing.encode() + b"\0"
        self._group, begun = _groups.begin(client, processes)
        self._place = f"{self._group.place}/{begun}"
        self._meetings = 0
        self._is_over = False

    def process_of(self, device: Any) -> int:
        return self._numbers.get(device.process_index, -1)

    def name(self, number: int) -> str:
        return f"process {self._processes[number]}"

    def meet(self, message: bytes, answer: Callable[[Sequence[bytes]], bytes]) -> bytes:
        place = self._next_place()
        deadline = time.monotonic() + self._timeout
        if self.number:
            return self._ask_first(place, message, deadline)
        try:
            answered = answer([message, *self._collect(place, deadline)])
        except BaseException as error:  # the other processes must not wait for an answer that will not come
            self._is_over = True
            if isinstance(error, interrupts.StoppedError):
                self._wait_for_all(place)
            self._answer(place, _FAILURE + self._reason(error))
            raise
        self._answer(place, _CONTENT + answered)
        return answered

    def fail(self, error: BaseException, *, after_all: bool = False) -> str:
        if self._is_over:
            return ""
        self._is_over = True
        place, failure = self._next_place(), _FAILURE + self._reason(error)
        with suppress(ProcessError):  # the caller raises `error`, which is the cause
            if self.number:
                self._send(place, f"sent/{self.number}", failure)
                return self._why_first_failed(place)
            if after_all and isinstance(error, Exception):  # not after Ctrl-C, which must not wait
                self._wait_for_all(place)
            self._answer(place, failure)
        return ""

    def end(self) -> None:
        self._is_over = True

    def _wait_for_all(self, place: str) -> None:
        """Wait until all processes have come to a meeting: none of them then writes to the upload."""
        with suppress(ProcessError), clearing_up():
            self._collect(place, time.monotonic() + self._timeout)

    def _ask_first(self, place: str, message: bytes, deadline: float) -> bytes:
        """Send a message to the first process and wait for its answer."""
        self._send(place, f"sent/{self.number}", _CONTENT + self._doing + message)
        part = self._wait_for(f"{place}/answer", deadline, [0])
        answered = self._receive(place, "answer", part, deadline, 0)
        if answered[:1] == _FAILURE:
            self._is_over = True
            raise ProcessError(answered[1:].decode())
        return answered[1:]

    def _why_first_failed(self, place: str) -> str:
        try:
            answered = bytes(self._client.key_value_try_get_bytes(f"{place}/answer"))[4:]
        except RuntimeError:  # the service has no such key: no answer yet
            return ""
        return answered[1:].decode(errors="replace") if answered[:1] == _FAILURE else ""

    def _reason(self, error: BaseException) -> bytes:
        try:
            text = str(error) if isinstance(error, ProcessError) else f"{self.name(self.number)}: {error!r}"
        except Exception:  # noqa: BLE001  the repr of an error may raise
            text = f"{self.name(self.number)}: {type(error).__name__}"
        return text[:_MAX_REASON].encode(errors="replace")

    def _answer(self, place: str, message: bytes) -> None:
        """Send the answer, and delete the keys of old meetings. The answer holds even if no process can be reached."""
        with suppress(ProcessError):
            self._send(place, "answer", message)
            old = _groups.end_meeting(self._group, place)
            for key in (f"{place}/sent", f"{place}/more/sent", *old):
                self._call(self._client.key_value_delete, key)

    def _next_place(self) -> str:
        self._meetings += 1
        return f"{self._place}/{self._meetings}"

    def _collect(self, place: str, deadline: float) -> list[bytes]:
        """Return the messages of the other processes: read all that have come, then wait for the rest."""
        parts = dict(self._call(self._client.key_value_dir_get_bytes, f"{place}/sent/"))
        absent = [i for i in range(1, self.count) if f"{place}/sent/{i}" not in parts]
        for at, number in enumerate(absent):
            key = f"{place}/sent/{number}"
            parts[key] = self._wait_for(key, deadline, absent[at:])
        messages = [
            self._receive(place, f"sent/{number}", parts[f"{place}/sent/{number}"], deadline, number)
            for number in range(1, self.count)
        ]
        reasons = [message[1:].decode() for message in messages if message[:1] == _FAILURE]
        if reasons:
            raise ProcessError("; ".join(reasons)[: 4 * _MAX_REASON])
        return [self._require_same_call(message[1:], number) for number, message in enumerate(messages, 1)]

    def _require_same_call(self, message: bytes, number: int) -> bytes:
        """Return the content of a message; raise a ProcessError if its sender makes another call."""
        doing, end, content = message.partition(b"\0")
        if doing + end != self._doing:
            raise ProcessError(
                f"the processes do different things: {self.name(0)} {self._doing[:-1].decode()}, {self.name(number)} "
                f"{doing.decode()}. Every process has to make the same calls in the same order"
            )
        return content

    # ------------------------------------------------------------------------------------- messages

    def _send(self, place: str, name: str, message: bytes) -> None:
        """Send a message in parts. The first part has their number, and is sent last, so that all of them are there."""
        parts = [message[i : i + _MESSAGE_BYTES] for i in range(0, len(message), _MESSAGE_BYTES)]
        for number, part in enumerate(parts[1:], 1):
            self._call(self._client.key_value_set_bytes, f"{place}/more/{name}/{number}", part)
        counted = len(parts).to_bytes(4, "little") + parts[0]
        self._call(self._client.key_value_set_bytes, f"{place}/{name}", counted)

    def _receive(self, place: str, name: str, first: bytes, deadline: float, sender: int) -> bytes:
        """Return the whole message that begins with the part `first`."""
        count = int.from_bytes(first[:4], "little")
        keys = (f"{place}/more/{name}/{number}" for number in range(1, count))
        return b"".join([first[4:], *(self._wait_for(key, deadline, [sender]) for key in keys)])

    def _wait_for(self, key: str, deadline: float, absent: Sequence[int]) -> bytes:
        """Wait for a key; after the deadline raise an error that names the processes that are `absent`."""
        while True:
            interrupts.check()
            if self.watch:
                self.watch()
            left = deadline - time.monotonic()
            if left <= 0:
                raise ProcessTimeoutError(
                    f"after {self._timeout:g} s {self.name(self.number)} still waits for "
                    f"{_name_all(self._processes[i] for i in absent)}. Every process has to make the same calls in the "
                    "same order; if they do and are only slower than that, allow more time: SaveOptions(timeout=) for "
                    "a save and a run, LoadOptions(timeout=) for a load"
                )
            try:
                milliseconds = 1 + int(1000 * min(left, _WAIT_SECONDS))
                return bytes(self._client.blocking_key_value_get_bytes(key, milliseconds))
            except RuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise _lost(error) from error

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function of the client; raise a LostError if the service cannot be reached."""
        try:
            return function(*arguments)
        except RuntimeError as error:
            raise _lost(error) from error


def _lost(error: RuntimeError) -> LostError:
    return LostError(f"another process has died, or JAX's coordination service cannot be reached: {error}")


def _name_all(processes: Iterable[int]) -> str:
    numbers = [str(process) for process in processes]
    shown = ", ".join(numbers[:20]) + (f" and {len(numbers) - 20} more" if len(numbers) > 20 else "")
    return f"process {shown}" if len(numbers) == 1 else f"the processes {shown}"
