"""Log what a file system writes to its disk, block by block, and make disks as a power cut may leave them.

The disk is a file of a file system in user space (FUSE, spoken here without a library), so that a loop device on it
passes on every write and every flush. Run as a program, this module is that file system. Needs Linux and root.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import stat
import struct
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import random

SECTOR = 512
_ENTRY = struct.Struct("<qI")  # offset and length of a write, whose bytes follow
_FLUSH, _MARK = -1, -2  # instead of an offset

# --------------------------------------------------------------------------------------- file system

_LOOKUP, _FORGET, _GETATTR, _OPEN, _READ, _WRITE, _STATFS = 1, 2, 3, 14, 15, 16, 17
_RELEASE, _FSYNC, _FLUSH_FILE, _INIT, _DESTROY, _FORGET_MANY = 18, 20, 25, 26, 38, 42
_ROOT, _DISK, _MARKS = 1, 2, 3
_NAMES = {b"disk": _DISK, b"mark": _MARKS}
_NOT_FOUND, _NOT_KNOWN = -2, -38
_MOST = 2**20  # bytes of one write


class Server:
    """A directory with two files: `disk` is the image; each write to `mark` is noted in the log."""

    def __init__(self, image: Path, log: Path, device: int) -> None:
        self.image = os.open(image, os.O_RDWR)
        self.size = os.fstat(self.image).st_size
        self.log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        self.device = device

    def serve(self) -> None:
        while True:
            try:
                request = os.read(self.device, _MOST + 4096)
            except OSError:  # unmounted
                return
            _, code, unique, node, *_ = struct.unpack_from("<IIQQIIII", request)
            if code in (_FORGET, _FORGET_MANY):
                continue
            error, body = self.answer(code, node, request[40:])
            with suppress(FileNotFoundError):  # interrupted
                os.write(self.device, struct.pack("<IiQ", 16 + len(body), error, unique) + body)
            if code == _DESTROY:
                return

    def answer(self, code: int, node: int, body: bytes) -> tuple[int, bytes]:
        if code == _INIT:
            flags = (1 << 5) | (1 << 22)  # large writes
            return 0, struct.pack(
                "<IIIIHHIIHHII24x", 7, 31, 2**17, flags, 16, 12, _MOST, 1, _MOST // 4096, 0, 0, 0
            )
        if code == _LOOKUP:
            found = _NAMES.get(body.rstrip(b"\0"))
            if found is None:
                return _NOT_FOUND, b""
            return 0, struct.pack("<QQQQII", found, 0, 60, 60, 0, 0) + self.attributes(found)
        if code == _GETATTR:
            return 0, struct.pack("<QII", 60, 0, 0) + self.attributes(node)
        if code == _OPEN:
            return 0, struct.pack("<QII", 0, 0, 0)
        if code == _READ:
            _, offset, size = struct.unpack_from("<QQI", body)
            return 0, os.pread(self.image, size, offset) if node == _DISK else b""
        if code == _WRITE:
            _, offset, size = struct.unpack_from("<QQI", body)
            return 0, self.write(node, offset, body[40 : 40 + size])
        if code == _FSYNC:
            os.write(self.log, _ENTRY.pack(_FLUSH, 0))
            return 0, b""
        if code == _STATFS:
            return 0, struct.pack("<QQQQQIIII24x", 0, 0, 0, 0, 0, 4096, 255, 4096, 0)
        if code in (_RELEASE, _FLUSH_FILE, _DESTROY):
            return 0, b""
        return _NOT_KNOWN, b""

    def write(self, node: int, offset: int, data: bytes) -> bytes:
        if node == _DISK:
            os.pwrite(self.image, data, offset)
            os.write(self.log, _ENTRY.pack(offset, len(data)) + data)
        else:
            os.write(self.log, _ENTRY.pack(_MARK, 0))
        return struct.pack("<II", len(data), 0)

    def attributes(self, node: int) -> bytes:
        mode = stat.S_IFDIR | 0o755 if node == _ROOT else stat.S_IFREG | 0o600
        size = self.size if node == _DISK else 0
        numbers = (0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)
        return struct.pack("<6Q", node, size, size // SECTOR, 0, 0, 0) + struct.pack("<10I", *numbers)


def main(image: str, log: str, place: str) -> None:
    device = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"faults", os.fsencode(place), b"fuse", 0, options):
        sys.exit(f"mount: {os.strerror(ctypes.get_errno())}")
    Server(Path(image), Path(log), device).serve()


# -------------------------------------------------------------------------------------------- client


class LoggedDisk:
    """An image as a file of the file system above, whose process ends when it is unmounted."""

    def __init__(self, image: Path, place: Path) -> None:
        place.mkdir()
        self.place, self.disk, self.log = place, place / "disk", image.with_suffix(".log")
        self._server = subprocess.Popen([sys.executable, __file__, str(image), str(self.log), str(place)])
        deadline = time.monotonic() + 20
        while not place.is_mount():
            if self._server.poll() is not None or time.monotonic() > deadline:
                raise OSError("the file system in user space did not start")
            time.sleep(0.01)

    def mark(self) -> None:
        descriptor = os.open(self.place / "mark", os.O_WRONLY)
        os.write(descriptor, b"x")
        os.close(descriptor)

    def close(self) -> None:
        subprocess.run(["umount", str(self.place)], check=True, capture_output=True)
        self._server.wait()


# -------------------------------------------------------------------------------------------- replay


@dataclass(frozen=True, slots=True)
class Write:
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class History:
    """The writes and flushes (None) of a save: after the first mark, up to the end; `returned` is the second mark."""

    base: list[Write]
    entries: list[Write | None]
    returned: int

    @classmethod
    def read(cls, log: Path) -> History:
        data, at = log.read_bytes(), 0
        entries: list[Any] = []
        while at < len(data):
            offset, nbytes = _ENTRY.unpack_from(data, at)
            at += _ENTRY.size
            entries.append(offset if offset < 0 else Write(offset, data[at : at + nbytes]))
            at += nbytes
        first, second = (number for number, entry in enumerate(entries) if entry == _MARK)
        after = [None if e == _FLUSH else e for e in entries[first + 1 :] if e != _MARK]
        return cls([e for e in entries[:first] if isinstance(e, Write)], after, second - first - 1)

    def cut(self, rng: random.Random) -> tuple[list[Write], bool]:
        """Return what is on the disk after a cut at a random moment, and whether the save had returned by then.

        All writes before the last flush are there. Of those after it any may be lost, they come in any order, and of
        one of them only some sectors are there.
        """
        most = min(len(self.entries), self.returned + max(4, self.returned // 4))
        moment = rng.randint(0, most)
        before = self.entries[:moment]
        flush = max((n for n, entry in enumerate(before) if entry is None), default=-1)
        sure = [entry for entry in before[: flush + 1] if entry is not None]
        open_ones = [entry for entry in before[flush + 1 :] if entry is not None]
        share = rng.choice([0.0, 0.2, 0.5, 0.8, 1.0])
        kept = [entry for entry in open_ones if rng.random() < share]
        rng.shuffle(kept)
        torn = _torn(rng.choice(open_ones), rng) if open_ones else []
        return [*sure, *kept, *torn], moment >= self.returned


def _torn(write: Write, rng: random.Random) -> list[Write]:
    """Return some of the sectors of a write: a beginning, an end, or any."""
    starts = list(range(0, len(write.data), SECTOR))
    at = rng.randint(0, len(starts))
    chosen = rng.choice([starts[:at], starts[at:], rng.sample(starts, at)])
    return [Write(write.offset + start, write.data[start : start + SECTOR]) for start in chosen]


def copy_sparse(source: Path, target: Path) -> None:
    subprocess.run(["cp", "--sparse=always", str(source), str(target)], check=True)


def apply(image: Path, writes: list[Write]) -> None:
    with image.open("r+b", buffering=0) as file:
        for write in writes:
            os.pwrite(file.fileno(), write.data, write.offset)


def cannot() -> str:
    if os.geteuid():
        return "needs root"
    return "" if os.path.exists("/dev/fuse") and shutil.which("umount") else "needs /dev/fuse"


if __name__ == "__main__":
    main(*sys.argv[1:])
