"""Open files and directories below an open directory by one system call, without leaving it (Linux 5.6)."""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

NO_OTHER_MOUNTS = 0x01
NO_MAGIC_LINKS = 0x02
NO_LINKS = 0x04
BENEATH = 0x08  # links, and names such as "..", may not lead above the directory

_OPENAT2 = 437  # the number of the system call, on every architecture
_MISSING = {errno.ENOSYS, errno.EPERM, errno.EINVAL, errno.E2BIG}  # some containers forbid it


class How(ctypes.Structure):
    """How to open: the flags of `os.open`, the mode of a new file, and what the way to it may not have."""

    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


def _load_syscall() -> Callable[..., int] | None:
    try:
        syscall = ctypes.CDLL(None, use_errno=True).syscall
    except (OSError, AttributeError):
        return None
    syscall.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_size_t]
    syscall.restype = ctypes.c_long
    return syscall


_syscall = _load_syscall() if sys.platform == "linux" else None
_SIZE = ctypes.sizeof(How)


def openat2(directory: int, path: str, how: How) -> int:
    """Return a descriptor, or an error number below zero: -ENOSYS where there is no such call."""
    if _syscall is None:
        return -errno.ENOSYS
    name = os.fsencode(path)
    while True:
        found = _syscall(_OPENAT2, directory, name, ctypes.byref(how), _SIZE)
        if found >= 0:
            return found
        code = ctypes.get_errno()
        if code != errno.EINTR:
            return -code


def is_missing(code: int) -> bool:
    """Tell whether an error number of `openat2` means that the call does not exist here, or is forbidden."""
    return -code in _MISSING
