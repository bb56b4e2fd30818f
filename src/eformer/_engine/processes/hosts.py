"""The processes that save or load one tree together: choose them, and announce errors to them.

Tests: tests/multihost/test_processes.py, tests/engine/saving/test_commit.py.
"""

from __future__ import annotations

from contextlib import contextmanager
from operator import index as as_number
from typing import TYPE_CHECKING, Any

from eformer._engine.processes.coordination import Board, BoardOfSeveral, Together
from eformer._engine.processes.coordination import Hosts as Hosts
from eformer._engine.processes.coordination import LostError as LostError
from eformer.errors import ProcessError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

TIMEOUT = 600.0  # seconds


def _this_process() -> tuple[int, int]:
    """Return the number of this process in the running program, and the number of its processes."""
    import jax  # late: commands that only read files start without it

    return jax.process_index(), jax.process_count()


def service_client() -> Any:
    """Return JAX's client of the coordination service, or None if the service was not started."""
    from jax._src import distributed  # noqa: TID251  JAX has no public name for the service that it documents

    return distributed.global_state.client


class _OneOfMany(Hosts):
    """One of several processes, which acts alone and with its own devices only."""

    def __init__(self, process: int) -> None:
        self._process = process

    def process_of(self, device: Any) -> int:
        return 0 if device.process_index == self._process else -1

    def name(self, number: int) -> str:
        return f"process {self._process}"


def current(doing: str, processes: Iterable[int] | None = None, timeout: float | None = None) -> Hosts:
    """Return the processes of the running program that take part: all of them, or `processes`.

    `doing` names the common task in error messages. Every process that takes part has to make these calls in the same
    order. The processes wait for each other for `timeout` seconds, or 600.
    """
    process, count = _this_process()
    chosen = tuple(range(count)) if processes is None else tuple(sorted({as_number(p) for p in processes}))
    if not chosen or chosen[0] < 0 or chosen[-1] >= count:
        raise ValueError(f"processes={list(chosen)}: the program has {count}, numbered from 0")
    if process not in chosen:
        raise ValueError(
            f"processes={list(chosen)} leaves out process {process}, which must not make this call then"
        )
    return Hosts() if count == 1 else _select(chosen, process, doing, timeout or TIMEOUT)


@contextmanager
def told_to_all(hosts: Hosts) -> Iterator[None]:
    """Announce an error in the block to the other processes, so that none waits for this one."""
    try:
        yield
    except BaseException as error:
        hosts.fail(error)
        raise


@contextmanager
def meeting(doing: str, timeout: float | None) -> Iterator[Hosts]:
    """Let all processes of the program meet in the block, and announce an error in one of them to all.

    `current` explains the arguments.
    """
    hosts = current(doing, None, timeout)
    with told_to_all(hosts):
        yield hosts
    hosts.end()


def board(place: str) -> Board:
    """Return the keys below a place that all processes of the program may set and read."""
    process, count = _this_process()
    client = service_client() if count > 1 else None
    return Board() if client is None else BoardOfSeveral(client, place, process, count)


def is_alone() -> bool:
    """Tell whether the running program has one process."""
    return _this_process()[1] == 1


def _select(chosen: tuple[int, ...], process: int, doing: str, timeout: float) -> Hosts:
    if len(chosen) == 1:
        return _OneOfMany(process)
    client = service_client()
    if client is None:
        raise ProcessError(
            "JAX's coordination service, by which several processes communicate, was not started: call "
            "jax.distributed.initialize() at the beginning of the program"
        )
    return Together(client, chosen, chosen.index(process), doing, timeout)
