"""Create, move and remove files in an open directory, without following links. Every change of a save goes through it.

Links in the path that the caller gives are followed once, when the directory is opened. After that, names are looked up
relative to the descriptor, so a link below the directory, or a directory that is swapped meanwhile, cannot redirect an
operation.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import stat
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Self

from eformer._engine.record.names import is_inside
from eformer._engine.stores.openat2 import (
    BENEATH,
    NO_LINKS,
    NO_MAGIC_LINKS,
    NO_OTHER_MOUNTS,
    How,
    is_missing,
    openat2,
)
from eformer._engine.tasks.interrupts import let_through
from eformer.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from eformer._engine.stores.base import Kind

logger = logging.getLogger("eformer")

# Errors of syncing a directory on file systems that cannot, such as some network file systems.
_NO_DIRECTORY_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EACCES, errno.EPERM}
# Errors of locking on a file system without locks.
_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL}
# Errors of a rename onto something that exists, and of a hard link on a file system without any.
_IN_THE_WAY = {errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR, errno.EISDIR}
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}

_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_CREATE = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

_MOST_DEPTH = 400  # of directories to remove; those written by eformer are never nested as deeply


class Directory:
    """An open directory. Its methods take plain names, without slashes, and do not follow links."""

    __slots__ = ("_can_be_read", "_where", "descriptor")

    def __init__(self, path: Path | str, descriptor: int, *, can_be_read: bool = True) -> None:
        self._where, self.descriptor, self._can_be_read = path, descriptor, can_be_read

    @property
    def path(self) -> Path:
        """Return the path by which it was opened, for messages and for reading."""
        return Path(self._where)

    @property
    def own_path(self) -> Path:
        """Return a path that leads to this very directory, whatever is given its name meanwhile; where the system has
        none, the path by which it was opened. It must not be used when the directory is closed."""
        path = Path(f"/proc/self/fd/{self.descriptor}")
        return path if path.is_dir() else self.path

    @classmethod
    def open(cls, path: Path) -> Directory:
        """Open the directory at a path that the caller named, following links in the path."""
        try:
            return cls(path, os.open(path, _OPEN))
        except PermissionError:  # perhaps files may be created in it, but not listed
            if not hasattr(os, "O_PATH"):
                raise
            return cls(path, os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC), can_be_read=False)

    def enter(self, path: str) -> Directory:
        """Open a directory below this one, "a" or "a/b", without following links.

        Raise NotADirectoryError if one of the names is a link or anything else but a directory, and another OSError if
        another file system, or another part of this one, is mounted on the way.
        """
        if not is_inside(path):
            raise FormatError(f"{path[:200]!r} is not the name of a directory in {self.path}")
        try:
            return Directory(f"{self._where}/{path}", _open_below(self.descriptor, path))
        except OSError as error:
            code = errno.ENOTDIR if error.errno == errno.ELOOP else error.errno
            raise OSError(code, os.strerror(code or 0), str(self.path / path)) from error

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
        """Return the status of an entry; of the link itself if it is one. Return None if it does not exist."""
        try:
            return os.stat(self._plain(name), dir_fd=self.descriptor, follow_symlinks=False)
        except FileNotFoundError:
            return None

    def target(self, name: str) -> os.stat_result | None:
        """Return the status of the target of a link, without opening it; None if it has none."""
        try:
            return os.stat(self._plain(name), dir_fd=self.descriptor)
        except OSError:
            return None

    def has_directory(self, name: str) -> bool:
        status = self.status(name)
        return status is not None and stat.S_ISDIR(status.st_mode)

    def kinds(self) -> dict[str, Kind]:
        """List the entries, sorted by name, with their kinds. Links, pipes and devices are "other"."""
        if not self._can_be_read:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self.path))
        kinds: dict[str, Kind] = {}
        # Opened again: btrfs lists what a directory had when it was opened, and threads would share the position.
        descriptor = os.open(".", _OPEN, dir_fd=self.descriptor)
        try:
            with os.scandir(descriptor) as entries:
                for entry in entries:
                    is_file = entry.is_file(follow_symlinks=False)
                    is_directory = not is_file and entry.is_dir(follow_symlinks=False)
                    kinds[entry.name] = "file" if is_file else "directory" if is_directory else "other"
        finally:
            os.close(descriptor)
        return dict(sorted(kinds.items()))

    def read(self, name: str, most: int) -> bytes:
        """Read a small regular file. Raise FormatError for anything else, and for more than `most` bytes."""
        return self.read_owned(name, most)[0]

    def read_owned(self, name: str, most: int) -> tuple[bytes, int]:
        """Do the same, and return the number of the user whose file it is, too."""
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            descriptor = os.open(self._plain(name), flags, dir_fd=self.descriptor)
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.ENXIO):  # a link, a socket
                raise
            raise FormatError(f"{self.path / name} is not a regular file") from error
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise FormatError(f"{self.path / name} is not a regular file")
            if status.st_size > most:
                raise FormatError(f"{self.path / name} has {status.st_size} bytes, more than {most}")
            data = b""
            while chunk := os.read(descriptor, status.st_size + 1):
                data += chunk
            return data, status.st_uid
        finally:
            os.close(descriptor)

    def _plain(self, name: str) -> str:
        """Return the name; refuse one that could lead out of the directory."""
        if "/" in name or name in ("", "..") or "\0" in name:
            raise FormatError(f"{name[:200]!r} is not the name of a file in {self.path}")
        return name

    # -------------------------------------------------------------------------------------- create

    def create(self, name: str, flags: int = os.O_WRONLY) -> int:
        """Create a file and return its descriptor. Raise FileExistsError if the name is taken."""
        return os.open(self._plain(name), flags | _CREATE, 0o666, dir_fd=self.descriptor)

    def make(self, name: str, *, usable: bool = False) -> None:
        """Make a directory; a `usable` one can be entered and written to by its owner, whatever the umask says."""
        try:
            os.mkdir(self._plain(name), dir_fd=self.descriptor)
        except OSError as error:  # which names no more than the name
            raise OSError(error.errno, error.strerror, str(self.path / name)) from error
        if usable and (status := self.status(name)) and status.st_mode & 0o700 != 0o700:
            self.set_mode(name, stat.S_IMODE(status.st_mode) | 0o700)

    def set_mode(self, name: str, mode: int) -> None:
        """Set the permissions of a file or directory, and never those of a link's target."""
        flags = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            descriptor = os.open(self._plain(name), os.O_RDONLY | flags, dir_fd=self.descriptor)
            change: int | str = descriptor
        except PermissionError:  # the umask lets nobody read it
            if not hasattr(os, "O_PATH"):
                raise
            descriptor = os.open(self._plain(name), os.O_PATH | flags, dir_fd=self.descriptor)
            change = f"/proc/self/fd/{descriptor}"  # which is not permitted for a link
        try:
            os.chmod(change, mode)
        finally:
            os.close(descriptor)

    def link(self, name: str, target: Path | str, nbytes: int) -> None:
        """Hard-link a regular file into this directory. Refuse a file of another length."""
        os.link(target, self._plain(name), dst_dir_fd=self.descriptor, follow_symlinks=False)
        status = self.status(name)
        if status is None or not stat.S_ISREG(status.st_mode) or status.st_size != nbytes:
            self.unlink(name)
            raise FormatError(f"{target} is not a regular file of {nbytes} bytes")

    # ---------------------------------------------------------------------------------------- move

    def rename(self, name: str, target: Directory, final: str) -> None:
        """Move an entry to another name. A file or link of that name is replaced."""
        os.rename(
            self._plain(name),
            self._plain(final),
            src_dir_fd=self.descriptor,
            dst_dir_fd=target.descriptor,
        )

    def replace(self, name: str, final: str) -> None:
        """Replace a file by another one. A link is replaced itself; its target stays as it is."""
        os.replace(
            self._plain(name),
            self._plain(final),
            src_dir_fd=self.descriptor,
            dst_dir_fd=self.descriptor,
        )

    def put(self, name: str, target: Directory, final: str) -> None:
        """Move an entry to a name that is free or an empty directory. Raise FileExistsError otherwise."""
        try:
            if self.has_directory(name):
                self.rename(name, target, final)
            else:
                self._link_or_rename(name, target, final)
        except OSError as error:
            if error.errno not in _IN_THE_WAY:
                raise
            raise FileExistsError(f"{target.path / final} already exists; choose another path") from error

    def _link_or_rename(self, name: str, target: Directory, final: str) -> None:
        """Move a file by a hard link, which never replaces anything; rename it on file systems without hard links."""
        try:
            os.link(
                self._plain(name),
                self._plain(final),
                src_dir_fd=self.descriptor,
                dst_dir_fd=target.descriptor,
                follow_symlinks=False,
            )
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            if target.status(final) is not None:
                raise FileExistsError(errno.EEXIST, "already exists", str(target.path / final)) from error
            self.rename(name, target, final)

    # -------------------------------------------------------------------------------------- remove

    def unlink(self, name: str) -> None:
        """Remove a file, or a link itself, if it exists."""
        with suppress(FileNotFoundError):
            os.unlink(self._plain(name), dir_fd=self.descriptor)

    def remove_if_empty(self, name: str) -> None:
        try:
            os.rmdir(self._plain(name), dir_fd=self.descriptor)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT, errno.ENOTDIR):
                raise

    def remove_tree(self, name: str) -> None:
        """Remove a directory and everything below it. Links are removed, not followed.

        Raise OSError at a mount point, and at directories that are nested too deeply to be written by eformer;
        everything that was not removed before stays. Another process may remove it at the same time.
        """
        with self.enter(name) as inner:
            inner.empty()
        with suppress(FileNotFoundError):
            os.rmdir(name, dir_fd=self.descriptor)

    def remove_opened(self, name: str, inner: Directory) -> None:
        """Remove everything in an open directory, and the directory if it still has this name.

        Whatever else has been given that name meanwhile stays.
        """
        inner.empty()
        self.remove_if_empty(name)

    def empty(self) -> None:
        """Remove everything in the directory, as `remove_tree` does."""
        self._empty(0)

    def _empty(self, depth: int) -> None:
        for name, kind in self.kinds().items():
            with suppress(FileNotFoundError):
                if kind == "directory":
                    with self.deeper(name, depth) as inner:
                        inner._empty(depth + 1)
                    os.rmdir(name, dir_fd=self.descriptor)
                else:
                    os.unlink(name, dir_fd=self.descriptor)

    def require_removable(self, name: str) -> None:
        """Raise the error that `remove_tree` would raise because of the contents, before anything is removed."""
        with self.enter(name) as inner:
            inner._look_through(0)

    def _look_through(self, depth: int) -> None:
        for name, kind in self.kinds().items():
            if kind == "directory":
                with self.deeper(name, depth) as inner:
                    inner._look_through(depth + 1)

    def deeper(self, name: str, depth: int) -> Directory:
        """Open a directory in this one. Raise OSError if it is nested too deeply to be written by eformer."""
        if depth > _MOST_DEPTH:
            raise OSError(errno.ELOOP, "Directories are nested too deeply", str(self.path))
        return self.enter(name)

    # ------------------------------------------------------------------------------- sync and lock

    def sync(self) -> None:
        """Put its entries on stable storage, if the file system can do that."""
        if not self._can_be_read:
            return
        try:
            os.fsync(self.descriptor)
        except OSError as error:
            if error.errno not in _NO_DIRECTORY_SYNC:
                raise

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the directory for one thread of one process at a time. There is no lock file that could be left over.

        Raise FileNotFoundError if the directory is no longer the one that its path leads to.
        """
        if not self._can_be_read:  # it cannot be locked, nor hold more than single files, which need no lock
            yield
            return
        descriptor = os.open(".", _OPEN, dir_fd=self.descriptor)  # locks belong to open files, not to callers
        try:
            lock(descriptor)
            if not os.path.samestat(os.stat(self.path), os.fstat(descriptor)):
                raise FileNotFoundError(errno.ENOENT, "Directory was moved or replaced", str(self.path))
            yield
        finally:
            unlock(descriptor)
            os.close(descriptor)


# ------------------------------------------------------------------------------------------ openat2


_RESOLVE = NO_OTHER_MOUNTS | NO_MAGIC_LINKS | NO_LINKS | BENEATH
_HOW = How(_OPEN | os.O_NOFOLLOW, 0, _RESOLVE)


def _open_below(descriptor: int, path: str) -> int:
    """Open a directory below another, without following links or crossing a mount point."""
    found = openat2(descriptor, path, _HOW)
    if found >= 0:
        return found
    if is_missing(found):
        return _step_by_step(descriptor, path)
    raise OSError(-found, os.strerror(-found), path)


def _step_by_step(descriptor: int, path: str) -> int:
    """Do the same name by name, without openat2."""
    mount, inner = _mount_of(descriptor), os.dup(descriptor)
    for name in path.split("/"):
        outer = inner
        try:
            inner = os.open(name, _OPEN | os.O_NOFOLLOW, dir_fd=outer)
        finally:
            os.close(outer)
        if _mount_of(inner) != mount:
            os.close(inner)
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), path)
    return inner


def _mount_of(descriptor: int) -> object:
    """Return an identity of the mount. The device would not do: a bind mount has that of the original."""
    try:
        with open(f"/proc/self/fdinfo/{descriptor}", "rb") as file:
            return next(line for line in file if line.startswith(b"mnt_id:"))
    except (OSError, StopIteration):  # not Linux
        return os.fstat(descriptor).st_dev


# -------------------------------------------------------------------------------------------- locks


def lock(descriptor: int, *, shared: bool = False) -> None:
    """Wait for the lock of a file. Several may hold it `shared`; as long as one does, `try_lock` raises."""
    try:
        # The caller closes the descriptor after any error, which releases the lock.
        let_through(lambda: fcntl.flock(descriptor, fcntl.LOCK_SH if shared else fcntl.LOCK_EX))
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        logger.debug(
            "this file system has no locks; do not save to one directory from several processes at once"
        )


def try_lock(descriptor: int) -> None:
    """Take the lock of a file, or raise OSError if another process or thread holds it."""
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def unlock(descriptor: int) -> None:
    """Release the lock of a file. Closing it is not enough: a child that was forked meanwhile holds the file, too."""
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
