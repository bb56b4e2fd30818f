"""SHA-256 of leaves on the disk, for those who recorded it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from eformer._engine.loading.fetch import fetch
from eformer._engine.loading.read_plan import Want, plan_reads
from eformer._engine.record.digests import sha256_of
from eformer._engine.record.dtypes import dtype_from_name, raw_pieces
from eformer._engine.record.pieces import pieces
from eformer._engine.tasks.pool import run_all
from eformer.errors import CorruptionError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from eformer._engine.formats.found import Found
    from eformer._engine.record.manifest import LeafEntry, TreeEntry
    from eformer._engine.stores.base import Files

_BYTES_AT_ONCE = 16 * 2**20


def check_sha256(found: Found, tree: TreeEntry, expected: Mapping[str, str], threads: int) -> None:
    """Every leaf in `expected` still has that SHA-256; else an error that names all that do not, and their files."""
    problems: list[str] = []
    files = found.files(tree)

    def check(name: str, entry: LeafEntry) -> None:
        now = sha256_of(_bytes(name, entry, tree, files))
        if now != expected[name]:
            where = ", ".join(sorted({tree.path_of(extent.file) for extent in entry.extents}))
            problems.append(f"leaf {name!r} in {where} has SHA-256 {now}, recorded is {expected[name]}")

    try:
        leaves = [(name, entry) for name, entry in tree.leaves.items() if name in expected]
        run_all([partial(check, name, entry) for name, entry in leaves], threads)
    finally:
        files.close()
    if problems:
        raise CorruptionError(f"{found.path}: validation failed: {'; '.join(sorted(problems))}")


def _bytes(name: str, entry: LeafEntry, tree: TreeEntry, files: Files) -> Iterator[Any]:
    """The elements in their order, a little at a time."""
    for region in pieces(entry.shape, dtype_from_name(entry.dtype).itemsize, _BYTES_AT_ONCE):
        wants = [Want(name, entry, entry.dtype, [region])]
        ((array,),) = fetch(plan_reads(wants, tree), wants, tree, files, 1)
        yield from raw_pieces(array)
