"""Read files of this machine from their disk, past the page cache."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

from eformer._engine.stores.directory import Closing, open_inside

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_UNIT = 4096  # bytes: offsets, lengths and addresses of a read past the cache are multiples
_DIRECT = getattr(os, "O_DIRECT", 0)  # 0: not Linux, where reads go through the cache


class Medium:
    """A file that is read from its disk. The page cache is not used, and keeps the pages that it has.

    A file system without O_DIRECT is read through the cache.
    """

    def __init__(self, descriptor: int, most: int) -> None:
        self._descriptor = descriptor
        self._memory = memoryview(mmap.mmap(-1, _rounded_up(most) + _UNIT))  # at the address of a page
        self._set_direct(_DIRECT)

    def read(self, offset: int, nbytes: int) -> memoryview:
        """Return bytes of the file, fewer at its end. They are valid until the next read."""
        start = offset % _UNIT
        wanted = _rounded_up(start + nbytes)
        done = 0
        while done < wanted and (count := self._read_into(self._memory[done:wanted], offset - start + done)):
            done += count
            if count % _UNIT:  # the end of the file
                break
        return self._memory[start : min(start + nbytes, done)]

    def _read_into(self, memory: memoryview, offset: int) -> int:
        try:
            return os.preadv(self._descriptor, [memory], offset)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._set_direct(0)  # the file system accepts the flag, and refuses the read
            return os.preadv(self._descriptor, [memory], offset)

    def _set_direct(self, flag: int) -> None:
        try:
            flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL) & ~_DIRECT
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags | flag)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise


@contextmanager
def medium(directory: Path, name: str, most: int) -> Iterator[Medium]:
    """Open a file in or below a directory for reads of at most `most` bytes each."""
    with Closing(open_inside(directory, name)) as descriptor:
        yield Medium(descriptor, most)


def _rounded_up(nbytes: int) -> int:
    return -(-nbytes // _UNIT) * _UNIT
