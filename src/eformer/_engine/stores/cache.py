"""Keep blocks of objects that never change in files of this machine, so that the next load does not fetch them.

Every object has one sparse file: a header, the digest of every block, then the blocks. A digest is written after its
block, and a block that does not match its digest, or has none, is fetched again: after a crash, damage, or a full disk.
All writers of a file write the same bytes at the same places, so processes need no locks. A cache never makes a read
fail: if the directory cannot be used, a warning says why and the reads go to the bucket.
"""

from __future__ import annotations

import hashlib
import logging
import mmap
import os
import re
import stat
import struct
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import lru_cache, partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import xxhash
from msgspec import Struct

from eformer._engine.stores.directory import read_into
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
"""A directory; None for that of EFORMER_CACHE, if it is set; False for no cache."""

BLOCK = 2**20

_MOST_BYTES = 100 * 10**9
_AT_ONCE = 8 * BLOCK  # fetched by one request, to map an object
_THREADS = 16
_FREED = 0.9  # of the limit is left after a removal
_LOOK_EVERY = 256 * 2**20  # bytes that are written between two looks at the size of the directory

_MAGIC = b"eformer cache 1\n"
_FIELDS = struct.Struct("<16sQQ")
_WHOLE_AT = 48
_DIGESTS_AT = 64
_DIGEST = 16
_PAGE = 4096

_SUFFIX = ".blocks"
_SAVE_ID = re.compile(r"\.([0-9a-f]{16})(?![0-9a-f])")

_chosen: ContextVar[Cached] = ContextVar("eformer_cache", default=None)


# ------------------------------------------------------------------------------------------- choosing


@contextmanager
def caching(directory: Cached) -> Iterator[None]:
    """Let the stores that are made inside of this block read through a cache."""
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
    """Return the key of an object; None if it may be replaced by another one of the same name.

    An object that carries the id of its save is never replaced; any other one has to be of a known version.
    """
    found = _SAVE_ID.search(name.partition("/")[0])
    mark = (version or "").strip() or (found[1] if found and version is None else "")
    if not mark:
        return None
    return hashlib.sha256("\0".join((url, name, mark)).encode("utf-8", "surrogatepass")).hexdigest()[:40]


# ---------------------------------------------------------------------------------------------- files


class _Entry(Struct, frozen=True):
    """An open file of the cache, and the length of its object."""

    descriptor: int
    nbytes: int

    @property
    def start(self) -> int:
        return _start(self.nbytes)

    def digests(self, blocks: range) -> list[bytes]:
        nbytes = len(blocks) * _DIGEST
        data = os.pread(self.descriptor, nbytes, _DIGESTS_AT + blocks.start * _DIGEST).ljust(nbytes, b"\0")
        return [data[at : at + _DIGEST] for at in range(0, nbytes, _DIGEST)]

    def read_into(self, memory: memoryview, offset: int) -> list[int]:
        """Fill memory from the blocks that are sound. Return the numbers of the others."""
        stop = min(self.nbytes, offset + len(memory))
        if offset >= stop:
            return []
        missing, blocks = [], _blocks(offset, stop - offset)
        for block, digest in zip(blocks, self.digests(blocks), strict=True):
            start, end = block * BLOCK, min((block + 1) * BLOCK, self.nbytes)
            is_inside = offset <= start and end <= stop
            part = memory[start - offset : end - offset] if is_inside else memoryview(bytearray(end - start))
            if not self._read_block(block, part, digest):
                missing.append(block)
            elif not is_inside:
                _copy(part, start, memory, offset)
        return missing

    def _read_block(self, number: int, memory: memoryview, digest: bytes) -> bool:
        """Fill memory with a block. Return False if it is not there, or damaged."""
        if digest == bytes(_DIGEST):
            return False
        found = read_into(self.descriptor, memory, self.start + number * BLOCK)
        return found == len(memory) and xxhash.xxh3_128_digest(memory) == digest

    def is_sound(self) -> bool:
        """Tell whether all blocks are there, and none is damaged."""
        memory = memoryview(bytearray(BLOCK))
        return not any(self.read_into(memory, offset) for offset in range(0, self.nbytes, BLOCK))

    def write(self, first: int, data: memoryview) -> None:
        """Write blocks that follow each other, then their digests."""
        _write(self.descriptor, data, self.start + first * BLOCK)
        digests = [xxhash.xxh3_128_digest(data[at : at + BLOCK]) for at in range(0, len(data), BLOCK)]
        _write(self.descriptor, b"".join(digests), _DIGESTS_AT + first * _DIGEST)

    def forget(self, blocks: range) -> None:
        _write(self.descriptor, bytes(_DIGEST), _WHOLE_AT)
        _write(self.descriptor, bytes(_DIGEST * len(blocks)), _DIGESTS_AT + blocks.start * _DIGEST)

    # A file that was checked once, after it had reached the disk, is mapped from then on without reading it.

    @property
    def is_whole(self) -> bool:
        return os.pread(self.descriptor, _DIGEST, _WHOLE_AT) == _whole_mark(self.nbytes)

    def set_whole(self) -> None:
        os.fsync(self.descriptor)
        _write(self.descriptor, _whole_mark(self.nbytes), _WHOLE_AT)

    def map(self) -> np.ndarray[Any, Any]:
        mapping = mmap.mmap(self.descriptor, 0, prot=mmap.PROT_READ)
        return np.frombuffer(mapping, np.uint8)[self.start :]


def _start(nbytes: int) -> int:
    """Return where the blocks begin: on a page, so that they can be mapped."""
    end = _DIGESTS_AT + -(-nbytes // BLOCK) * _DIGEST
    return -(-end // _PAGE) * _PAGE


def _header(nbytes: int) -> bytes:
    fields = _FIELDS.pack(_MAGIC, nbytes, BLOCK)
    return fields + xxhash.xxh3_128_digest(fields)


def _whole_mark(nbytes: int) -> bytes:
    return xxhash.xxh3_128_digest(_header(nbytes) + b"whole")


def _write(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    while data:
        count = os.pwrite(descriptor, data, offset)
        data, offset = data[count:], offset + count


class Cache:
    """A directory of objects, of which the least recently used are removed when it gets too large.

    limit   bytes; None for 100 GB, or half of the disk if that is less. Larger objects are left out
    """

    def __init__(self, directory: str, limit: int | None = None) -> None:
        self.directory, self._limit = directory, limit
        self._written, self._lock = 0, Lock()
        self._was_seen = self._has_warned = False

    # ---------------------------------------------------------------------------------------- open

    @contextmanager
    def entry(self, key: str, nbytes: int | None = None) -> Iterator[_Entry | None]:
        """Open the file of an object; with `nbytes` make it if it is not there. Yield None if that is impossible.

        An error of the operating system ends the block, and is only logged.
        """
        entry = None
        with self._warnings():
            entry = self._open(key, nbytes)
        try:
            with self._warnings():
                yield entry
        finally:
            if entry:
                os.close(entry.descriptor)

    @contextmanager
    def _warnings(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            logger.debug("%s: %s", self.directory, error)  # removed meanwhile, by another process
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                why = error.strerror or error
                logger.warning(
                    "the cache %s cannot be used, reading from the bucket: %s", self.directory, why
                )

    def _open(self, key: str, nbytes: int | None) -> _Entry | None:
        self._require_own()
        if nbytes is not None and nbytes > self.limit:
            return None
        path = os.path.join(self.directory, key + _SUFFIX)
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | (os.O_CREAT if nbytes else 0)
        try:
            descriptor = os.open(path, flags, 0o600)
        except FileNotFoundError:
            self._was_seen = self._was_seen and not nbytes  # else the directory is gone: make it again
            return None
        entry = None
        try:
            if (found := self._length(descriptor, path, nbytes)) is not None:
                os.utime(descriptor)  # used now
                entry = _Entry(descriptor, found)
            return entry
        finally:
            if entry is None:
                os.close(descriptor)

    def _require_own(self) -> None:
        """Make the directory, or refuse one that others can write to."""
        if self._was_seen:
            return
        os.makedirs(self.directory, mode=0o700, exist_ok=True)
        status = os.stat(self.directory)
        if status.st_uid != os.geteuid() or status.st_mode & stat.S_IWOTH:
            raise PermissionError("it belongs to another user, or everybody may write to it")
        self._was_seen = True

    def _length(self, descriptor: int, path: str, nbytes: int | None) -> int | None:
        """Return the length of the object whose file this is. A new file gets `nbytes`. Return None if that is not
        known, and for a file that is damaged, which is removed."""
        status = os.fstat(descriptor)
        is_shared = status.st_nlink > 1  # a file from elsewhere, which must not be written
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or is_shared:
            raise PermissionError(f"{path} is not a file of this user, or has a second name")
        header = os.pread(descriptor, _FIELDS.size + _DIGEST, 0)
        status = os.fstat(descriptor)  # again: another thread may have begun the file, its length first
        if not header.strip(b"\0"):
            if nbytes:
                os.ftruncate(descriptor, _start(nbytes) + nbytes)
                _write(descriptor, _header(nbytes), 0)
            return nbytes
        if len(header) == _FIELDS.size + _DIGEST:
            found = int(_FIELDS.unpack_from(header)[1])
            if header == _header(found) and status.st_size == _start(found) + found:
                return found
        with self._lock, suppress(FileNotFoundError):
            if os.path.samestat(os.lstat(path), status):  # another thread may have put a new one there
                os.unlink(path)
        return None

    # -------------------------------------------------------------------------------------- blocks

    def keep(self, key: str, nbytes: int, first: int, data: memoryview) -> None:
        """Write blocks of an object that follow each other."""
        if not nbytes or self._has_warned:
            return
        with self.entry(key, nbytes) as entry:
            if entry:
                entry.write(first, data)
                self._count(len(data))

    # --------------------------------------------------------------------------------------- limit

    @property
    def limit(self) -> int:
        if self._limit is None:
            disk = os.statvfs(self.directory)
            self._limit = min(_MOST_BYTES, disk.f_frsize * disk.f_blocks // 2)
        return self._limit

    def _count(self, nbytes: int) -> None:
        """Remove objects now and then."""
        with self._lock:
            is_first = not self._written
            self._written += nbytes
            is_due = is_first or self._written > min(_LOOK_EVERY, self.limit // 16)
            self._written = 1 if is_due else self._written
        if is_due:
            self.trim()

    def trim(self) -> None:
        """Remove the least recently used objects if the directory is larger than its limit."""
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
        """List the time of last use, the size on disk and the path of every object."""
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

    def read_into(self, number: int, memory: memoryview, offset: int) -> int:
        key = self._keys[number]
        if key is None or not len(memory):
            return self._files.read_into(number, memory, offset)
        nbytes, missing = 0, [*_blocks(offset, len(memory))]
        with self._cache.entry(key) as entry:
            if entry:
                missing = entry.read_into(memory, offset)
                nbytes = entry.nbytes
        for first, stop in _runs(missing):
            data, nbytes = self._files.fetch(number, first * BLOCK, (stop - first) * BLOCK)
            self._cache.keep(key, nbytes, first, memoryview(data))
            _copy(memoryview(data), first * BLOCK, memory, offset)
        return max(0, min(len(memory), nbytes - offset))

    def forget(self, number: int, offset: int, nbytes: int) -> bool:
        """Let a range be fetched again that is not what it should be. Return False if it was not in the cache."""
        key, blocks = self._keys[number], _blocks(offset, nbytes)
        if key is not None:
            with self._cache.entry(key) as entry:
                if entry and any(digest.strip(b"\0") for digest in entry.digests(blocks)):
                    entry.forget(blocks)
                    return True
        return False

    def nbytes(self, number: int) -> int:
        """Ask the bucket, so that a missing object is noticed even if it is cached."""
        return self._files.nbytes(number)

    def map(self, number: int) -> np.ndarray[Any, Any] | None:
        """Fetch the whole object, and map the file that it is in."""
        key = self._keys[number]
        if key is None:
            return None
        with self._cache.entry(key) as entry:
            if entry and entry.is_whole:
                return entry.map()
        nbytes = self._files.nbytes(number)
        run_all([partial(self._complete, number, at, nbytes) for at in range(0, nbytes, _AT_ONCE)], _THREADS)
        with self._cache.entry(key) as entry:
            if entry and entry.is_sound():
                entry.set_whole()
                return entry.map()
        return None

    def _complete(self, number: int, offset: int, nbytes: int) -> None:
        """Fetch the blocks of a range that are not there, or damaged."""
        self.read_into(number, memoryview(bytearray(min(_AT_ONCE, nbytes - offset))), offset)


def _blocks(offset: int, nbytes: int) -> range:
    """Return the numbers of the blocks that a range of an object lies in."""
    return range(offset // BLOCK, -(-(offset + nbytes) // BLOCK))


def _copy(data: memoryview, start: int, memory: memoryview, offset: int) -> None:
    """Copy what two ranges of an object have in common: `data` begins at `start`, `memory` at `offset`."""
    first, stop = max(start, offset), min(start + len(data), offset + len(memory))
    if first < stop:
        into, part = memory[first - offset : stop - offset], data[first - start : stop - start]
        np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(part, np.uint8))  # other threads run meanwhile


def _runs(blocks: list[int]) -> Iterator[tuple[int, int]]:
    """Join blocks that follow each other."""
    for _, run in groupby(enumerate(blocks), lambda each: each[1] - each[0]):
        numbers = [block for _, block in run]
        yield numbers[0], numbers[-1] + 1
