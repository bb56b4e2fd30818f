"""Watch which files and directories are opened, by whatever library: Linux tells."""

import ctypes
import os
import struct
from pathlib import Path

_IN_OPEN = 0x20
_EVENT = struct.Struct("iIII")

_libc = ctypes.CDLL(None, use_errno=True)


class Opens:
    """Everything at and below some paths. `seen` lists what was opened since."""

    def __init__(self, *tops: Path) -> None:
        self._descriptor = _libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        assert self._descriptor >= 0
        paths = [path for top in tops for path in (top, *top.rglob("*")) if not path.is_symlink()]
        self._paths = {self._watch(path): path for path in paths}

    def _watch(self, path: Path) -> int:
        number = _libc.inotify_add_watch(self._descriptor, os.fsencode(path), _IN_OPEN)
        assert number >= 0, os.strerror(ctypes.get_errno())
        return number

    def seen(self) -> list[str]:
        found = set()
        while data := self._read():
            while data:
                number, _, _, length = _EVENT.unpack_from(data)
                found.add(str(self._paths.get(number, "?")))
                data = data[_EVENT.size + length :]
        return sorted(found)

    def _read(self) -> bytes:
        try:
            return os.read(self._descriptor, 2**16)
        except BlockingIOError:
            return b""

    def close(self) -> None:
        os.close(self._descriptor)
