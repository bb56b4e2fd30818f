"""Directories of zarr arrays that others wrote, described as if they were ours: extents, but no digests."""

from __future__ import annotations

import os
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from eformer._engine.formats.markers import ORBAX_CHECKPOINT, ORBAX_TREE
from eformer._engine.formats.nested_names import nested, parts_of_path
from eformer._engine.formats.zarr.index import INDEX, Listed
from eformer._engine.formats.zarr.zarray import ZARRAY, ZArray, chunks_of, count_chunks, parse_zarray
from eformer._engine.record.manifest import DataFile, Extent, LeafEntry, TreeEntry, foreign_tree
from eformer._engine.stores.local import open_inside, read_range, stamp
from eformer.errors import CorruptionError, FormatError, NotFoundError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

_MOST_DEPTH = 100
_CHECKPOINTS = {INDEX, ORBAX_TREE, ORBAX_CHECKPOINT}  # what another checkpoint has at its top
_MOST_DESCRIPTION = 2**20


def discover(directory: Path) -> Iterator[Listed]:
    """All arrays below a directory, in order. Links are not followed, nor are other checkpoints; directories that may
    not be listed, such as lost+found, are left out."""
    todo = [("", 0)]
    while todo:
        path, depth = todo.pop()
        below, names = [], set()
        with suppress(PermissionError) if path else nullcontext(), os.scandir(directory / path) as entries:
            for entry in entries:
                names.add(entry.name)
                if entry.is_dir(follow_symlinks=False) and not entry.name.startswith("."):
                    below.append(f"{path}/{entry.name}" if path else entry.name)
        if ZARRAY in names and path:
            yield Listed(path)
        elif depth < _MOST_DEPTH and not (path and _CHECKPOINTS & names):
            todo += [(name, depth + 1) for name in sorted(below, reverse=True)]


@dataclass(slots=True)
class _Arrays:
    """Files and leaves, as they are found."""

    directory: Path
    stamps: dict[str, tuple[int, ...]]
    files: list[DataFile] = field(default_factory=list)

    def add(self, listed: Listed) -> LeafEntry:
        path, name = listed.path, f"{listed.path}/{ZARRAY}"
        raw = self._description(name)
        array = parse_zarray(raw, str(self.directory / name))
        _check_listed(listed, array)
        if array.eformer:
            raise NotFoundError(
                f"{self.directory} holds no checkpoint: the array {path} belongs to a save that has not finished, or "
                f"whose {INDEX} is gone. Read it with TensorStore if you want it nevertheless"
            )
        self.files.append(DataFile(name, len(raw), len(raw)))
        extents = tuple(self._extents(path, array, raw.decode(errors="replace")))
        return LeafEntry(array.name_of_dtype, array.shape, extents)

    def _description(self, name: str) -> bytes:
        try:
            descriptor = open_inside(self.directory, name)
        except FileNotFoundError:
            raise CorruptionError(f"{self.directory / name} is missing: there is no such array") from None
        try:
            self.stamps[name] = stamp(descriptor)
            return read_range(descriptor, 0, _MOST_DESCRIPTION)
        finally:
            os.close(descriptor)

    def _extents(self, path: str, array: ZArray, raw: str) -> Iterator[Extent]:
        sizes = _chunk_sizes(self.directory / path, array)
        expected = count_chunks(array.shape, array.chunks)
        if expected > len(sizes):
            raise CorruptionError(
                f"{self.directory / path}: {expected - len(sizes)} of {expected} chunks are missing, the first is "
                f"{_first_missing(array, sizes)!r}; they are not taken for zeros"
            )
        for name, box in chunks_of(array.shape, array.chunks) if expected else ():
            name = name.replace(".", array.dimension_separator)
            if name not in sizes:
                raise CorruptionError(f"{self.directory / path / name} is missing; it is not taken for zeros")
            coding = array.coding(box.shape, raw)
            if not array.compressor and sizes[name] != array.chunk_nbytes:
                raise CorruptionError(
                    f"{self.directory / path / name} has {sizes[name]} bytes, a chunk has {array.chunk_nbytes}"
                )
            nbytes = sizes[name] if coding else array.nbytes_of(box.shape)
            region = None if box.shape == array.shape else (box.start, box.stop)
            yield Extent(len(self.files), 0, nbytes, "", region, coding)
            self.files.append(DataFile(f"{path}/{name}", sizes[name]))


def _check_listed(listed: Listed, array: ZArray) -> None:
    """What the index says of an array, if it says it, is all there is to compare the array with."""
    is_other_shape = listed.shape is not None and listed.shape != array.shape
    is_other_dtype = listed.dtype is not None and listed.dtype != array.name_of_dtype
    if is_other_shape or is_other_dtype:
        raise FormatError(
            f"the index says {listed.dtype}{list(listed.shape or ())}, {ZARRAY} says "
            f"{array.name_of_dtype}{list(array.shape)}"
        )


def _chunk_sizes(directory: Path, array: ZArray) -> dict[str, int]:
    """The lengths of the files that may be chunks, by name."""
    depth = len(array.shape) if array.dimension_separator == "/" else 1
    sizes: dict[str, int] = {}
    for folder, folders, names in os.walk(directory):
        inner = os.path.relpath(folder, directory)
        level = 0 if inner == "." else inner.count("/") + 1
        if level + 1 >= depth:
            folders.clear()
        for name in names:
            if name[0] != ".":
                path = name if inner == "." else f"{inner}/{name}"
                sizes[path] = os.lstat(f"{folder}/{name}").st_size
    return sizes


def _first_missing(array: ZArray, sizes: Mapping[str, int]) -> str:
    names = (name.replace(".", array.dimension_separator) for name, _ in chunks_of(array.shape, array.chunks))
    return next(name for name in names if name not in sizes)


def tree_of_arrays(
    directory: Path,
    paths: Mapping[str, Listed],
    stamps: dict[str, tuple[int, ...]],
    *,
    structure: Any = None,
    values: Mapping[str, Any] | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> TreeEntry:
    """The arrays at these paths as one tree; the stamps of their descriptions are added to those there are.

    With a `structure` the keys are the names of its leaves, else paths that dicts are made of.
    """
    arrays = _Arrays(directory, stamps)
    entries = {}
    for name, listed in paths.items():
        try:
            entries[name] = arrays.add(listed)
        except FormatError as error:
            raise type(error)(f"leaf {name!r}: {error}") from error
    if structure is None:
        structure, names = nested({key: parts_of_path(key) for key in entries})
        entries = {names[name]: entry for name, entry in entries.items()}
    return foreign_tree(
        files=tuple(arrays.files),
        metadata=metadata,
        values=values,
        structure=structure,
        leaves=entries,
    )


def counted_from(directory: str, listed: Sequence[Listed]) -> dict[str, Listed]:
    """Each array by its path as it is seen from a directory."""
    start = f"{directory}/" if directory else ""
    found = {array.path.removeprefix(start): array for array in listed}
    if len(found) < len(listed):
        raise FormatError(f"arrays in and beside {directory!r} are listed together, and would get one name")
    return found
