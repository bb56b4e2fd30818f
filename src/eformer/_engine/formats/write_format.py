"""The seam between a save and the format that it writes.

A format is made for one save. It plans files and reads and extends the index; it never writes. In the order of calls:

    format.check_place(store)              refuse what must not be replaced, before anything is written
    format.begin(store)                    the upload that takes the new files
    format.layout(groups, sha256)          sources become planned files
    format.header(file, sha256)            once the digests of its extents are known, if `header_needs_digests`
    format.read_index(store)               under the lock
    index.commit(tree, store, upload)      final names, and the next index
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from eformer._engine.record.indexes import FORMAT, INDEX, SAFETENSORS
from eformer._engine.stores import base as stores
from eformer.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Container, Mapping, Sequence

    from eformer._engine.record.manifest import Manifest, TreeEntry
    from eformer._engine.record.planned import PlannedFile, Source
    from eformer._engine.stores.base import Change, Store, Upload, Version


class Index(stores.OldIndex, Protocol):
    """The index of a place as it is before a commit."""

    @property
    def barred(self) -> Container[str]:
        """The saves and files that no index may name any more."""

    def commit(self, tree: TreeEntry, store: Store, upload: Upload) -> Change:
        """Choose final names for the new files, and make the next index."""


@dataclass(frozen=True, slots=True)
class ManifestIndex:
    """The base of an index that has a manifest in it."""

    manifest: Manifest
    version: Version | None

    @property
    def save_ids(self) -> set[str]:
        return self.manifest.save_ids

    @property
    def barred(self) -> Container[str]:
        return self.manifest.barred

    def has_committed(self, save_id: str) -> bool:
        return self.manifest.has_committed(save_id)


def other_format(store: Store, index: str) -> FileExistsError:
    """Say that the directory has the index of the other format."""
    format_name = FORMAT if index == INDEX else SAFETENSORS
    return FileExistsError(
        f"{store.path_to(index)} is there: the directory holds a checkpoint of another format, or something else. "
        f"Save to another directory, or with format={format_name!r}"
    )


class WriteFormat(Protocol):
    """How a tree lies in files."""

    @property
    def name(self) -> str: ...

    @property
    def index_name(self) -> str: ...

    @property
    def header_needs_digests(self) -> bool:
        """Whether a file's header can only be written after its extents."""

    @property
    def keeps_records(self) -> bool:
        """Whether the place will have an index, so that leaves and digests have to be recorded."""

    def own_nbytes(self, source: Source) -> int:
        """Return how many bytes of a leaf this process writes, before compression."""

    def check_place(self, store: Store) -> bool:
        """Tell whether there is a checkpoint; refuse files that are not ours to replace."""

    def begin(self, store: Store, token: str = "", *, is_first: bool = False) -> Upload:
        """Begin an upload, or join the one of another process. If it `is_first`, there is no checkpoint yet."""

    def layout(self, groups: Sequence[Sequence[Source]], sha256: Mapping[str, str]) -> list[PlannedFile]:
        """Plan the files of the leaves; no two groups share one."""

    def header(self, file: PlannedFile, sha256: Mapping[str, str]) -> bytes:
        """Return the header of a file, as long as it was planned."""

    def process_file(self, files: Sequence[PlannedFile], sha256: Mapping[str, str]) -> PlannedFile | None:
        """Return the file with the record of one of several processes; None if the headers carry it."""

    def read_index(self, store: Store) -> Index: ...

    def is_committed(self, store: Store, save_id: str) -> bool:
        """Tell whether the index names a save; True if that cannot be known."""


def is_committed(format: WriteFormat, store: Store, save_id: str) -> bool:  # noqa: A002
    """Tell whether the index names a save; True if that cannot be known: nothing is removed that might be named."""
    try:
        return format.read_index(store).has_committed(save_id)
    except (OSError, FormatError):
        return True
