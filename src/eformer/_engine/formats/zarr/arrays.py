"""Write a directory of zarr arrays, under one index or without an index, as other programs do.

Tests: tests/engine/formats/test_zarr.py, tests/engine/stores/test_links_indexes.py,
tests/engine/formats/test_process_records.py.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import msgspec

from eformer._engine.formats.write_format import ManifestIndex, may_be_committed, other_format
from eformer._engine.formats.zarr.layout import plan_arrays
from eformer._engine.formats.zarr.read import array_at, discover, read_index, structure_of
from eformer._engine.record.by_process import ProcessRecord
from eformer._engine.record.indexes import FORMAT, INDEX, MANIFEST, ORBAX_TREE, Index, Listed
from eformer._engine.record.manifest import CommitLog, Manifest, TreeEntry
from eformer._engine.record.names import escape, is_text
from eformer._engine.record.planned import PlannedFile, Source, data_files, leaf_entries
from eformer._engine.record.text import few
from eformer._engine.record.zarray import ZARRAY
from eformer._engine.stores.base import Change, Replaced, Store, Upload, require_short
from eformer._engine.stores.local import is_there, on_disk
from eformer._engine.stores.ocdbt import DatabaseUpload
from eformer._engine.stores.removal import DATABASE_MARK
from eformer.errors import FormatError, StructureError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from eformer._engine.record.options import SaveOptions


@dataclass(frozen=True, slots=True)
class ZarrArrays:
    """The format of one save of arrays. `arrays` has the array of every leaf, by name, in the order of the tree.

    Without an index (`has_index=False`) the arrays carry no mark, and look like arrays of any other program.
    """

    name: ClassVar = FORMAT
    index_name: ClassVar = INDEX
    header_needs_digests: ClassVar = False

    prefix: str
    save_id: str
    block: int
    options: SaveOptions
    arrays: Mapping[str, Listed]
    has_index: bool = True
    several: bool = False
    process: int = 0

    @property
    def keeps_records(self) -> bool:
        return self.has_index

    @property
    def mark(self) -> str:
        return self.save_id if self.has_index else ""

    @property
    def base(self) -> str:
        return escape(self.prefix) if self.prefix else "tree"

    @property
    def root(self) -> str:
        """The directory of a tree whose plain name is taken. Its dots keep it apart from every leaf: paths of leaves
        have none."""
        return f"{self.base}.ocdbt.{self.save_id}" if self.options.ocdbt else f"{self.base}.{self.save_id}"

    def own_nbytes(self, source: Source) -> int:
        return source.itemsize * sum(box.size for box in source.own_regions)

    def begin(self, store: Store, token: str = "", *, may_be_new: bool = False) -> Upload:
        directory = on_disk(store)
        if not self.has_index and directory is None:
            # A bucket cannot rename, so the arrays are written under their plain names.
            if self.several:
                raise ValueError(
                    f"{store.url}: in a bucket, write_index=False needs a single process; save with an index"
                )
            return store.begin(self.base if self.prefix else "")
        if not self.options.ocdbt:
            save_id = self.save_id if self.has_index else ""
            return store.begin(self.root, token, save_id=save_id, may_be_new=may_be_new)
        if directory is None:
            raise ValueError(
                f"{store.url}: SaveOptions.ocdbt needs a local directory; save there, or without ocdbt"
            )
        return DatabaseUpload(directory, token, mark=self.mark, process=self.process, may_be_new=may_be_new)

    # ---------------------------------------------------------------------------------------- plan

    def layout(self, groups: Sequence[Sequence[Source]], sha256: Mapping[str, str]) -> list[PlannedFile]:
        sources = [source for group in groups for source in group]
        paths = {name: array.path for name, array in self.arrays.items()}
        return list(plan_arrays(sources, paths, self.options, self.block, self.mark))

    def header(self, file: PlannedFile, sha256: Mapping[str, str]) -> bytes:
        return file.header

    def process_file(self, files: Sequence[PlannedFile], sha256: Mapping[str, str]) -> PlannedFile | None:
        """Return the file with the record of this process, beside the first array that the process writes: a record may
        be too long for `.zarray`."""
        if not files:
            return None
        leaves = {array.path: name for name, array in self.arrays.items()}
        extents = {name: entry.extents for name, entry in leaf_entries(files, {}).items()}
        here = dict.fromkeys(leaves[file.name.rpartition("/")[0]] for file in files)
        record = ProcessRecord(
            {name: extents.get(name, ()) for name in here}, dict(sha256), tuple(data_files(files))
        )
        data = record.to_json()
        path = files[0].name.rpartition("/")[0]
        return PlannedFile(f"{path}/{DATABASE_MARK}-{self.process}", [], len(data), data)

    # -------------------------------------------------------------------------------------- commit

    def check_place(self, store: Store) -> bool:
        self._require_short_paths(store)
        index, _ = read_index(store)
        if index is not None:
            return True
        try:
            there = store.kinds()
        except FileNotFoundError:
            return False
        if MANIFEST in there:
            raise other_format(store, MANIFEST)
        if ORBAX_TREE in there:
            raise FileExistsError(
                f"{store.path_to(ORBAX_TREE)} was not written by eformer; save to another directory"
            )
        return False

    def _require_short_paths(self, store: Store) -> None:
        """Refuse paths that are too long to be opened. They could be written, relative to an open directory, but not
        be read by their full path."""
        if not self.options.ocdbt:
            longest = max((array.path for array in self.arrays.values()), key=len, default="")
            require_short(store, f"{self.root}/{longest}/{'0' * 20}")

    def read_index(self, store: Store) -> _ArraysIndex:
        index, version = read_index(store)
        manifest = index.manifest(store.path_to(INDEX)) if index else Manifest(format=FORMAT)
        return _ArraysIndex(manifest, version, self, index)

    may_be_committed = may_be_committed


@dataclass(frozen=True, slots=True)
class _ArraysIndex(ManifestIndex):
    format: ZarrArrays
    found: Index | None

    def change_for(self, tree: TreeEntry, store: Store, upload: Upload) -> Change:
        fmt = self.format
        # Another save may have written it since the check.
        if self.found is None and on_disk(store) is not None and store.exists(MANIFEST):
            raise other_format(store, MANIFEST)
        if self.found is not None and not fmt.has_index:
            raise ValueError(
                f"{store.path_to(INDEX)} exists, and arrays beside it that it does not list would not be found; "
                "save to another directory, or with an index"
            )
        index = self.found or self._of_others(store)
        root, moves = self._final_places(index, store, upload)
        if not fmt.has_index:
            unmarked = [f"{array.path}/{ZARRAY}" for array in fmt.arrays.values()]
            return Change(moves, unmarked=unmarked)
        tree = msgspec.structs.replace(
            tree,
            raw_root=root or msgspec.UNSET,
            ocdbt=True if root and fmt.options.ocdbt else msgspec.UNSET,
        )
        manifest = self.manifest.with_tree(fmt.prefix, tree)
        manifest = msgspec.structs.replace(manifest, digest=Index().digest)
        listed = list(fmt.arrays.values())
        if root:
            listed = [Listed(f"{root}/{array.path}", array.shape, array.dtype) for array in listed]

        def encoded(log: CommitLog | msgspec.UnsetType) -> bytes:
            said = msgspec.structs.replace(manifest, log=log)
            return index.with_tree(fmt.prefix, listed, said).to_json()

        tidy = None
        if not index.is_ours and fmt.prefix in index.prefixes:
            tidy = partial(_remove_structure, fmt.prefix)
        return Change(moves, encoded, manifest, tuple(self._replaced(index)), tidy=tidy)

    def _of_others(self, store: Store) -> Index:
        """Make an index that lists the arrays of another program in the directory as a tree without a prefix. A save
        without a prefix begins an empty index."""
        is_beside = self.format.has_index and self.format.prefix
        listed = discover(store) if is_beside else ()
        found = [array for array in listed if (there := array_at(store, array.path)) and not there.eformer]
        for array in found:
            if not is_text(array.path):
                raise FormatError(
                    f"{store.url} holds the array {array.path!r}, whose name is not UTF-8; no index can list it. "
                    "Rename it, or save to another directory"
                )
        return Index(arrays=found) if found else Index()

    def _final_places(self, index: Index, store: Store, upload: Upload) -> tuple[str, dict[str, str]]:
        """Choose plain names for a first save, else a directory with the save's id: a name that an index ever used is
        not used again."""
        fmt, contents = self.format, upload.names()
        if on_disk(store) is None:  # objects cannot be renamed
            if not fmt.has_index:
                self._require_unused(store)
            return (fmt.root, {"": fmt.root}) if fmt.has_index and contents else ("", {})
        self._require_listed(contents, store)
        if not contents:
            return "", {}
        there = store.kinds().keys()
        is_first_save = fmt.prefix not in index.listed()
        # Asked by name, because case may not count; not in an empty place, where thousands of questions take long.
        is_free = not (there and any(map(store.kind, contents)))
        if is_first_save and not fmt.prefix and not fmt.options.ocdbt and is_free:
            return "", {name: name for name in contents}
        if not fmt.has_index and (not fmt.prefix or fmt.base in there):
            raise _not_told_apart(store, there & {fmt.base, *contents})
        plain = f"{fmt.base}.ocdbt" if fmt.options.ocdbt else fmt.base
        root = plain if is_first_save and not store.kind(plain) and plain != "tree" else fmt.root
        return root, {"": root}

    def _require_listed(self, contents: Sequence[str], store: Store) -> None:
        """Refuse to commit arrays that the directory of new files does not list yet, as on a network file system."""
        written = {array.path.split("/")[0] for array in self.format.arrays.values()}
        lost = [] if self.format.options.ocdbt and contents else sorted(written.difference(contents))
        if lost:
            raise OSError(
                f"{store.url}: the file system does not list {few(lost)}, which were just written. Save again"
            )

    def _require_unused(self, store: Store) -> None:
        """Refuse to write to plain names that are taken."""
        fmt = self.format
        tops = {fmt.base} if fmt.prefix else {array.path.split("/")[0] for array in fmt.arrays.values()}
        there = store.kinds().keys() if is_there(store) else set()
        if taken := tops & there:
            raise _not_told_apart(store, taken)

    def _replaced(self, index: Index) -> Iterator[Replaced]:
        """List the directories that the next index no longer names, to be removed."""
        prefix, listed = self.format.prefix, index.listed()
        tops = {p: {array.path.split("/")[0] for array in arrays} for p, arrays in listed.items()}
        kept = {name for p, names in tops.items() if p != prefix for name in names}
        tree = self.manifest.trees.get(prefix)
        mark = tree.save_id if tree else ""
        arrays: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
        for array in listed.get(prefix, ()) if not mark else ():
            # An array without a shape is another program's: a save of eformer only listed it, and it must stay.
            if array.shape is not None:
                arrays.setdefault(array.path.split("/")[0], []).append((array.path, array.shape))
        for name in sorted(tops.get(prefix, set()) - kept):
            yield Replaced(name, mark, tuple(arrays.get(name, ())))


def _not_told_apart(store: Store, names: set[str]) -> FileExistsError:
    return FileExistsError(
        f"{store.url} has {sorted(names)[:8]}; without an index nothing could tell the new arrays from the old ones. "
        "Save to another directory, or with an index"
    )


def _remove_structure(prefix: str, store: Store, upload: Upload) -> None:
    """Remove the structure file of a tree by the original package that was replaced."""
    with suppress(FileNotFoundError, StructureError):  # the file is another program's
        if structure_of(store, prefix):
            upload.remove([f"{prefix}_structure.json"])
