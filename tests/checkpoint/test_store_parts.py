"""Ranges of a file, read as if they were one file."""

import pytest

from eformer.checkpoint._store.parts import Joined, PartFiles

FILE = bytes(range(100))


class OneFile:
    def read_into(self, number, memory, offset):
        data = FILE[offset : offset + len(memory)]
        memory[: len(data)] = data
        return len(data)


def read(ranges, offset, nbytes):
    files, memory = PartFiles(OneFile(), [Joined("x", ranges)]), bytearray(nbytes)
    return bytes(memory[: files.read_into(1, memoryview(memory), offset)])


@pytest.mark.parametrize(
    "ranges", [((10, 5), (30, 7), (3, 1)), ((0, 0), (50, 4), (20, 0), (60, 9)), ((0, 100),)]
)
def test_every_stretch_of_joined_ranges_is_what_lies_there(ranges):
    whole = b"".join(FILE[start : start + nbytes] for start, nbytes in ranges)
    for offset in range(len(whole) + 2):
        for nbytes in range(len(whole) + 3):
            assert read(ranges, offset, nbytes) == whole[offset : offset + nbytes]


def test_what_the_file_no_longer_has_ends_the_part():
    assert read(((95, 10), (0, 3)), 2, 11) == FILE[97:]
