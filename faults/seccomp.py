"""Stop a process at each system call that changes a disk, and let it go on, fail, or die there.

A filter of the kernel (seccomp(2), user notification) tells a supervisor of the calls before they are made. So calls of
every thread and library are seen, also those of C++ that no hook in Python reaches. Needs Linux >= 5.5, not root.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform
import struct
from contextlib import suppress
from dataclasses import dataclass

_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_NO_NEW_PRIVS, _SET_MODE_FILTER, _NEW_LISTENER = 38, 1, 8
_NOTIFY, _ALLOW = 0x7FC00000, 0x7FFF0000
_RECEIVE, _SEND = 0xC0502100, 0xC0182101
_CONTINUE = 1
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC

# By name: the numbers on x86-64 and arm64 (None: not there), and the arguments of the path that is changed, or of the
# descriptor: (directory, path), (None, path) or (descriptor,).
_CALLS: dict[str, tuple[int | None, int | None, tuple[int | None, ...]]] = {
    "write": (1, 64, (0,)),
    "pwrite64": (18, 68, (0,)),
    "writev": (20, 66, (0,)),
    "pwritev": (296, 70, (0,)),
    "pwritev2": (328, 287, (0,)),
    "sendfile": (40, 71, (0,)),
    "copy_file_range": (326, 285, (2,)),
    "ftruncate": (77, 46, (0,)),
    "fallocate": (285, 47, (0,)),
    "fsync": (74, 82, (0,)),
    "fdatasync": (75, 83, (0,)),
    "syncfs": (306, 267, (0,)),
    "fchmod": (91, 52, (0,)),
    "open": (2, None, (None, 0)),
    "openat": (257, 56, (0, 1)),
    "creat": (85, None, (None, 0)),
    "truncate": (76, 45, (None, 0)),
    "rename": (82, None, (None, 1)),
    "renameat": (264, 38, (2, 3)),
    "renameat2": (316, 276, (2, 3)),
    "unlink": (87, None, (None, 0)),
    "unlinkat": (263, 35, (0, 1)),
    "rmdir": (84, None, (None, 0)),
    "mkdir": (83, None, (None, 0)),
    "mkdirat": (258, 34, (0, 1)),
    "link": (86, None, (None, 1)),
    "linkat": (265, 37, (2, 3)),
    "symlinkat": (266, 36, (1, 2)),
    "chmod": (90, None, (None, 0)),
    "fchmodat": (268, 53, (0, 1)),
}
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}


def cannot() -> str:
    """Return why this machine cannot do it; nothing if it can."""
    if platform.machine() not in _MACHINES:
        return f"the numbers of system calls on {platform.machine()} are not known here"
    sizes = ctypes.create_string_buffer(6)
    number = 317 if platform.machine() == "x86_64" else 277
    if _LIBC.syscall(number, 3, 0, sizes) or struct.unpack("HHH", sizes.raw)[:2] != (80, 24):
        return "this kernel has no notifications of seccomp"
    return ""


def _numbers() -> dict[int, str]:
    column, _ = _MACHINES[platform.machine()]
    found = {row[column]: name for name, row in _CALLS.items()}
    return {number: name for number, name in found.items() if number is not None}


# --------------------------------------------------------------------------------------------- filter


def _program() -> bytes:
    """Return instructions (classic BPF) that report our calls; opens only if they may write."""
    _, architecture = _MACHINES[platform.machine()]
    load, equal, any_bit, give = 0x20, 0x15, 0x45, 0x06
    lines = [(load, 0, 0, 4), (equal, 1, 0, architecture), (give, 0, 0, _ALLOW), (load, 0, 0, 0)]
    for number, name in _numbers().items():
        if name in ("open", "openat"):
            flags = 16 + 8 * (1 if name == "open" else 2)
            lines += [
                (equal, 0, 4, number),
                (load, 0, 0, flags),
                (any_bit, 0, 1, _WRITES),
                (give, 0, 0, _NOTIFY),
                (give, 0, 0, _ALLOW),
            ]
        else:
            lines += [(equal, 0, 1, number), (give, 0, 0, _NOTIFY)]
    lines.append((give, 0, 0, _ALLOW))
    return b"".join(struct.pack("HBBI", *line) for line in lines)


def install() -> int:
    """Filter the calls of this thread and of all that it starts; return the descriptor that tells of them."""
    program = ctypes.create_string_buffer(_program())
    header = struct.pack("HxxxxxxQ", (len(program) - 1) // 8, ctypes.addressof(program))
    number = 317 if platform.machine() == "x86_64" else 277
    _LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    listener = _LIBC.syscall(number, _SET_MODE_FILTER, _NEW_LISTENER, header)
    if listener < 0:
        raise OSError(ctypes.get_errno(), f"seccomp: {os.strerror(ctypes.get_errno())}")
    return listener


# ----------------------------------------------------------------------------------------- supervisor


@dataclass(frozen=True, slots=True)
class Call:
    """A system call that waits for an answer."""

    listener: int
    id: int
    pid: int
    name: str
    arguments: tuple[int, ...]

    @classmethod
    def receive(cls, listener: int) -> Call | None:
        """Return the next call, None if the process that made it is gone."""
        buffer = bytearray(80)
        try:
            fcntl.ioctl(listener, _RECEIVE, buffer)
        except OSError:
            return None
        ident, pid, _, number, _, _, *arguments = struct.unpack("QIIiIQ6Q", buffer)
        return cls(listener, ident, pid, _numbers()[number], tuple(arguments))

    def answer(self, error: int = 0) -> None:
        """Let the call be made, or fail with an error number."""
        flags = 0 if error else _CONTINUE
        with suppress(OSError):  # killed in the meantime
            fcntl.ioctl(self.listener, _SEND, bytearray(struct.pack("QqiI", self.id, 0, -error, flags)))

    def is_below(self, folder: str) -> bool:
        where = self.path()
        return where == folder or where.startswith(f"{folder}/")

    def path(self) -> str:
        """Return the path of what would be changed, as far as it can be told."""
        *_, which = _CALLS[self.name]
        try:
            if len(which) == 1:
                return os.readlink(f"/proc/{self.pid}/fd/{self.arguments[which[0]]}")
            directory, path = which
            name = self._text(self.arguments[path])
            if name.startswith("/") or directory is None:
                return name
            descriptor = struct.unpack("i", struct.pack("I", self.arguments[directory] & 0xFFFFFFFF))[0]
            base = "cwd" if descriptor < 0 else f"fd/{descriptor}"
            return f"{os.readlink(f'/proc/{self.pid}/{base}')}/{name}"
        except OSError:
            return ""

    def _text(self, address: int) -> str:
        with open(f"/proc/{self.pid}/mem", "rb", buffering=0) as memory:
            memory.seek(address)
            data = memory.read(4096 - address % 4096)
            if b"\0" not in data:
                data += memory.read(4096)
        return os.fsdecode(data.partition(b"\0")[0])
