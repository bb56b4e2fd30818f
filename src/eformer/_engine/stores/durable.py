"""Write files of this machine whole and durably, or not at all.

Tests: tests/engine/stores/test_local.py.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import re
import secrets
import stat
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from eformer._engine.stores.directory import (
    Closing,
    Directory,
    function_of_libc,
    lock,
    unlock,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

logger = logging.getLogger("eformer")

SCRATCH = re.compile(r"\.eformer-[0-9a-f]{16}\.tmp")

LARGE_WRITE = 2**18  # bytes

_sync_file_range = function_of_libc(
    "sync_file_range", ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint
)
_START_WRITEBACK = 2  # SYNC_FILE_RANGE_WRITE
_RWF_DONTCACHE = 0x80  # Linux 6.14; os has no name for it yet
_NO_SUCH_FLAG = {errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS}


def scratch_name() -> str:
    """Return a hidden name that no reader looks for."""
    return f".eformer-{secrets.token_hex(8)}.tmp"


# ------------------------------------------------------------------------------------------ replacing


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Open a new file that takes the place of `path` at the end of the block. After an error it is removed.

    Afterwards the bytes and the name are on stable storage. Parents are created. The permissions of an existing file
    are kept. A link is replaced by the file; its target stays as it is.
    """
    final = Path(path)
    make_directories(final.parent)
    with Directory.open(final.parent) as directory, replacing_in(directory, final.name) as file:
        yield file


@contextmanager
def replacing_in(directory: Directory, name: str) -> Iterator[IO[bytes]]:
    """Open a new file that takes the place of `name` in an open directory at the end of the block.

    Until then it has a scratch name and is locked, so that a later writer can tell whether this writer is alive.
    """
    mode, is_done = replaceable_mode(directory, name), False
    while not is_done:
        scratch = scratch_name()
        with Closing(directory.create(scratch, os.O_RDWR)) as descriptor:
            try:
                lock(descriptor)
                if os.fstat(descriptor).st_nlink == 0:
                    continue  # another save swept it before it was locked
                if mode is not None:
                    os.fchmod(descriptor, mode)
                with open(descriptor, "wb", closefd=False) as file:
                    yield file
                os.fsync(descriptor)
                directory.rename(scratch, directory, name)
                is_done = True
            finally:
                if not is_done:
                    with suppress(OSError):
                        directory.unlink(scratch)
                unlock(descriptor)
    directory.sync()


def replaceable_mode(directory: Directory, name: str) -> int | None:
    """Return the permissions for a file that replaces `name`; None for the default.

    Refuse anything but a regular file. Permissions are kept only from a file of the same user, because permissions of
    another user's file could let that user write to the new file. Setuid and setgid bits are never kept.
    """
    status = directory.status(name)
    if status is None:
        return None
    if is_link := stat.S_ISLNK(status.st_mode):
        try:
            status = os.stat(name, dir_fd=directory.descriptor)
        except OSError:  # a link to a missing file
            return None
    if not stat.S_ISREG(status.st_mode):  # a directory, a pipe, /dev/null
        raise OSError(errno.EINVAL, "Not a regular file", str(directory.path / name))
    return None if is_link or status.st_uid != os.geteuid() else status.st_mode & 0o777


# ---------------------------------------------------------------------------------------- directories


def make_directories(path: Path) -> None:
    """Make a directory and its parents, durably: each parent is synced, because a new directory only survives a crash
    then."""
    missing = [p for p in (path, *path.parents) if not p.exists()]
    for directory in reversed(missing):
        directory.mkdir(exist_ok=True)
        sync_directory(directory.parent)


def sync_directory(path: Path) -> None:
    with Directory.open(path) as directory:
        directory.sync()


# --------------------------------------------------------------------------------------------- writes


def write_all(descriptor: int, data: Any, offset: int) -> None:
    """Write all bytes. Let the disk begin with large data immediately."""
    view = memoryview(data)
    start, nbytes = offset, len(view)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written
    if nbytes >= LARGE_WRITE and _sync_file_range:
        # The sync at the end then finds little to do. This is a hint; that sync reports the errors.
        _sync_file_range(descriptor, start, nbytes, _START_WRITEBACK)


def write_past_cache(descriptor: int, data: Any, offset: int) -> bool:
    """Write all bytes without keeping them in the page cache. Return False if the file system cannot do this.

    A save that is large beside the memory would push all other files out of the cache. On a virtual machine, which has
    to ask its host for the memory first, writing through the cache also takes up to twice as long.
    """
    try:
        written = os.pwritev(descriptor, [data], offset, _RWF_DONTCACHE)
    except (OSError, AttributeError, NotImplementedError) as error:
        if isinstance(error, OSError) and error.errno not in _NO_SUCH_FLAG:
            raise
        logger.debug("this file system cannot write past the page cache")
        write_all(descriptor, data, offset)
        return False
    write_all(descriptor, memoryview(data)[written:], offset + written)
    return True


def sync_data(descriptor: int) -> None:
    """Put the bytes and the length of a file on stable storage."""
    (os.fdatasync if hasattr(os, "fdatasync") else os.fsync)(descriptor)
