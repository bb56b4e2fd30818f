"""The processes that save one tree together: which one this is, how many there are, how they meet."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence


class Hosts(Protocol):
    """What a save needs of the processes that take part in it. Every one makes the same calls in the same order."""

    @property
    def index(self) -> int: ...

    @property
    def count(self) -> int: ...

    def gather(self, message: bytes) -> Sequence[bytes]:
        """The messages of all processes, by index; returns when all have sent theirs."""

    def process_of(self, device: Any) -> int:
        """The index of the process that a device belongs to."""


class Alone:
    """One process, which is the whole world."""

    index = 0
    count = 1

    def gather(self, message: bytes) -> Sequence[bytes]:
        return [message]

    def process_of(self, device: Any) -> int:
        return 0


def current() -> Hosts:
    """The processes of the running program."""
    import jax  # late: what only reads files starts without it

    if jax.process_count() > 1:
        raise NotImplementedError("saving from several processes is not possible yet; gather to one first")
    return Alone()
