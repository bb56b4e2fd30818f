"""Read files of a local directory: by number, within a budget of open descriptors, or past the page cache."""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import resource
import weakref
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np

from eformer._engine.stores.directory import (
    ON_THE_WAY,
    Closing,
    content_of,
    open_beneath,
    open_inside,
    read_into,
    read_once,
    version_of,
)
from eformer._engine.tasks.forks import Lock
from eformer.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from eformer._engine.stores.base import Version

logger = logging.getLogger("eformer")

_WORTH_MAPPING = 2**16  # bytes; reading a smaller file is as fast as mapping it

# At most this many files, and a quarter of the process's limit, are held open together. Other files are opened for each
# read.
_MOST_HELD = 256


class _Budget:
    """The number of files that all readers of the process hold open, and the limit for it."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._held = 0

    def take(self, count: int) -> bool:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = limit // 4 if limit > 0 else _MOST_HELD
        with self._lock:
            if count > _MOST_HELD or self._held + count > max(most, 1):
                return False
            self._held += count
            return True

    def give_back(self, count: int) -> None:
        with self._lock:
            self._held -= count


_budget = _Budget()


class LocalFiles:
    """Files of a local directory. Raise FileNotFoundError for a file in `versions` that has been replaced since."""

    def __init__(
        self, directory: Path, names: Sequence[str], versions: Mapping[str, Version] | None = None
    ) -> None:
        self.directory, self.names, self.versions = directory, names, versions or {}
        self.real = os.path.realpath(directory)
        self.base = -1
        self.opening = Lock()
        self.held: dict[int, int] = {}
        self.budgeted = 0

    def hold(self, numbers: Iterable[int]) -> None:
        wanted = sorted(set(numbers) - self.held.keys())
        if not _budget.take(len(wanted)):
            return
        self.budgeted += len(wanted)
        # If a file is gone, files of earlier calls stay open, because other threads may be reading them.
        for number in wanted:
            self.held[number] = self._open(number)

    def read_into(self, number: int, memory: memoryview, offset: int) -> int:
        if (held := self.held.get(number)) is not None:  # done for thousands of files, so without objects
            return read_into(held, memory, offset)
        with self._descriptor(number) as descriptor:
            return read_into(descriptor, memory, offset)

    def nbytes(self, number: int) -> int:
        with self._descriptor(number) as descriptor:
            return os.fstat(descriptor).st_size

    def map(self, number: int) -> np.ndarray[Any, Any] | None:
        with self._descriptor(number) as descriptor:
            if os.fstat(descriptor).st_size < _WORTH_MAPPING or not _budget.take(1):
                return None
            try:
                mapping = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
            except (OSError, ValueError) as error:  # the file system has no memory maps
                _budget.give_back(1)
                path = self.directory / self.names[number]
                logger.debug("%s cannot be mapped and is read instead: %s", path, error)
                return None
            weakref.finalize(mapping, _budget.give_back, 1)  # a mapping has a descriptor of its own
            return np.frombuffer(mapping, np.uint8)

    def rewritten(self) -> str | None:
        for number, name in enumerate(self.names):
            if name not in self.versions:
                continue
            held = self.held.get(number)
            try:
                with (
                    Closing(open_inside(self.directory, name)) if held is None else nullcontext(held) as file
                ):
                    now = version_of(os.fstat(file))
            except (FileNotFoundError, FormatError):
                return name
            # A held file that was replaced as a whole keeps its content; only its number of links changes.
            if content_of(now) != content_of(self.versions[name]):
                return name
        return None

    def close(self) -> None:
        while self.held:
            os.close(self.held.popitem()[1])
        base, self.base = self.base, -1
        if base >= 0:
            os.close(base)
        _budget.give_back(self.budgeted)
        self.budgeted = 0

    def _descriptor(self, number: int) -> AbstractContextManager[int]:
        held = self.held.get(number)
        return Closing(self._open(number)) if held is None else nullcontext(held)

    def _open(self, number: int) -> int:
        name = self.names[number]
        is_below = "/" in name
        descriptor = (
            open_beneath(self._base(), self.real, name) if is_below else open_inside(self.directory, name)
        )
        if name in self.versions and self.versions[name] != version_of(os.fstat(descriptor)):
            os.close(descriptor)
            raise FileNotFoundError(f"{self.directory / name} was replaced")
        return descriptor

    def _base(self) -> int:
        """Open the directory when the first file below it is read."""
        with self.opening:
            if self.base < 0:
                self.base = os.open(self.real, ON_THE_WAY)
            return self.base


# ------------------------------------------------------------------------------------ past the page cache

_UNIT = 4096  # bytes; offsets, lengths and addresses of a read past the cache are multiples of it
_DIRECT = getattr(os, "O_DIRECT", 0)  # 0 outside of Linux, where reads go through the cache


class Medium:
    """A file that is read from its disk. The page cache is not used, and keeps its pages.

    A file system without O_DIRECT is read through the cache.
    """

    def __init__(self, descriptor: int, most: int) -> None:
        self._descriptor = descriptor
        self._memory = memoryview(mmap.mmap(-1, _rounded_up(most) + _UNIT))  # at the address of a page
        self._set_direct(_DIRECT)

    def read(self, offset: int, nbytes: int) -> memoryview:
        """Return bytes of the file, fewer at its end. The memory is valid until the next read."""
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
            return read_once(self._descriptor, memory, offset)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._set_direct(0)  # the file system accepts the flag, and refuses the read
            return read_once(self._descriptor, memory, offset)

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
