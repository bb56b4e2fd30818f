"""Measure the memory of this process and of its machine."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_INACTIVE = ("inactive_file", "total_inactive_file")  # in version 2 of control groups, and in version 1


def resident_bytes() -> int:
    """Return the resident memory of this process, in bytes; where the system does not tell it, its peak so far."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):  # not Linux
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
    return pages * os.sysconf("SC_PAGE_SIZE")


def available_memory() -> int:
    """Estimate the memory that this process can still use, in bytes: the least of the machine and its control groups.

    Pages of the page cache that the kernel gives up count as available.
    """
    return max(0, min([_of_machine(), *_of_groups()]))


def _of_machine() -> int:
    with suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")  # not Linux


def _of_groups(
    root: Path = Path("/sys/fs/cgroup"), groups: Path = Path("/proc/self/cgroup")
) -> Iterator[int]:
    """Yield the memory that each enclosing control group still allows, in version 1 or 2 of control groups."""
    try:
        lines = groups.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, limit, usage = root, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            base, limit, usage = root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        inner = base / path.lstrip("/")
        for directory in (inner, *inner.parents):
            if directory.is_relative_to(base):
                yield from _remaining(directory, limit, usage)


def _remaining(group: Path, limit: str, usage: str) -> Iterator[int]:
    try:
        left = int((group / limit).read_text()) - int((group / usage).read_text())
    except (OSError, ValueError):  # no such group, or no limit: "max"
        return
    yield left + _inactive(group)


def _inactive(group: Path) -> int:
    """Return the bytes in the page cache that a group has not used lately.

    The kernel counts them as used by the group, but gives them up when the group needs memory.
    """
    with suppress(OSError):
        stats = dict(line.split(" ", 1) for line in (group / "memory.stat").read_text().splitlines())
        return max(int(stats.get(name, 0)) for name in _INACTIVE)
    return 0
