"""An open directory: everything that a save creates, moves or removes goes through one, and never through a link.

The path that the caller gives may lead through links; opening it is the only time that they are followed. From then on
names are looked up under the descriptor, so that a link that lies below, or a directory that is swapped meanwhile,
leads nowhere.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import stat
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Literal, Self

from eformer._engine.record.names import is_inside
from eformer.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

logger = logging.getLogger("eformer")

Kind = Literal["file", "directory", "other"]

# Errors of a directory that cannot be synced: some network file systems.
_NO_DIRECTORY_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EACCES, errno.EPERM}
# Errors of a file system without locks.
_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL}
# Errors of a rename onto something that exists, and of a hard link on a file system without any.
_IN_THE_WAY = {errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR, errno.EISDIR}
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}

_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_CREATE = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

_MOST_DEPTH = 400  # of what is removed; no tree of ours is nested as deeply
_MOST_SMALL = 2**31


class Directory:
    """A directory that is open. Names that its methods take are names in it; no link is followed."""

    __slots__ = ("_can_be_read", "descriptor", "path")

    def __init__(self, path: Path, descriptor: int, *, can_be_read: bool = True) -> None:
        self.path, self.descriptor, self._can_be_read = path, descriptor, can_be_read

    @classmethod
    def open(cls, path: Path) -> Directory:
        """Open the directory at a path that the caller named, through whatever links there are in it."""
        try:
            return cls(path, os.open(path, _OPEN))
        except PermissionError:  # one may be allowed to create files in it, but not to list them
            if not hasattr(os, "O_PATH"):
                raise
            return cls(path, os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC), can_be_read=False)

    def enter(self, name: str) -> Directory:
        """Open a directory below this one, each step of the way without following a link.

        Raises NotADirectoryError where one of the names is a link, or anything else but a directory.
        """
        if not is_inside(name):
            raise FormatError(f"{name[:200]!r} is not the name of a directory in {self.path}")
        descriptor = -1
        for part in name.split("/"):
            outer = self.descriptor if descriptor < 0 else descriptor
            try:
                inner = os.open(part, _OPEN | os.O_NOFOLLOW, dir_fd=outer)
            except OSError as error:
                code = errno.ENOTDIR if error.errno == errno.ELOOP else error.errno
                raise OSError(code, error.strerror, str(self.path / name)) from error
            finally:
                if descriptor >= 0:
                    os.close(descriptor)
            descriptor = inner
        return Directory(self.path / name, descriptor)

    def close(self) -> None:
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---------------------------------------------------------------------------------------- look

    @property
    def inode(self) -> int:
        return os.fstat(self.descriptor).st_ino

    def status(self, name: str) -> os.stat_result | None:
        """What is there under this name, itself and not what it leads to; None if nothing is."""
        try:
            return os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)
        except FileNotFoundError:
            return None

    def has_directory(self, name: str) -> bool:
        status = self.status(name)
        return status is not None and stat.S_ISDIR(status.st_mode)

    def kinds(self) -> dict[str, Kind]:
        """The names in it, sorted, and what each of them is: links, pipes and devices are "other"."""
        kinds: dict[str, Kind] = {}
        with os.scandir(self.descriptor) as entries:
            for entry in entries:
                is_file = entry.is_file(follow_symlinks=False)
                is_directory = not is_file and entry.is_dir(follow_symlinks=False)
                kinds[entry.name] = "file" if is_file else "directory" if is_directory else "other"
        return dict(sorted(kinds.items()))

    def read(self, name: str) -> bytes:
        """The whole of a small regular file."""
        descriptor = os.open(
            name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=self.descriptor
        )
        with open(descriptor, "rb", buffering=0) as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_size > _MOST_SMALL:
                raise FormatError(f"{self.path / name} is not a small regular file")
            return file.read()

    # -------------------------------------------------------------------------------------- create

    def create(self, name: str, flags: int = os.O_WRONLY) -> int:
        """A descriptor of a new file; raises FileExistsError if there is anything of this name."""
        return os.open(name, flags | _CREATE, 0o666, dir_fd=self.descriptor)

    def make(self, name: str) -> None:
        os.mkdir(name, dir_fd=self.descriptor)

    def link(self, name: str, target: Path | str, nbytes: int) -> None:
        """Give a regular file of this length another name, here."""
        os.link(target, name, dst_dir_fd=self.descriptor, follow_symlinks=False)
        status = self.status(name)
        if status is None or not stat.S_ISREG(status.st_mode) or status.st_size != nbytes:
            self.unlink(name)
            raise FormatError(f"{target} is no file of {nbytes} bytes")

    # ---------------------------------------------------------------------------------------- move

    def rename(self, name: str, target: Directory, final: str) -> None:
        """Move something to a name that is free, or that of a file or link whose place it takes."""
        os.rename(name, final, src_dir_fd=self.descriptor, dst_dir_fd=target.descriptor)

    def replace(self, name: str, final: str) -> None:
        """Put a file in the place of another; a link is replaced, and what it leads to stays as it is."""
        os.replace(name, final, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)

    def put(self, name: str, target: Directory, final: str) -> None:
        """Move something to where nothing is, or an empty directory; else raises FileExistsError."""
        try:
            if self.has_directory(name):
                self.rename(name, target, final)
            else:
                self._link_or_rename(name, target, final)
        except OSError as error:
            if error.errno not in _IN_THE_WAY:
                raise
            raise FileExistsError(f"{target.path / final} is there by now; choose another path") from error

    def _link_or_rename(self, name: str, target: Directory, final: str) -> None:
        """A link never takes another's place; not all file systems have them."""
        try:
            os.link(
                name,
                final,
                src_dir_fd=self.descriptor,
                dst_dir_fd=target.descriptor,
                follow_symlinks=False,
            )
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            if target.status(final) is not None:
                raise FileExistsError(errno.EEXIST, "is there", str(target.path / final)) from error
            self.rename(name, target, final)

    # -------------------------------------------------------------------------------------- remove

    def unlink(self, name: str) -> None:
        """Remove a file, or a link itself, if it is there."""
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.descriptor)

    def remove_if_empty(self, name: str) -> None:
        try:
            os.rmdir(name, dir_fd=self.descriptor)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT, errno.ENOTDIR):
                raise

    def remove_tree(self, name: str) -> None:
        """Remove a directory with all that is below it. Links are removed, not followed; another file system that is
        mounted there, and what is nested too deeply to be ours, is an error."""
        device = os.fstat(self.descriptor).st_dev
        with self.enter(name) as inner:
            inner._empty(device, 0)
        os.rmdir(name, dir_fd=self.descriptor)

    def _empty(self, device: int, depth: int) -> None:
        if os.fstat(self.descriptor).st_dev != device:
            raise OSError(errno.EXDEV, "is on another file system", str(self.path))
        if depth > _MOST_DEPTH:
            raise OSError(errno.ELOOP, "is nested too deeply", str(self.path))
        for name, kind in self.kinds().items():
            if kind == "directory":
                with self.enter(name) as inner:
                    inner._empty(device, depth + 1)
                os.rmdir(name, dir_fd=self.descriptor)
            else:
                os.unlink(name, dir_fd=self.descriptor)

    # ------------------------------------------------------------------------------- sync and lock

    def sync(self) -> None:
        """Put the names in it on stable storage, where the file system can do that."""
        if not self._can_be_read:
            return
        try:
            os.fsync(self.descriptor)
        except OSError as error:
            if error.errno not in _NO_DIRECTORY_SYNC:
                raise

    @contextmanager
    def locked(self) -> Iterator[None]:
        """One thread of one process at a time. The lock is on the directory itself, so nothing stays behind.

        Raises FileNotFoundError if the directory is no longer the one that its path leads to.
        """
        descriptor = os.open(".", _OPEN, dir_fd=self.descriptor)  # a lock belongs to who has opened it
        try:
            lock(descriptor)
            if not os.path.samestat(os.stat(self.path), os.fstat(descriptor)):
                raise FileNotFoundError(
                    errno.ENOENT, "was moved away, and something else is there", str(self.path)
                )
            yield
        finally:
            unlock(descriptor)
            os.close(descriptor)


def lock(descriptor: int, *, shared: bool = False) -> None:
    """Waits for it. Several may hold it `shared`; as long as one does, `try_lock` raises."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        logger.debug(
            "this file system has no locks: do not save to one directory from several processes at once"
        )


def try_lock(descriptor: int) -> None:
    """Raises if somebody else holds it."""
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def unlock(descriptor: int) -> None:
    """Closing would do, but for children: one that was forked meanwhile holds the file, and so the lock, too."""
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
