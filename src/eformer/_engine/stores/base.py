"""The seam between checkpoints and the places that hold them: a store reads by name, an upload writes.

A store is one place: a directory of this machine, a prefix of a bucket. Names in it are relative, with slashes. Reading
needs no preparation; everything that writes goes through an `Upload`, whose files nobody sees before its commit:

    upload = store.begin(root)
    upload.put(...); sink = upload.create(...); sink.write(...); sink.close()
    upload.sync()                                  # the new files are complete and durable
    upload.commit(commit)                          # read the index, give the files their names, swap the index, tidy up
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
"""Tells a file from a later one of the same name: identity and times of a local file, the ETag of an object."""

Kind = Literal["file", "directory", "other"]

Takes = Literal["ranges", "streams", "files"]
"""How an upload takes large files."""

_MOST_WHOLE = 2**29  # bytes


class Entry(Struct, frozen=True):
    """A file as it was seen: its name in the store, its length and its version."""

    name: str
    nbytes: int
    version: Version = ""


class Replaced(Struct, frozen=True):
    """A directory that the index stops naming, and the save that wrote it.

    Without a save (`save_id` is empty) another program wrote it: then only the listed arrays, (path, shape) each, may be
    removed from it.
    """

    name: str
    save_id: str
    arrays: tuple[tuple[str, tuple[int, ...]], ...] = ()


Identity = tuple[object, ...]
"""Tells a checkpoint from a later one of the same name."""


class SwapError(Exception):
    """The index is not the one that was expected: another save has committed meanwhile."""


class Files(Protocol):
    """Files of a checkpoint, read by number from any thread."""

    def read_into(self, number: int, memory: memoryview, offset: int) -> int:
        """Fill `memory` from `offset` on. Return how many bytes there were: fewer only at the end of the file."""

    def nbytes(self, number: int) -> int: ...

    def map(self, number: int) -> np.ndarray[Any, Any] | None:
        """Return the file as read-only memory that outlives this object and the file's name; None if it cannot be
        mapped."""

    def hold(self, numbers: Iterable[int]) -> None:
        """Keep these files readable as they are now, if there are not too many. Raise FileNotFoundError if one is
        gone."""

    def rewritten(self) -> str | None:
        """Return the name of a file that was written to in place since it was first looked at.

        Only files of other programs are watched: ours are never written to again.
        """

    def close(self) -> None: ...


@runtime_checkable
class KeepsCopies(Protocol):
    """Files that are read through a cache."""

    def forget(self, number: int, offset: int, nbytes: int) -> bool:
        """Read a range from its source the next time. Return False if no copy of it was kept."""


class Sink(Protocol):
    """A new file of known length."""

    def write(self, data: Any, offset: int) -> None:
        """Write bytes at an offset, from any thread, in any order."""

    def close(self) -> None:
        """Complete the file: everything has been written."""


class Store(Protocol):
    """One place that holds a checkpoint, to be read. Safe to use from any thread.

    url              the place, for messages
    key              the same text for every store of the same place
    read_threads     how many reads to have under way at once
    read_bytes       how many bytes to read at once
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
        """List one level, sorted: what each name is. Links are "other". Raise FileNotFoundError if nothing is there."""

    def sizes(self, below: str, depth: int = 1) -> dict[str, int]:
        """Return the lengths of the files in a directory, and `depth` levels down, by path from there."""

    def kind(self, name: str) -> Kind | None:
        """Tell what a name is; None if nothing has it. Links are "other"."""

    def is_file(self, name: str) -> bool:
        """Tell whether a name is a file, and no link."""

    def exists(self, name: str) -> bool:
        """Tell whether a name leads to something, perhaps through a link."""

    def read(self, name: str, start: int = 0, nbytes: int | None = None) -> tuple[bytes, Entry]:
        """Read a range of a file, to its end at most, and say which version it was of.

        Raise FileNotFoundError if there is no such file, FormatError for a name that leads out of the store and for
        anything but a regular file.
        """

    def open(self, names: Sequence[str], versions: Mapping[str, Version] | None = None) -> Files:
        """Open files for reading by number. A file in `versions` that is another one by now raises
        FileNotFoundError."""

    def begin(self, root: str = "", token: str = "", *, save_id: str = "", is_first: bool = False) -> Upload:
        """Begin an upload, or join the one of another process by its `token`.

        `save_id` is in the names of all files; without one the names are those that the files will have.

        `root` is the directory that the files will be in, unless the commit moves them somewhere else; a bucket writes
        there at once.

        The upload makes the place. If `is_first`, there is no checkpoint yet: the directory is synced as well, because
        another program may have made it and died.
        """


class OldIndex(Protocol):
    """The index of a place, as it is before a commit. `manifest` and `save_ids` are None if they are not known."""

    @property
    def version(self) -> Version | None:
        """The version of its file; None if there is none."""

    @property
    def manifest(self) -> Manifest | None: ...

    @property
    def save_ids(self) -> Container[str] | None:
        """The saves that it names."""

    def has_committed(self, save_id: str) -> bool:
        """Tell whether a save was committed, even if others have replaced its tree since."""


class Change(Struct, frozen=True):
    """The effect of a commit: final names for new files and directories, and the next index.

    moves      final names by name; "" stands for the directory of all new files
    index      returns the next index, given what it has to say of saves; None: the new files are all there is
    manifest   what the next index says
    replaced   directories that are removed once the index is in place
    unmarked   the files that describe new arrays without the mark of their save, which identify them for a later save
    tidy       removes what the next index does not name any more, and updates indexes for other readers
    """

    moves: Mapping[str, str] = {}
    index: Callable[[CommitLog | UnsetType], bytes] | None = None
    manifest: Manifest | None = None
    replaced: Sequence[Replaced] = ()
    unmarked: Sequence[str] | None = None
    tidy: Callable[[Store, Upload], None] | None = None

    def gone(self, index: OldIndex) -> set[str]:
        """Return the names of `replaced`, and those that `index`, the one before, has and the next one has not.

        Directories of other programs are not among them: they may hold more than the arrays that were replaced.
        """
        gone = {one.name for one in self.replaced if one.save_id}
        if index.manifest is not None and self.manifest is not None:
            gone |= index.manifest.names() - self.manifest.names()
        return gone


class Commit(Struct, frozen=True):
    """A commit, as an upload carries it out. In the order of calls: `read`, `change`, after an error `is_done`.

    read     reads the index. The store is the place; of a new place, it is where that is made
    change   chooses final names, and makes the next index
    name     the name of the index
    sweeps   whether the remains of writers that died are removed, too
    is_done  tells whether the index names the save; True if that cannot be known, or nothing has to be withdrawn
    """

    read: Callable[[Store], OldIndex]
    change: Callable[[Any, Store], Change]
    name: str = ""
    save_id: str = ""
    sweeps: bool = False
    is_done: Callable[[], bool] = lambda: True


class Upload(Protocol):
    """The new files of one save. Nobody sees them before `commit`; without it `close` removes them.

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

    def create(self, name: str, nbytes: int) -> Sink:
        """Begin a file of known length, where `takes` is "ranges". One that is not closed is removed with the
        upload."""

    def stream(self, name: str, nbytes: int, chunks: Iterable[Any]) -> None:
        """Write a file of known length from pieces of memory, in their order."""

    def put(self, files: Sequence[tuple[str, bytes]]) -> None:
        """Write many small files. Neighbours of one directory should follow each other."""

    def link(self, name: str, source: Store, entry: Entry) -> bool:
        """Use a file of another checkpoint again under a new name. Return False if it has to be written."""

    def sync(self) -> None:
        """Return when all files written so far are complete and on stable storage."""

    def names(self) -> list[str]:
        """List the new files and directories of all processes, one level."""

    def is_published(self, name: str, final: str) -> bool:
        """Tell whether a linked file is in place already under this name."""

    def commit(self, commit: Commit) -> None:
        """Give the new files their final names and swap the index, so that every reader sees the save or none does.

        On a disk this happens under a lock. In a bucket the index is swapped on the condition that it has not changed;
        if it has, the commit is begun again. After an error nothing of the save is left, unless the index names it.
        Raise LeaseLostError if another save has taken this one for dead.
        """

    def swap(self, name: str, data: bytes, expected: Version | None) -> None:
        """Replace a small file, while `tidy` is called, if its version is still the one expected (None: it does not
        exist). Raise SwapError if it is not; under a lock it always is."""

    def remove(self, names: Iterable[str]) -> None:
        """Remove files of the place, if they are there."""

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
    """The index of a place that has none, or the bytes of a small file in the place of an index."""

    version: Version | None = None
    data: bytes | None = None
    manifest: None = None
    save_ids: None = None

    def has_committed(self, save_id: str) -> bool:
        return False


def update_file(
    store: Store, name: str, change: Callable[[bytes | None], bytes], *, sweep: bool = False
) -> None:
    """Replace a small file by what `change` makes of it; again if another process has replaced it meanwhile.

    With `sweep`, the remains of uploads to the place that died are removed, too.
    """

    def read(store: Store) -> NoIndex:
        try:
            data, entry = read_whole(store, name)
        except FileNotFoundError:
            return NoIndex()
        return NoIndex(entry.version, data)

    def to_change(index: NoIndex, _: Store) -> Change:
        after = change(index.data)
        return Change(index=lambda _: after)

    with closing(store.begin(is_first=True)) as upload:
        upload.commit(Commit(read, to_change, name, sweeps=sweep))


def publish(upload: Upload, names: Iterable[str]) -> None:
    """Let the new files of an upload appear together under their names. There is no index."""
    change = Change({name: name for name in names})
    upload.commit(Commit(lambda _: NoIndex(), lambda *_: change))


def remove_files(store: Store, names: Sequence[str]) -> None:
    """Remove files that eformer wrote, if they are there."""
    if names:
        with closing(store.begin()) as upload:
            upload.remove(names)


def read_whole(store: Store, name: str, most: int = _MOST_WHOLE) -> tuple[bytes, Entry]:
    """Read a small file; refuse one that is far too long to be what it should be."""
    data, entry = store.read(name, 0, most)
    if entry.nbytes > most:
        raise FormatError(f"{store.path_to(name)} is {entry.nbytes} bytes long, at most {most} are expected")
    return data, entry
