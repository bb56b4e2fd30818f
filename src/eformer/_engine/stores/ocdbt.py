"""Store many small files as keys of an OCDBT database of TensorStore, in few files.

Tests: tests/engine/formats/test_zarr.py, tests/engine/formats/test_process_records.py.
"""

from __future__ import annotations

import os
import re
import threading
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from eformer._engine.record.names import is_text
from eformer._engine.stores.directory import own_path, walk
from eformer._engine.stores.local_upload import LocalUpload
from eformer._engine.stores.ocdbt_nodes import require_bounded_nodes
from eformer._engine.stores.removal import DATABASE_MARK
from eformer._engine.stores.virtual_files import UnchangingFiles
from eformer.errors import CorruptionError, FormatError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from eformer._engine.stores.base import Change, Entry, Store, Takes
    from eformer._engine.stores.directory import Directory

DATABASE_MANIFEST = "manifest.ocdbt"
_MANIFESTS = re.compile(r"manifest\.(ocdbt|[0-9a-f]{16})")  # some databases have a manifest for each version

# Written values are held in memory until they are committed.
_COMMIT_BYTES = 8 * 2**20
_COMMIT_KEYS = 20_000

_CACHE_BYTES = 32 * 2**20

_BRANCH = "process-"  # directories in which other processes write databases of their own


# TensorStore is imported inside of functions: it takes longer than the rest of eformer, and few programs need it.


def _context() -> Any:
    import tensorstore as ts

    # No fsync here: the upload syncs all files at the end. A cache, because every read would begin at the root of the
    # database.
    return ts.Context({"file_io_sync": False, "cache_pool": {"total_bytes_limit": _CACHE_BYTES}})


def _open(directory: Path, path: str, context: Any = None) -> Any:
    """Open the database in a directory, by a path without dots, which TensorStore refuses."""
    import tensorstore as ts

    _require_text(directory)
    base = {"driver": "file", "path": f"{path}/"}
    spec = {"driver": "ocdbt", "base": base, "config": {"compression": None}}
    context = context or _context()
    try:
        return ts.KvStore.open(spec, context=context).result()
    except ValueError as error:
        raise FormatError(f"{directory} is not a readable OCDBT database: {error}") from error


def _require_text(directory: Path) -> None:
    if not is_text(str(directory)):
        raise ValueError(f"{str(directory)!r} is not UTF-8; TensorStore needs a UTF-8 path for a database")


def require_plain_files(directory: Path, *, is_database: bool = True) -> None:
    """Refuse links, pipes and devices: TensorStore would wait for a pipe, and follow a link anywhere. Also refuse a
    database whose nodes decode to far more than is stored."""
    if directory.is_symlink():
        raise FormatError(f"{directory} is a link; a database must be a directory of the checkpoint")
    if is_database and not (directory / DATABASE_MANIFEST).is_file():
        raise FileNotFoundError(f"{directory} is not an OCDBT database: {DATABASE_MANIFEST} is missing")
    manifests = []
    for path, entry in walk(directory):
        if not entry.is_file(follow_symlinks=False) and not entry.is_dir(follow_symlinks=False):
            raise FormatError(f"{directory / path} is not a regular file")
        if _MANIFESTS.fullmatch(entry.name):
            manifests.append(path)
    if is_database and is_text(str(directory)):  # TensorStore opens no other files
        require_bounded_nodes(directory, manifests)


def list_arrays(directory: Path) -> list[str]:
    """List the paths of the zarr arrays in a database, which any program may have written."""
    import tensorstore as ts

    base = {"driver": "file", "path": f"{os.path.realpath(directory)}/"}  # TensorStore refuses dots
    try:
        keys = ts.KvStore.open({"driver": "ocdbt", "base": base}).result().list().result()
    except ValueError as error:
        raise FormatError(f"{directory} is not a readable OCDBT database: {error}") from error
    paths = [key.decode(errors="backslashreplace").rpartition("/") for key in keys]
    return sorted(path for path, _, name in paths if name in (".zarray", "zarr.json"))


class DatabaseUpload(LocalUpload):
    """An upload of files as keys of a database. Each process writes a database of its own, and the first process joins
    them."""

    takes: Takes = "files"
    _home: Directory | None = None  # the directory of this process's database
    _is_busy = False

    def __init__(
        self, directory: Path, token: str = "", *, mark: str, process: int = 0, may_be_new: bool = False
    ) -> None:
        _require_text(directory)
        super().__init__(directory, token, may_be_new=may_be_new)
        self._mark, self._branch = mark, f"{_BRANCH}{process}" if process else ""
        self._values = threading.Lock()
        try:
            self._home = self.made_folder(self._branch)
            self._database = _open(self._home.path, _path_to(self._home))
            self._begin()
        except BaseException:
            self.close()
            raise

    def _begin(self) -> None:
        import tensorstore as ts

        self._transaction = ts.Transaction()
        self._waiting_bytes = self._waiting = 0

    def create(self, name: str, nbytes: int) -> NoReturn:
        raise NotImplementedError("a database takes whole files only; use put")

    def put(self, files: Sequence[tuple[str, bytes]]) -> None:
        for name, data in files:
            with self._values:
                self._database.with_transaction(self._transaction).write(name, data).result()
                self._waiting_bytes, self._waiting = self._waiting_bytes + len(data), self._waiting + 1
                if self._waiting_bytes >= _COMMIT_BYTES or self._waiting >= _COMMIT_KEYS:
                    self._commit_values()

    def _commit_values(self) -> None:
        """Put all values into the files."""
        assert self._home is not None
        self._is_busy = True  # before the write: after a Ctrl-C TensorStore may still be writing
        try:
            self._transaction.commit_sync()
        except ValueError as error:  # TensorStore raises ValueError for errors of the disk
            self._is_busy = False
            raise _told(error, self._home) from error
        self._is_busy = False
        self._begin()

    def link(self, name: str, store: Store, entry: Entry) -> bool:
        return False

    def sync(self) -> None:
        with self._values:
            self._commit_values()
        self.unsynced = list(self._written())
        super().sync()

    def _written(self) -> Iterator[str]:
        """List the files of this process's database, which TensorStore has written."""
        with self.folder(self._branch) as folder:
            for path, entry in walk(own_path(folder)):
                if not entry.is_dir(follow_symlinks=False) and (self._branch or not path.startswith(_BRANCH)):
                    yield f"{self._branch}/{path}" if self._branch else path

    def _publish(self, change: Change, save_id: str) -> None:
        if change.moves:
            super().put([(DATABASE_MARK, self._mark.encode())])
            if _join_branches(self.folder("")):
                self.sync()
            else:
                super().sync()
        described = None if change.unmarked is None else [DATABASE_MARK]
        super()._publish(msgspec.structs.replace(change, unmarked=described), save_id)

    def abandon(self) -> None:
        # It stays open while TensorStore may still write to it: else another directory could get its number, and the
        # writes.
        if self._home is not None and not self._is_busy:
            self._home.close()
        super().abandon()


def _path_to(folder: Directory) -> str:
    own = own_path(folder)
    return os.path.realpath(own) if own == folder.path else str(own)


def _told(error: ValueError, folder: Directory) -> OSError:
    """Return the message of TensorStore, with the path of the directory instead of the number of its descriptor."""
    return OSError(str(error).replace(str(own_path(folder)), str(folder.path)))


def _join_branches(whole: Directory) -> bool:
    """Join the databases of other processes, if any, to this one. Their files stay, their manifests are removed.

    After an error the directories stay open: TensorStore may still write to them, and other directories could get their
    numbers.
    """
    names = [name for name, kind in whole.kinds().items() if kind == "directory" and name.startswith(_BRANCH)]
    folders = {name: whole.enter(name) for name in names}
    branches = {name: folder for name, folder in folders.items() if folder.status(DATABASE_MANIFEST)}
    if branches:
        _copy_branches(whole, branches)
    for folder in (whole, *folders.values()):
        folder.close()
    return bool(branches)


def _copy_branches(whole: Directory, branches: Mapping[str, Directory]) -> None:
    import tensorstore as ts

    context = _context()
    target = _open(whole.path, _path_to(whole), context)
    for name, branch in branches.items():
        transaction = ts.Transaction(atomic=True)
        # TensorStore only joins databases that lie below this one.
        source = _open(branch.path, f"{_path_to(whole)}/{name}", context)
        try:
            source.experimental_copy_range_to(target.with_transaction(transaction)).result()
            transaction.commit_sync()
        except ValueError as error:
            raise _told(error, whole) from error
        branch.unlink(DATABASE_MANIFEST)


class DatabaseFiles(UnchangingFiles):
    """The values of a database, read as files. `keep` is an object that has to live as long as this one, such as a
    temporary copy.

    Values are only replaced with the whole database. They cannot be held: they are gone when a save replaces the
    database.
    """

    def __init__(self, directory: Path, names: Sequence[str], keep: object = None) -> None:
        require_plain_files(directory)
        self._keep = keep
        self._store = _open(directory, os.path.realpath(directory))
        self.directory, self.names = directory, names

    def read_into(self, number: int, memory: memoryview, offset: int) -> int:
        value = self._read(number, offset, offset + len(memory))
        memory[: len(value)] = value
        return len(value)

    def nbytes(self, number: int) -> int:
        return len(self._read(number, 0, None))

    def _read(self, number: int, start: int, stop: int | None) -> bytes:
        name = self.names[number]
        try:
            wanted = slice(start, stop)
            read = self._store.read(name, byte_range=wanted, staleness_bound=float("-inf")).result()
        except ValueError as error:
            if "OUT_OF_RANGE" in str(error):
                return b""  # as for a file that is too short
            raise CorruptionError(f"{self.directory}: {name!r} cannot be read: {error}") from error
        if read.state != "value":
            raise CorruptionError(f"{self.directory}: {name!r} is missing")
        return bytes(read.value)

    def close(self) -> None:
        self._store = None
