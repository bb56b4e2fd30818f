"""The seam between a save and the format that it writes.

A format is made for one save. It plans files, and reads and extends the index; it never writes. In the order of calls:

    format.check_place(store)              refuse files that must not be replaced, before anything is written
    format.begin(store)                    begin the upload that takes the new files
    format.layout(groups, sha256)          turn sources into planned files
    format.header(file, sha256)            if `header_needs_digests`: once the digests of the file's extents are known
    format.read_index(store)               under the lock of the place, if it has one
    index.change_for(tree, store, upload)  choose final names, and make the next index

Tests: tests/engine/formats/test_safetensors.py, tests/engine/formats/test_zarr.py.
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


class FormatIndex(stores.OldIndex, Protocol):
    """The index of a place as it is before a commit."""

    @property
    def barred(self) -> Container[str]:
        """The saves and files that no later index may name."""

    def change_for(self, tree: TreeEntry, store: Store, upload: Upload) -> Change:
        """Choose final names for the new files, and make the next index."""


@dataclass(frozen=True, slots=True)
class ManifestIndex:
    """The base of an index that contains a manifest."""

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
    """Return the error for a directory that has the index of the other format."""
    format_name = FORMAT if index == INDEX else SAFETENSORS
    return FileExistsError(
        f"{store.path_to(index)} exists: the directory holds a checkpoint of another format, or other files. "
        f"Save to another directory, or with format={format_name!r}"
    )


class WriteFormat(Protocol):
    """The format of one save: how its tree lies in files."""

    @property
    def name(self) -> str: ...

    @property
    def index_name(self) -> str: ...

    @property
    def header_needs_digests(self) -> bool:
        """Whether the header of a file contains digests, and can only be written after the extents."""

    @property
    def keeps_records(self) -> bool:
        """Whether the place gets an index, which records leaves and digests."""

    def own_nbytes(self, source: Source) -> int:
        """Return the number of bytes of a leaf that this process writes, before compression."""

    def check_place(self, store: Store) -> bool:
        """Tell whether the place holds a checkpoint; refuse files that eformer must not replace."""

    def begin(self, store: Store, token: str = "", *, may_be_new: bool = False) -> Upload:
        """Begin an upload; with a `token`, join the upload of another process. `may_be_new` if `check_place` has found
        no checkpoint."""

    def layout(self, groups: Sequence[Sequence[Source]], sha256: Mapping[str, str]) -> list[PlannedFile]:
        """Plan the files of the leaves. Leaves of different groups never share a file."""

    def header(self, file: PlannedFile, sha256: Mapping[str, str]) -> bytes:
        """Return the header of a file. Its length is the planned one, whatever the digests are."""

    def process_file(self, files: Sequence[PlannedFile], sha256: Mapping[str, str]) -> PlannedFile | None:
        """Return the file with the record of this process, if several save; None if the headers carry the record."""

    def read_index(self, store: Store) -> FormatIndex: ...

    def may_be_committed(self, store: Store, save_id: str) -> bool:
        """Tell whether the index names a save; True if that cannot be known."""


def may_be_committed(format: WriteFormat, store: Store, save_id: str) -> bool:  # noqa: A002
    """Tell whether the index names a save. If it cannot be read, return True, so that no named file is removed."""
    try:
        return format.read_index(store).has_committed(save_id)
    except (OSError, FormatError):
        return True
