"""Several processes played by the threads of one: the meeting places of a save, without a network."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import jax

if TYPE_CHECKING:
    from collections.abc import Callable


class Crew:
    """`count` hosts that share the devices of this process evenly."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.barrier = threading.Barrier(count, timeout=60)
        self.board: list[bytes] = [b""] * count
        self.meetings = 0

    def run(self, work: Callable[[Any], Any]) -> list[Any]:
        """What `work(host)` returned or raised on every host."""
        outcomes: list[Any] = [None] * self.count

        def play(index: int) -> None:
            try:
                outcomes[index] = work(Host(self, index))
            except Exception as error:  # noqa: BLE001
                outcomes[index] = error

        threads = [threading.Thread(target=play, args=(index,)) for index in range(self.count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return outcomes


class Host:
    def __init__(self, crew: Crew, index: int) -> None:
        self.crew, self.index, self.count = crew, index, crew.count

    def gather(self, message: bytes) -> list[bytes]:
        self.crew.board[self.index] = message
        self.crew.barrier.wait()
        messages = list(self.crew.board)
        if self.crew.barrier.wait() == 0:  # nobody writes the next message before all have read this one
            self.crew.meetings += 1
        return messages

    def process_of(self, device: Any) -> int:
        return jax.devices().index(device) * self.count // jax.device_count()
