"""Directories are listed, entered and walked below an open descriptor."""

import os
import subprocess
import sys

import pytest

from eformer._engine.stores import directory
from eformer._engine.stores.directory import (
    Directory,
    open_inside,
    remove_opened,
    require_removable,
    try_lock,
    walk,
)
from eformer.errors import FormatError


def test_a_directory_lists_what_is_there_now_wherever_its_descriptor_stands(tmp_path):
    """On btrfs a descriptor lists what was there when it was opened, or when it last stood at the beginning."""
    with Directory.open(tmp_path) as place:
        (tmp_path / "new").write_bytes(b"")
        for end in (2**31 - 1, 2**62):  # of a directory of tmpfs, of ext4
            os.lseek(place.descriptor, end, os.SEEK_SET)
            assert place.kinds() == {"new": "file"}


def nest(path, depth):
    """Make directories one in another; the last has a file."""
    path.mkdir()
    descriptor = os.open(path, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("d", dir_fd=descriptor)
        outer, descriptor = descriptor, os.open("d", os.O_RDONLY, dir_fd=descriptor)
        os.close(outer)
    os.close(os.open("file", os.O_CREAT, dir_fd=descriptor))
    os.close(descriptor)


def test_directories_that_are_nested_absurdly_deep_are_neither_read_nor_removed(tmp_path):
    for depth in (400, 402):
        nest(tmp_path / f"{depth}", depth)
    before = len(os.listdir("/dev/fd"))
    with Directory.open(tmp_path) as place, place.enter("402") as inner:
        assert len(list(walk(tmp_path / "400"))) == 401
        require_removable(place, "400")
        with pytest.raises(FormatError, match="nested more than 400 deep"):
            list(walk(tmp_path / "402"))
        with pytest.raises(OSError, match="nested too deeply"):
            require_removable(place, "402")
        with pytest.raises(OSError, match="nested too deeply"):
            remove_opened(place, "402", inner)
    assert len(os.listdir("/dev/fd")) == before
    os.system(f"rm -r {tmp_path / '402'}")


def test_a_file_of_a_directory_that_is_missing_is_named_whole_and_a_bad_name_is_refused_first(tmp_path):
    with pytest.raises(FileNotFoundError, match="gone/file'"):
        open_inside(tmp_path / "gone", "file")
    for name in ("..", "a/../file", ""):
        with pytest.raises(FormatError, match="is not the name of a file"):
            open_inside(tmp_path / "gone", name)


@pytest.mark.parametrize("levels", [1, 2, 3, 0])
def test_a_walk_goes_as_deep_as_it_is_asked_to(tmp_path, levels):
    (tmp_path / "top" / "a" / "b").mkdir(parents=True)
    (tmp_path / "top" / "a" / "b" / "file").touch()
    expected = ["a", "a/b", "a/b/file"]
    assert [path for path, _ in walk(tmp_path, "top", levels)] == expected[: levels or None]


def test_without_the_system_call_no_descriptor_is_left_open(tmp_path, monkeypatch):
    monkeypatch.setattr(directory, "_syscall", None)
    (tmp_path / "a" / "b").mkdir(parents=True)
    with Directory.open(tmp_path) as place:
        before = len(os.listdir("/dev/fd"))
        place.enter("a/b").close()
        for path in ("a/absent", "absent/b"):
            with pytest.raises(FileNotFoundError):
                place.enter(path)
        assert len(os.listdir("/dev/fd")) == before


def test_a_lock_ends_with_its_process_even_if_a_child_of_it_lives(tmp_path):
    program = f"""
import os, sys, time
from eformer._engine.stores.directory import lock
descriptor = os.open({str(tmp_path)!r}, os.O_RDONLY)
lock(descriptor)
if os.fork() == 0:
    print("forked", flush=True)
    time.sleep(5)  # longer than the rest of the test takes
    os._exit(0)
sys.stdin.read(1)
"""
    parent = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert parent.stdout.readline() == b"forked\n"
    descriptor = os.open(tmp_path, os.O_RDONLY)
    try:
        with pytest.raises(BlockingIOError):
            try_lock(descriptor)
        parent.kill()
        parent.wait()
        try_lock(descriptor)
    finally:
        os.close(descriptor)
        parent.stdin.close()
        parent.stdout.close()
