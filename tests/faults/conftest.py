"""What the faults happen to."""

import os
import tempfile
from pathlib import Path

import pytest

from support.disks import CannotMount, FragileDisk, SmallDisk
from support.faults import DATABASE, LAYOUTS, Forks


@pytest.fixture(params=LAYOUTS, ids=str)
def layout(request):
    return request.param


@pytest.fixture(params=[*LAYOUTS, DATABASE], ids=str)
def any_layout(request):
    return request.param


@pytest.fixture
def place():
    """A folder in memory, if there is one: a process that dies does not care what was synced, and syncing takes long."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def forks():
    """One server for all tests that kill saves, which run in one worker."""
    forks = Forks()
    yield forks
    forks.close()


@pytest.fixture
def fragile_disk(tmp_path):
    yield from mounted(FragileDisk, tmp_path / "disk")


@pytest.fixture
def small_disk(tmp_path):
    yield from mounted(SmallDisk, tmp_path / "disk")


def mounted(kind, *args):
    try:
        disk = kind(*args)
    except CannotMount as reason:
        pytest.skip(str(reason))
    yield disk
    disk.close()
