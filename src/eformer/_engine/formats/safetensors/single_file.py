"""Write one safetensors file that carries its own manifest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import msgspec

from eformer._engine.formats.find import FOREIGN, find
from eformer._engine.formats.safetensors.layout import header_of, own_nbytes, plan_files
from eformer._engine.formats.safetensors.names import INDEX_SUFFIX, is_marked
from eformer._engine.formats.safetensors.read import read_manifest
from eformer._engine.record.digests import stamp_digest
from eformer._engine.record.indexes import SAFETENSORS
from eformer._engine.record.manifest import DataFile, Manifest, encode_leaves
from eformer._engine.record.planned import PlannedFile, leaf_entries
from eformer._engine.stores.base import Change, NoIndex
from eformer._engine.stores.local import check_replaceable, is_there
from eformer.errors import CorruptionError, FormatError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from eformer._engine.record.manifest import TreeEntry
    from eformer._engine.record.planned import Source
    from eformer._engine.stores.base import Store, Upload


@dataclass(frozen=True, slots=True)
class SafetensorsFile:
    """The format of one save to a file. `tensors` has what each leaf is called in it, in the order of the tree.

    With `overwrite` it may replace a file that another program wrote.

    The header has the manifest in it. Digests have a fixed width, so its length is known before they are.
    """

    name: ClassVar = SAFETENSORS
    keeps_records: ClassVar = True
    header_needs_digests: ClassVar = True

    index_name: str
    prefix: str
    tree: TreeEntry
    tensors: Mapping[str, str]
    overwrite: bool = False

    def own_nbytes(self, source: Source) -> int:
        return own_nbytes(source)

    def begin(self, store: Store, token: str = "", *, is_first: bool = False) -> Upload:
        return store.begin("", token, is_first=is_first)

    # ---------------------------------------------------------------------------------------- plan

    def layout(self, groups: Sequence[Sequence[Source]], sha256: Mapping[str, str]) -> list[PlannedFile]:
        sources = [source for group in groups for source in group]
        file, *others = plan_files(sources, self.tensors, 2**63, self.tree.block) or [PlannedFile("", [], 0)]
        if others:
            raise FormatError(
                f"{self.index_name}: too many leaves for the header of one file; save to a directory"
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

    def process_file(self, files: Sequence[PlannedFile], sha256: Mapping[str, str]) -> None:
        """One process alone writes a file."""

    # -------------------------------------------------------------------------------------- commit

    def check_place(self, store: Store) -> bool:
        """Refuse to replace a file of a checkpoint, or one that holds another tree than this save. Of a link only
        itself is replaced, never its target."""
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
        except (FileNotFoundError, CorruptionError):  # it is gone; or eformer wrote it, and it is damaged
            return True
        except FormatError as error:
            self._require_overwrite(store, f"cannot be read: {error}")
            return True
        if found.path != path:
            there = "" if found.path.endswith(INDEX_SUFFIX) else "there, or "
            raise ValueError(f"{path} belongs to the checkpoint {found.path}; save {there}to another file")
        others = set(found.trees) - {self.prefix}
        if others and found.manifest.format not in FOREIGN:
            raise ValueError(
                f"{path} holds the tree {sorted(others)}, and one file holds one tree; save to a directory to keep "
                "several"
            )
        if found.manifest.format in FOREIGN and not is_marked(found.tree(None).raw_metadata):
            self._require_overwrite(store, "was not written by eformer")
        return True

    def _require_overwrite(self, store: Store, problem: str) -> None:
        """Refuse to replace a file that may be all that somebody has of a model. An empty file is nothing to lose."""
        if not self.overwrite and store.read(self.index_name, 0, 0)[1].nbytes:
            raise FileExistsError(
                f"{store.path_to(self.index_name)} {problem}; to replace it, remove it first or pass overwrite=True to "
                "checkpoint.save"
            )

    def read_index(self, store: Store) -> _NoIndex:
        return _NoIndex()

    def is_committed(self, store: Store, save_id: str) -> bool:
        try:
            trees = find(store.path_to(self.index_name)).manifest.trees
        except FileNotFoundError:
            return False
        except (OSError, FormatError):
            return True
        return any(tree.save_id == save_id for tree in trees.values())


class _NoIndex(NoIndex, frozen=True):
    """The file itself is all there is to swap."""

    barred: tuple[str, ...] = ()

    def commit(self, tree: TreeEntry, store: Store, upload: Upload) -> Change:
        return Change({file.name: file.name for file in tree.files})


def _is_named(store: Store, name: str) -> bool:
    """Tell whether a manifest names this file of the directory."""
    try:
        manifest, _ = read_manifest(store)
    except FormatError:
        return False
    trees = manifest.trees.values() if manifest else ()
    return any(file.name == name for tree in trees for file in tree.files)
