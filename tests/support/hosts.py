"""Simulate several processes by threads of one, which meet in memory instead of over a network."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from eformer._engine.saving.save import complete
from eformer._engine.saving.start import start
from eformer.checkpoint import SaveOptions
from eformer.errors import ProcessError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class Crew:
    """A number of hosts that share the devices of this process evenly."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.meetings: dict[int, Meeting] = {}
        self.lock = threading.Lock()
        self.sent: list[int] = []

    def meeting(self, number: int) -> Meeting:
        with self.lock:
            return self.meetings.setdefault(number, Meeting(self.count))

    def run(self, work: Callable[[Any], Any]) -> list[Any]:
        """Run `work(host)` on every host; return the results, or the errors that were raised."""
        outcomes: list[Any] = [None] * self.count

        def play(number: int) -> None:
            try:
                outcomes[number] = work(Host(self, number))
            except Exception as error:  # noqa: BLE001
                outcomes[number] = error

        threads = [threading.Thread(target=play, args=(number,)) for number in range(self.count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return outcomes


class Meeting:
    def __init__(self, count: int) -> None:
        self.messages: list[Any] = [None] * count
        self.answer: Any = None
        self.changed = threading.Condition()

    def wait(self, is_done: Callable[[], bool]) -> None:
        if not self.changed.wait_for(is_done, timeout=60):
            raise TimeoutError


class Host:
    def __init__(self, crew: Crew, number: int) -> None:
        self.crew, self.number, self.count = crew, number, crew.count
        self.rounds = 0
        self.is_over = False

    def meet(self, message: bytes, answer: Callable[[Sequence[bytes]], bytes]) -> bytes:
        assert isinstance(message, bytes)
        self.crew.sent.append(len(message))
        meeting = self._say(message)
        if self.number == 0:
            with meeting.changed:
                meeting.wait(lambda: None not in meeting.messages)
            try:
                failed = [str(m) for m in meeting.messages if isinstance(m, ProcessError)]
                if failed:
                    raise ProcessError("; ".join(failed))
                text: Any = answer(meeting.messages)
            except BaseException as error:
                self.is_over = True
                self._answer(meeting, self._told(error))
                raise
            self._answer(meeting, text)
        with meeting.changed:
            meeting.wait(lambda: meeting.answer is not None)
        if isinstance(meeting.answer, ProcessError):
            self.is_over = True
            raise meeting.answer
        return meeting.answer

    def fail(self, error: BaseException, *, after_all: bool = False) -> str:
        if self.is_over:
            return ""
        self.is_over = True
        meeting = self._say(self._told(error))
        if self.number == 0:
            if after_all:
                with meeting.changed:
                    meeting.wait(lambda: None not in meeting.messages)
            self._answer(meeting, self._told(error))
        return ""

    def end(self) -> None:
        self.is_over = True

    def _told(self, error: BaseException) -> ProcessError:
        is_said = isinstance(error, ProcessError)
        return ProcessError(str(error) if is_said else f"{self.name(self.number)}: {error!r}")

    def _say(self, message: Any) -> Meeting:
        meeting = self.crew.meeting(self.rounds)
        self.rounds += 1
        with meeting.changed:
            meeting.messages[self.number] = message
            meeting.changed.notify_all()
        return meeting

    @staticmethod
    def _answer(meeting: Meeting, answer: Any) -> None:
        with meeting.changed:
            meeting.answer = answer
            meeting.changed.notify_all()

    def process_of(self, device: Any) -> int:
        return jax.devices().index(device) * self.count // jax.device_count()

    def name(self, number: int) -> str:
        return f"process {number}"


def save_together(crew, tree_of, path, layout=("safetensors", {}), **options):
    """Save `tree_of(host)` from every host; return the errors that were raised, or None for each."""
    name, special = layout

    def work(host):
        options_ = SaveOptions(**special, **options)
        complete(start(tree_of(host), path, format=name, options=options_, hosts=host))

    return crew.run(work)


def sharded_tree():
    """Return arrays that eight devices hold in several ways, and leaves of other kinds."""
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))

    def put(spec):
        return jax.device_put(jnp.arange(64 * 8.0).reshape(64, 8), NamedSharding(mesh, spec))

    tree = {
        "rows": put(P("x")),
        "both": put(P("x", "y")),
        "columns": put(P(None, "y")),
        "everywhere": put(P()),
    }
    return tree | {"numpy": np.arange(5), "one": jnp.ones(3), "n": 3, "empty": jnp.zeros((0, 4))}
