"""Write safetensors files: a directory of files under one manifest, or one file that carries its own manifest.

A data file of a directory is never touched again once a manifest names it. Files that the manifest no longer names are
removed last.

Tests: tests/engine/formats/test_safetensors.py, tests/engine/saving/test_held_promises.py.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import msgspec

from eformer._engine.formats.find import FOREIGN, find
from eformer._engine.formats.process_records import CARRIED
from eformer._engine.formats.safetensors.header import read_metadata
from eformer._engine.formats.safetensors.hf_index import bring_up_to_date, save_of_index
from eformer._engine.formats.safetensors.layout import header_of, own_nbytes, plan_files
from eformer._engine.formats.safetensors.names import (
    INDEX_SUFFIX,
    PRIVATE,
    SUFFIX,
    base_name,
    file_metadata,
    is_leftover,
    is_marked,
    plain_names,
    renumbered,
    unique_names,
)
from eformer._engine.formats.safetensors.read import is_ours, prefix_of_file, read_manifest
from eformer._engine.formats.write_format import ManifestIndex, may_be_committed, other_format
from eformer._engine.record.digests import stamp_digest
from eformer._engine.record.indexes import INDEX as ZARR_INDEX
from eformer._engine.record.indexes import MANIFEST, ORBAX_TREE, PEFT_CONFIG, SAFETENSORS
from eformer._engine.record.manifest import CommitLog, DataFile, Manifest, TreeEntry, encode_leaves
from eformer._engine.record.planned import PlannedFile, Source, leaf_entries, process_record
from eformer._engine.stores.base import Change, Kind, NoIndex, Store, SwapError, Upload
from eformer._engine.stores.local import check_replaceable, is_there, on_disk
from eformer.errors import CorruptionError, FormatError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from msgspec import UnsetType


@dataclass(frozen=True, slots=True)
class _Safetensors:
    """The base of the formats of a directory and of a single file."""

    name: ClassVar = SAFETENSORS
    keeps_records: ClassVar = True
    own_nbytes = staticmethod(own_nbytes)

    def process_file(self, files: Sequence[PlannedFile], sha256: Mapping[str, str]) -> None:
        """Return None: the headers of a directory's files carry the record, and a single file is of one process."""


@dataclass(frozen=True, slots=True)
class SafetensorsDirectory(_Safetensors):
    """The format of one save to a directory. If `several` processes save, each puts its record into its own headers.

    `tensors` has each leaf's name in its file.
    """

    index_name: ClassVar = MANIFEST

    prefix: str
    save_id: str
    block: int
    tensors: Mapping[str, str]
    max_shard_bytes: int
    several: bool = False
    process: int = 0

    @property
    def header_needs_digests(self) -> bool:
        return self.several

    def begin(self, store: Store, token: str = "", *, may_be_new: bool = False) -> Upload:
        return store.begin("", token, save_id=self.save_id, may_be_new=may_be_new)

    # ---------------------------------------------------------------------------------------- plan

    def layout(self, groups: Sequence[Sequence[Source]], sha256: Mapping[str, str]) -> list[PlannedFile]:
        plan = partial(plan_files, tensors=self.tensors, max_bytes=self.max_shard_bytes, block=self.block)
        files = [file for sources in groups for file in plan(sources, has_record=self.several)]
        names = unique_names(plain_names(base_name(self.prefix), len(files)), self.save_id)
        for file, name in zip(files, names, strict=True):
            file.name = f"process-{self.process}-{name}" if self.several else name
            file.header = self.header(file, sha256)
            file.nbytes += len(file.header)
        return files

    def header(self, file: PlannedFile, sha256: Mapping[str, str]) -> bytes:
        metadata = file_metadata(self.save_id, base_name(self.prefix))
        if self.several:
            metadata[CARRIED] = process_record([file], sha256).to_json().decode()
        return header_of(file, self.tensors, metadata)

    # -------------------------------------------------------------------------------------- commit

    def check_place(self, store: Store) -> bool:
        """Tell whether the directory has a checkpoint. Refuse files of other programs that the save would replace, and
        a damaged manifest: it may name files that can still be rescued."""
        try:
            there = store.kinds()  # before the manifest is read, because a concurrent save may write it
        except FileNotFoundError:
            return False
        if ZARR_INDEX in there:
            raise other_format(store, ZARR_INDEX)
        manifest, _ = read_manifest(store)
        if manifest is None or self.prefix not in manifest.trees:
            foreign = [MANIFEST] if manifest is None and MANIFEST in there else []
            foreign += [name for name in self._foreign_files(store, there) if name in there]
            if foreign and store.exists(foreign[0]):  # a file that is being removed does not count
                raise FileExistsError(
                    f"{store.path_to(foreign[0])} was not written by eformer; save to another directory"
                )
        return manifest is not None

    def _foreign_files(self, store: Store, there: Mapping[str, Kind]) -> Iterator[str]:
        """List the names that a new tree would use and a file of another program may have."""
        base = base_name(self.prefix)
        yield from (ORBAX_TREE, PEFT_CONFIG)
        if base + SUFFIX in there and not is_ours(store, base + SUFFIX):
            yield base + SUFFIX
        index = base + INDEX_SUFFIX
        if save_of_index(store, index, there.get(index))[0] is None:
            yield index

    def read_index(self, store: Store) -> _Index:
        manifest, version = read_manifest(store)
        return _Index(manifest or Manifest(format=SAFETENSORS), version, self.prefix)

    may_be_committed = may_be_committed


@dataclass(frozen=True, slots=True)
class _Index(ManifestIndex):
    prefix: str

    def change_for(self, tree: TreeEntry, store: Store, upload: Upload) -> Change:
        # Another save may have written an index of arrays since the check, and readers would prefer it.
        if on_disk(store) is not None and store.exists(ZARR_INDEX):
            raise other_format(store, ZARR_INDEX)
        finals = self._final_names(tree, store, upload)
        moves = {file.name: final for file, final in zip(tree.files, finals, strict=True)}
        files = tuple(msgspec.structs.replace(file, name=moves[file.name]) for file in tree.files)
        manifest = self.manifest.with_tree(self.prefix, msgspec.structs.replace(tree, files=files))

        def encoded(log: CommitLog | UnsetType) -> bytes:
            return msgspec.structs.replace(manifest, log=log).to_json()

        return Change(moves, encoded, manifest, tidy=partial(_tidy, manifest))

    def _final_names(self, tree: TreeEntry, store: Store, upload: Upload) -> list[str]:
        """Choose plain names for the first save of a tree, if they are free, else names with the save's id: a name that
        a manifest ever used never goes to another file. Objects in a bucket have had their final names since the
        beginning."""
        if on_disk(store) is None:
            return [file.name for file in tree.files]
        new = [file.name for file in tree.files if f".{tree.save_id}{SUFFIX}" in file.name]
        kept = [file.name for file in tree.files if f".{tree.save_id}{SUFFIX}" not in file.name]
        names = plain_names(base_name(self.prefix), len(new))
        is_first_save = not kept and self.prefix not in self.manifest.trees
        # Asked by name: where case does not count, the plain name of prefix "EMA" is that of "ema".
        if not is_first_save or any(map(store.kind, names)):
            names = unique_names(names, tree.save_id)
        if any(name.endswith(PRIVATE) for name in kept):
            # Other readers cannot read the kept files, and must not take the new files for the whole tree.
            names = [name + PRIVATE for name in names]
        finals = dict(zip(new, names, strict=True)) | {name: _free_name(store, upload, name) for name in kept}
        return [finals[file.name] for file in tree.files]


def _free_name(store: Store, upload: Upload, planned: str) -> str:
    """Return the name for a file that the save keeps. If the place has another file of the planned name, as a copy of
    the reused directory does, return a free name."""
    name = planned
    while store.kind(name) and not upload.is_published(planned, name):
        name = renumbered(name)
    return name


def _tidy(manifest: Manifest, store: Store, upload: Upload) -> None:
    if on_disk(store) is None:  # other saves may be under way, and the upload removes the old files itself
        _bring_up_to_date_without_locks(manifest, store, upload)
        return
    there = store.kinds()
    bases = bring_up_to_date(store, there, upload, manifest)
    named = {file.name for tree in manifest.trees.values() for file in tree.files}
    upload.remove(_leftovers(store, there, named, bases))


def _bring_up_to_date_without_locks(manifest: Manifest, store: Store, upload: Upload) -> None:
    """Write the Hugging Face indexes, again and again until the manifest did not change while they were written:
    the last of several concurrent saves leaves indexes that match."""
    while True:
        try:
            bring_up_to_date(store, store.kinds(), upload, manifest)
            is_written = True
        except SwapError:  # another save has written one
            is_written = False
        now, _ = read_manifest(store)
        if now is None or (is_written and _saves_in(now) == _saves_in(manifest)):
            return
        manifest = now


def _saves_in(manifest: Manifest) -> dict[str, str]:
    return {prefix: tree.save_id for prefix, tree in manifest.trees.items()}


def _leftovers(store: Store, names: Iterable[str], named: set[str], bases: set[str]) -> list[str]:
    """List the files of earlier saves of the trees in the manifest. Files of other trees stay, because people copy
    single files; files that eformer did not write stay as well."""
    return [
        name
        for name in names
        if name.endswith((SUFFIX, PRIVATE))
        and name not in named
        and is_leftover(name, _metadata(store, name), bases)
    ]


def _metadata(store: Store, name: str) -> Mapping[str, str]:
    """Return the metadata of a file; nothing if it does not begin like a safetensors file."""
    with suppress(FormatError, OSError):
        return read_metadata(store, name)
    return {}


# ----------------------------------------------------------- one file that carries its own manifest


@dataclass(frozen=True, slots=True)
class SafetensorsFile(_Safetensors):
    """The format of one save to a file. `tensors` has each leaf's name in the file, in the order of the tree.

    With `overwrite` the save may replace a file that another program wrote.

    The header contains the manifest. Digests have a fixed width, so its length is known before the digests are.
    """

    header_needs_digests: ClassVar = True

    index_name: str
    prefix: str
    tree: TreeEntry
    tensors: Mapping[str, str]
    overwrite: bool = False

    def begin(self, store: Store, token: str = "", *, may_be_new: bool = False) -> Upload:
        return store.begin("", token, may_be_new=may_be_new)

    # ---------------------------------------------------------------------------------------- plan

    def layout(self, groups: Sequence[Sequence[Source]], sha256: Mapping[str, str]) -> list[PlannedFile]:
        sources = [source for group in groups for source in group]
        file, *more = plan_files(sources, self.tensors, 2**63, self.tree.block) or [PlannedFile("", [], 0)]
        if more:
            raise FormatError(
                f"{self.index_name}: the tree has too many leaves for the header of one file; save to a directory"
            )
        file.name = self.index_name
        file.header = self.header(file, sha256)
        file.nbytes += len(file.header)
        return [file]

    def header(self, file: PlannedFile, sha256: Mapping[str, str]) -> bytes:
        entries = leaf_entries([file], sha256)
        leaves = {name: entries[name] for name in self.tensors}
        data_nbytes = sum(extent.nbytes for extent in file.extents)
        tree = msgspec.structs.replace(
            self.tree, files=(DataFile("", data_nbytes),), raw_leaves=encode_leaves(leaves)
        )
        manifest = Manifest(format=SAFETENSORS).with_tree(self.prefix, tree)
        text = msgspec.json.encode(manifest).decode()
        metadata = {"digest": manifest.digest, "format": "pt", "manifest": text}
        return stamp_digest(header_of(file, self.tensors, metadata))

    # -------------------------------------------------------------------------------------- commit

    def check_place(self, store: Store) -> bool:
        """Refuse to replace a file of a checkpoint in a directory, or a file that holds another tree. A link is
        replaced itself, never its target."""
        path = store.path_to(self.index_name)
        kind = store.kind(self.index_name)
        if kind is None:
            return is_there(store)
        check_replaceable(store, self.index_name)
        if kind == "other":
            if _is_named(store, self.index_name):
                raise ValueError(f"{path} belongs to the checkpoint {store.url}; save there")
            return True
        try:
            found = find(path)
        except (FileNotFoundError, CorruptionError):  # it was removed, or it is a damaged file by eformer
            return True
        except FormatError as error:
            self._require_overwrite(store, f"cannot be read: {error}")
            return True
        if found.path != path:
            there = "" if found.path.endswith(INDEX_SUFFIX) else "there, or "
            raise ValueError(f"{path} belongs to the checkpoint {found.path}; save {there}to another file")
        lost = set(found.trees) - {self.prefix}
        if lost and found.manifest.format not in FOREIGN:
            raise ValueError(
                f"{path} holds the tree {sorted(lost)}, and one file holds one tree; save to a directory to keep "
                "several"
            )
        if found.manifest.format in FOREIGN and not is_marked(found.tree(None).raw_metadata):
            self._require_overwrite(store, "was not written by eformer")
        return True

    def _require_overwrite(self, store: Store, problem: str) -> None:
        """Refuse to replace a file that may be the only copy of a model, unless `overwrite` is set. An empty file may
        be replaced."""
        if not self.overwrite and store.read(self.index_name, 0, 0)[1].nbytes:
            raise FileExistsError(
                f"{store.path_to(self.index_name)} {problem}; to replace it, remove it first or pass overwrite=True to "
                "checkpoint.save"
            )

    def read_index(self, store: Store) -> _NoIndex:
        return _NoIndex()

    def may_be_committed(self, store: Store, save_id: str) -> bool:
        try:
            trees = find(store.path_to(self.index_name)).manifest.trees
        except FileNotFoundError:
            return False
        except (OSError, FormatError):
            return True
        return any(tree.save_id == save_id for tree in trees.values())


class _NoIndex(NoIndex, frozen=True):
    """The index of a single file. It is empty: a commit swaps the file itself."""

    barred: tuple[str, ...] = ()

    def change_for(self, tree: TreeEntry, store: Store, upload: Upload) -> Change:
        return Change({file.name: file.name for file in tree.files})


def _is_named(store: Store, name: str) -> bool:
    """Tell whether a manifest names this file of the directory."""
    with suppress(FormatError):
        return prefix_of_file(store, name) is not None
    return False
