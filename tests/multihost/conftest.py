"""Jobs that last for all tests: starting one takes longer than what it does."""

import socket

import pytest

from support.disks import CannotMount, SmallDisk
from support.processes import Job


@pytest.fixture(scope="session", autouse=True)
def known_host():
    """JAX's collectives of CPUs look up the name of the machine."""
    try:
        socket.getaddrinfo(socket.gethostname(), None)
    except OSError as error:
        pytest.skip(f"{socket.gethostname()} has no address: {error}")


@pytest.fixture(scope="session")
def jobs(tmp_path_factory):
    """Jobs by (processes, devices of each), started when they are needed first."""
    started = {}

    def job(processes, devices):
        if (processes, devices) not in started or not started[processes, devices].is_open:
            log = tmp_path_factory.mktemp(f"job-{processes}x{devices}")
            started[processes, devices] = Job(processes, devices, log)
        return started[processes, devices]

    yield job
    for one in started.values():
        one.close()


@pytest.fixture
def two(jobs):
    return jobs(2, 2)


@pytest.fixture
def four(jobs):
    return jobs(4, 2)


@pytest.fixture
def small_disk(tmp_path):
    try:
        disk = SmallDisk(tmp_path / "disk")
    except CannotMount as reason:
        pytest.skip(str(reason))
    yield disk
    disk.close()
