"""The seam between checkpoints and the places that hold them: a store reads by name, an upload writes.

A store is one place: a directory of this machine, a prefix of a bucket. Names in it are relative, with slashes. Reading
needs no preparation; all writing goes through an `Upload`, whose files are invisible before its commit:

    upload = store.begin(root)
    upload.put(...); sink = upload.create(...); sink.write(...); sink.close()
    upload.sync()                                  # the new files are complete and durable
    upload.commit(commit)                          # read the index, name the files, swap the index, tidy up
    upload.close()                                 # remove the files if they were not committed
"""

from __future__ import annotations

import errno
import logging
import os
from contextlib import closing
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from msgspec import Struct

from eformer.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Mapping, Sequence

    import numpy as np
    from msgspec import UnsetType

    from eformer._engine.record.manifest import CommitLog, Manifest

logger = logging.getLogger("eformer")

Version = str
"""Tells a file from a later file of the same name: identity and times of a local file, the ETag of an object."""

Kind = Literal["file", "directory", "other"]

Takes = Literal["ranges", "streams", "files"]
"""How an upload takes large files."""

_MOST_WHOLE = 2**29  # bytes


class Entry(Struct, frozen=True):
    """The name of a file in the store, and its length and version when it was read."""

    name: str
    nbytes: int
    version: Version = ""


class Replaced(Struct, frozen=True):
    """A directory that the index stops naming, and the save that wrote it.

    An empty `save_id` means that another program wrote it. Then only the listed arrays, (path, shape) each, may be
    removed.
    """

    name: str
    save_id: str
    arrays: tuple[tuple[str, tuple[int, ...]], ...] = ()


Identity = tuple[object, ...]
"""Tells a checkpoint from a later checkpoint of the same name."""


class SwapError(Exception):
    """The index has another version than expected: another save has committed meanwhile."""


class Files(Protocol):
    """Files of a checkpoint, read by number from any thread."""

    def read_into(self, number: int, memory: memoryview, offset: int) -> int:
        """Fill `memory` from `offset` on. Return the number of bytes read, which is smaller only at the end of the
        file."""

    def nbytes(self, number: int) -> int: ...

    def map(self, number: int) -> np.ndarray[Any, Any] | None:
        """Return the file as read-only memory that outlives this object and the file's name; None if it cannot be
        mapped."""

    def hold(self, numbers: Iterable[int]) -> None:
        """Keep these files readable as they are now, up to a limit on their number. Raise FileNotFoundError if a file
        is gone."""

    def rewritten(self) -> str | None:
        """Return the name of a file that was written to in place since it was first looked at.

        Only files of other programs are watched: eformer never writes to its own files again.
        """

    def close(self) -> None: ...


@runtime_checkable
class KeepsCopies(Protocol):
    """Files that are read through a cache."""

    def forget(self, number: int, offset: int, nbytes: int) -> bool:
        """Drop the copy of a range, so that the next read asks its source. Return False if it had no copy."""


class Sink(Protocol):
    """A new file of known length."""

    def write(self, data: Any, offset: int) -> None:
        """Write bytes at an offset, from any thread, in any order."""

    def close(self) -> None:
        """Complete the file, all bytes of which have been written."""


class Store(Protocol):
    """One place that holds a checkpoint, to be read. Safe to use from any thread.

    url              the place, for messages
    key              the same text for every store of the same place
    read_threads     how many reads to have under way together
    read_bytes       how many bytes to read by one call
    most_path_bytes  how long the paths of files may be
    """

    url: str
    read_threads: int
    read_bytes: int
    most_path_bytes: int

    @property
    def key(self) -> str: ...

    def path_to(self, name: str) -> str:
        """Return where a file is, for messages."""

    def parent(self) -> tuple[Store, str]:
        """Return the store around this one, and the name that this one has there."""

    def at(self, below: str) -> Store:
        """Return the store of a directory below this one."""

    def kinds(self, below: str = "") -> dict[str, Kind]:
        """List one level: the kind of each name, sorted. Links are "other". Raise FileNotFoundError if it does not
        exist."""

    def sizes(self, below: str, depth: int = 1) -> dict[str, int]:
        """Return the lengths of the files in a directory, and `depth` levels down, by path from there."""

    def kind(self, name: str) -> Kind | None:
        """Return the kind of a name, None if it does not exist. Links are "other"."""

    def is_file(self, name: str) -> bool:
        """Tell whether a name is a regular file, not a link."""

    def exists(self, name: str) -> bool:
        """Tell whether a name exists. Links are followed."""

    def read(self, name: str, start: int = 0, nbytes: int | None = None) -> tuple[bytes, Entry]:
        """Read a range of a file, to its end at most. Return the bytes, and the entry with the version that was read.

        Raise FileNotFoundError if the file does not exist, FormatError for a name that leads out of the store and for
        anything but a regular file.
        """

    def open(self, names: Sequence[str], versions: Mapping[str, Version] | None = None) -> Files:
        """Open files for reading by number. Raise FileNotFoundError if a file in `versions` has been replaced since."""

    def begin(
        self, root: str = "", token: str = "", *, save_id: str = "", may_be_new: bool = False
    ) -> Upload:
        """Begin an upload, or join the upload of another process by its `token`.

        `save_id` is in the names of all files. Without it the names are final.

        `root` is the directory that the files will be in, unless the commit moves them somewhere else; a bucket writes
        there directly.

        The upload makes the place. `may_be_new` means that no checkpoint is known to be there: the directory may not
        exist, or another program may have made it and died before syncing it. Then the directory around it is synced.
        """


class OldIndex(Protocol):
    """The index of a place, as it is before a commit. `manifest` and `save_ids` are None if they are not known."""

    @property
    def version(self) -> Version | None:
        """The version of its file; None if the file does not exist."""

    @property
    def manifest(self) -> Manifest | None: ...

    @property
    def save_ids(self) -> Container[str] | None:
        """The saves that it names."""

    def has_committed(self, save_id: str) -> bool:
        """Tell whether a save was committed, even if later saves have replaced its tree."""


class Change(Struct, frozen=True):
    """The effect of a commit: final names for new files and directories, and the next index.

    moves      final names by name; "" stands for the directory of all new files
    index      returns the next index, given its log of saves; None if the place has no index
    manifest   the manifest in the next index
    replaced   directories that are removed once the index is in place
    unmarked   the files that describe new arrays without the mark of their save, which identify them for a later save
    tidy       removes files that the next index no longer names, and updates Hugging Face indexes
    """

    moves: Mapping[str, str] = {}
    index: Callable[[CommitLog | UnsetType], bytes] | None = None
    manifest: Manifest | None = None
    replaced: Sequence[Replaced] = ()
    unmarked: Sequence[str] | None = None
    tidy: Callable[[Store, Upload], None] | None = None

    def gone(self, index: OldIndex) -> set[str]:
        """Return the names that only the old index has, and the names of `replaced`.

        Leave out directories of other programs, which may hold more than the replaced arrays.
        """
        gone = {one.name for one in self.replaced if one.save_id}
        if index.manifest is not None and self.manifest is not None:
            gone |= index.manifest.names() - self.manifest.names()
        return gone


class Commit(Struct, frozen=True):
    """A commit, as an upload carries it out. In the order of calls: `read`, `change`; after an error
    `may_be_committed`.

    read               reads the index, given the store of the place, or of the directory in which a new place is made
    change             chooses final names, and makes the next index
    name               the name of the index
    sweeps             whether the remains of writers that died are removed, too
    may_be_committed   tells whether the index names the save; True if that cannot be known, or nothing has to be
                       withdrawn
    """

    read: Callable[[Store], OldIndex]
    change: Callable[[Any, Store], Change]
    name: str = ""
    save_id: str = ""
    sweeps: bool = False
    may_be_committed: Callable[[], bool] = lambda: True


class Upload(Protocol):
    """The new files of one save. They are invisible before `commit`; without a commit, `close` removes them.

    token   by which another process joins
    takes   how large files are written: in any order by `create`, from their beginning to their end by `stream`, or in
            one piece by `put`
    nbytes  how many bytes will be written in all, to be set before the first file is created: a save that is large
            beside the available memory does not stay in the page cache
    """

    token: str
    takes: Takes
    nbytes: int

    def announce(self) -> None:
        """Let other processes find the upload by its token."""

    def require_room(self, nbytes: int) -> None:
        """Raise OSError, before anything is written, if it is certain that so many bytes do not fit."""

    def create(self, name: str, nbytes: int) -> Sink:
        """Begin a file of known length, where `takes` is "ranges". A file that is never closed is removed with the
        upload."""

    def stream(self, name: str, nbytes: int, chunks: Iterable[Any]) -> None:
        """Write a file of known length from buffers, in their order."""

    def put(self, files: Sequence[tuple[str, bytes]]) -> None:
        """Write many small files. Neighbours of one directory should follow each other."""

    def link(self, name: str, store: Store, entry: Entry) -> bool:
        """Use a file of a checkpoint in `store` again, under a new name. Return False if it has to be written."""

    def sync(self) -> None:
        """Return when all files written so far are complete and on stable storage."""

    def names(self) -> list[str]:
        """List the new files and directories of all processes, one level."""

    def is_published(self, name: str, final: str) -> bool:
        """Tell whether a linked file already has its final name."""

    def commit(self, commit: Commit) -> None:
        """Give the new files their final names and swap the index, so that every reader sees the save or none does.

        On a disk this happens under a lock. In a bucket the index is swapped on the condition that it has not changed;
        if it has, the commit is begun again. After an error nothing of the save is left, unless the index names the
        save. Raise LeaseLostError if another save has taken this one for dead.
        """

    def swap(self, name: str, data: bytes, expected: Version | None) -> None:
        """Replace a small file, while `tidy` is called, if it has the expected version (None: it does not exist). Raise
        SwapError otherwise, which cannot happen under a lock."""

    def remove(self, names: Iterable[str]) -> None:
        """Remove files of the place, if they exist."""

    def close(self) -> None: ...


def tidy_up(change: Change, store: Store, upload: Upload, finish: Callable[[Change], None]) -> None:
    """Remove replaced files after a commit. The checkpoint is safe by now: an error is logged, and the next save
    removes the rest."""
    try:
        finish(change)
        if change.tidy:
            change.tidy(store, upload)
    except (OSError, FormatError, SwapError) as error:
        logger.warning("%s is saved, but could not be tidied up: %s", store.url, error)


def require_short(store: Store, name: str) -> None:
    """Raise OSError if the path of a file would be too long for its store."""
    path = store.path_to(name)
    if len(os.fsencode(path)) > store.most_path_bytes:
        raise OSError(
            errno.ENAMETOOLONG,
            f"File name too long: at most {store.most_path_bytes} bytes; use shorter names, or format='safetensors'",
            path,
        )


class NoIndex(Struct, frozen=True):
    """The index of a place without an index; or a small file, with its bytes, that `update_file` replaces like an
    index."""

    version: Version | None = None
    data: bytes | None = None
    manifest: None = None
    save_ids: None = None

    def has_committed(self, save_id: str) -> bool:
        return False


def update_file(
    store: Store, name: str, change: Callable[[bytes | None], bytes | None], *, sweep: bool = False
) -> None:
    """Replace a small file by the result of `change`, given its bytes; leave it as it is for None. Retry if another
    process has replaced it meanwhile.

    With `sweep`, also remove the remains of uploads whose process died.
    """

    def read(store: Store) -> NoIndex:
        try:
            data, entry = read_whole(store, name)
        except FileNotFoundError:
            return NoIndex()
        return NoIndex(entry.version, data)

    def to_change(index: NoIndex, _: Store) -> Change:
        after = change(index.data)
        return Change() if after is None else Change(index=lambda _: after)

    with closing(store.begin(may_be_new=True)) as upload:
        upload.commit(Commit(read, to_change, name, sweeps=sweep))


def publish(upload: Upload, names: Iterable[str]) -> None:
    """Let the new files of an upload appear together under their names, in a place without an index."""
    change = Change({name: name for name in names})
    upload.commit(Commit(lambda _: NoIndex(), lambda *_: change))


def remove_files(store: Store, names: Sequence[str]) -> None:
    """Remove files that eformer wrote, if they exist."""
    if names:
        with closing(store.begin()) as upload:
            upload.remove(names)


def read_whole(store: Store, name: str, most: int = _MOST_WHOLE) -> tuple[bytes, Entry]:
    """Read a small file. Raise FormatError if it is longer than `most` bytes."""
    data, entry = store.read(name, 0, most)
    if entry.nbytes > most:
        raise FormatError(f"{store.path_to(name)} is {entry.nbytes} bytes long, expected at most {most}")
    return data, entry
