"""Notice what an input must never cause: anything outside opened or changed, programs started, memory without bound."""

from __future__ import annotations

import ctypes
import os
import resource
import struct
import sys
from pathlib import Path
from typing import Any

_ALL_EVENTS = 0xFFF
_NONBLOCK = os.O_NONBLOCK
_EVENT = struct.Struct("iIII")
_FORBIDDEN = (
    "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "pickle.find_class",
    "socket.connect", "socket.bind", "shutil.chown", "os.symlink", "marshal.loads", "marshal.load", "marshal.dumps",
)  # fmt: skip
_CHANGES = (
    "os.remove",
    "os.rename",
    "os.mkdir",
    "os.rmdir",
    "os.truncate",
    "os.link",
    "os.utime",
    "os.chmod",
)


class OutsideError(Exception):
    """An input has caused something outside of its directory."""


class Guard:
    """Watch the process: by an audit hook for Python, and by inotify for the directory beside that of the case."""

    def __init__(self, root: Path) -> None:
        self.root = str(root)
        self.is_on = False
        self.seen: list[str] = []
        self._allowed = tuple(
            {
                self.root,
                sys.prefix,
                sys.base_prefix,
                str(Path(__file__).parents[2]),
                "/proc/",
                "/sys/",
                "/dev/null",
                "/dev/urandom",
            }
            | {path for path in sys.path if path}
        )
        outside = root / "outside"
        outside.mkdir(exist_ok=True)
        (outside / "secret").write_bytes(b"secret")
        (outside / "secret.safetensors").write_bytes(b"secret")
        self._watch = _inotify(outside)
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.is_on:
            return
        if event in _FORBIDDEN and not _is_import() and not _reads_hdf5(event, arguments):
            self.seen.append(f"{event}{arguments!r:.300}")
        elif event == "open" or event in _CHANGES:
            for path in arguments[:2] if event in ("os.rename", "os.link") else arguments[:1]:
                self._look(event, path)

    def _look(self, event: str, path: Any) -> None:
        if isinstance(path, bytes):
            path = os.fsdecode(path)
        if not isinstance(path, str):
            return
        is_out = ".." in path.split("/") or path.startswith(f"{self.root}/outside")
        if is_out or (path.startswith("/") and not path.startswith(self._allowed)):
            self.seen.append(f"{event} of {path[:300]}")

    def check(self) -> None:
        """Raise if anything was noticed since the last call."""
        try:
            data = os.read(self._watch, 65536)
        except BlockingIOError:
            data = b""
        if data:
            mask = _EVENT.unpack_from(data)[1]
            self.seen.append(f"inotify: something was done with a file outside, mask {mask:#x}")
        if self.seen:
            seen, self.seen = self.seen, []
            raise OutsideError("; ".join(seen[:5]))


def _reads_hdf5(event: str, arguments: tuple[Any, ...]) -> bool:
    """Tell whether this starts the one program that eformer starts."""
    return event == "subprocess.Popen" and any("hdf5_reader import main" in str(one) for one in arguments[1])


def _is_import() -> bool:
    """Tell whether a module is being imported, which reads compiled code."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def _inotify(directory: Path) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = libc.inotify_init1(_NONBLOCK)
    if descriptor < 0 or libc.inotify_add_watch(descriptor, os.fsencode(directory), _ALL_EVENTS) < 0:
        raise OSError(ctypes.get_errno(), "inotify")
    return descriptor


def limit_memory(more: int) -> None:
    """Let this process have so many bytes more than it has now."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + more
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
