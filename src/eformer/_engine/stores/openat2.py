"""Open files and directories below an open directory, through no link: by openat2 (Linux 5.6), or name by name."""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

# A directory that others are opened below. O_PATH: it need not be readable.
ON_THE_WAY = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC

_ONE_MOUNT, _NO_LINKS, _BENEATH = 0x01, 0x04, 0x08  # _BENEATH: names such as ".." do not lead above it
_OPENAT2 = 437  # the number of the system call, on every architecture
_MISSING = {errno.ENOSYS, errno.EPERM, errno.EINVAL, errno.E2BIG}  # some containers forbid it


def _load_syscall() -> Callable[..., int] | None:
    try:
        syscall = ctypes.CDLL(None, use_errno=True).syscall
    except (OSError, AttributeError):
        return None
    syscall.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_size_t]
    syscall.restype = ctypes.c_long
    return syscall


_syscall = _load_syscall() if sys.platform == "linux" else None


@cache
def _how(flags: int, one_mount: bool) -> ctypes.Array[ctypes.c_uint64]:
    """Return the struct open_how: the flags of `os.open`, the mode of a new file, and what may not be on the way."""
    return (ctypes.c_uint64 * 3)(flags, 0, _NO_LINKS | _BENEATH | (_ONE_MOUNT if one_mount else 0))


def open_below(base: int, path: str, flags: int, *, one_mount: bool = False) -> int:
    """Open "a" or "a/b" below an open directory, with the flags of `os.open`.

    Raise OSError: ELOOP or ENOTDIR at a link and, with `one_mount`, EXDEV where something is mounted on the way.
    """
    if _syscall is None:
        return _open_step_by_step(base, path, flags, one_mount)
    name, how = os.fsencode(path), _how(flags, one_mount)
    while (found := _syscall(_OPENAT2, base, name, how, ctypes.sizeof(how))) < 0:
        code = ctypes.get_errno()
        if code in _MISSING:
            return _open_step_by_step(base, path, flags, one_mount)
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code), path)
    return found


def _open_step_by_step(base: int, path: str, flags: int, one_mount: bool) -> int:
    """Open each name of the path in turn, without the system call."""
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
    """Return an identity of the mount. The device would not do: a bind mount has that of the original."""
    try:
        with open(f"/proc/self/fdinfo/{descriptor}", "rb") as file:
            return next(line for line in file if line.startswith(b"mnt_id:"))
    except (OSError, StopIteration):  # not Linux
        return os.fstat(descriptor).st_dev
