"""Open files of a local directory without leaving it."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import contextmanager
from typing import TYPE_CHECKING

from eformer._engine.record.names import is_inside
from eformer._engine.stores.openat2 import BENEATH, NO_LINKS, NO_MAGIC_LINKS, How, is_missing, openat2
from eformer.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from eformer._engine.stores.base import Version

# O_NONBLOCK: a pipe or a device is refused, not waited for. O_NOCTTY: nor does a terminal become that of the process.
_FILE = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_NOFOLLOW | os.O_CLOEXEC
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_ON_THE_WAY = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC

_WITHOUT_LINKS = {flags: How(flags, 0, BENEATH | NO_LINKS | NO_MAGIC_LINKS) for flags in (_FILE, _FOLDER)}

# Errors of a path with a link, without following it: openat2 raises the first, O_DIRECTORY with O_NOFOLLOW the second.
_PERHAPS_A_LINK = {errno.ELOOP, errno.ENOTDIR}
# Errors of paths that were never made.
_NO_SUCH_PATH = {*_PERHAPS_A_LINK, errno.ENAMETOOLONG}

_MOST_DEPTH = 400  # of directories; no tree of ours is nested as deeply

# --------------------------------------------------------------------------------------------- files


def open_inside(directory: Path, name: str) -> int:
    """Open the regular file `name` in or below this directory, to which the caller's path leads.

    Refuse a name or a link that leads out, a pipe or a device; never wait for one. Of what is outside nothing is
    opened, not even to refuse it.
    """
    if not is_inside(name):
        raise FormatError(f"{name[:200]!r} is not the name of a file in {directory}")
    path = directory / name
    try:
        if "/" not in name:
            try:
                return _regular(os.open(path, _FILE), path)
            except OSError as error:
                if error.errno not in (errno.ELOOP, errno.ENXIO):  # a link, a socket
                    raise
        return _regular(_open_in(directory, name, _FILE), path)
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        raise FormatError(f"{name[:200]!r} cannot be a file of {directory}: {error.strerror}") from error


def open_beneath(base: int, real: str, name: str) -> int:
    """Do the same below an open directory whose real path is known, by one call: thousands of times."""
    if not is_inside(name):
        raise FormatError(f"{name[:200]!r} is not the name of a file in {real}")
    return _regular(_open(base, real, name, _FILE), f"{real}/{name}")


def _open_in(directory: Path, name: str, flags: int) -> int:
    """Open a file or a directory below another, whose real path is needed only if there are links."""
    base = open_base(directory)
    try:
        return _open_without_links(base, name, flags)
    except OSError:
        return _open(base, os.path.realpath(directory), name, flags)
    finally:
        os.close(base)


def _open(base: int, real: str, name: str, flags: int) -> int:
    """Open a file or a directory below another; through links only if they end there, or at a blob of a cache."""
    path = f"{real}/{name}"
    try:
        return _open_without_links(base, name, flags)
    except OSError as error:
        target = os.path.realpath(path) if error.errno in _PERHAPS_A_LINK else path
        if target == path:
            raise _refusal(path, error) from error
    try:
        return _open_target(base, real, target, flags)
    except OSError as error:
        raise _refusal(path, error) from error


def _open_target(base: int, real: str, target: str, flags: int) -> int:
    """Open the end of a link. Links that others put on the way meanwhile are not followed."""
    if target.startswith(f"{real}/"):
        return _open_without_links(base, target.removeprefix(f"{real}/"), flags)
    if os.path.dirname(target) == _blobs_of(real):
        with _opened(os.path.dirname(target)) as blobs:
            return _open_without_links(blobs, os.path.basename(target), flags)
    raise OSError(errno.EXDEV, f"link to {target!r}, outside of the checkpoint")


def _blobs_of(real: str) -> str | None:
    """Return where the cache of Hugging Face keeps the files of a snapshot; None for any other directory."""
    snapshots = os.path.dirname(real)
    return f"{os.path.dirname(snapshots)}/blobs" if os.path.basename(snapshots) == "snapshots" else None


def _open_without_links(base: int, path: str, flags: int) -> int:
    found = openat2(base, path, _WITHOUT_LINKS[flags])
    if found >= 0:
        return found
    if is_missing(found):
        return _open_step_by_step(base, path, flags)
    raise OSError(-found, os.strerror(-found), path)


def _open_step_by_step(base: int, path: str, flags: int) -> int:
    """Do the same name by name, without openat2."""
    *outer, last = path.split("/")
    inner = os.dup(base)
    try:
        for name in outer:
            outside, inner = inner, -1
            try:
                inner = os.open(name, _ON_THE_WAY | os.O_NOFOLLOW, dir_fd=outside)
            finally:
                os.close(outside)
        return os.open(last, flags, dir_fd=inner)
    finally:
        if inner >= 0:
            os.close(inner)


@contextmanager
def _opened(directory: Path | str) -> Iterator[int]:
    """Open the directory that the caller's path leads to, to open others below it."""
    descriptor = open_base(directory)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def open_base(directory: Path | str) -> int:
    """Do the same for somebody who closes it."""
    return os.open(directory, _ON_THE_WAY)


def _regular(descriptor: int, path: Path | str) -> int:
    """Return the descriptor of a regular file; close anything else, and refuse it."""
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise _not_regular(path)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _not_regular(path: Path | str) -> FormatError:
    return FormatError(f"{path} is not a regular file")


def _refusal(path: str, error: OSError) -> Exception:
    """Return the error to raise: with the whole path, of which calls below a descriptor name only a part."""
    if error.errno == errno.ENXIO:
        return _not_regular(path)
    if error.errno == errno.EXDEV:
        return FormatError(f"{path} is a {error.strerror}")
    if error.errno in _NO_SUCH_PATH:
        return FormatError(f"{path[:300]} cannot be a file of the checkpoint: {error.strerror}")
    return OSError(error.errno, error.strerror, path)


# --------------------------------------------------------------------------------------- directories


@contextmanager
def listing(directory: Path, below: str = "") -> Iterator[Iterator[os.DirEntry[str]]]:
    """List a directory, or one below it. Refuse a link that leads out of it.

    The entries have names and no paths.
    """
    if not below:
        with os.scandir(directory) as entries:
            yield entries
        return
    if not is_inside(below):
        raise FormatError(f"{below[:200]!r} is not the name of a directory in {directory}")
    descriptor = _open_in(directory, below, _FOLDER)
    try:
        with os.scandir(descriptor) as entries:
            yield entries
    finally:
        os.close(descriptor)


def directory_inside(directory: Path, below: str) -> Path:
    """Return the path of a directory below another, for a library that reads by path. Refuse links."""
    if not is_inside(below):
        raise FormatError(f"{below[:200]!r} is not the name of a directory in {directory}")
    path = directory / below
    try:
        with _opened(directory) as base:
            os.close(_open_without_links(base, below, _FOLDER))
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} is missing") from None
    except OSError as error:
        if error.errno not in _NO_SUCH_PATH:
            raise
        raise FormatError(f"{path} is a link, or not a directory of the checkpoint") from error
    return path


def walk(directory: Path) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """List everything below a directory by path, without following links: not even those that others put there
    meanwhile. Raise FormatError if it is nested absurdly deep."""
    todo = [("", 0)]
    with _opened(directory) as base:
        while todo:
            outer, depth = todo.pop()
            if depth > _MOST_DEPTH:
                raise FormatError(f"{directory} has directories that are nested more than {_MOST_DEPTH} deep")
            descriptor = _open_without_links(base, outer or ".", _FOLDER)
            try:
                with os.scandir(descriptor) as entries:
                    for entry in entries:
                        path = f"{outer}/{entry.name}" if outer else entry.name
                        yield path, entry
                        if entry.is_dir(follow_symlinks=False):
                            todo.append((path, depth + 1))
            finally:
                os.close(descriptor)


# --------------------------------------------------------------------------------------------- bytes


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
