"""Open files of a local directory without leaving it."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from eformer._engine.record.names import is_inside
from eformer._engine.stores.openat2 import BENEATH, How, openat2
from eformer.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from eformer._engine.stores.base import Version

_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
_BENEATH = How(_READ, 0, BENEATH)

# Errors of paths that were never made.
_NO_SUCH_PATH = {errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP}

_MOST_DEPTH = 400  # of directories; no tree of ours is nested as deeply


def walk(directory: Path | str) -> Iterator[os.DirEntry[str]]:
    """List everything below a directory without following links. Raise FormatError if it is nested absurdly deep."""
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
    """Open the regular file `name` in or below this directory.

    Refuse a name or a link that leads out, a pipe or a device; never wait for one.
    """
    if not is_inside(name):
        raise FormatError(f"{name[:200]!r} is not the name of a file in {directory}")
    if "/" in name:
        return open_below(os.path.realpath(directory), name)
    path = directory / name
    try:
        if path.is_symlink() and not _leads_inside(path):
            raise FormatError(f"{path} is a link to {os.readlink(path)!r}, outside of the checkpoint")
        return open_regular(path)
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        raise FormatError(f"{name[:200]!r} cannot be a file of {directory}: {error.strerror}") from error


def open_beneath(base: int, real: str, name: str) -> int:
    """Do the same below an open directory, by one call: thousands of times."""
    if is_inside(name) and (descriptor := openat2(base, name, _BENEATH)) >= 0:
        _require_regular(descriptor, f"{real}/{name}")
        return descriptor
    return open_below(real, name)  # which knows the other way, and the reason


def open_below(real: str, name: str) -> int:
    """Do the same below a directory whose real path is known."""
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
    """Return where an open file really is. Asking the kernel takes a tenth of the time of following every link."""
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:  # not Linux
        return os.path.realpath(path)


def _leads_inside(path: Path) -> bool:
    target = Path(os.path.realpath(path))
    here = Path(os.path.realpath(path.parent))
    return target.parent in (here, here.parent.parent / "blobs")


def open_regular(path: Path | str) -> int:
    descriptor = os.open(path, _READ)
    _require_regular(descriptor, path)
    return descriptor


def _require_regular(descriptor: int, path: Path | str) -> None:
    """Close anything but a regular file, and refuse it."""
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise FormatError(f"{path} is not a regular file")
    except BaseException:
        os.close(descriptor)
        raise


def read_into(descriptor: int, memory: memoryview, offset: int) -> int:
    """Fill `memory` from `offset` on. Return how many bytes there were: fewer only at the end of the file."""
    done = 0
    while done < len(memory):
        count = os.preadv(descriptor, [memory[done:]], offset + done)
        if count == 0:
            break
        done += count
    return done


def read_range(descriptor: int, offset: int, nbytes: int) -> bytes:
    """Read up to `nbytes` from `offset` on; fewer only at the end of the file."""
    chunks = []
    while nbytes > 0 and (chunk := os.pread(descriptor, nbytes, offset)):
        chunks.append(chunk)
        nbytes, offset = nbytes - len(chunk), offset + len(chunk)
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def version_of(status: os.stat_result) -> Version:
    """Return by what to know a file again, however its name and its inode are used later.

    The part after the last slash changes with the number of its links, too; the part before it only with its content.
    """
    return f"{status.st_dev}-{status.st_ino}-{status.st_size}-{status.st_mtime_ns}/{status.st_ctime_ns}"


def content_of(version: Version) -> str:
    """Return the part of a version that does not change when the file is linked."""
    return version.rpartition("/")[0]
