"""Reading every byte of a checkpoint once, to see whether it is what was saved. Needs no jax."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from eformer.checkpoint._codec import xxh3_128
from eformer.checkpoint._formats._reading import FOREIGN, Found, close_files, find, was_replaced
from eformer.checkpoint._plan import Want
from eformer.checkpoint._pool import default_threads
from eformer.checkpoint._store.local import read_range
from eformer.checkpoint._transfer import Damage, check
from eformer.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from eformer.checkpoint._manifest import Extent, TreeEntry


@dataclass(frozen=True, slots=True)
class Report:
    """What `verify` found. `has_digests` is False for files of other writers, of which only the structure was
    checked, and that all bytes are there."""

    path: str
    trees: int
    leaves: int
    nbytes: int
    has_digests: bool
    damages: tuple[Damage, ...]

    @property
    def ok(self) -> bool:
        return not self.damages

    def __str__(self) -> str:
        if self.damages:
            return "\n  ".join([f"{self.path}: {len(self.damages)} damaged", *map(str, self.damages)])
        how = (
            "every digest matches"
            if self.has_digests
            else "all there, but without digests nothing more is known"
        )
        return f"{self.path}: {self.leaves} leaves, {self.nbytes} bytes: {how}"


def verify(path: str | os.PathLike[str]) -> Report:
    """Every leaf of every tree at `path` against its digests, and the files' headers; all damage in one report.

    A checkpoint whose manifest cannot be read has no leaves to report on: that raises.
    """
    while True:
        found = find(path)
        damages = [damage for tree in found.trees.values() for damage in _damages(found, tree)]
        if not damages or not was_replaced(found):
            break
    return Report(
        path=str(found.path),
        trees=len(found.trees),
        leaves=sum(len(tree.leaves) + len(tree.raw_values) for tree in found.trees.values()),
        nbytes=sum(tree.nbytes for tree in found.trees.values()),
        has_digests=found.manifest.format != FOREIGN,
        damages=tuple(damages),
    )


def _damages(found: Found, tree: TreeEntry) -> list[Damage]:
    descriptors, gone = _open_what_is_there(found, tree)
    try:
        damages = [
            damage for number in range(len(tree.files)) for damage in _file_damages(tree, number, descriptors)
        ]
        wants = []
        for name, entry in tree.leaves.items():
            if lost := [extent for extent in entry.extents if extent.file in gone]:
                damages += [_lost(name, extent, tree, gone[extent.file]) for extent in lost]
            else:
                wants.append(Want(name, entry, entry.dtype))
        check(wants, tree, descriptors, default_threads(), damages.append)
    finally:
        close_files(descriptors)
    return damages


def _open_what_is_there(found: Found, tree: TreeEntry) -> tuple[list[int], dict[int, str]]:
    """A descriptor for each file, -1 where there is none; and why, by its number."""
    descriptors, gone = [-1] * len(tree.files), {}
    for number in range(len(tree.files)):
        try:
            descriptors[number] = found.open_files(tree, [number])[number]
        except (OSError, FormatError) as error:
            gone[number] = str(error)
    return descriptors, gone


def _lost(leaf: str, extent: Extent, tree: TreeEntry, why: str) -> Damage:
    file = tree.files[extent.file]
    start = file.header_nbytes + extent.offset
    return Damage(leaf, file.name, start, start + extent.nbytes, f"cannot be read: {why}")


def _file_damages(tree: TreeEntry, number: int, descriptors: Sequence[int]) -> Iterator[Damage]:
    """What is wrong outside of the leaves: the header, which other readers go by, and the length."""
    file, descriptor = tree.files[number], descriptors[number]
    if descriptor < 0:
        return
    nbytes = os.fstat(descriptor).st_size
    if nbytes != file.nbytes:
        yield Damage("", file.name, 0, nbytes, f"are all there is, recorded is a length of {file.nbytes}")
    if file.header:
        digest = xxh3_128(read_range(descriptor, 0, file.header_nbytes))
        if digest != file.header:
            problem = f"are damaged: they digest to {digest}, recorded is {file.header}"
            yield Damage(
                "",
                file.name,
                0,
                file.header_nbytes,
                f"{problem}. This is the header, which only other readers use",
            )
