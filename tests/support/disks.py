"""File systems of a test's own: small ones that fill up, and ones whose power can be cut. They need root."""

from __future__ import annotations

import fcntl
import mmap
import os
import shutil
import struct
import subprocess
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_SHUTDOWN = 0x8004587D  # EXT4_IOC_SHUTDOWN, which xfs has, too
_NO_LOG_FLUSH = 2

_MIB = {"ext4": 16, "xfs": 304, "btrfs": 128}  # their mkfs take no less; the files are sparse
# Options that keep a file system from syncing on its own, whether after a while or when a file is replaced.
OPTIONS = {"ext4": "loop,commit=600,noauto_da_alloc", "xfs": "loop", "btrfs": "loop,commit=600"}


class CannotMount(Exception):
    """The reason why a test that needs a file system of its own cannot run."""


class Mount:
    """A mounted file system of a test; `options` are those of mount(8)."""

    def __init__(self, source: str, place: Path, *options: str) -> None:
        self.source, self.place, self.options = source, place, options
        place.mkdir()
        try:
            self.mount()
        except CannotMount:
            place.rmdir()  # the next case of this process uses the same name
            raise

    def mount(self) -> None:
        administer("mount", *self.options, self.source, str(self.place))

    def unmount(self) -> None:
        administer("umount", str(self.place))

    def close(self) -> None:
        if self.place.is_mount():
            with suppress(CannotMount):
                return self.unmount()
            administer("umount", "--lazy", str(self.place))  # one of its files is still open
        return None


class SmallDisk(Mount):
    """A disk of a few pages, which can be filled up."""

    def __init__(self, place: Path, pages: int = 256) -> None:
        super().__init__("tmpfs", place, "-t", "tmpfs", "-o", f"size={pages * mmap.PAGESIZE}")

    @contextmanager
    def filled_but_for(self, pages: int) -> Iterator[None]:
        ballast = self.place / "ballast"
        free = shutil.disk_usage(self.place).free
        ballast.write_bytes(bytes(free - pages * mmap.PAGESIZE))
        yield
        ballast.unlink()


class FragileDisk(Mount):
    """An ext4 or xfs whose power can be cut; everything that was not synced is then lost."""

    def __init__(self, place: Path, kind: str = "ext4") -> None:
        self.image = place.with_suffix(f".{kind}")
        make_image(self.image, kind)
        super().__init__(str(self.image), place, "-t", kind, "-o", OPTIONS[kind])
        try:
            self.cut_power()
        except OSError as error:
            self.close()
            raise CannotMount(f"this {kind} cannot be shut down: {error}") from error
        self.restart()

    def cut_power(self) -> None:
        cut_power(self.place)

    def restart(self) -> None:
        self.unmount()
        self.mount()

    def sync(self) -> None:
        administer("sync", "--file-system", str(self.place))

    def remove(self) -> None:
        """Unmount it and remove its image."""
        self.close()
        self.place.rmdir()
        self.image.unlink()


def make_image(image: Path, kind: str) -> None:
    """Make a file with an empty file system in it."""
    with open(image, "wb") as file:
        file.truncate(_MIB[kind] * 2**20)
    administer(f"mkfs.{kind}", "-q", "-F" if kind == "ext4" else "-f", str(image))


def cut_power(place: Path) -> None:
    """Shut the file system at a place down at once, without what it has not written (an ioctl of ext4 and xfs)."""
    descriptor = os.open(place, os.O_RDONLY)
    try:
        fcntl.ioctl(descriptor, _SHUTDOWN, struct.pack("I", _NO_LOG_FLUSH))
    finally:
        os.close(descriptor)


def administer(*command: str) -> None:
    if not shutil.which(command[0]):
        raise CannotMount(f"{command[0]} is not installed")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason, _, _ = done.stderr.partition("\n")
        raise CannotMount(f"{command[0]}: {reason}")
