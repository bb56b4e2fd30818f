"""Reading every byte of a checkpoint once, to see whether it is what was saved. Needs no jax."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from eformer._engine.formats.find import find, was_replaced
from eformer._engine.formats.process_records import unreadable
from eformer._engine.loading.fetch import check
from eformer._engine.loading.read_plan import Want
from eformer._engine.record.digests import xxh3_128
from eformer._engine.record.text import count, few
from eformer._engine.tasks.pool import default_threads
from eformer._engine.tasks.progress import metered
from eformer.errors import Damage, FormatError

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator

    from eformer._engine.formats.found import Found
    from eformer._engine.record.manifest import Extent, TreeEntry
    from eformer._engine.stores.base import Files
    from eformer._engine.tasks.progress import Meter, Progress


@dataclass(frozen=True, slots=True)
class Report:
    """What `verify` found. `has_digests` is False for files of other writers, of which only the structure was
    checked, and that all bytes are there; `has_checksums` if these have checksums of their own. `left_out` are the
    files of a directory that are not read, and may hold leaves."""

    path: str
    trees: int
    leaves: int
    nbytes: int
    has_digests: bool
    damages: tuple[Damage, ...]
    has_checksums: bool = False
    left_out: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.damages and not self.left_out

    def __str__(self) -> str:
        if not self.left_out:
            return self._checked
        left_out = (
            f"{count(len(self.left_out), 'file')} left out, which may hold leaves: {few(self.left_out)}"
        )
        return f"{self._checked}\n  {left_out}"

    @property
    def _checked(self) -> str:
        if self.damages:
            return "\n  ".join([f"{self.path}: {len(self.damages)} damaged", *map(str, self.damages)])
        how = "all there, but without digests nothing more is known"
        if self.left_out:
            how = "can be read"
        if self.has_digests:
            how = "every digest matches"
        elif self.has_checksums:
            how = "every checksum matches"
        return f"{self.path}: {self.leaves} leaves, {self.nbytes} bytes: {how}"


def verify(path: str | os.PathLike[str], *, progress: Progress = None) -> Report:
    """Every leaf of every tree at `path` against its digests, and the files' headers; all damage in one report.

    Files in a directory of another writer that are not read, and may hold leaves, are reported as left out.
    A checkpoint whose manifest cannot be read has no leaves to report on: that raises. `progress` is True for a bar, or
    is called with the bytes that were read and with all there are.
    """
    while True:
        found = find(path)
        trees, damages = _readable(found)
        with metered(progress, sum(tree.nbytes for tree in trees), "verifying") as meter:
            damages += [damage for tree in trees for damage in _damages(found, tree, meter)]
        if found.find_damages:
            damages += found.find_damages()
        if not damages or not was_replaced(found):
            break
    return Report(
        path=str(found.path),
        trees=len(found.trees),
        leaves=sum(len(tree.leaves) + len(tree.raw_values) for tree in trees),
        nbytes=sum(tree.nbytes for tree in trees),
        has_digests=all(tree.save_id for tree in trees),
        damages=tuple(damages),
        has_checksums=found.find_damages is not None,
        left_out=found.left_out(),
    )


def _readable(found: Found) -> tuple[list[TreeEntry], list[Damage]]:
    """The trees, without those whose parts are gone or damaged, so that nobody knows what is in them."""
    trees, damages = [], []
    for prefix, record in found.manifest.trees.items():
        if record.parts:
            try:
                found.trees[prefix].leaves  # noqa: B018
            except (OSError, FormatError) as error:
                found_out = unreadable(found.store, record) or [(str(found.path), str(error))]
                damages += [
                    Damage("", name, 0, 0, f"cannot be read: {problem}") for name, problem in found_out
                ]
                continue
        trees.append(found.trees[prefix])
    trees += [found.trees[prefix] for prefix in found.trees if prefix not in found.manifest.trees]
    return trees, damages


def _damages(found: Found, tree: TreeEntry, meter: Meter) -> list[Damage]:
    try:
        files = found.files(tree)
    except (FileNotFoundError, FormatError) as error:
        return [Damage("", tree.root, 0, 0, f"cannot be read: {error}")]
    try:
        damages: list[Damage] = []
        gone: dict[int, str] = {}
        for number in range(len(tree.files)):
            try:
                damages += _file_damages(tree, number, files)
            except (OSError, FormatError) as error:
                gone[number] = str(error)
                if tree.files[number].header_nbytes == tree.files[number].nbytes:
                    damages.append(_lost_header(tree, number, str(error)))
        wants = []
        for name, entry in tree.leaves.items():
            if lost := [extent for extent in entry.extents if extent.file in gone]:
                damages += [_lost(name, extent, tree, gone[extent.file]) for extent in lost]
            else:
                wants.append(Want(name, entry, entry.dtype))
        check(wants, tree, files, default_threads(), damages.append, meter)
    finally:
        files.close()
    return damages


def _lost(leaf: str, extent: Extent, tree: TreeEntry, why: str) -> Damage:
    start = tree.files[extent.file].header_nbytes + extent.offset
    return Damage(leaf, tree.path_of(extent.file), start, start + extent.nbytes, f"cannot be read: {why}")


def _lost_header(tree: TreeEntry, number: int, why: str) -> Damage:
    return Damage("", tree.path_of(number), 0, tree.files[number].header_nbytes, f"cannot be read: {why}")


def _file_damages(tree: TreeEntry, number: int, files: Files) -> Iterator[Damage]:
    """What is wrong outside of the leaves: the header, which other readers go by, and the length."""
    file, name = tree.files[number], tree.path_of(number)
    nbytes = files.nbytes(number)
    if nbytes != file.nbytes:
        yield Damage("", name, 0, nbytes, f"are all there is, recorded is a length of {file.nbytes}")
    if file.header and nbytes >= file.header_nbytes:
        header = bytearray(file.header_nbytes)
        found = files.read_into(number, memoryview(header), 0)
        digest = xxh3_128(memoryview(header)[:found])
        if digest != file.header:
            problem = f"are damaged: they digest to {digest}, recorded is {file.header}"
            yield Damage(
                "",
                name,
                0,
                file.header_nbytes,
                f"{problem}. This is the header, which only other readers use",
            )
