"""Write files of this machine whole and durably, or not at all."""

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

from eformer._engine.stores.directory import Closing, Directory, lock, try_lock, unlock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

logger = logging.getLogger("eformer")

SCRATCH = re.compile(r"\.eformer-[0-9a-f]{16}\.tmp")

LARGE_WRITE = 2**18  # bytes

_RWF_DONTCACHE = 0x80  # Linux 6.14; os has no name for it yet
_NO_SUCH_FLAG = {errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS}


def scratch_name() -> str:
    """Return a name that nobody looks for."""
    return f".eformer-{secrets.token_hex(8)}.tmp"


# ------------------------------------------------------------------------------------------ replacing


@contextmanager
def replacing(path: str | os.PathLike[str], *, sweep: bool = False) -> Iterator[IO[bytes]]:
    """Open a new file that takes the place of `path` when the block ends well, and is removed when it does not.

    Afterwards the bytes and the name are on stable storage. Parents are created. The permissions of an existing file
    are kept. A link is replaced by the file; its target stays as it is. With `sweep`, the files of writers that died
    are removed from the directory first.
    """
    final = Path(path)
    make_directories(final.parent)
    with Directory.open(final.parent) as directory:
        if sweep:
            sweep_files(directory)
        with replacing_in(directory, final.name) as file:
            yield file


@contextmanager
def replacing_in(directory: Directory, name: str) -> Iterator[IO[bytes]]:
    """Open a new file that takes the place of `name` in an open directory when the block ends well."""
    mode = replaceable_mode(directory, name)
    with _scratch_file(directory, mode) as (descriptor, scratch):
        with open(descriptor, "wb", closefd=False) as file:
            yield file
        os.fsync(descriptor)
        directory.rename(scratch, directory, name)
    directory.sync()


def replaceable_mode(directory: Directory, name: str) -> int | None:
    """Return the permissions for a file that replaces `name`; None for the default.

    Refuse anything but a regular file. Permissions are taken over from a file of the same user alone: those of another
    user could let that one write to the new file. Bits that make programs run as their owner are never kept.
    """
    status = directory.status(name)
    if status is None:
        return None
    is_link = stat.S_ISLNK(status.st_mode)
    target = directory.target(name) if is_link else status
    if target is not None and not stat.S_ISREG(target.st_mode):  # a directory, a pipe, /dev/null
        raise OSError(errno.EINVAL, "Not a regular file", str(directory.path / name))
    if is_link or status.st_uid != os.geteuid():
        return None
    return status.st_mode & 0o777


@contextmanager
def _scratch_file(directory: Directory, mode: int | None) -> Iterator[tuple[int, str]]:
    """Create a file under a scratch name, locked while its writer lives; remove it at the end if it is still there."""
    descriptor, name = -1, ""
    while descriptor < 0:
        name = scratch_name()
        descriptor = directory.create(name, os.O_RDWR)
        try:
            lock(descriptor)
            if mode is not None:
                os.fchmod(descriptor, mode)
            if os.fstat(descriptor).st_nlink == 0:  # swept between its creation and the lock
                os.close(descriptor)
                descriptor = -1
        except BaseException:
            os.close(descriptor)
            with suppress(OSError):
                directory.unlink(name)
            raise
    try:
        yield descriptor, name
    finally:
        try:
            with suppress(OSError):
                directory.unlink(name)
        finally:
            unlock(descriptor)
            os.close(descriptor)


def sweep_files(directory: Directory) -> None:
    """Remove the scratch files of writers that died. A file that cannot be removed is left for the next time."""
    with suppress(OSError):  # the directory cannot be listed
        for name, kind in directory.kinds().items():
            if kind == "file" and SCRATCH.fullmatch(name):
                remove_if_dead(directory, name)


def remove_if_dead(directory: Directory, name: str) -> None:
    """Remove a scratch file unless its writer is alive."""
    # An error: its writer is alive and holds the lock, or has just removed it.
    with suppress(OSError), Closing(directory.open_file(name)) as descriptor:
        try_lock(descriptor)
        directory.unlink(name)


# ---------------------------------------------------------------------------------------- directories


def make_directories(path: Path) -> None:
    """Make a directory and its parents, durably: a new one only survives a crash if its parent was synced."""
    missing = [p for p in (path, *path.parents) if not p.exists()]
    for directory in reversed(missing):
        directory.mkdir(exist_ok=True)
        sync_directory(directory.parent)


def sync_directory(path: Path) -> None:
    with Directory.open(path) as directory:
        directory.sync()


# --------------------------------------------------------------------------------------------- writes


def write_all(descriptor: int, data: Any, offset: int) -> None:
    """Write all bytes, and let the disk begin with large ones at once."""
    view = memoryview(data)
    start, nbytes = offset, len(view)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written
    if nbytes >= LARGE_WRITE:
        _start_writeback(descriptor, start, nbytes)


def write_past_cache(descriptor: int, data: Any, offset: int) -> bool:
    """Write all bytes without keeping them in the page cache. Return False if the file system cannot do that.

    A save that is large beside the memory would push everything else out of the cache; and on a virtual machine, which
    has to ask its host for the memory first, writing through it takes up to twice as long.
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
    """Put the bytes of a file on stable storage, and its length."""
    (os.fdatasync if hasattr(os, "fdatasync") else os.fsync)(descriptor)


def _load_sync_file_range() -> Callable[[int, int, int, int], int] | None:
    try:
        function = ctypes.CDLL(None).sync_file_range
    except (OSError, AttributeError):  # not Linux
        return None
    function.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return function


_sync_file_range = _load_sync_file_range()
_START_WRITEBACK = 2  # SYNC_FILE_RANGE_WRITE


def _start_writeback(descriptor: int, offset: int, nbytes: int) -> None:
    """Let the disk begin, so that the sync at the end finds little to do. A hint: that sync reports errors."""
    if _sync_file_range:
        _sync_file_range(descriptor, offset, nbytes, _START_WRITEBACK)
