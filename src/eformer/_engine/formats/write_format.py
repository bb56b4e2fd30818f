"""The seam between a save and the format that it writes.

A format is made for one save. It plans files and reads and extends the index; it never writes. In the order of calls:

    format.check_place(store)              refuse what must not be replaced, before anything is written
    format.begin(store)                    the upload that takes the new files
    format.layout(groups, sha256)          sources become planned files
    format.header(file, sha256)            once the digests of its extents are known, if `header_needs_digests`
    format.read_index(store)               under the lock
    index.commit(tree, store, upload)      final names, and the next index
    commit.tidy(store, upload)             remove what the next index does not name
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Mapping, Sequence

    from eformer._engine.record.manifest import TreeEntry
    from eformer._engine.record.planned import PlannedFile, Source
    from eformer._engine.stores.base import Replaced, Store, Upload, Version


class Commit(Struct, frozen=True):
    """What a commit does: final names for the new files, and the next index.

    Without an `index` the new files are all there is. `replaced` and `unmarked` are those of `Upload.publish`. Once the
    index is in place, `tidy` removes what it does not name any more, and updates indexes for other readers.
    """

    moves: Mapping[str, str]
    index: bytes | None = None
    replaced: Sequence[Replaced] = ()
    unmarked: Sequence[str] | None = None
    tidy: Callable[[Store, Upload], None] | None = None


class Index(Protocol):
    """The index of a place as it is before a commit."""

    @property
    def version(self) -> Version | None:
        """The version of its file; None if there is none."""

    @property
    def save_ids(self) -> Container[str] | None:
        """The saves that it names; None if that is not known."""

    @property
    def barred(self) -> Container[str]:
        """The saves and files that no index may name any more."""

    def has_committed(self, save_id: str) -> bool:
        """Tell whether a save was committed, even if others have replaced its tree since."""

    def commit(self, tree: TreeEntry, store: Store, upload: Upload) -> Commit:
        """Choose final names for the new files, and make the next index."""


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
