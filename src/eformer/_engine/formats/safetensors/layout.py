"""Decide which leaves share a safetensors file."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


# safetensors readers refuse a header of more than 100 MB.
MAX_HEADER_BYTES = 90_000_000
_HEADER_BYTES_A_LEAF = 150
_PART_BYTES_A_LEAF = 250  # its extent, digest and SHA-256, which the files of several processes carry


def layout(sizes: Mapping[str, int], limit: int, *, has_parts: bool = False) -> list[list[str]]:
    """Which leaves share a file of at most `limit` bytes: those of one module, in their order, while they fit.

    A module that fits a file is not torn; a leaf larger than the limit has a file of its own.
    """
    files: list[list[str]] = []
    used = header = 0
    for module in _modules(sizes):
        total = sum(sizes[name] for name in module)
        if used + total > limit >= total:
            used = limit + 1  # the next file takes it whole
        for name in module:
            nbytes = len(name.encode()) + _HEADER_BYTES_A_LEAF
            if has_parts:
                nbytes += 2 * len(name.encode()) + _PART_BYTES_A_LEAF
            header += nbytes
            if not files or used + sizes[name] > limit or header > MAX_HEADER_BYTES:
                files.append([])
                used, header = 0, nbytes
            files[-1].append(name)
            used += sizes[name]
    return files


def _modules(names: Iterable[str]) -> Iterable[list[str]]:
    """The names by what stands before their last dot, modules in order of their first leaf."""
    modules: dict[str, list[str]] = {}
    for name in names:
        modules.setdefault(name.rpartition(".")[0], []).append(name)
    return modules.values()
