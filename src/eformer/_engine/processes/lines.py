"""Lines between the processes of a job: TCP connections for bulk data, which JAX's key-value store is too slow for.

A process opens a door, and tells its address and its secret to the other processes in a meeting. At both ends of a line
the process proves that it knows the secret, before it sends or believes anything else:

    the door      MAGIC, 32 random bytes
    the caller    32 random bytes, HMAC-SHA256(secret, b"caller" + both)
    the door      HMAC-SHA256(secret, b"door" + both)

Then both send messages: a length in 8 bytes, and so many bytes. Nothing is encrypted, as in JAX's own traffic. A door
is open to the network: lengths, times and the number of lines are bounded, and a stranger learns nothing.

Tests: tests/engine/processes/test_lines.py.
"""

from __future__ import annotations

import hmac
import logging
import os
import secrets
import socket
import threading
import time
import weakref
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Self

from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger("eformer")

MOST_LINES = 256  # of a door; each has a thread
SECONDS = 30.0  # until a message of the other process counts as lost
GREETING_SECONDS = 10.0  # for the proof of the secret
_POLL = 0.5  # seconds until a closed door is noticed
_MOMENT = 1.0  # seconds for the lines of a closed door to end by themselves
_MAGIC = b"eformer\1"
_RANDOM, _PROOF = 32, 32  # bytes


class DoorAddress(Struct, frozen=True, array_like=True):
    """The address of a door, and its secret."""

    host: str
    port: int
    secret: str


class Line:
    """An open line. One thread at a time uses it. Raise OSError for a line that is closed or too slow, or has sent more
    bytes than expected."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # else short messages wait for 40 ms
        self.peer = ":".join(map(str, connection.getpeername()[:2]))

    def send(self, message: bytes | memoryview, seconds: float = SECONDS) -> None:
        self._socket.settimeout(seconds)
        self._socket.sendall(len(message).to_bytes(8, "little"))
        self._socket.sendall(message)

    def receive(self, most: int, seconds: float = SECONDS) -> bytes:
        """Receive a message of at most `most` bytes."""
        memory = bytearray(self._length(most, seconds))
        self.fill(memoryview(memory), seconds)
        return bytes(memory)

    def receive_into(self, memory: memoryview) -> int:
        """Receive a message into memory, and return its length."""
        nbytes = self._length(len(memory), SECONDS)
        self.fill(memory[:nbytes])
        return nbytes

    def fill(self, memory: memoryview, seconds: float = SECONDS) -> None:
        """Receive exactly so many bytes."""
        until = time.monotonic() + seconds
        while memory:
            try:
                self._socket.settimeout(max(0.001, until - time.monotonic()))
                nbytes = self._socket.recv_into(memory)
            except TimeoutError:
                raise TimeoutError(f"{self.peer} has sent too little within {seconds:g} s") from None
            if not nbytes:
                raise ConnectionResetError(f"{self.peer} has closed the line")
            memory = memory[nbytes:]
            if memory and time.monotonic() > until:  # a byte now and then is too slow, too
                raise TimeoutError(f"{self.peer} has sent too little within {seconds:g} s")

    def write(self, data: bytes, seconds: float = SECONDS) -> None:
        """Send bytes without a length before them."""
        self._socket.settimeout(seconds)
        self._socket.sendall(data)

    def close(self) -> None:
        with suppress(OSError):  # wakes the thread that waits for a message
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def leave_to_parent(self) -> None:
        """Close the descriptor in a forked child. The line of the parent stays open."""
        self._socket.close()

    def _length(self, most: int, seconds: float) -> int:
        head = bytearray(8)
        self.fill(memoryview(head), seconds)
        if (nbytes := int.from_bytes(head, "little")) > most:
            raise OSError(f"{self.peer} sends a message of {nbytes} bytes, expected at most {most}")
        return nbytes


def dial(address: DoorAddress, patience: float = 0.0) -> Line:
    """Open a line to a door. Raise OSError if the door is closed or does not know the secret, or hangs up for so many
    seconds, because it has too many lines."""
    until = time.monotonic() + patience
    while True:
        try:
            return _dial(address)
        except ConnectionResetError:
            if time.monotonic() > until:
                raise
            time.sleep(_POLL)


def _dial(address: DoorAddress) -> Line:
    line = Line(socket.create_connection((address.host, address.port), GREETING_SECONDS))
    try:
        greeting = bytearray(len(_MAGIC) + _RANDOM)
        line.fill(memoryview(greeting), GREETING_SECONDS)
        if not greeting.startswith(_MAGIC):
            raise ConnectionRefusedError(f"{line.peer} is no door of eformer")
        both = bytes(greeting[len(_MAGIC) :]) + (own := secrets.token_bytes(_RANDOM))
        line.write(own + _proof(address.secret, b"caller", both), GREETING_SECONDS)
        proof = bytearray(_PROOF)
        line.fill(memoryview(proof), GREETING_SECONDS)
        if not hmac.compare_digest(bytes(proof), _proof(address.secret, b"door", both)):
            raise ConnectionRefusedError(f"{line.peer} does not know the secret of this job")
    except BaseException:
        line.close()
        raise
    return line


def _proof(secret: str, who: bytes, both: bytes) -> bytes:
    return hmac.digest(secret.encode(), who + both, "sha256")


class Door:
    """A door at an address of this machine. `serve` gets each line of a caller that knows the secret, in a thread of
    its own, until the line is closed. An error in it closes the line."""

    def __init__(self, host: str, serve: Callable[[Line], None]) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, 0), family=family, backlog=MOST_LINES)
        self._socket.settimeout(_POLL)
        self.address = DoorAddress(host, self._socket.getsockname()[1], secrets.token_hex(32))
        self._serve, self._is_closed = serve, threading.Event()
        self._lines: weakref.WeakSet[Line] = weakref.WeakSet()
        self._threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        self._slots = threading.BoundedSemaphore(MOST_LINES)
        _doors.add(self)
        threading.Thread(target=self._wait_for_callers, name="eformer-door", daemon=True).start()

    def close(self) -> None:
        """Close the door, and after a moment, in which `serve` may say so, all its lines."""
        self._is_closed.set()
        self._socket.close()
        until = time.monotonic() + _MOMENT
        for thread in list(self._threads):
            thread.join(max(0.0, until - time.monotonic()))
        for line in list(self._lines):
            line.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def leave_to_parent(self) -> None:
        self._socket.close()
        for line in list(self._lines):
            line.leave_to_parent()

    def _wait_for_callers(self) -> None:
        while not self._is_closed.is_set():
            try:
                connection, _ = self._socket.accept()
            except TimeoutError:
                continue
            except OSError as error:  # closed; or too many open files, which passes
                logger.debug("a caller was not let in: %s", error)
                self._is_closed.wait(_POLL)
                continue
            if self._slots.acquire(blocking=False):
                self._begin(connection)
            else:
                connection.close()

    def _begin(self, connection: socket.socket) -> None:
        try:
            thread = threading.Thread(
                target=self._answer, args=(connection,), name="eformer-line", daemon=True
            )
            thread.start()
            self._threads.add(thread)
        except RuntimeError:  # no thread can start
            connection.close()
            self._slots.release()

    def _answer(self, connection: socket.socket) -> None:
        try:
            with closing(Line(connection)) as line:
                self._lines.add(line)
                if not self._is_closed.is_set():
                    self._greet(line)
                    self._serve(line)
        except Exception as error:  # noqa: BLE001  whatever a stranger sends ends the stranger's line alone
            logger.debug("a line has ended: %r", error)
        finally:
            connection.close()
            self._slots.release()

    def _greet(self, line: Line) -> None:
        own = secrets.token_bytes(_RANDOM)
        line.write(_MAGIC + own, GREETING_SECONDS)
        answer = bytearray(_RANDOM + _PROOF)
        line.fill(memoryview(answer), GREETING_SECONDS)
        both = own + bytes(answer[:_RANDOM])
        if not hmac.compare_digest(bytes(answer[_RANDOM:]), _proof(self.address.secret, b"caller", both)):
            raise ConnectionRefusedError(f"{line.peer} does not know the secret of this job")
        line.write(_proof(self.address.secret, b"door", both), GREETING_SECONDS)


_doors: weakref.WeakSet[Door] = weakref.WeakSet()


def _leave_to_parent() -> None:
    """In a forked child: leave the doors to the parent, whose threads are not here."""
    for door in list(_doors):
        door.leave_to_parent()
    _doors.clear()


os.register_at_fork(after_in_child=_leave_to_parent)
