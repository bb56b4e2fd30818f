"""Keep blocks of immutable objects in files of this machine, so that the next load does not fetch them.

Every block is a file: its bytes, then the length of its object and a digest. The file appears by a rename, so processes
need no locks. A block that does not match its digest, after a crash or damage, is fetched again. To map an object, its
blocks are joined in one more file. A cache never makes a read fail: if the directory cannot be used, a warning says
why, and the reads go to the bucket.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import math
import mmap
import os
import re
import secrets
import stat
import struct
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import xxhash

from eformer._engine.stores.directory import Closing, read_into, sync_opened
from eformer._engine.stores.durable import write_all
from eformer._engine.stores.urls import local_path
from eformer._engine.stores.virtual_files import UnchangingFiles
from eformer._engine.tasks.forks import Lock
from eformer._engine.tasks.pool import run_all

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from eformer._engine.stores.base import Version
    from eformer._engine.stores.bucket import BucketFiles

logger = logging.getLogger("eformer")

Cached = str | os.PathLike[str] | Literal[False] | None
"""A directory; None for the directory in EFORMER_CACHE, if it is set; False for no cache."""

BLOCK = 2**20

_MOST_BYTES = 100 * 10**9
_AT_ONCE = 8 * BLOCK  # fetched by one request, to map an object
_THREADS = 16
_FREED = 0.9  # of the limit is left after a removal
_LOOK_EVERY = 2**30  # bytes written between two measurements of the directory

_TAIL = struct.Struct(
    "<Q16s"
)  # end of a block: the length of its object, and the digest of its bytes, seeded by that length
_WHOLE = "whole"  # instead of the number of a block: the file of all blocks
_SUFFIX = ".block"
_SAVE_ID = re.compile(r"\.([0-9a-f]{16})(?![0-9a-f])")

_chosen: ContextVar[Cached] = ContextVar("eformer_cache", default=None)


# ------------------------------------------------------------------------------------------- choosing


@contextmanager
def caching(directory: Cached) -> Iterator[None]:
    """Let stores that are made in this block read through a cache."""
    token = _chosen.set(directory)
    try:
        yield
    finally:
        _chosen.reset(token)


def current_cache() -> Cache | None:
    """Return the cache that was chosen by an argument or the environment, if any."""
    chosen = _chosen.get()
    directory = os.environ.get("EFORMER_CACHE") if chosen is None else chosen
    if not directory:
        return None
    return _cache_at(os.path.abspath(local_path(directory)), _limit())


def _limit() -> int | None:
    text = os.environ.get("EFORMER_CACHE_BYTES")
    if not text:
        return None
    if not text.isdecimal():
        raise ValueError(f"EFORMER_CACHE_BYTES is {text!r}, expected a number of bytes")
    return int(text)


@lru_cache(64)
def _cache_at(directory: str, limit: int | None) -> Cache:
    return Cache(directory, limit)


def key_of(url: str, name: str, version: Version | None) -> str | None:
    """Return the key of an object in the cache; None if another object of the same name may replace it.

    An object whose name has a save id is never replaced. Any other object needs a known version.
    """
    found = _SAVE_ID.search(name.partition("/")[0])
    mark = (version or "").strip() or (found[1] if found and version is None else "")
    if not mark:
        return None
    return hashlib.sha256("\0".join((url, name, mark)).encode("utf-8", "surrogatepass")).hexdigest()[:40]


# ---------------------------------------------------------------------------------------------- files


class Cache:
    """A directory of blocks, of which the least recently used are removed when it gets too large.

    limit   bytes; None for 100 GB, or half of the disk if that is less. Larger objects are left out
    """

    def __init__(self, directory: str, limit: int | None = None) -> None:
        self.directory, self._limit = directory, limit
        self._written, self._lock = math.inf, Lock()  # bytes since the directory was last measured
        self._has_warned = False

    @contextmanager
    def _warnings(self) -> Iterator[None]:
        """Log an error of the operating system, and end the block."""
        try:
            yield
        except FileNotFoundError:
            pass  # it never existed, or another process has removed it
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                why = error.strerror or error
                logger.warning(
                    "the cache %s cannot be used, reading from the bucket: %s", self.directory, why
                )

    def _require_own(self) -> None:
        """Make the directory. Raise if another user can write to it."""
        os.makedirs(self.directory, mode=0o700, exist_ok=True)
        status = os.stat(self.directory)
        if status.st_uid != os.geteuid() or status.st_mode & stat.S_IWOTH:
            raise PermissionError("it belongs to another user, or all users may write to it")

    def _path(self, key: str, block: object) -> str:
        return os.path.join(self.directory, f"{key}.{block}{_SUFFIX}")

    # ---------------------------------------------------------------------------------------- read

    @contextmanager
    def _opened(self, key: str, block: object) -> Iterator[tuple[int, int]]:
        """Open a file. Yield its descriptor and its length."""
        self._require_own()
        path = self._path(key, block)
        with Closing(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)) as descriptor:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
                raise PermissionError(f"{path} is not a file of this user")
            os.utime(descriptor)  # for `trim`, which removes the least recently used files
            yield descriptor, status.st_size

    def read(self, key: str, block: int, memory: memoryview, offset: int) -> int | None:
        """Copy the bytes that a block and a range of its object have in common. `memory` is the range from `offset` on.

        Return the length of the object; None if the block is missing or damaged.
        """
        with self._warnings(), self._opened(key, block) as (descriptor, nbytes):
            length, start = nbytes - _TAIL.size, block * BLOCK
            if not 0 < length <= BLOCK:
                return None
            whole, digest = _TAIL.unpack(os.pread(descriptor, _TAIL.size, length))
            is_inside = offset <= start and start + length <= offset + len(memory)
            part = memory[start - offset :][:length] if is_inside else memoryview(bytearray(length))
            if read_into(descriptor, part, 0) == length and _digest(part, whole) == digest:
                if not is_inside:
                    _copy(part, start, memory, offset)
                return int(whole)
        return None

    def map(self, key: str, nbytes: int) -> np.ndarray[Any, Any] | None:
        """Map an object whose blocks were joined. Return None if they were not, or if the file is too short."""
        with self._warnings(), self._opened(key, _WHOLE) as (descriptor, found):
            if found == nbytes:
                return np.frombuffer(mmap.mmap(descriptor, nbytes, prot=mmap.PROT_READ), np.uint8)
        return None

    # --------------------------------------------------------------------------------------- write

    @contextmanager
    def _new(self, key: str, block: object) -> Iterator[int]:
        """Yield a new file, which appears at the end of the block unless an error ends it."""
        self._require_own()
        scratch = self._path(key, f"{block}.{secrets.token_hex(8)}")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            with Closing(os.open(scratch, flags, 0o600)) as descriptor:
                yield descriptor
            os.replace(scratch, self._path(key, block))
        except BaseException:
            with suppress(OSError):
                os.unlink(scratch)
            raise

    def keep(self, key: str, nbytes: int, first: int, data: memoryview) -> None:
        """Write blocks of an object that follow each other."""
        with self._warnings():
            for at in range(0, len(data), BLOCK):
                if self._has_warned or nbytes > self.limit:
                    return
                block = data[at : at + BLOCK]
                tail = _TAIL.pack(nbytes, _digest(block, nbytes))
                with self._new(key, first + at // BLOCK) as descriptor:
                    written = os.pwrite(descriptor, block, 0) + os.pwrite(descriptor, tail, len(block))
                    if written < len(block) + len(tail):
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                self._count(len(block))

    def join(self, key: str, nbytes: int) -> None:
        """Write all blocks to one file, to be mapped. It is on the disk before it appears, and is not checked again."""
        memory = memoryview(bytearray(BLOCK))
        with self._warnings(), self._new(key, _WHOLE) as descriptor:
            for block in _blocks(0, nbytes):
                start = block * BLOCK
                part = memory[: min(BLOCK, nbytes - start)]
                if self.read(key, block, part, start) != nbytes:
                    raise FileNotFoundError(self._path(key, block))
                write_all(descriptor, part, start)
            sync_opened(descriptor)
            self._count(nbytes)

    def mend(self, key: str, data: memoryview, offset: int) -> None:
        """Write to the file of all blocks in place, so that processes that have mapped it see the change."""
        flags = os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        with self._warnings(), Closing(os.open(self._path(key, _WHOLE), flags)) as descriptor:
            write_all(descriptor, data, offset)

    def forget(self, key: str, blocks: range) -> bool:
        """Remove blocks. Return False if the cache had none of them."""
        was_there = False
        for block in blocks:
            with suppress(OSError):
                os.unlink(self._path(key, block))
                was_there = True
        return was_there

    # --------------------------------------------------------------------------------------- limit

    @property
    def limit(self) -> int:
        if self._limit is None:
            self._require_own()
            disk = os.statvfs(self.directory)
            self._limit = min(_MOST_BYTES, disk.f_frsize * disk.f_blocks // 2)
        return self._limit

    def _count(self, nbytes: int) -> None:
        """Count written bytes, and measure the directory when they are many."""
        with self._lock:
            self._written += nbytes
            is_due = self._written > min(_LOOK_EVERY, self.limit // 16)
            self._written = 0 if is_due else self._written
        if is_due:
            self.trim()

    def trim(self) -> None:
        """Remove the least recently used files if the directory is larger than its limit."""
        found = sorted(self._files(), reverse=True)
        left = sum(nbytes for _, nbytes, _ in found)
        if left <= self.limit:
            return
        while found and left > _FREED * self.limit:
            _, nbytes, path = found.pop()
            with suppress(FileNotFoundError):
                os.unlink(path)
            left -= nbytes

    def _files(self) -> Iterator[tuple[int, int, str]]:
        """List the time of last use, the size on disk and the path of every file."""
        with os.scandir(self.directory) as entries:
            for entry in entries:
                if entry.name.endswith(_SUFFIX):
                    with suppress(FileNotFoundError):
                        status = entry.stat(follow_symlinks=False)
                        yield status.st_mtime_ns, status.st_blocks * 512, entry.path


# --------------------------------------------------------------------------------------------- reading


class CachedFiles(UnchangingFiles):
    """Objects by number, read through a cache if they never change."""

    def __init__(
        self,
        files: BucketFiles,
        cache: Cache,
        url: str,
        names: Sequence[str],
        versions: Mapping[str, Version],
    ) -> None:
        self._files, self._cache = files, cache
        self._keys = [key_of(url, name, versions.get(name)) for name in names]
        self._maps: dict[int, np.ndarray[Any, Any]] = {}

    def read_into(self, number: int, memory: memoryview, offset: int) -> int:
        key = self._keys[number]
        if key is None or not len(memory):
            return self._files.read_into(number, memory, offset)
        if number in self._maps:  # read the same file that the caller of `map` has
            _copy(self._maps[number].data, 0, memory, offset)
            return max(0, min(len(memory), len(self._maps[number]) - offset))
        nbytes, missing = offset + len(memory), list[int]()
        for block in _blocks(offset, len(memory)):
            if block * BLOCK >= nbytes:
                break
            if (found := self._cache.read(key, block, memory, offset)) is None:
                missing.append(block)
            else:
                nbytes = found
        if missing:  # by one request, even if some blocks in between are cached
            start = missing[0] * BLOCK
            data, nbytes = self._files.fetch(number, start, (missing[-1] + 1) * BLOCK - start)
            self._cache.keep(key, nbytes, missing[0], memoryview(data))
            _copy(memoryview(data), start, memory, offset)
        return max(0, min(len(memory), nbytes - offset))

    def forget(self, number: int, offset: int, nbytes: int) -> bool:
        """Drop a range that failed its check, so that it is fetched again. Return False if it was not in the cache."""
        key = self._keys[number]
        if key is None:
            return False
        was_there = self._cache.forget(key, _blocks(offset, nbytes))
        if number in self._maps:
            data, _ = self._files.fetch(number, offset, nbytes)
            self._cache.mend(key, memoryview(data), offset)
        return was_there or number in self._maps

    def nbytes(self, number: int) -> int:
        """Ask the bucket, so that a missing object is noticed even if it is cached."""
        return self._files.nbytes(number)

    def map(self, number: int) -> np.ndarray[Any, Any] | None:
        """Fetch the whole object into one file, and map that file."""
        key = self._keys[number]
        if key is None or not (nbytes := self._files.nbytes(number)):
            return None
        if (found := self._cache.map(key, nbytes)) is None:
            run_all(
                [partial(self._complete, number, at, nbytes) for at in range(0, nbytes, _AT_ONCE)], _THREADS
            )
            self._cache.join(key, nbytes)
            found = self._cache.map(key, nbytes)
        if found is not None:
            self._maps[number] = found
        return found

    def _complete(self, number: int, offset: int, nbytes: int) -> None:
        """Fetch the missing and damaged blocks of a range."""
        self.read_into(number, memoryview(bytearray(min(_AT_ONCE, nbytes - offset))), offset)


def _blocks(offset: int, nbytes: int) -> range:
    """Return the numbers of the blocks that a range of an object lies in."""
    return range(offset // BLOCK, -(-(offset + nbytes) // BLOCK))


def _digest(block: memoryview, nbytes: int) -> bytes:
    return xxhash.xxh3_128_digest(block, seed=nbytes)


def _copy(data: memoryview, start: int, memory: memoryview, offset: int) -> None:
    """Copy the common bytes of two ranges of an object: `data` begins at `start`, `memory` at `offset`."""
    first, stop = max(start, offset), min(start + len(data), offset + len(memory))
    if first < stop:
        into, part = memory[first - offset : stop - offset], data[first - start : stop - start]
        np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(part, np.uint8))  # other threads run meanwhile
