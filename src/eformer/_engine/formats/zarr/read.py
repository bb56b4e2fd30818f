"""Find checkpoints in zarr arrays: by eformer's manifest in an index, by an index alone, or by the arrays.

Tests: tests/engine/formats/test_zarr.py, tests/engine/formats/test_hostile_arrays.py,
tests/compat/test_original_checkpoints.py.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from eformer._engine.formats.found import Foreign, Found, Place, Trees
from eformer._engine.formats.left_out import MOST_DEPTH, left_out
from eformer._engine.formats.nested_names import nest, parts_of_path
from eformer._engine.formats.process_records import joined_trees
from eformer._engine.formats.zarr.layout import chunks_of, count_chunks
from eformer._engine.formats.zarr.original_structure import OriginalStructure, parse_original_structure
from eformer._engine.record.digests import check_own_digest, has_own_digest
from eformer._engine.record.indexes import FORMAT, INDEX, ORBAX_CHECKPOINT, ORBAX_TREE, Index, Listed
from eformer._engine.record.manifest import (
    UNREADABLE,
    DataFile,
    Extent,
    LeafEntry,
    Manifest,
    TreeEntry,
    foreign_tree,
)
from eformer._engine.record.names import is_inside
from eformer._engine.record.values import locating, parse_json, parse_lenient, value_to_json
from eformer._engine.record.zarray import MOST_ZARRAY, ZARRAY, ZArray, parse_zarray
from eformer._engine.stores.base import Store, Version, read_whole
from eformer._engine.stores.checkpoints import has_unfinished
from eformer._engine.stores.ocdbt import DATABASE_MANIFEST
from eformer._engine.stores.removal import DATABASE_MARK
from eformer.errors import CorruptionError, Damage, FormatError, NotFoundError, StructureError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

FOREIGN = "tensorstore, of another writer"

_METADATA = "checkpoint_metadata.json"
ZATTRS = ".zattrs"
_MOST_MARK = 64  # bytes

Versions = dict[str, "Version"]

_CHECKPOINTS = {INDEX, ORBAX_TREE, ORBAX_CHECKPOINT}  # files at the top of another checkpoint
_SAVE = re.compile(r".+\.[0-9a-f]{16}")  # a directory with the arrays of one save, finished or not


def by_index(place: Place) -> Found | None:
    """Find the checkpoint that the index of a directory describes. Return None if there is no index."""
    store = place.store
    index, version = read_index(store)
    if index is None or version is None:
        return None
    manifest = index.manifest(store.path_to(INDEX))
    versions = {INDEX: version}
    foreign_trees = {p: listed for p, listed in index.listed().items() if p not in manifest.trees}
    describe = {
        prefix: partial(_listed_tree, store, prefix, arrays, versions)
        for prefix, arrays in foreign_trees.items()
    }
    also = {}
    if list(foreign_trees) == [""]:  # version 1.0 of the original had directories in place of prefixes
        also = _directories(store, foreign_trees[""], versions)
    if not index.is_ours:
        manifest = Manifest(format=FOREIGN)
    trees = joined_trees(store, manifest.trees, describe, also)
    read = {array.path for arrays in foreign_trees.values() for array in arrays}
    unread = partial(left_out, store, read)
    foreign = Foreign() if index.is_ours else Foreign(find_left_out=unread)
    marks = partial(_damaged_marks, store, manifest)
    return Found(store.url, store, manifest, trees, versions=versions, foreign=foreign, check_beside=marks)


def _damaged_marks(store: Store, manifest: Manifest) -> list[Damage]:
    """Compare the marks of databases with the manifest. A save removes a replaced database only by its mark."""
    found = []
    for tree in manifest.trees.values():
        if not tree.is_database or not store.exists(f"{tree.root}/{DATABASE_MANIFEST}"):
            continue  # a database that is missing is reported as such
        name = f"{tree.root}/{DATABASE_MARK}"
        try:
            mark = store.read(name, 0, _MOST_MARK)[0].decode(errors="replace")
        except (OSError, FormatError) as error:
            found.append(Damage("", name, 0, 0, f"cannot be read: {error}"))
            continue
        if mark != tree.save_id:
            problem = f"are the mark {mark!r}, expected {tree.save_id!r}"
            found.append(Damage("", name, 0, len(mark), problem))
    return found


def _listed_tree(store: Store, prefix: str, listed: list[Listed], versions: Versions) -> TreeEntry:
    """Describe a tree of the original package by its structure file, or as nested dicts without one."""
    metadata = _metadata(store)
    unreadable = None
    try:
        if found := structure_of(store, prefix):
            metadata["custom_metadata"] = value_to_json(found.extras)
            by_path = {array.path: array for array in listed}
            arrays = {name: by_path.get(path, Listed(path)) for name, path in found.arrays.items()}
            return tree_of_arrays(
                store, arrays, versions, structure=found.document, values=found.values, metadata=metadata
            )
    except StructureError as error:  # the arrays can still be loaded with a `like`
        unreadable = {UNREADABLE: str(error)}
    below = prefix.replace(".", "/")  # the directory of the prefix, as the original named it
    tree = tree_of_arrays(store, counted_from(below, listed), versions, metadata=metadata)
    if unreadable is not None:
        tree = msgspec.structs.replace(tree, structure=msgspec.Raw(msgspec.json.encode(unreadable)))
    return tree


def structure_of(store: Store, prefix: str) -> OriginalStructure | None:
    """Read the original's structure file of a tree; None if it has none."""
    name = f"{prefix}_structure.json"
    if not prefix or not is_inside(name) or "/" in name or not store.exists(name):
        return None
    try:
        found = parse_original_structure(read_whole(store, name)[0], store.path_to(name))
    except FormatError as error:
        raise StructureError(str(error)) from error
    if found.prefix != prefix:
        raise StructureError(f"{store.path_to(name)} is for the prefix {found.prefix!r}, expected {prefix!r}")
    return found


def _metadata(store: Store) -> dict[str, Any]:
    """Read the metadata that the original package wrote beside its index, one file for all prefixes."""
    try:
        data, _ = read_whole(store, _METADATA)
    except FileNotFoundError:
        return {}
    document = parse_json(data, dict[str, Any], f"{store.path_to(_METADATA)} is damaged")
    return {name: value_to_json(value) for name, value in document.items()}


def without_index(place: Place) -> Found | None:
    """Describe the arrays of a directory without an index as one tree, and each of its directories as a prefix as
    well."""
    store = place.store
    listed = list(discover(store))
    if not listed:
        return None
    if has_unfinished(store):
        raise NotFoundError(
            f"{store.url} holds no checkpoint: its arrays belong to a save that has not finished; "
            "save again to clean up"
        )
    versions: Versions = {}
    describe = {"": partial(_described, store, listed, versions)}
    trees = Trees({}, describe, _directories(store, listed, versions))
    foreign = Foreign(find_left_out=partial(left_out, store, {array.path for array in listed}))
    return Found(store.url, store, Manifest(format=FOREIGN), trees, versions=versions, foreign=foreign)


def _described(store: Store, listed: Sequence[Listed], versions: Versions) -> TreeEntry:
    metadata = to_metadata(read_attributes(store, [array.path for array in listed]))
    return tree_of_arrays(store, counted_from("", listed), versions, metadata=metadata)


def _directories(
    store: Store, listed: Sequence[Listed], versions: Versions
) -> dict[str, Callable[[], TreeEntry]]:
    """Describe the arrays of each outermost directory as a tree."""
    inner: dict[str, list[Listed]] = {}
    for array in listed:
        top, slash, _ = array.path.partition("/")
        if slash:
            inner.setdefault(top, []).append(array)
    return {
        top: partial(tree_of_arrays, store, counted_from(top, arrays), versions)
        for top, arrays in inner.items()
    }


def to_metadata(attributes: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return attributes as metadata of the tree: attributes of the root by their names, of a path under `PATH/`."""
    below = {f"{path}/": value_to_json(dict(found)) for path, found in attributes.items() if path and found}
    return below | {name: value_to_json(value) for name, value in attributes.get("", {}).items()}


def read_attributes(store: Store, arrays: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Read the attributes of arrays of zarr 2, given by path, and of the groups around them."""
    found = {}
    for path in sorted({path for array in arrays for path in _upwards(array)}):
        name = f"{path}/{ZATTRS}" if path else ZATTRS
        if store.exists(name):
            problem = f"{store.path_to(name)} does not hold attributes"
            found[path] = parse_lenient(read_whole(store, name)[0], dict[str, Any], problem)
    return found


def _upwards(path: str) -> Iterable[str]:
    """Yield a path and the paths above it, up to the root."""
    while path:
        yield path
        path = path.rpartition("/")[0]
    yield ""


# ---------------------------------------- `tensorstore_index.json`, by eformer or by another program


def read_index(store: Store) -> tuple[Index | None, Version | None]:
    """Read the index of a directory, by any program, and its version; None if the directory has no index."""
    origin = store.path_to(INDEX)
    try:
        data, entry = read_whole(store, INDEX)
    except FileNotFoundError:
        return None, None
    if has_own_digest(data):
        check_own_digest(data, origin)
    index = parse_json(data, Index, f"{origin} is not an index of arrays")
    _check(index, origin, has_digest=has_own_digest(data))
    return index, entry.version


def _check(index: Index, origin: str, *, has_digest: bool) -> None:
    if index.format != FORMAT:
        raise FormatError(f"{origin}: Unsupported index format: {index.format[:40]!r}, expected {FORMAT!r}")
    if index.is_ours and not has_digest:
        raise CorruptionError(
            f"{origin} contains a manifest, but its beginning is damaged; restore the file from a copy"
        )
    if "" in index.prefixes:
        raise FormatError(f"{origin} has an empty prefix")
    for prefix, arrays in index.listed().items():
        paths = [array.path for array in arrays]
        for path in paths:  # also in an index by eformer: anyone can compute a digest
            if not is_inside(path):
                raise FormatError(
                    f"{origin}: {path[:200]!r}, listed under {prefix!r}, leads out of the directory"
                )
        if len(set(paths)) < len(paths):
            raise FormatError(f"{origin} lists an array of {prefix!r} twice")


# ---------------------------- arrays of other programs, described with extents, but without digests


def discover(store: Store) -> Iterator[Listed]:
    """List all arrays below a directory, in order.

    Links are not followed. Other checkpoints are not entered, nor are unfinished saves to them, which are visible in a
    bucket. Directories without permission to list them, such as lost+found, are skipped. A directory that does not
    exist has no arrays.
    """
    todo = [("", 0)]
    while todo:
        path, depth = todo.pop()
        # A directory may be removed meanwhile.
        with suppress(FileNotFoundError, *([PermissionError] if path else [])):
            kinds = store.kinds(path)
            if ZARRAY in kinds and path:
                yield Listed(path)
            elif depth < MOST_DEPTH and not (path and _CHECKPOINTS & kinds.keys()):
                below = [name for name, kind in kinds.items() if kind == "directory" and name[0] != "."]
                below = [name for name in below if not (path and _SAVE.fullmatch(name))]
                todo += [(f"{path}/{name}" if path else name, depth + 1) for name in reversed(below)]


def array_at(store: Store, path: str) -> ZArray | None:
    """Read the description of an array by any program. Return None if it does not exist or is invalid."""
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
        raw, where = self._description(name), self.store.path_to(name)
        array = parse_zarray(raw, where)
        array.require_readable(where)
        _check_listed(listed, array, where)
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
            raise CorruptionError(
                f"{self.store.path_to(name)} is missing, and with it the array; restore it from a copy"
            ) from None
        self.versions[name] = entry.version
        return data

    def _extents(self, path: str, array: ZArray, raw: str) -> Iterator[Extent]:
        sizes = _chunk_sizes(self.store, path, array)
        expected = count_chunks(array.shape, array.chunks)
        for name, box in chunks_of(array.shape, array.chunks):
            name = name.replace(".", array.dimension_separator)
            where = self.store.path_to(f"{path}/{name}")
            if name not in sizes:
                missing = max(1, expected - len(sizes))
                raise missing_chunks(self.store.path_to(path), missing, expected, f", the first is {name!r}")
            coding = array.coding(box.shape, raw)
            if not array.compressor and sizes[name] != array.chunk_nbytes:
                raise CorruptionError(f"{where} has {sizes[name]} bytes, expected {array.chunk_nbytes}")
            nbytes = sizes[name] if coding else array.nbytes_of(box.shape)
            part = None if box.shape == array.shape else (box.start, box.stop)
            yield Extent(len(self.files), 0, nbytes, "", part, coding)
            self.files.append(DataFile(f"{path}/{name}", sizes[name]))


def _check_listed(listed: Listed, array: ZArray, where: str) -> None:
    """Refuse an array whose shape or dtype differs from the index, if the index records them."""
    is_other_shape = listed.shape is not None and listed.shape != array.shape
    is_other_dtype = listed.dtype is not None and listed.dtype != array.name_of_dtype
    if is_other_shape or is_other_dtype:
        raise FormatError(
            f"{where} describes {array.name_of_dtype}{list(array.shape)}, but the index says "
            f"{listed.dtype}{list(listed.shape or ())}; restore both files from one copy"
        )


def _chunk_sizes(store: Store, path: str, array: ZArray) -> dict[str, int]:
    """Return the lengths of the files that may be chunks, by name."""
    depth = len(array.shape) if array.dimension_separator == "/" else 1
    sizes = store.sizes(path, max(1, depth))
    return {name: nbytes for name, nbytes in sizes.items() if name.rpartition("/")[2][0] != "."}


def missing_chunks(where: str, missing: int, expected: int, first: str = "") -> CorruptionError:
    return CorruptionError(
        f"{where}: {missing} of {expected} chunks are missing{first}; they are not read as zeros. (zarr-python leaves "
        "out chunks that equal the fill value, unless write_empty_chunks is set)"
    )


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
        with locating(f"leaf {name!r}"):
            entries[name] = arrays.add(listed)
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
    """Return the arrays by their paths relative to `directory`, and arrays outside it by their whole paths."""
    start = f"{directory}/" if directory else ""
    found = {array.path.removeprefix(start): array for array in listed}
    if len(found) < len(listed):
        raise FormatError(
            f"arrays inside and outside {directory!r} are listed together, and would get the same name"
        )
    return found
