"""Checkpoints in a bucket: s3://, gs://, az://, and memory:// for tests.

Objects are immutable and have no directories, and they cannot be renamed or locked. Data objects get names that are
never used again. A commit replaces the index on the condition that it still has the version that was read. `leases`
tells how the remains of dead saves are found and removed.
"""

from __future__ import annotations

import os
import re
import secrets
import threading
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import numpy as np
from msgspec import UNSET

from eformer._engine.record.names import is_inside
from eformer._engine.stores.base import Entry, SwapError, tidy_up
from eformer._engine.stores.cache import CachedFiles
from eformer._engine.stores.leases import LEASES, Leases, require_conditions
from eformer._engine.stores.objects import PART_BYTES, UnansweredError
from eformer._engine.stores.virtual_files import UnchangingFiles
from eformer._engine.tasks import interrupts
from eformer._engine.tasks.deadline import clearing_up, time_left
from eformer._engine.tasks.forks import Lock
from eformer._engine.tasks.pool import cancelled_with_others, run_all
from eformer.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from msgspec import UnsetType

    from eformer._engine.record.manifest import CommitLog
    from eformer._engine.stores.base import Change, Commit, Files, Kind, Store, Takes, Version
    from eformer._engine.stores.cache import Cache
    from eformer._engine.stores.objects import Objects, Stream

_MOST_KEY = 1024  # bytes, on all of Amazon's, Google's and Microsoft's
_NOT_IN_KEYS = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")  # obstore refuses them
_THREADS = 16  # they wait for the network most of the time
_FEW = 8  # objects that are looked up one by one


class BucketStore:
    """All objects whose keys begin with a path."""

    read_bytes = 8 * 2**20  # for 16 threads this is 128 MiB of memory
    read_threads = _THREADS

    def __init__(self, objects: Objects, path: str, cache: Cache | None = None) -> None:
        self.objects, self._path, self.cache = objects, path.strip("/"), cache
        self.url = self.key = objects.path_to(self._path) if self._path else objects.url
        self.most_path_bytes = len(self.url.encode()) - len(self._path.encode()) + _MOST_KEY

    def path_to(self, name: str) -> str:
        return f"{self.url}/{name}"

    def parent(self) -> tuple[BucketStore, str]:
        outer, _, name = self._path.rpartition("/")
        return BucketStore(self.objects, outer, self.cache), name

    def at(self, below: str) -> BucketStore:
        return BucketStore(self.objects, f"{self._path}/{below}", self.cache)

    # ---------------------------------------------------------------------------------------- look

    def kinds(self, below: str = "") -> dict[str, Kind]:
        start = self.key_of(below) if below else self._path
        directories, objects = self.objects.children(start)
        kinds: dict[str, Kind] = {name: "directory" for name in directories if name != LEASES}
        kinds.update({found.key.rpartition("/")[2]: "file" for found in objects})
        if not kinds:
            raise FileNotFoundError(f"no objects exist below {self.objects.path_to(start)}")
        return dict(sorted(kinds.items()))

    def sizes(self, below: str, depth: int = 1) -> dict[str, int]:
        start = f"{self.key_of(below) if below else self._path}/".lstrip("/")
        found = {entry.key.removeprefix(start): entry.nbytes for entry in self.objects.list(start)}
        return {name: nbytes for name, nbytes in found.items() if name.count("/") < depth}

    def kind(self, name: str) -> Kind | None:
        if self.exists(name):
            return "file"
        try:
            return "directory" if self.at(name).kinds() else None
        except FileNotFoundError:
            return None

    def exists(self, name: str) -> bool:
        return self.objects.find(f"{self._path}/{name}") is not None

    is_file = exists

    # ---------------------------------------------------------------------------------------- read

    def read(self, name: str, start: int = 0, nbytes: int | None = None) -> tuple[bytes, Entry]:
        data, found = self.objects.read(self.key_of(name), start, nbytes)
        return bytes(data), Entry(name, found.nbytes, found.version)

    def open(self, names: Sequence[str], versions: Mapping[str, Version] | None = None) -> Files:
        files = BucketFiles(self.objects, names, [self.key_of(name) for name in names], versions or {})
        if self.cache is None:
            return files
        return CachedFiles(files, self.cache, f"{self.objects.server} {self.url}", names, versions or {})

    def key_of(self, name: str) -> str:
        if not is_inside(name) or _NOT_IN_KEYS.search(name):
            raise FormatError(f"{name[:200]!r} is not the name of a file in {self.url}")
        # Without a slash at its beginning, as servers list it.
        return f"{self._path}/{name}" if self._path else name

    # --------------------------------------------------------------------------------------- write

    def begin(
        self, root: str = "", token: str = "", *, save_id: str = "", may_be_new: bool = False
    ) -> BucketUpload:
        return BucketUpload(self.objects, self._path, root, token, save_id)


class BucketFiles(UnchangingFiles):
    """Objects by number. A range is one request. Objects that a save replaces stay readable for a while."""

    def __init__(
        self, objects: Objects, names: Sequence[str], keys: Sequence[str], versions: Mapping[str, Version]
    ) -> None:
        self._objects, self._keys = objects, keys
        self._versions = {number: versions[name] for number, name in enumerate(names) if name in versions}
        self._listing, self._listed = Lock(), dict[str, int]()

    def read_into(self, number: int, memory: memoryview, offset: int) -> int:
        data, _ = self.fetch(number, offset, len(memory))
        found = np.frombuffer(data, np.uint8)
        np.frombuffer(memory, np.uint8)[: len(found)] = found  # numpy lets other threads run meanwhile
        return len(found)

    def fetch(self, number: int, offset: int, nbytes: int) -> tuple[Any, int]:
        """Return a range of an object, and the length of the whole object."""
        data, found = self._objects.read(self._keys[number], offset, nbytes, self._versions.get(number))
        return data, found.nbytes

    def nbytes(self, number: int) -> int:
        if not self._versions and len(self._keys) > _FEW:
            return self._lengths().get(self._keys[number]) or self._objects.head(self._keys[number]).nbytes
        found = self._objects.head(self._keys[number])
        if self._versions.get(number, found.version) != found.version:
            raise FileNotFoundError(f"{self._objects.path_to(self._keys[number])} was replaced")
        return found.nbytes

    def _lengths(self) -> dict[str, int]:
        """Return the lengths of all objects in the directories of these, by one listing for all threads."""
        with self._listing:
            if not self._listed:
                below = os.path.commonpath({key.rpartition("/")[0] for key in self._keys})
                found = self._objects.list(f"{below}/" if below else "")
                self._listed = {entry.key: entry.nbytes for entry in found}
            return self._listed

    def map(self, number: int) -> None:
        """Raise, because objects are not in files."""
        raise ValueError(
            f"{self._objects.path_to(self._keys[number])} is not a file of this machine, which mmap=True needs; pass "
            'options={"cache": DIRECTORY} or set EFORMER_CACHE'
        )


# --------------------------------------------------------------------------------------------- writing


class BucketUpload:
    """New objects, under names that no index has yet. With a `save_id`, a lease says that their writer is alive.

    Without one the names are final: then an object appears when it is published.
    """

    takes: Takes = "streams"

    def __init__(self, objects: Objects, path: str, root: str, token: str, save_id: str) -> None:
        self.token = token or save_id or secrets.token_hex(8)
        self._objects, self._path = objects, path
        self._start = f"{path}/{root}/" if root else f"{path}/"
        self._new: set[str] = set()
        self.nbytes = 0  # a bucket has no page cache to spare
        self._stage: Literal["open", "asked", "committed", "closed"] = "open"  # asked: for a new index
        self._is_doubtful = False  # objects may arrive after this upload has ended
        self._is_unanswered = False  # the server let a request of a cancelled save wait
        self._unpublished = None if token or save_id else _Unpublished(objects)
        self._leases: Leases | None = None
        if not token:
            require_conditions(objects, path)
        elif save_id:
            objects.head(f"{path}/{LEASES}/{token}")  # raises if the first process has not begun the save
        if save_id and not token:  # the first process has the lease for all
            self._leases = Leases(objects, path, self.token)
            self._leases.lease.begin()

    def announce(self) -> None:
        """Note that other processes put objects, too. They find the upload by its lease, which exists already."""
        self._is_doubtful = True

    # --------------------------------------------------------------------------------------- write

    def require_room(self, nbytes: int) -> None:
        """A bucket has room for everything."""

    def create(self, name: str, nbytes: int) -> NoReturn:
        raise NotImplementedError("objects are sent from their beginning to their end; use stream")

    def stream(self, name: str, nbytes: int, chunks: Iterable[Any]) -> None:
        """Write a file from pieces in their order. Return when it is complete."""
        key = self._start + name
        self._new.add(key)
        if nbytes <= PART_BYTES:
            self.put([(name, b"".join(chunks))])
        elif self._unpublished:
            self._unpublished.send(key, chunks)
        else:
            stream = self._objects.stream(key, chunks)
            self._send(stream.wait, stream.may_appear)

    def put(self, files: Sequence[tuple[str, bytes]]) -> None:
        objects = [(self._start + name, data) for name, data in files]
        self._new.update(key for key, _ in objects)
        if self._unpublished:
            self._unpublished.small += objects
        else:
            self._send(lambda: self._objects.put_all(objects))

    def link(self, name: str, store: Store, entry: Entry) -> bool:
        """Use the object under its present name if that is final, else let the server copy it."""
        if not isinstance(store, BucketStore) or store.objects is not self._objects:
            return False
        key, final = store.key_of(entry.name), self._start + name
        try:
            if self._objects.head(key).version != entry.version:
                return False
            if key != final:
                self._new.add(final)
                self._send(lambda: self._objects.copy(key, final))
        except OSError:
            return False
        return True

    def _send(self, put: Callable[[], None], may_appear: Callable[[], bool] = lambda: True) -> None:
        """Put objects. After an error, remember whether they may still appear."""
        try:
            put()
        except BaseException as error:
            self._is_doubtful |= may_appear()
            self._is_unanswered |= isinstance(error, UnansweredError)
            raise

    def sync(self) -> None:
        """A put that is acknowledged is durable."""

    def names(self) -> list[str]:
        directories, objects = self._objects.children(self._start.rstrip("/"))
        return sorted({*directories, *(found.key.rpartition("/")[2] for found in objects)} - {LEASES})

    def is_published(self, name: str, final: str) -> bool:
        """A name is never used for another object."""
        return name == final and self._start + name not in self._new

    # ------------------------------------------------------------------------------------- publish

    def commit(self, commit: Commit) -> None:
        store = BucketStore(self._objects, self._path)
        try:
            change = self._swapped(commit, store)
        except BaseException:
            if not commit.may_be_committed():
                with clearing_up():
                    self._withdraw()
            raise
        tidy_up(change, store, self, self._finish)

    def _swapped(self, commit: Commit, store: BucketStore) -> Change:
        """Publish the objects and swap the index; again, if another save has swapped it first."""
        change: Change | None = None
        while True:
            index = commit.read(store)
            if change and index.has_committed(commit.save_id):
                return change  # the answer was lost, and another save has come since
            if self._leases and commit.sweeps:
                # Find dead saves: the commit bars them, and `_finish` removes their objects.
                self._leases.look()
            change = commit.change(index, store)
            log: CommitLog | UnsetType = UNSET
            if self._leases and index.manifest and change.manifest:
                log = self._leases.log(index.manifest, change.manifest)
            self._publish(change)
            if change.index is None:
                return change
            with suppress(SwapError):
                self.swap(commit.name, change.index(log), index.version)
                return change

    def _publish(self, change: Change) -> None:
        """Let waiting objects appear, and make sure that all objects exist."""
        for name, final in change.moves.items():
            if (self._start + name).rstrip("/") != f"{self._path}/{final}":
                raise AssertionError(f"objects cannot be renamed: {name!r} to {final!r}")
        # Before the index names them: a reader that finds the index finds all objects.
        if self._unpublished:
            self._unpublished.publish()
        if self._leases:
            kept = [name for name, final in change.moves.items() if name and self.is_published(name, final)]
            require = [partial(self._leases.require, self._start + name) for name in kept]
            run_all(require, _THREADS if len(kept) >= _THREADS else 1)
            self._leases.retire()

    def swap(self, name: str, data: bytes, expected: Version | None) -> None:
        if self._stage == "open":
            self._stage = "asked"  # before the request: a Ctrl-C may come at any point after it is sent
        self._objects.swap(f"{self._path}/{name}", data, expected)

    def _withdraw(self) -> None:
        """Remove the new objects of this upload and of its other processes, and copies that it made of objects of other
        saves.

        Keep them all if a request to name them may still arrive. Then the next save removes them, once its index makes
        sure that this one fails.
        """
        # After "asked" the index may name the objects, even if the request for it seems to have failed.
        if self._leases and self._stage == "open":
            self._leases.remove_own()
            self._objects.delete(self._new)

    def _finish(self, change: Change) -> None:
        """Remove the objects of dead saves, and arrays of another program that the index no longer names."""
        self._stage = "committed"
        if self._leases:
            self._leases.finish()
        for replaced in (one for one in change.replaced if not one.save_id):
            for path, _ in replaced.arrays:
                self._objects.delete(found.key for found in self._objects.list(f"{self._path}/{path}/"))

    def remove(self, names: Iterable[str]) -> None:
        self._objects.delete(f"{self._path}/{name}" for name in names)

    def close(self) -> None:
        if self._stage == "closed":
            return
        # The lease stays if a put of an object or of the index may still arrive. It runs out, and then the next save
        # bars this save in the index and removes its objects.
        is_over = self._stage == "committed" or (self._stage == "open" and not self._is_doubtful)
        try:
            with (
                suppress(OSError),
                clearing_up(is_urgent=self._is_unanswered),
            ):  # the next save removes the rest
                if self._unpublished:
                    self._unpublished.cancel()
                self._withdraw()
                if self._leases and is_over:
                    self._leases.lease.end()
        finally:
            self._stage = "closed"
            self.abandon()

    def abandon(self) -> None:
        """Stop renewing the lease and remove nothing, as if this process had died."""
        if self._leases:
            self._leases.lease.stop()


class _Unpublished:
    """Objects that appear when they are published: small ones wait here, the last piece of a large one waits."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self.small: list[tuple[str, bytes]] = []
        self._large: list[Stream] = []
        self._published = threading.Event()

    def send(self, key: str, chunks: Iterable[Any]) -> None:
        """Send an object, except for its end."""
        sent = threading.Event()
        stream = self._objects.stream(key, self._held_back(chunks, sent))
        stream.on_end(sent.set)
        self._large.append(stream)
        with cancelled_with_others(stream.cancel):
            if not interrupts.wait_until(sent.wait, time_left()):
                stream.wait()
        stream.raise_error()

    def _held_back(self, chunks: Iterable[Any], sent: threading.Event) -> Iterator[Any]:
        yield from chunks
        sent.set()
        self._published.wait()

    def publish(self) -> None:
        self._published.set()
        for stream in self._large:
            stream.wait()
        self._objects.put_all(self.small)

    def cancel(self) -> None:
        for stream in self._large:
            stream.cancel()
        self._published.set()
