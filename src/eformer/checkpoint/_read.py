"""The bytes of leaves that a load has placed: planned, read and checked, in host memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from eformer.checkpoint._plan import Read, Want, plan_reads
from eformer.checkpoint._transfer import fetch
from eformer.errors import CorruptionError, FormatError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy as np

    from eformer.checkpoint._formats._found import Found
    from eformer.checkpoint._items import Item
    from eformer.checkpoint._manifest import TreeEntry
    from eformer.checkpoint._store.files import Files

_MUCH = 2**20  # bytes of one file


def read(
    found: Found,
    tree: TreeEntry,
    items: Sequence[Item],
    threads: int,
    *,
    verify: bool,
    memory: np.ndarray[Any, Any] | None = None,
) -> None:
    """The items have their arrays, those that are large in `memory` as far as it goes."""
    wants = [Want(item.name, item.entry, item.dtype, item.regions) for item in items]
    reads = plan_reads(wants, tree)
    files = found.files(tree)
    try:
        needed = _needed_files(tree, reads)
        files.hold(needed)
        _require_bytes(tree, items, needed, files)
        fetched = fetch(reads, wants, tree, files, threads, verify=verify, memory=memory)
    finally:
        files.close()
    for item, arrays in zip(items, fetched, strict=True):
        item.arrays = arrays


def _require_bytes(tree: TreeEntry, items: Sequence[Item], needed: Iterable[int], files: Files) -> None:
    """Refuses files that are shorter than the leaves, before much memory is allocated for these."""
    lengths = [file.nbytes for file in tree.files]
    for number in needed:
        if lengths[number] > _MUCH and not tree.is_database:
            lengths[number] = files.nbytes(number)
    if all(length >= file.nbytes for length, file in zip(lengths, tree.files, strict=True)):
        return
    for item in items:
        for extent in item.entry.extents:
            file = tree.files[extent.file]
            stop = file.header_nbytes + extent.offset + extent.nbytes
            if stop > lengths[extent.file]:
                raise CorruptionError(
                    f"leaf {item.name!r}: {tree.path_of(extent.file)} was cut short: it ends after "
                    f"{lengths[extent.file]} bytes, the leaf after {stop}; restore the file from a copy, or load "
                    "an older checkpoint"
                )


def _needed_files(tree: TreeEntry, reads: Sequence[Read]) -> set[int]:
    """By number; refuses leaves that claim more bytes than the files have, before memory is allocated for them."""
    claimed = [0] * len(tree.files)
    for read in reads:
        claimed[read.file] += read.nbytes
    for file, nbytes in zip(tree.files, claimed, strict=True):
        if nbytes > file.nbytes:
            raise FormatError(f"the leaves in {file.name!r} claim {nbytes} bytes, it has {file.nbytes}")
    return {read.file for read in reads}
