"""The machine's limits: what plain programs take for the same bytes and the same number of leaves."""

from __future__ import annotations

import ctypes
import errno
import os
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import measuring
import numpy as np
from measuring import BLOCK, PAGE, CacheError, aligned, libc, settle, tries

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

RWF_DONTCACHE = 0x80  # os has no name for it before Python 3.15
SYNC_FILE_RANGE_WRITE = 2
UNSUPPORTED = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS}

# ------------------------------------------------------------------------------------------- writing

WriteBlock = "Callable[[int, memoryview, int], int]"


def plain(descriptor: int, data: memoryview, at: int) -> int:
    return os.pwrite(descriptor, data, at)


def written_out(descriptor: int, data: memoryview, at: int) -> int:
    """The disk begins at once instead of waiting for the sync."""
    written = os.pwrite(descriptor, data, at)
    begin, length = ctypes.c_int64(at), ctypes.c_int64(len(data))
    if libc.sync_file_range(descriptor, begin, length, SYNC_FILE_RANGE_WRITE):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return written


def uncached(descriptor: int, data: memoryview, at: int) -> int:
    return os.pwritev(descriptor, [data], at, RWF_DONTCACHE)


MODES: dict[str, tuple[WriteBlock, int]] = {
    "buffered": (plain, 0),
    "written out": (written_out, 0),
    "O_DIRECT": (plain, getattr(os, "O_DIRECT", 0)),
    "RWF_DONTCACHE": (uncached, 0),
}


def write(mode: str, directory: Path, nbytes: int, threads: Sequence[int], most: int) -> dict[str, Any]:
    """Seconds until the bytes are on stable storage in a new file, for each number of threads."""
    data = filled(nbytes)
    try:
        return {
            "values": {
                f"save, {count} threads": min(tries(most, partial(write_one, mode, directory, data, count)))
                for count in threads
            }
        }
    except (OSError, AttributeError) as error:
        if isinstance(error, OSError) and error.errno not in UNSUPPORTED:
            raise
        return {"values": {}, "skipped": f"{mode}: this system cannot do it ({error})"}


def write_one(mode: str, directory: Path, data: np.ndarray, threads: int) -> float:
    write_block, flags = MODES[mode]
    path, view = directory / "plain", memoryview(data)
    path.unlink(missing_ok=True)
    settle(0 if flags else data.nbytes)
    start = time.perf_counter()
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | flags)
    try:
        os.ftruncate(descriptor, data.nbytes)
        in_blocks(lambda at: write_block(descriptor, view[at : at + BLOCK], at), data.nbytes, threads)
        os.fdatasync(descriptor)
    finally:
        os.close(descriptor)
    measuring.sync(directory)
    return time.perf_counter() - start


def filled(nbytes: int) -> np.ndarray:
    """Memory that has been touched, whole pages of it, with bytes that do not compress."""
    data = aligned(-(-nbytes // PAGE) * PAGE)
    tile = np.random.default_rng(0).integers(0, 256, min(data.nbytes, 16 * BLOCK), np.uint8)
    for at in range(0, data.nbytes, tile.nbytes):
        part = data[at : at + tile.nbytes]
        part[:] = tile[: part.nbytes]
    return data


# ------------------------------------------------------------------------------------------- reading


def read(
    directory: Path, nbytes: int, *, warm: Sequence[int], cold: Sequence[int], most: int
) -> dict[str, Any]:
    """Seconds from the page cache and from the disk into fresh memory, for each number of threads."""
    path = directory / "plain"
    write_one("buffered", directory, data := filled(nbytes), 2)
    nbytes = data.nbytes
    del data
    values, skipped = {}, []
    read_one(path, min(nbytes, BLOCK), 2, 0)  # a rehearsal
    for count in warm:
        values[f"load, {count} threads"] = min(tries(most, partial(read_warm, path, nbytes, count)))
    for mode, flags in (("buffered", 0), ("O_DIRECT", getattr(os, "O_DIRECT", 0))) if cold else ():
        try:
            for count in cold:
                seconds = tries(most, partial(read_cold, path, nbytes, count, flags))
                values[f"cold load, {mode}, {count} threads"] = min(seconds)
        except CacheError as error:
            skipped.append(f"cold load, {mode}: {error}")
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
            skipped.append(f"cold load, {mode}: this system cannot do it ({error})")
    return {"values": values, "skipped": "; ".join(skipped)}


def read_warm(path: Path, nbytes: int, threads: int) -> float:
    measuring.warm(path, nbytes)
    return read_one(path, nbytes, threads, 0)


def read_cold(path: Path, nbytes: int, threads: int, flags: int) -> float:
    settle(nbytes)
    measuring.drop(path)
    return read_one(path, nbytes, threads, flags)


def read_one(path: Path, nbytes: int, threads: int, flags: int) -> float:
    start = time.perf_counter()
    descriptor = os.open(path, os.O_RDONLY | flags)
    try:
        memory = memoryview(aligned(nbytes))  # every page of it is touched, because it is read into
        in_blocks(lambda at: os.preadv(descriptor, [memory[at : at + BLOCK]], at), nbytes, threads)
    finally:
        os.close(descriptor)
    return time.perf_counter() - start


def in_blocks(transfer: Callable[[int], int], nbytes: int, threads: int) -> None:
    with ThreadPoolExecutor(threads) as pool:
        if (moved := sum(pool.map(transfer, range(0, nbytes, BLOCK)))) != nbytes:
            raise OSError(f"{moved} of {nbytes} bytes were moved")


# --------------------------------------------------------------------------------------------- files

DESCRIPTION = b" " * 180  # as long as a `.zarray`


def files(directory: Path, count: int, nbytes: int, threads: Sequence[int], most: int) -> dict[str, Any]:
    """Seconds to make an array of zarr for each of `count` leaves, ten to a directory: a directory, a description and
    a chunk, all on stable storage; and to read the chunks. The fastest number of threads counts."""
    chunk = bytes(nbytes // count)
    saves, loads = [], []
    for number, workers in enumerate(threads):
        for turn in range(most):
            top = directory / f"files-{number}-{turn}"  # a name that is used again finds inodes just freed
            save, load = make_files(top, count, chunk, workers)
            saves.append(save)
            loads.append(load)
    return {"values": {"files of a save": min(saves), "files of a load": min(loads)}}


def make_files(top: Path, count: int, chunk: bytes, threads: int) -> tuple[float, float]:
    settle(0)
    top.mkdir()
    tens = range(0, count, 10)
    start = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda first: make_ten(f"{top}/{first}", min(10, count - first), chunk), tens))
    sync_many(top)
    saved = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda first: read_ten(f"{top}/{first}", min(10, count - first), len(chunk)), tens))
    return saved - start, time.perf_counter() - saved


def sync_many(top: Path) -> None:
    """The whole file system: much faster than thousands of files one by one."""
    descriptor = os.open(top, os.O_RDONLY)
    try:
        if libc.syncfs(descriptor):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    finally:
        os.close(descriptor)


def make_ten(folder: str, count: int, chunk: bytes) -> None:
    os.mkdir(folder)  # noqa: PTH102  thousands of times
    for number in range(count):
        array = f"{folder}/{number}"
        os.mkdir(array)  # noqa: PTH102
        for name, data in ((".zarray", DESCRIPTION), ("0", chunk)):
            descriptor = os.open(f"{array}/{name}", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            os.write(descriptor, data)
            os.close(descriptor)


def read_ten(folder: str, count: int, nbytes: int) -> None:
    for number in range(count):
        descriptor = os.open(f"{folder}/{number}/0", os.O_RDONLY)
        os.read(descriptor, nbytes)
        os.close(descriptor)


# -------------------------------------------------------------------------------------------- leaves


def floors(tree: Any, leaves: Sequence[np.ndarray], place: Any) -> dict[str, Any]:
    """Seconds that jax and numpy take for so many leaves: to hand out their bytes, and to make arrays of bytes."""
    import jax  # here, because the limits of the disk are measured without it

    def views() -> list[np.ndarray]:
        return [
            np.ndarray(leaf.shape, leaf.dtype, memory, at) for leaf, at in zip(leaves, starts, strict=True)
        ]

    starts, end = [], 0
    for leaf in leaves:
        starts.append(end)
        end += -(-leaf.nbytes // 64) * 64  # at such addresses XLA takes host memory as it is
    memory = aligned(end)
    memory[::PAGE] = 0
    jax.block_until_ready(jax.device_put(views()[:10], place))
    settle(0)
    save = measuring.measure(lambda: [np.asarray(leaf) for leaf in jax.tree.flatten(tree)[0]])
    made = measuring.measure(views)
    load = measuring.measure(lambda: jax.block_until_ready(jax.device_put(made.value, place)))
    seconds = {"floor of a save": save, "floor of a load": load, "floor of a numpy load": made}
    return {"values": {name: measured.seconds for name, measured in seconds.items()}}
