"""Meetings of several processes by the key-value store of JAX's coordination service.

The service starts before any device, answers in a millisecond and needs no collectives, in which a background thread
must not take part. It is slow for large data (30 MB/s), so messages are short; bulk data goes through the directory
that is saved to.

A meeting uses keys below eformer/<group>/<number of the save or load>/<number of the meeting>:

    sent/<index>                   the message of a process
    answer                         the answer of the first process
    more/<either of them>/<n>      further pieces of a long message
"""

from __future__ import annotations

import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from eformer._engine.record.digests import xxh3_128
from eformer._engine.tasks import interrupts
from eformer._engine.tasks.forks import Lock
from eformer.errors import ProcessError, ProcessTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

# The service would take longer messages in one piece, but keeps all of them in memory.
_PIECE_BYTES = 2**18

# Python cannot be interrupted while a call of JAX waits, so each call waits only for a short time.
_WAIT_SECONDS = 2.0

# The keys of a meeting are deleted when so many later ones have ended: by then all processes have read them.
_KEPT_MEETINGS = 64

# The first byte of a message: it has content, or says why the process has failed.
_CONTENT, _FAILURE = b"\0", b"\1"
_MAX_REASON = 4000  # characters of an error


class LostError(ProcessError):
    """The other processes cannot be reached any more."""


def this_process() -> tuple[int, int]:
    """Return the index of this process in the running program, and how many processes there are."""
    import jax  # late: tools that only read files start without it

    return jax.process_index(), jax.process_count()


def service_client() -> Any:
    """Return JAX's client of the coordination service, or None if the service was not started."""
    from jax._src import distributed  # noqa: TID251  JAX has no public name for the service that it documents

    return distributed.global_state.client


class Hosts:
    """The processes that take part in a save or a load: the `index` of this one, their `count`, and how they meet.

    All of them make the same calls in the same order: `meet` any number of times, then either `end` or `fail`. This
    class is a single process, to which every device belongs.
    """

    index = 0
    count = 1

    def meet(self, message: bytes, answer: Callable[[Sequence[bytes]], bytes]) -> bytes:
        """Send this process's message, and return the first process's answer to the messages of all.

        Only the first process calls `answer`. If a process has failed, or the first fails to answer, all others raise
        a ProcessError that says why. Blocks until all processes have come.
        """
        return answer([message])

    def fail(self, error: BaseException, *, after_all: bool = False) -> str:
        """Announce that this process has failed and comes to no further meeting. No-op if that is known.

        With `after_all`, the first process tells the others only once they have come to the next meeting: it may then
        remove what they were writing to. Returns why the first process has failed, or "".
        """
        return ""

    def end(self) -> None:
        """Note that the last meeting is over: a later `fail` has no one to tell."""

    def process_of(self, device: Any) -> int:
        """Return the index of the process that a device belongs to, or -1 if that takes no part."""
        return 0

    def name(self, index: int) -> str:
        """Return the name of a process for messages."""
        return f"process {index}"


# ------------------------------------------------------------------------------------------------ groups


class _Group:
    """A group of processes. Its saves and loads are numbered, alike in all of them, as they make the same calls."""

    def __init__(self, members: tuple[int, ...]) -> None:
        self.place = f"eformer/{xxh3_128(repr(members).encode())[:8]}"
        self.begun = 0
        self.ended: deque[str] = deque()  # the places of meetings, in the first process


class _Groups:
    """The groups that this process belongs to."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._client: Any = None
        self._groups: dict[tuple[int, ...], _Group] = {}

    def begin(self, client: Any, members: tuple[int, ...]) -> tuple[_Group, int]:
        """Return the group, and the number of the save or load that it begins."""
        with self._lock:
            if client is not self._client:  # JAX was started anew, and all processes count from the beginning
                self._client, self._groups = client, {}
            group = self._groups.setdefault(members, _Group(members))
            group.begun += 1
            return group, group.begun

    def end_meeting(self, group: _Group, place: str) -> list[str]:
        """Note that a meeting has ended, and return the places of old meetings to delete."""
        with self._lock:
            group.ended.append(place)
            return [group.ended.popleft() for _ in range(len(group.ended) - _KEPT_MEETINGS)]


_groups = _Groups()


# ---------------------------------------------------------------------------------------------- meetings


class Together(Hosts):
    """Several processes that are `doing` one thing together."""

    def __init__(self, client: Any, members: tuple[int, ...], index: int, doing: str, timeout: float) -> None:
        self.index, self.count = index, len(members)
        self._client, self._members, self._timeout = client, members, timeout
        self._indices = {process: index for index, process in enumerate(members)}
        self._doing = doing.encode() + b"\0"
        self._group, number = _groups.begin(client, members)
        self._place = f"{self._group.place}/{number}"
        self._meetings = 0
        self._is_over = False

    def process_of(self, device: Any) -> int:
        return self._indices.get(device.process_index, -1)

    def name(self, index: int) -> str:
        return f"process {self._members[index]}"

    def meet(self, message: bytes, answer: Callable[[Sequence[bytes]], bytes]) -> bytes:
        place = self._next_place()
        deadline = time.monotonic() + self._timeout
        if self.index:
            return self._ask_first(place, message, deadline)
        try:
            answered = answer([message, *self._collect(place, deadline)])
        except BaseException as error:  # the others must not wait for an answer that will not come
            self._is_over = True
            self._answer(place, _FAILURE + self._reason(error))
            raise
        self._answer(place, _CONTENT + answered)
        return answered

    def fail(self, error: BaseException, *, after_all: bool = False) -> str:
        if self._is_over:
            return ""
        self._is_over = True
        place, failure = self._next_place(), _FAILURE + self._reason(error)
        with suppress(ProcessError):  # the error at hand is the one to raise
            if self.index:
                self._send(place, f"sent/{self.index}", failure)
                return self._why_first_failed(place)
            if after_all and isinstance(error, Exception):
                with suppress(ProcessError):
                    self._collect(place, time.monotonic() + self._timeout)
            self._answer(place, failure)
        return ""

    def end(self) -> None:
        self._is_over = True

    def _ask_first(self, place: str, message: bytes, deadline: float) -> bytes:
        """Send a message to the first process and wait for its answer."""
        self._send(place, f"sent/{self.index}", _CONTENT + self._doing + message)
        piece = self._wait_for(f"{place}/answer", deadline, [0])
        answered = self._receive(place, "answer", piece, deadline, 0)
        if answered[:1] == _FAILURE:
            self._is_over = True
            raise ProcessError(answered[1:].decode())
        return answered[1:]

    def _why_first_failed(self, place: str) -> str:
        try:
            answered = bytes(self._client.key_value_try_get_bytes(f"{place}/answer"))[4:]
        except RuntimeError:  # it has not answered
            return ""
        return answered[1:].decode(errors="replace") if answered[:1] == _FAILURE else ""

    def _reason(self, error: BaseException) -> bytes:
        try:
            text = str(error) if isinstance(error, ProcessError) else f"{self.name(self.index)}: {error!r}"
        except Exception:  # noqa: BLE001  an error whose own repr raises
            text = f"{self.name(self.index)}: {type(error).__name__}"
        return text[:_MAX_REASON].encode(errors="replace")

    def _answer(self, place: str, message: bytes) -> None:
        """Send the answer, and delete the keys of old meetings. The decision holds even if nobody can be told."""
        with suppress(ProcessError):
            self._send(place, "answer", message)
            old = _groups.end_meeting(self._group, place)
            for key in (f"{place}/sent", f"{place}/more/sent", *old):
                self._call(self._client.key_value_delete, key)

    def _next_place(self) -> str:
        self._meetings += 1
        return f"{self._place}/{self._meetings}"

    def _collect(self, place: str, deadline: float) -> list[bytes]:
        """Return the messages of the others: read those that have come in one call, then wait for each of the rest."""
        pieces = dict(self._call(self._client.key_value_dir_get_bytes, f"{place}/sent/"))
        absent = [i for i in range(1, self.count) if f"{place}/sent/{i}" not in pieces]
        for number, index in enumerate(absent):
            key = f"{place}/sent/{index}"
            pieces[key] = self._wait_for(key, deadline, absent[number:])
        messages = [
            self._receive(place, f"sent/{index}", pieces[f"{place}/sent/{index}"], deadline, index)
            for index in range(1, self.count)
        ]
        reasons = [message[1:].decode() for message in messages if message[:1] == _FAILURE]
        if reasons:
            raise ProcessError("; ".join(reasons)[: 4 * _MAX_REASON])
        return [self._require_same_call(message[1:], index) for index, message in enumerate(messages, 1)]

    def _require_same_call(self, message: bytes, index: int) -> bytes:
        """Return the content of a message; raise a ProcessError if its sender does something else."""
        doing, end, content = message.partition(b"\0")
        if doing + end != self._doing:
            raise ProcessError(
                f"the processes do different things: {self.name(0)} {self._doing[:-1].decode()}, {self.name(index)} "
                f"{doing.decode()}. Every process has to make the same calls in the same order"
            )
        return content

    # ------------------------------------------------------------------------------------- messages

    def _send(self, place: str, name: str, message: bytes) -> None:
        """Send a message in pieces. The first piece says how many there are, and is sent last."""
        pieces = [message[i : i + _PIECE_BYTES] for i in range(0, len(message), _PIECE_BYTES)]
        for number, piece in enumerate(pieces[1:], 1):
            self._call(self._client.key_value_set_bytes, f"{place}/more/{name}/{number}", piece)
        counted = len(pieces).to_bytes(4, "little") + pieces[0]
        self._call(self._client.key_value_set_bytes, f"{place}/{name}", counted)

    def _receive(self, place: str, name: str, first: bytes, deadline: float, sender: int) -> bytes:
        """Return the whole message that begins with the piece `first`."""
        count = int.from_bytes(first[:4], "little")
        keys = (f"{place}/more/{name}/{number}" for number in range(1, count))
        return b"".join([first[4:], *(self._wait_for(key, deadline, [sender]) for key in keys)])

    def _wait_for(self, key: str, deadline: float, absent: Sequence[int]) -> bytes:
        """Wait for a key; after the deadline raise an error that names the processes that are `absent`."""
        while True:
            interrupts.check()
            left = deadline - time.monotonic()
            if left <= 0:
                raise ProcessTimeoutError(
                    f"after {self._timeout:g} s {self.name(self.index)} still waits for "
                    f"{_name_all(self._members[i] for i in absent)}. Every process has to make the same calls in the "
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
