"""Describe zarr arrays of other programs as eformer records its own: with extents, but without digests."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from eformer._engine.formats.markers import ORBAX_CHECKPOINT, ORBAX_TREE
from eformer._engine.formats.nested_names import nest, parts_of_path
from eformer._engine.formats.zarr.layout import chunks_of, count_chunks
from eformer._engine.record.indexes import INDEX, Listed
from eformer._engine.record.manifest import DataFile, Extent, LeafEntry, TreeEntry, foreign_tree
from eformer._engine.record.zarray import MOST_ZARRAY, ZARRAY, ZArray, parse_zarray
from eformer.errors import CorruptionError, FormatError, NotFoundError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from eformer._engine.stores.base import Store, Version

_MOST_DEPTH = 100
_CHECKPOINTS = {INDEX, ORBAX_TREE, ORBAX_CHECKPOINT}  # files at the top of another checkpoint
_SAVE = re.compile(r".+\.[0-9a-f]{16}")  # a directory in which a save has put its arrays, or is putting them


def discover(store: Store) -> Iterator[Listed]:
    """List all arrays below a directory, in order.

    Links are not followed, and other checkpoints are not entered, nor saves to them that have not finished: in a bucket
    those are in sight. Directories that may not be listed, such as lost+found, are skipped. A directory that does not
    exist, or not any more, has no arrays.
    """
    todo = [("", 0)]
    while todo:
        path, depth = todo.pop()
        with suppress(FileNotFoundError, *([PermissionError] if path else [])):  # somebody removes it
            kinds = store.kinds(path)
            if ZARRAY in kinds and path:
                yield Listed(path)
            elif depth < _MOST_DEPTH and not (path and _CHECKPOINTS & kinds.keys()):
                below = [name for name, kind in kinds.items() if kind == "directory" and name[0] != "."]
                below = [name for name in below if not (path and _SAVE.fullmatch(name))]
                todo += [(f"{path}/{name}" if path else name, depth + 1) for name in reversed(below)]


def array_at(store: Store, path: str) -> ZArray | None:
    """Read the description of an array by any program. Return None if there is none, or one that makes no sense."""
    with suppress(FileNotFoundError, FormatError):
        return parse_zarray(store.read(f"{path}/{ZARRAY}", 0, MOST_ZARRAY)[0], path)
    return None


@dataclass(slots=True)
class _Arrays:
    """The arrays of a tree, and the files found for them so far."""

    store: Store
    versions: dict[str, Version]
    files: list[DataFile] = field(default_factory=list)

    def add(self, listed: Listed) -> LeafEntry:
        path, name = listed.path, f"{listed.path}/{ZARRAY}"
        raw = self._description(name)
        array = parse_zarray(raw, self.store.path_to(name))
        array.require_readable(self.store.path_to(name))
        _check_listed(listed, array)
        if array.eformer:
            raise NotFoundError(
                f"{self.store.url} holds no checkpoint: the array {path} belongs to a save that has not finished, or "
                f"whose {INDEX} is missing. TensorStore can still read the array"
            )
        self.files.append(DataFile(name, len(raw), len(raw)))
        extents = tuple(self._extents(path, array, raw.decode(errors="replace")))
        return LeafEntry(array.name_of_dtype, array.shape, extents)

    def _description(self, name: str) -> bytes:
        try:
            data, entry = self.store.read(name, 0, MOST_ZARRAY)
        except FileNotFoundError:
            raise CorruptionError(f"{self.store.path_to(name)} is missing: there is no such array") from None
        self.versions[name] = entry.version
        return data

    def _extents(self, path: str, array: ZArray, raw: str) -> Iterator[Extent]:
        sizes = _chunk_sizes(self.store, path, array)
        expected = count_chunks(array.shape, array.chunks)
        if expected > len(sizes):
            raise CorruptionError(
                f"{self.store.path_to(path)}: {expected - len(sizes)} of {expected} chunks are missing, the first is "
                f"{_first_missing(array, sizes)!r}; they are not read as zeros. (zarr-python leaves out chunks that "
                "equal the fill value, unless write_empty_chunks is set)"
            )
        for name, box in chunks_of(array.shape, array.chunks) if expected else ():
            name = name.replace(".", array.dimension_separator)
            where = self.store.path_to(f"{path}/{name}")
            if name not in sizes:
                raise CorruptionError(f"{where} is missing; it is not read as zeros")
            coding = array.coding(box.shape, raw)
            if not array.compressor and sizes[name] != array.chunk_nbytes:
                raise CorruptionError(f"{where} has {sizes[name]} bytes, expected {array.chunk_nbytes}")
            nbytes = sizes[name] if coding else array.nbytes_of(box.shape)
            region = None if box.shape == array.shape else (box.start, box.stop)
            yield Extent(len(self.files), 0, nbytes, "", region, coding)
            self.files.append(DataFile(f"{path}/{name}", sizes[name]))


def _check_listed(listed: Listed, array: ZArray) -> None:
    """Refuse an array whose shape or dtype differs from the index, if that records them."""
    is_other_shape = listed.shape is not None and listed.shape != array.shape
    is_other_dtype = listed.dtype is not None and listed.dtype != array.name_of_dtype
    if is_other_shape or is_other_dtype:
        raise FormatError(
            f"the index says {listed.dtype}{list(listed.shape or ())}, {ZARRAY} says "
            f"{array.name_of_dtype}{list(array.shape)}"
        )


def _chunk_sizes(store: Store, path: str, array: ZArray) -> dict[str, int]:
    """Return the lengths of the files that may be chunks, by name."""
    depth = len(array.shape) if array.dimension_separator == "/" else 1
    sizes = store.sizes(path, max(1, depth))
    return {name: nbytes for name, nbytes in sizes.items() if name.rpartition("/")[2][0] != "."}


def _first_missing(array: ZArray, sizes: Mapping[str, int]) -> str:
    names = (name.replace(".", array.dimension_separator) for name, _ in chunks_of(array.shape, array.chunks))
    return next(name for name in names if name not in sizes)


def tree_of_arrays(
    store: Store,
    paths: Mapping[str, Listed],
    versions: dict[str, Version],
    *,
    structure: Any = None,
    values: Mapping[str, Any] | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> TreeEntry:
    """Describe the arrays at these paths as one tree; add the versions of their descriptions to `versions`.

    With a `structure`, the keys of `paths` are the names of its leaves; without one, they are paths to nest dicts by.
    """
    arrays = _Arrays(store, versions)
    entries = {}
    for name, listed in paths.items():
        try:
            entries[name] = arrays.add(listed)
        except FormatError as error:
            raise type(error)(f"leaf {name!r}: {error}") from error
    if structure is None:
        structure, entries = nest(entries, parts_of_path)
    return foreign_tree(
        files=tuple(arrays.files),
        metadata=metadata,
        values=values,
        structure=structure,
        leaves=entries,
    )


def counted_from(directory: str, listed: Sequence[Listed]) -> dict[str, Listed]:
    """Return the arrays by their paths relative to a directory."""
    start = f"{directory}/" if directory else ""
    found = {array.path.removeprefix(start): array for array in listed}
    if len(found) < len(listed):
        raise FormatError(
            f"arrays inside and outside {directory!r} are listed together, and would get the same name"
        )
    return found
