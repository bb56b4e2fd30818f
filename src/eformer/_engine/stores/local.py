"""Files of this machine: written whole and durably or not at all, read without leaving their directory."""

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

from eformer._engine.record.names import is_inside
from eformer._engine.stores.directory import Directory, lock, try_lock, unlock
from eformer.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

logger = logging.getLogger("eformer")

# What paths that were never made answer.
_NO_SUCH_PATH = {errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP}

_LARGE_WRITE = 2**18

_RWF_DONTCACHE = 0x80  # Linux 6.14; os has no name for it yet
_NO_SUCH_FLAG = {errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS}

_BEGINNING = 64
_MOST_SMALL = 2**29
_MOST_DEPTH = 400  # of directories; no tree of ours is nested as deeply

SCRATCH = re.compile(r"\.eformer-[0-9a-f]{16}\.tmp")

_sync_data = getattr(os, "fdatasync", os.fsync)


def local_path(path: str | os.PathLike[str]) -> Path:
    """Refuses an address: as a path, gs://bucket would quietly be a directory of this machine."""
    if not os.fspath(path):
        raise ValueError("the path is empty")
    if "://" in os.fspath(path):
        raise ValueError(f"{path} is no path of this machine, and other stores are not supported yet")
    return Path(path)


# -------------------------------------------------------------------------------------------- writing


class Scratch:
    """A new file under a name that nobody looks for, until it is published.

    It stays locked while its writer lives, so that `sweep` can tell what a dead one left behind.
    """

    def __init__(self, directory: Directory, mode: int | None = None) -> None:
        self.directory = directory
        self.descriptor = -1
        self.is_cached = True
        while self.descriptor < 0:
            self.name = f".eformer-{secrets.token_hex(8)}.tmp"
            self.descriptor = directory.create(self.name, os.O_RDWR)
            try:
                lock(self.descriptor)
                if mode is not None:
                    os.fchmod(self.descriptor, mode)
                if os.fstat(self.descriptor).st_nlink == 0:  # swept between its creation and the lock
                    self.close()
            except BaseException:
                self.discard()
                raise

    @property
    def path(self) -> Path:
        return self.directory.path / self.name

    def resize(self, nbytes: int) -> None:
        os.ftruncate(self.descriptor, nbytes)

    def pass_by(self) -> None:
        """From here on what is written does not stay in the page cache, if the file system can do that.

        A save that is large beside the memory would push everything else out of it; and on a virtual machine, which has
        to ask its host for the memory first, writing takes up to twice as long.
        """
        self.is_cached = False

    def write(self, data: Any, offset: int) -> None:
        if self.is_cached or len(data) < _LARGE_WRITE:
            write_all(self.descriptor, data, offset)
        else:
            self.write_by(data, offset)

    def write_by(self, data: Any, offset: int) -> None:
        try:
            written = os.pwritev(self.descriptor, [data], offset, _RWF_DONTCACHE)
        except (OSError, AttributeError, NotImplementedError) as error:
            if isinstance(error, OSError) and error.errno not in _NO_SUCH_FLAG:
                raise
            logger.debug("%s goes through the page cache: this file system cannot do without", self.path)
            self.is_cached, written = True, 0
        write_all(self.descriptor, memoryview(data)[written:], offset + written)

    def sync(self) -> None:
        _sync_data(self.descriptor)

    def close(self) -> None:
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            unlock(descriptor)
            os.close(descriptor)

    def discard(self) -> None:
        """Gone, unless it was published."""
        try:
            with suppress(OSError):
                self.directory.unlink(self.name)
        finally:
            self.close()


def write_all(descriptor: int, data: Any, offset: int) -> None:
    view = memoryview(data)
    start, nbytes = offset, len(view)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written
    if nbytes >= _LARGE_WRITE:
        _start_writeback(descriptor, start, nbytes)


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """A new file that takes the place of `path` when the block ends well, and goes away when it does not.

    Afterwards the bytes and the name are on stable storage. Parents are created. Permissions of a file that was there
    are kept. A link is replaced by the file; what it points to stays as it is.
    """
    final = Path(path)
    make_directories(final.parent)
    with Directory.open(final.parent) as directory, replacing_in(directory, final.name) as file:
        yield file


@contextmanager
def replacing_in(directory: Directory, name: str) -> Iterator[IO[bytes]]:
    """The same in a directory that is open."""
    scratch = scratch_for(directory, name)
    try:
        with open(scratch.descriptor, "wb", closefd=False) as file:
            yield file
        os.fsync(scratch.descriptor)
        directory.replace(scratch.name, name)
    finally:
        scratch.discard()
    directory.sync()


def scratch_for(directory: Directory, name: str) -> Scratch:
    """A scratch file that may take the place of `name`; refuses what is not ours to replace.

    It gets the permissions of a file that is there and belongs to the same user: those of somebody else's could let
    that one write to what is now ours, and what makes programs run as their owner is never kept.
    """
    status = directory.status(name)
    if status is None:
        return Scratch(directory)
    is_link = stat.S_ISLNK(status.st_mode)
    leads_to = directory.target(name) if is_link else status
    if leads_to is not None and not stat.S_ISREG(leads_to.st_mode):  # a directory, a pipe, /dev/null
        raise OSError(errno.EINVAL, "Not a regular file", str(directory.path / name))
    if is_link or status.st_uid != os.geteuid():
        return Scratch(directory)
    return Scratch(directory, status.st_mode & 0o777)


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
    """Lets the disk begin at once, so that the sync at the end finds little to do. A hint: that sync reports errors."""
    if _sync_file_range:
        _sync_file_range(descriptor, offset, nbytes, _START_WRITEBACK)


def physical_memory() -> int:
    """Of this machine, in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def make_directories(path: Path) -> None:
    """Like mkdir -p, and durable: a new directory is only there after a crash if its parent was synced."""
    missing = [p for p in (path, *path.parents) if not p.exists()]
    for directory in reversed(missing):
        directory.mkdir(exist_ok=True)
        sync_directory(directory.parent)


def sync_directory(path: Path) -> None:
    with Directory.open(path) as directory:
        directory.sync()


def sweep(directory: Directory) -> None:
    """Removes the scratch files of writers that died. What cannot be removed is left for the next time."""
    with suppress(OSError):  # which cannot be listed
        for name, kind in directory.kinds().items():
            if kind == "file" and SCRATCH.fullmatch(name):
                _remove_if_dead(directory, name)


def _remove_if_dead(directory: Directory, name: str) -> None:
    with suppress(OSError):  # it is alive (locked), or its writer has just removed it
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(name, flags, dir_fd=directory.descriptor)
        try:
            try_lock(descriptor)
            directory.unlink(name)
        finally:
            os.close(descriptor)


# -------------------------------------------------------------------------------------------- reading


def list_names(directory: Path | str) -> list[str]:
    return sorted(os.listdir(directory))


def walk(directory: Path | str) -> Iterator[os.DirEntry[str]]:
    """Everything below a directory; links are not followed. FormatError for what is nested absurdly deep."""
    todo = [(os.fspath(directory), 0)]
    while todo:
        path, depth = todo.pop()
        if depth > _MOST_DEPTH:
            raise FormatError(f"{directory} has directories that are nested more than {_MOST_DEPTH} deep")
        with os.scandir(path) as entries:
            for entry in entries:
                yield entry
                if entry.is_dir(follow_symlinks=False):
                    todo.append((entry.path, depth + 1))


def open_inside(directory: Path, name: str) -> int:
    """A descriptor of the regular file `name` in or below this directory.

    A name or a link that leads out, a pipe or a device are refused, and never waited for.
    """
    if not is_inside(name):
        raise FormatError(f"{name[:200]!r} is not the name of a file in {directory}")
    if "/" in name:
        return open_below(os.path.realpath(directory), name)
    path = directory / name
    if path.is_symlink() and not _leads_inside(path):
        raise FormatError(f"{path} is a link to {os.readlink(path)!r}, outside of the checkpoint")
    return open_regular(path)


def open_below(real: str, name: str) -> int:
    """The same below a directory whose real path is known: thousands of times, hence text."""
    if not is_inside(name):
        raise FormatError(f"{name[:200]!r} is not the name of a file in {real}")
    path = f"{real}/{name}"
    try:
        descriptor = open_regular(path)
    except OSError as error:
        if error.errno not in _NO_SUCH_PATH:
            raise
        raise FormatError(f"{path[:300]} cannot be a file of the checkpoint: {error.strerror}") from error
    if not _real(descriptor, path).startswith(real + "/"):
        os.close(descriptor)
        raise FormatError(f"{path} leads to {os.path.realpath(path)!r}, outside of the checkpoint")
    return descriptor


def _real(descriptor: int, path: str) -> str:
    """Where an open file really is; asking the kernel takes a tenth of the time of following every link."""
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:  # not Linux
        return os.path.realpath(path)


def _leads_inside(path: Path) -> bool:
    """Also to ../../blobs, where the cache of Hugging Face keeps the files that its snapshots link to."""
    target = Path(os.path.realpath(path))
    here = Path(os.path.realpath(path.parent))
    return target.parent in (here, here.parent.parent / "blobs")


def open_regular(path: Path | str) -> int:
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise FormatError(f"{path} is not a regular file")
    return descriptor


def read_into(descriptor: int, memory: memoryview, offset: int) -> int:
    """Fills `memory` from `offset` on; returns how many bytes there were, less only at the file's end."""
    done = 0
    while done < len(memory):
        count = os.preadv(descriptor, [memory[done:]], offset + done)
        if count == 0:
            break
        done += count
    return done


def read_range(descriptor: int, offset: int, nbytes: int) -> bytes:
    """Up to `nbytes` from `offset` on; less only at the file's end."""
    chunks = []
    while nbytes > 0 and (chunk := os.pread(descriptor, nbytes, offset)):
        chunks.append(chunk)
        nbytes, offset = nbytes - len(chunk), offset + len(chunk)
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def read_range_of(path: Path, nbytes: int) -> bytes:
    """The beginning of a file."""
    descriptor = open_regular(path)
    try:
        return read_range(descriptor, 0, nbytes)
    finally:
        os.close(descriptor)


def read_small(directory: Path, name: str, is_wanted: Callable[[bytes], bool] | None = None) -> bytes | None:
    """The whole of a file that is small beside the data; None if its beginning is not what is wanted."""
    descriptor = open_inside(directory, name)
    try:
        nbytes = os.fstat(descriptor).st_size
        if is_wanted and not is_wanted(read_range(descriptor, 0, _BEGINNING)):
            return None
        if nbytes > _MOST_SMALL:
            raise FormatError(
                f"{directory / name} is {nbytes} bytes long, more than can be what it should be"
            )
        return read_range(descriptor, 0, nbytes)
    finally:
        os.close(descriptor)


def stamp(descriptor: int) -> tuple[int, ...]:
    """By what to know an open file again, however its name and number are used later."""
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
