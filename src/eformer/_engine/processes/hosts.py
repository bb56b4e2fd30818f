"""The processes that save or load one tree together: choose them, announce errors to them, and tell their hosts.

Tests: tests/multihost/test_processes.py, tests/engine/saving/test_commit.py, tests/engine/processes/test_lines.py.
"""

from __future__ import annotations

import ipaddress
import socket
import uuid
from contextlib import contextmanager
from operator import index as as_number
from pathlib import Path
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


# -------------------------------------------------------------------------------------- hosts and addresses


def host_id() -> str:
    """Return an id of this host that its processes share, and that changes if the host is replaced or restarted."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:  # not Linux
        return f"{socket.gethostname()}-{uuid.getnode():x}"


def own_address() -> str:
    """Return the address of this machine by which it reaches the coordinator of the job.

    The machine of the coordinator may know its own name as a loopback address, by which no other machine reaches it: it
    takes the address of its default route then.
    """
    host, port = _coordinator()
    address = _outgoing(host, port)
    is_name = host != "localhost" and not _is_loopback(host)
    return _outgoing(_SOMEWHERE, port) if is_name and _is_loopback(address) else address


_SOMEWHERE = "192.0.2.1"  # of TEST-NET: a datagram socket that is connected to it sends nothing


def _coordinator() -> tuple[str, int]:
    from jax._src import distributed  # noqa: TID251  JAX has no public name for the service that it documents

    host, _, port = (distributed.global_state.coordinator_address or "127.0.0.1:1").rpartition(":")
    return host.strip("[]"), int(port)


def _outgoing(host: str, port: int) -> str:
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return False
