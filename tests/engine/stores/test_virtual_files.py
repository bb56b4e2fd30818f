"""Ranges of a file, read as if they were one file."""

import io
from functools import partial

import pytest

from eformer._engine.stores.virtual_files import BinaryFile, ChainedFiles, JoinedRanges, VirtualFiles

FILE = bytes(range(100))


class OneFile:
    def read_into(self, number, memory, offset):
        data = FILE[offset : offset + len(memory)]
        memory[: len(data)] = data
        return len(data)


def read(ranges, offset, nbytes):
    files, memory = VirtualFiles(OneFile(), [(0, JoinedRanges("x", ranges))]), bytearray(nbytes)
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


class Named:
    """Files that note what is asked of them."""

    def __init__(self, name):
        self.name, self.held, self.is_open = name, [], True

    def hold(self, numbers):
        self.held += numbers

    def read_into(self, number, memory, offset):
        memory[:2] = f"{self.name}{number}".encode()
        return 2

    def nbytes(self, number):
        return number

    def map(self, number):
        return f"{self.name}{number}"

    def rewritten(self):
        return self.name if self.name == "b" else None

    def close(self):
        self.is_open = False


def test_files_of_two_kinds_are_counted_one_after_the_other():
    first, then = Named("a"), Named("b")
    files = ChainedFiles(first, 3, then)
    files.hold(iter([0, 2, 3, 5]))
    memory = bytearray(2)
    assert [files.read_into(n, memoryview(memory), 0) and bytes(memory) for n in (2, 3)] == [b"a2", b"b0"]
    assert [files.nbytes(n) for n in (2, 4)] == [2, 1]
    assert [files.map(n) for n in (0, 4)] == ["a0", "b1"]
    assert (first.held, then.held) == ([0, 2], [0, 2])
    assert files.rewritten() == "b"
    files.close()
    assert not first.is_open
    assert not then.is_open


def test_virtual_files_follow_the_files_that_they_are_made_of():
    real, joined = Named("a"), JoinedRanges("x", ((0, 1), (1, 1)))
    files = VirtualFiles(real, [(1, joined), (0, joined)], 2)
    files.hold([1, 2, 3])
    assert sorted(real.held) == [0, 1, 1]
    assert [files.nbytes(n) for n in (0, 1, 2)] == [0, 1, 2]
    assert [files.map(n) for n in (1, 2)] == ["a1", None]
    files.close()
    assert not real.is_open


def test_a_file_object_ends_where_its_part_of_the_file_ends():
    file = io.BufferedReader(BinaryFile(partial(OneFile().read_into, 0), 40))
    assert file.seek(-5, io.SEEK_END) == 35
    assert file.read(10) == FILE[35:40]
    assert file.seek(7) == 7
    assert file.read() == FILE[7:40]
    with pytest.raises(OSError, match="Invalid argument"):
        file.seek(-41, io.SEEK_END)
