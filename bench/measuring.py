"""What every measurement is made of: clocks, counters, page caches and stable storage. Needs no jax."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

BLOCK = 4 * 2**20
PAGE = 4096
HUGE_PAGE = 2 * 2**20
MOST_LEFT = 0.01  # of a file that was dropped from memory; a little metadata may stay

libc = ctypes.CDLL(None, use_errno=True)

# -------------------------------------------------------------------------------------------- clocks


@dataclass(frozen=True, slots=True)
class Measured:
    """What a call returned, and what it took; counters are None where the kernel does not have them."""

    value: Any
    seconds: float
    grown: int | None  # bytes of resident memory, at its highest
    read: int | None  # bytes that were asked of the kernel, from wherever it had them
    written: int | None


def measure(call: Callable[[], Any]) -> Measured:
    has_peak, before, counts = reset_peak(), resident("VmRSS"), io_counts()
    start = time.perf_counter()
    value = call()
    seconds = time.perf_counter() - start
    after = io_counts()
    return Measured(
        value,
        seconds,
        grown=resident("VmHWM") - before if has_peak else None,
        read=after["rchar"] - counts["rchar"] if counts else None,
        # The first counts calls to write, the second pages that go to the disk, by whatever way.
        written=max(after[name] - counts[name] for name in ("wchar", "write_bytes")) if counts else None,
    )


ENOUGH = 2.5  # seconds


def tries(most: int, attempt: Callable[[], Any], seconds: Callable[[Any], float] = float) -> list[Any]:
    """What came of a few tries, of which the fastest counts: a shared machine takes its time from one of them, not from
    all. What takes long is tried less often."""
    done = [attempt()]
    while len(done) < most and sum(map(seconds, done)) < ENOUGH:
        done.append(attempt())
    return done


def settle(room: int) -> None:
    """Nothing that came before is left to be done or to be used again, and there are `room` bytes of free memory.

    Heap pages that an earlier call has left behind would make the next one quicker than any first call. And a virtual
    machine gives free memory back to its host after seconds; to get it again takes twenty times as long as a load.
    """
    gc.collect()
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
    os.sync()
    np.empty(min(room, available() // 2), np.uint8)[::PAGE] = 0


def deferred(arrays: Iterable[np.ndarray]) -> float:
    """Seconds that a load has left to whoever looks first: a look at every page, less a second look.

    The second look goes to other bytes of the same pages, which are no more in the processor's caches than those of
    the first.
    """
    views = [array.reshape(-1).view(np.uint8) for array in arrays]
    looks = [[view[::PAGE] for view in views], [view[min(PAGE, view.size) // 2 :: PAGE] for view in views]]
    seconds = []
    for look in looks:
        start = time.perf_counter()
        for view in look:
            view.sum()
        seconds.append(time.perf_counter() - start)
    return max(0.0, seconds[0] - seconds[1])


# ------------------------------------------------------------------------------------------- counters


def resident(field: str) -> int:
    return int(Path("/proc/self/status").read_text().split(f"{field}:")[1].split()[0]) * 1024


def reset_peak() -> bool:
    """Whether the high-water mark of resident memory now starts from here."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def io_counts() -> dict[str, int]:
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:  # a kernel without task accounting, or a container that hides it
        return {}
    return {name: int(count) for name, _, count in (line.partition(":") for line in lines)}


def available() -> int:
    return int(Path("/proc/meminfo").read_text().split("MemAvailable:")[1].split()[0]) * 1024


# --------------------------------------------------------------------------------- memory and its bytes


def aligned(nbytes: int) -> np.ndarray:
    """Fresh memory that has not been touched, at the address of a huge page, where the kernel may use some."""
    memory = np.empty(nbytes + HUGE_PAGE, np.uint8)
    return memory[-memory.ctypes.data % HUGE_PAGE :][:nbytes]


def is_equal(found: np.ndarray, saved: np.ndarray) -> bool:
    """Whether every bit is the same; in blocks, because a comparison takes as much memory as it compares."""
    a, b = (np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in (found, saved))
    step = 4 * BLOCK
    return a.size == b.size and all(
        np.array_equal(a[at : at + step], b[at : at + step]) for at in range(0, a.size, step)
    )


# ---------------------------------------------------------------------------------------------- files


def files_in(path: Path) -> Iterator[Path]:
    """All files of a checkpoint, which may be one."""
    if path.is_file():
        yield path
    for directory, _, names in os.walk(path):
        yield from (Path(directory, name) for name in names)


def warm(path: Path, room: int) -> None:
    """The page cache has every byte, and all is settled. In this order: the cache would take the free memory, and leave
    to the next call what the host still has to give."""
    read_once(path)
    settle(room)


def read_once(path: Path) -> None:
    """The page cache has every byte."""
    block = bytearray(BLOCK)
    for file in files_in(path):
        with file.open("rb", buffering=0) as opened:
            while opened.readinto(block):
                pass


def sync_all(path: Path) -> None:
    """On stable storage: every file, every directory, and the name of the first of them."""
    if path.is_file():
        sync(path)
    for directory, _, files in os.walk(path, topdown=False):
        for name in (*files, "."):
            sync(Path(directory, name))
    sync(path.parent)


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


class CacheError(OSError):
    """The page cache cannot be emptied here, or nobody can tell."""


def drop(path: Path) -> None:
    """The page cache has nothing of these files: the next read is the disk's."""
    sync_all(path)
    left = total = 0
    for file in files_in(path):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            size = os.fstat(descriptor).st_size
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            left += resident_pages(descriptor, size)
            total += -(-size // PAGE)
        finally:
            os.close(descriptor)
    if left > max(1, MOST_LEFT * total):
        raise CacheError(f"the page cache keeps {left} of {total} pages that it was asked to drop")


def resident_pages(descriptor: int, size: int) -> int:
    """How many pages of the file are in memory, which mapping it does not change."""
    if size == 0:
        return 0
    with mmap.mmap(descriptor, size, prot=mmap.PROT_READ) as mapped:
        memory = np.frombuffer(mapped, np.uint8)
        pages = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
        address, length = ctypes.c_void_p(memory.ctypes.data), ctypes.c_size_t(size)
        failed = libc.mincore(address, length, ctypes.c_void_p(pages.ctypes.data))
        error = ctypes.get_errno()
        del memory  # or the mapping could not be closed
    if failed:
        raise CacheError(error, f"mincore: {os.strerror(error)}")
    return int((pages & 1).sum()) * (mmap.PAGESIZE // PAGE)
