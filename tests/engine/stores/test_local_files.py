"""Reads past the page cache."""

import os
import random
import tempfile
from pathlib import Path

import pytest

from eformer._engine.stores.local_files import medium
from eformer.errors import FormatError

DATA = random.Random(1).randbytes(50_001)


@pytest.fixture(params=["disk", "memory"])
def place(request, tmp_path):
    if request.param == "disk":
        yield tmp_path
    else:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
            yield Path(path)


@pytest.mark.parametrize(
    ("offset", "nbytes"), [(0, 50_001), (0, 4096), (1, 4095), (4095, 2), (4096, 8192), (49_999, 2), (7, 0)]
)
def test_any_range_can_be_read(place, offset, nbytes):
    (place / "x").write_bytes(DATA)
    with medium(place, "x", 50_001) as file:
        assert bytes(file.read(offset, nbytes)) == DATA[offset : offset + nbytes]


def test_a_file_that_is_cut_short_gives_fewer_bytes(place):
    (place / "x").write_bytes(DATA[:5000])
    with medium(place, "x", 50_001) as file:
        assert bytes(file.read(0, 50_001)) == DATA[:5000]
        assert bytes(file.read(4999, 100)) == DATA[4999:5000]
        assert bytes(file.read(9000, 100)) == b""


def test_bytes_that_are_not_on_the_disk_yet_are_read(place):
    (place / "x").write_bytes(DATA)
    with medium(place, "x", 100) as file, (place / "x").open("r+b") as other:
        other.write(b"changed")
        other.flush()
        assert bytes(file.read(0, 7)) == b"changed"


def test_a_name_that_leads_out_is_refused(place):
    with pytest.raises(FormatError, match="is not the name of a file"), medium(place, "../x", 1):
        pass


def test_the_page_cache_stays_as_it_is(tmp_path):
    (tmp_path / "x").write_bytes(DATA)
    descriptor = os.open(tmp_path / "x", os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    with medium(tmp_path, "x", 50_001) as file:
        assert bytes(file.read(0, 50_001)) == DATA
    with pytest.raises(BlockingIOError):  # the bytes are not in memory
        os.preadv(descriptor, [bytearray(100)], 0, os.RWF_NOWAIT)
    os.close(descriptor)
