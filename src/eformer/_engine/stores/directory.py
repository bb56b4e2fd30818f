"""Open, list, create, move and remove files below an open directory. Every change of a save goes through here.

Links in the path of the caller are followed once, when the directory is opened. After that, names are looked up
relative to the descriptor, so swapping a directory on the path cannot redirect an operation. `Directory` follows no
link and crosses no mount. Readers may cross mounts, and may follow a link that ends below the directory or in the
blobs of a cache of Hugging Face.

Tests: tests/engine/stores/test_directory.py, tests/engine/stores/test_links.py, tests/engine/stores/test_neighbours.py,
tests/faults/test_read_only.py.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import os
import stat
import sys
import time
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from eformer._engine.record.names import is_inside
from eformer._engine.stores.answers import CALLS_THAT_READ
from eformer._engine.tasks import interrupts
from eformer.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from eformer._engine.stores.base import Kind, Version

logger = logging.getLogger("eformer")

# Errors of syncing a directory, on file systems without this, such as some network file systems.
_NO_DIRECTORY_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EACCES, errno.EPERM}
# Errors of locking on a file system without locks.
_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}
# Errors of a rename onto an existing name, and of a hard link on a file system without hard links.
_IN_THE_WAY = {errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR, errno.EISDIR}
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
# Errors of a path with a link, without following it: openat2 raises the first, O_DIRECTORY with O_NOFOLLOW the second.
_PERHAPS_A_LINK = {errno.ELOOP, errno.ENOTDIR}
# Errors of opening a socket: the second is that of macOS.
_A_SOCKET = {errno.ENXIO, errno.EOPNOTSUPP}
# Errors of writing without permission, or to a file system that is mounted read-only.
_READ_ONLY = {errno.EACCES, errno.EPERM, errno.EROFS}
# Errors of paths that do not exist.
_NO_SUCH_PATH = {*_PERHAPS_A_LINK, errno.ENAMETOOLONG}

# A directory below which other directories and files are opened. O_PATH: it need not be readable.
ON_THE_WAY = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC
_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FOLDER = _OPEN | os.O_NOFOLLOW
# O_NONBLOCK: opening a pipe or a device does not wait, so that it can be refused. O_NOCTTY: a terminal does not become
# the terminal of the process.
FILE = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_NOFOLLOW | os.O_CLOEXEC
_CREATE = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

_MOST_DEPTH = 400  # of directories; eformer never nests directories as deeply

MOST_AT_ONCE = 2**30  # bytes of a read or a write; macOS refuses 2 GiB and more


class Directory:
    """An open directory. Its methods take plain names, without slashes, and do not follow links.

    `where` is the path by which it was opened, as text for messages.
    """

    __slots__ = ("_can_be_read", "descriptor", "where")

    def __init__(self, path: Path | str, descriptor: int, *, can_be_read: bool = True) -> None:
        self.where, self.descriptor, self._can_be_read = path, descriptor, can_be_read

    @property
    def path(self) -> Path:
        """Return the path by which it was opened, for messages and for reading."""
        return Path(self.where)

    @classmethod
    def open(cls, path: Path) -> Directory:
        """Open the directory at a path that the caller named, following links in the path."""
        try:
            return cls(path, os.open(path, _OPEN))
        except PermissionError:  # a directory may allow creating files and forbid listing them
            return cls(path, os.open(path, ON_THE_WAY), can_be_read=False)

    def enter(self, path: str, depth: int = 0) -> Directory:
        """Open a directory below this one, "a" or "a/b", without following links.

        Raise NotADirectoryError if a name is a link or anything else but a directory. Raise another OSError at a mount
        point, even of the same file system, and if the directories are nested more deeply than eformer nests them.
        """
        _checked(path, self.where, "directory", is_path=True)
        if depth > _MOST_DEPTH:
            raise OSError(errno.ELOOP, "Directories are nested too deeply", str(self.path))
        try:
            descriptor = open_below(self.descriptor, path, _FOLDER, one_mount=True)
            return Directory(f"{self.where}/{path}", descriptor)
        except OSError as error:
            code = errno.ENOTDIR if error.errno == errno.ELOOP else error.errno
            raise OSError(code, os.strerror(code or 0), str(self.path / path)) from error

    def __enter__(self) -> Self:
        return self

    def close(self, *_: object) -> None:
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    __exit__ = close

    # ---------------------------------------------------------------------------------------- look

    def status(self, name: str) -> os.stat_result | None:
        """Return the status of an entry, without following a link. Return None if it does not exist."""
        try:
            return os.stat(_checked(name, self.where), dir_fd=self.descriptor, follow_symlinks=False)
        except FileNotFoundError:
            return None

    def has_directory(self, name: str) -> bool:
        status = self.status(name)
        return status is not None and stat.S_ISDIR(status.st_mode)

    def kinds(self) -> dict[str, Kind]:
        """List the entries, sorted by name, with their kinds. Links, pipes and devices are "other"."""
        if not self._can_be_read:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self.path))
        # Opened again, because btrfs lists the entries at the time of opening, and threads would share the position.
        return kinds_of(os.open(".", _OPEN, dir_fd=self.descriptor))

    def read(self, name: str, most: int) -> tuple[bytes, int]:
        """Read a small file. Return its bytes and the number of its owner.

        Raise FormatError for anything but a regular file, and for more than `most` bytes.
        """
        with Closing(open_beneath(self.descriptor, self.where, name, through_links=False)) as descriptor:
            status = os.fstat(descriptor)
            if status.st_size > most:
                raise FormatError(f"{self.path / name} has {status.st_size} bytes, more than {most}")
            return read_range(descriptor, 0, status.st_size), status.st_uid

    # -------------------------------------------------------------------------------------- create

    def create(self, name: str, flags: int = os.O_WRONLY) -> int:
        """Create a file and return its descriptor. Raise FileExistsError if the name is taken."""
        try:
            return os.open(_checked(name, self.where), flags | _CREATE, 0o666, dir_fd=self.descriptor)
        except OSError as error:
            self._explain(error)
            raise

    def make(self, name: str, *, usable: bool = False) -> None:
        """Make a directory. With `usable`, its owner can enter it and write to it, whatever the umask says."""
        try:
            os.mkdir(_checked(name, self.where), dir_fd=self.descriptor)
        except OSError as error:  # the error of the system has only the name, not the path
            self._explain(error)
            raise OSError(error.errno, error.strerror, str(self.path / name)) from error
        if usable and (status := self.status(name)) and status.st_mode & 0o700 != 0o700:
            set_mode(self, name, stat.S_IMODE(status.st_mode) | 0o700)

    def _explain(self, error: OSError) -> None:
        """Raise an error that says which calls work here, if this user cannot write to the directory."""
        if error.errno in _READ_ONLY:
            said = f"{error.strerror}: this user cannot write here; {CALLS_THAT_READ}"
            raise OSError(error.errno, said, str(self.path)) from None

    def link(self, name: str, target: Path | str) -> None:
        """Hard-link a file into this directory. The caller compares the new link with the file that it meant."""
        os.link(target, _checked(name, self.where), dst_dir_fd=self.descriptor, follow_symlinks=False)

    # ---------------------------------------------------------------------------------------- move

    def rename(self, name: str, target: Directory, final: str) -> None:
        """Move an entry to another name. A file of that name is replaced; if it is a link, the link is, not its
        target."""
        name, final = _checked(name, self.where), _checked(final, self.where)
        os.rename(name, final, src_dir_fd=self.descriptor, dst_dir_fd=target.descriptor)

    def put(self, name: str, target: Directory, final: str) -> None:
        """Move an entry to a name that is free or an empty directory. Raise FileExistsError otherwise."""
        name, final = _checked(name, self.where), _checked(final, self.where)
        try:
            if not self.has_directory(name):
                here, there = self.descriptor, target.descriptor
                try:  # a hard link never replaces an entry
                    return os.link(name, final, src_dir_fd=here, dst_dir_fd=there, follow_symlinks=False)
                except OSError as error:
                    if error.errno not in _NO_LINKS:
                        raise
                if target.status(final) is not None:
                    raise FileExistsError(errno.EEXIST, "already exists")
            self.rename(name, target, final)
        except OSError as error:
            if error.errno not in _IN_THE_WAY:
                raise
            raise FileExistsError(f"{target.path / final} already exists; choose another path") from error

    # -------------------------------------------------------------------------------------- remove

    def unlink(self, name: str) -> None:
        """Remove a file, or a link itself, if it exists."""
        with suppress(FileNotFoundError):
            os.unlink(_checked(name, self.where), dir_fd=self.descriptor)

    def remove_if_empty(self, name: str) -> None:
        try:
            os.rmdir(_checked(name, self.where), dir_fd=self.descriptor)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT, errno.ENOTDIR):
                raise

    # ------------------------------------------------------------------------------- sync and lock

    def sync(self) -> None:
        """Put the entries of the directory on stable storage, if the file system can do that."""
        if not self._can_be_read:
            return
        try:
            sync_opened(self.descriptor)
        except OSError as error:
            if error.errno not in _NO_DIRECTORY_SYNC:
                raise

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the directory for one thread of one process at a time. No lock file is made that could be left over.

        Raise FileNotFoundError if the path no longer leads to this directory.
        """
        if not self._can_be_read:  # it cannot be locked; only single files go there, which need no lock
            yield
            return
        # Opened again, because a lock belongs to the open file: two threads with one descriptor would share it.
        with Closing(os.open(".", _OPEN, dir_fd=self.descriptor)) as descriptor:
            try:
                lock(descriptor)
                if not os.path.samestat(os.stat(self.where), os.fstat(descriptor)):
                    raise FileNotFoundError(errno.ENOENT, "Directory was moved or replaced", str(self.path))
                yield
            finally:
                unlock(descriptor)


# macOS: fsync leaves the bytes in the cache of the drive, and this command empties it.
_FULL_SYNC: int | None = getattr(fcntl, "F_FULLFSYNC", None)
# Errors of file systems without this command, such as network file systems.
_NO_FULL_SYNC = {errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOTTY}


def sync_opened(descriptor: int, *, data_only: bool = False) -> None:
    """Put an open file or directory on stable storage; with `data_only`, the bytes and the length of a file."""
    if _FULL_SYNC is not None:
        try:
            fcntl.fcntl(descriptor, _FULL_SYNC)
            return
        except OSError as error:
            if error.errno not in _NO_FULL_SYNC:
                raise
    (os.fdatasync if data_only and hasattr(os, "fdatasync") else os.fsync)(descriptor)


def own_path(directory: Directory) -> Path:
    """Return a path that leads to this very directory, even if another directory gets its name. Where the system has no
    such path, return the path by which it was opened. Use it only while the directory is open."""
    path = Path(f"/proc/self/fd/{directory.descriptor}")
    return path if path.is_dir() else directory.path


def set_mode(directory: Directory, name: str, mode: int) -> None:
    """Set the permissions of a file or directory, never of a link's target."""
    name, folder = _checked(name, directory.path), directory.descriptor
    try:
        with Closing(os.open(name, FILE, dir_fd=folder)) as descriptor:
            os.chmod(descriptor, mode)
    except PermissionError:  # the umask makes it unreadable
        try:
            os.chmod(name, mode, dir_fd=folder, follow_symlinks=False)
        except ValueError:  # a C library before glibc 2.32, or a link
            flags = getattr(os, "O_PATH", os.O_RDONLY) | os.O_NOFOLLOW | os.O_CLOEXEC
            with Closing(os.open(name, flags, dir_fd=folder)) as descriptor:
                os.chmod(f"/proc/self/fd/{descriptor}", mode)  # not permitted for a link


# ----------------------------------------------------------------------------------- remove everything


def remove_opened(directory: Directory, name: str, inner: Directory) -> None:
    """Remove everything in an open directory, and the directory itself if it still has this name. Links are not
    followed.

    Raise OSError at a mount point, and at directories that are nested more deeply than eformer nests them; the rest
    stays then. Another entry that has got this name meanwhile stays, too. Another process may remove the same directory
    at the same time.
    """
    for folder, entry, kind in _contents(inner):
        with suppress(FileNotFoundError):
            (os.rmdir if kind == "directory" else os.unlink)(entry, dir_fd=folder.descriptor)
    directory.remove_if_empty(name)


def remove_entry(directory: Directory, name: str) -> None:
    """Remove a file, or a directory with everything in it."""
    if directory.has_directory(name):
        with directory.enter(name) as inner:
            remove_opened(directory, name, inner)
    else:
        directory.unlink(name)


def require_removable(directory: Directory, name: str) -> None:
    """Raise the error that removing a directory would raise because of its contents, and remove nothing."""
    with directory.enter(name) as inner:
        for _ in _contents(inner):
            pass


def _contents(directory: Directory, depth: int = 0) -> Iterator[tuple[Directory, str, Kind]]:
    """List everything below. Each entry comes with the open directory around it, and after its own contents."""
    for name, kind in directory.kinds().items():
        if kind == "directory":
            # An error means that another process has removed it.
            with suppress(FileNotFoundError), directory.enter(name, depth) as inner:
                yield from _contents(inner, depth + 1)
        yield directory, name, kind


# ------------------------------------------------------------------------------------------- reading


def open_inside(directory: Path, name: str) -> int:
    """Open the regular file `name` in or below the directory at the caller's path.

    Refuse a name or a link that leads out, and a pipe or a device, without waiting for it. Nothing outside of the
    directory is opened, not even to refuse it.
    """
    _checked(name, directory, "file", is_path=True)
    if "/" not in name:
        path = f"{directory}/{name}"
        try:
            return _regular(os.open(path, FILE), path)
        except OSError as error:
            if error.errno not in {*_A_SOCKET, errno.ELOOP, errno.ENAMETOOLONG}:  # ELOOP: a link
                raise
    with Closing(os.open(directory, ON_THE_WAY)) as base:
        return open_beneath(base, directory, name)


def open_beneath(base: int, directory: Path | str, name: str, *, through_links: bool = True) -> int:
    """Open the regular file `name` below `base`, the open descriptor of `directory`. Meant for loops over many
    files."""
    return _regular(_open(base, directory, name, FILE, through_links=through_links), f"{directory}/{name}")


def directory_inside(directory: Path, below: str) -> Path:
    """Return the path of a directory below another, for a library that reads by path. Refuse links."""
    _checked(below, directory, "directory", is_path=True)
    path = directory / below
    try:
        with Closing(os.open(directory, ON_THE_WAY)) as base:
            os.close(open_below(base, below, _FOLDER))
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} is missing") from None
    except OSError as error:
        if error.errno not in _NO_SUCH_PATH:
            raise
        raise FormatError(f"{path} is a link, or not a directory of the checkpoint") from error
    return path


def walk(directory: Path, below: str = "", levels: int = 0) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """List everything in a directory, or in a directory below it, by path, at most `levels` deep.

    Refuse a link at `below` that leads out. No other link is followed, not even a link that appears during the listing.
    An entry has no path of its own, and is valid until the next entry. Raise FormatError if directories are nested
    absurdly deep.
    """
    where = directory / below
    with Closing(open_folder(directory, below)) as top:
        todo = [("", 0)]
        while todo:
            outer, depth = todo.pop()
            if depth > _MOST_DEPTH:
                raise FormatError(f"{where} has directories that are nested more than {_MOST_DEPTH} deep")
            descriptor = _open(top, where, outer, _FOLDER, through_links=False) if outer else os.dup(top)
            prefix, depth = f"{outer}/" if outer else "", depth + 1
            with Closing(descriptor), os.scandir(descriptor) as entries:
                for entry in entries:
                    yield prefix + entry.name, entry
                    if depth != levels and entry.is_dir(follow_symlinks=False):
                        todo.append((prefix + entry.name, depth))


def open_folder(directory: Path, below: str = "") -> int:
    """Open a directory, or a directory below it. Refuse a link at `below` that leads out."""
    if not below:
        return os.open(directory, _OPEN)
    with Closing(os.open(directory, ON_THE_WAY)) as base:
        return _open(base, directory, below, _FOLDER)


def kinds_of(descriptor: int) -> dict[str, Kind]:
    """List an open directory, sorted by name, and close it. Links, pipes and devices are "other"."""
    kinds: dict[str, Kind] = {}
    with Closing(descriptor), os.scandir(descriptor) as entries:
        for entry in entries:
            is_file = entry.is_file(follow_symlinks=False)
            is_directory = not is_file and entry.is_dir(follow_symlinks=False)
            kinds[entry.name] = "file" if is_file else "directory" if is_directory else "other"
    return dict(sorted(kinds.items()))


def _checked(name: str, directory: Path | str, kind: Kind = "file", *, is_path: bool = False) -> str:
    """Return the name. Refuse a name that could lead out of the directory and, without `is_path`, a name with
    slashes."""
    is_plain = name not in ("", ".", "..") and "\0" not in name
    if not (is_path and is_inside(name) if "/" in name else is_plain):
        raise FormatError(f"{name[:200]!r} is not the name of a {kind} in {directory}")
    return name


def _open(base: int, directory: Path | str, name: str, flags: int, *, through_links: bool = True) -> int:
    """Open a file or a directory below a directory. Follow a link only if it ends below, or at a blob of Hugging Face's
    cache."""
    _checked(name, directory, "directory" if flags == _FOLDER else "file", is_path=True)
    try:
        try:
            return open_below(base, name, flags)
        except OSError as error:
            if not through_links or error.errno not in _PERHAPS_A_LINK:
                raise
            real = os.path.realpath(directory)
            end = os.path.realpath(f"{real}/{name}")
            if end == f"{real}/{name}":
                raise
        return _open_end(base, real, end, flags)
    except OSError as error:
        raise _refusal(f"{directory}/{name}", error) from error


def _open_end(base: int, real: str, end: str, flags: int) -> int:
    """Open the end of a link. Refuse links that appear on the way meanwhile."""
    if end.startswith(f"{real}/"):
        return open_below(base, end.removeprefix(f"{real}/"), flags)
    # The cache of Hugging Face keeps the files of snapshots/* in blobs/*.
    (outer, name), snapshots = os.path.split(end), os.path.dirname(real)
    if os.path.basename(snapshots) == "snapshots" and outer == f"{os.path.dirname(snapshots)}/blobs":
        with Closing(os.open(outer, ON_THE_WAY)) as blobs:
            return open_below(blobs, name, flags)
    raise OSError(errno.EXDEV, f"link to {end!r}, outside of the checkpoint")


def _regular(descriptor: int, path: Path | str) -> int:
    """Return the descriptor if it is a regular file. Close and refuse anything else."""
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise FormatError(f"{path} is not a regular file")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _refusal(path: str, error: OSError) -> Exception:
    """Return the error to raise, with the whole path: errors below a descriptor have only the name."""
    if error.errno in _A_SOCKET:
        return FormatError(f"{path} is not a regular file")
    if error.errno == errno.EXDEV:
        return FormatError(f"{path} is a {error.strerror}")
    if error.errno in _NO_SUCH_PATH:
        return FormatError(f"{path[:300]} cannot be a file of the checkpoint: {error.strerror}")
    return OSError(error.errno, error.strerror, path)


class Closing(int):
    """Closes a descriptor at the end of a block. A class, because a generator takes longer and loops do this for each
    file."""

    def __enter__(self) -> int:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self)


# ------------------------------------------------------------------------------------------- openat2

_ONE_MOUNT, _THROUGH_NO_LINK, _BENEATH = 0x01, 0x04, 0x08  # _BENEATH: ".." does not lead above the directory
_OPENAT2 = 437  # the number of the system call (Linux 5.6), on every architecture
_MISSING = {errno.ENOSYS, errno.EPERM, errno.EINVAL, errno.E2BIG}  # some containers forbid it


def function_of_libc(name: str, *arguments: Any) -> Callable[..., int] | None:
    """Return a function of the C library, with the types of its arguments; None if the library lacks it."""
    try:
        function: Callable[..., int] = getattr(ctypes.CDLL(None, use_errno=True), name)
    except (OSError, AttributeError):
        return None
    function.argtypes = arguments  # type: ignore[attr-defined]
    return function


_ARGUMENTS = (ctypes.c_long, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_size_t)
_syscall = function_of_libc("syscall", *_ARGUMENTS) if sys.platform == "linux" else None


@cache
def _how(flags: int, one_mount: bool) -> ctypes.Array[ctypes.c_uint64]:
    """Return the struct open_how: the flags of `os.open`, the mode of a new file, and the kinds of links and mounts to
    refuse."""
    return (ctypes.c_uint64 * 3)(flags, 0, _THROUGH_NO_LINK | _BENEATH | (_ONE_MOUNT if one_mount else 0))


def open_below(base: int, path: str, flags: int, *, one_mount: bool = False) -> int:
    """Open "a" or "a/b" below an open directory, with the flags of `os.open`, through no link.

    Raise OSError: ELOOP or ENOTDIR at a link and, with `one_mount`, EXDEV where something is mounted on the way.
    """
    name, how = os.fsencode(path), _how(flags, one_mount)
    while _syscall:
        if (found := _syscall(_OPENAT2, base, name, how, ctypes.sizeof(how))) >= 0:
            return found
        if (code := ctypes.get_errno()) in _MISSING:
            break
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code), path)
    return _open_step_by_step(base, path, flags, one_mount)


def _open_step_by_step(base: int, path: str, flags: int, one_mount: bool) -> int:
    """Open each name of the path in turn, where the system lacks openat2."""
    *outer, last = path.split("/")
    mount = _mount_of(base) if one_mount else None
    inner = os.dup(base)
    try:
        for name, how in (*((name, ON_THE_WAY) for name in outer), (last, flags)):
            outside, inner = inner, os.open(name, how | os.O_NOFOLLOW, dir_fd=inner)
            os.close(outside)
            if one_mount and _mount_of(inner) != mount:
                raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), path)
    except BaseException:
        os.close(inner)
        raise
    return inner


def _mount_of(descriptor: int) -> object:
    """Return an identity of the mount. The device would not do, because a bind mount has the device of its original."""
    try:
        with open(f"/proc/self/fdinfo/{descriptor}", "rb") as file:
            return next(line for line in file if line.startswith(b"mnt_id:"))
    except (OSError, StopIteration):  # not Linux
        return os.fstat(descriptor).st_dev


# --------------------------------------------------------------------------------------------- bytes


def read_into(descriptor: int, memory: memoryview, offset: int) -> int:
    """Fill `memory` from `offset` on. Return the number of bytes read, which is smaller only at the end of the file."""
    done = 0
    while done < len(memory) and (count := read_once(descriptor, memory[done:], offset + done)):
        done += count
    return done


def read_once(descriptor: int, memory: memoryview, offset: int) -> int:
    """Read into `memory` by one call, which may read less. Return the number of bytes."""
    memory = memory[:MOST_AT_ONCE]
    if hasattr(os, "preadv"):
        return os.preadv(descriptor, [memory], offset)
    data = os.pread(descriptor, len(memory), offset)  # macOS before version 11
    memory[: len(data)] = data
    return len(data)


def read_range(descriptor: int, offset: int, nbytes: int) -> bytes:
    """Read up to `nbytes` from `offset` on; fewer only at the end of the file."""
    chunks = []
    while nbytes > 0 and (chunk := os.pread(descriptor, min(nbytes, MOST_AT_ONCE), offset)):
        chunks.append(chunk)
        nbytes, offset = nbytes - len(chunk), offset + len(chunk)
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def version_of(status: os.stat_result) -> Version:
    """Return a version that tells a file from any later file, even with the same name and inode.

    The text after the last slash also changes with the number of links; the text before it only with the content.
    """
    return f"{status.st_dev}-{status.st_ino}-{status.st_size}-{status.st_mtime_ns}/{status.st_ctime_ns}"


def content_of(version: Version) -> str:
    """Return the part of a version that does not change when the file is linked."""
    return version.rpartition("/")[0]


# -------------------------------------------------------------------------------------------- locks


def lock(descriptor: int, *, shared: bool = False) -> None:
    """Wait for the lock of a file. Several descriptors may hold it `shared`; meanwhile `try_lock` raises."""
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    try:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)  # nearly always free
        except BlockingIOError:
            # The caller closes the descriptor after any error, which releases the lock.
            if interrupts.given_up.get():  # only a signal would interrupt the call of the system
                interrupts.wait_until(partial(_is_locked_after, descriptor, kind))
            else:
                interrupts.let_through(partial(fcntl.flock, descriptor, kind))
        _locked[descriptor] = os.fstat(descriptor)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        logger.debug(
            "this file system has no locks; do not save to one directory from several processes at once"
        )


def _is_locked_after(descriptor: int, kind: int, seconds: float | None) -> bool:
    """Wait, and tell whether the lock could be taken then."""
    time.sleep(seconds or 0)
    with suppress(BlockingIOError):
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        return True
    return False


def try_lock(descriptor: int) -> None:
    """Take the lock of a file, or raise OSError if another process or thread holds it."""
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    _locked[descriptor] = os.fstat(descriptor)


def unlock(descriptor: int) -> None:
    """Release the lock of a file. Closing the file is not enough, because a child that was forked meanwhile has it
    open, too."""
    _locked.pop(descriptor, None)
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)


# The descriptors that hold locks, and their files.
_locked: dict[int, os.stat_result] = {}


def _let_go_in_child() -> None:
    """Let a forked child hold no lock of its parent: if the parent is killed, its lock would live as long as the child.

    The child must not unlock the files either, because parent and child share one lock. It closes its copies, and puts
    the null device in their places, so that code of the parent that goes on here finds no file of another kind.
    """
    for descriptor, file in _locked.items():
        with suppress(OSError):
            # Otherwise the descriptor was closed, and its number is used again.
            if os.path.samestat(os.fstat(descriptor), file):
                null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
                os.dup2(null, descriptor, inheritable=False)
                os.close(null)
    _locked.clear()


os.register_at_fork(after_in_child=_let_go_in_child)
