"""Store many small files as keys of an OCDBT database of TensorStore, in few files."""

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
from eformer.errors import CorruptionError, FormatError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from eformer._engine.stores.base import Change, Entry, Store
    from eformer._engine.stores.directory import Directory

DATABASE_MANIFEST = "manifest.ocdbt"
_MANIFESTS = re.compile(r"manifest\.(ocdbt|[0-9a-f]{16})")  # some databases have one for each version

# Written values are held in memory until they are committed.
_COMMIT_BYTES = 8 * 2**20
_COMMIT_KEYS = 20_000

_CACHE_BYTES = 32 * 2**20

_BRANCH = "process-"  # the directories in which other processes write databases of their own


# TensorStore is imported inside of functions: it takes longer than the rest of eformer, and few programs need it.


def _context() -> Any:
    import tensorstore as ts

    # The upload syncs all files at the end. Without a cache every read would begin at the root of the database.
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
    """Refuse links, pipes and devices: TensorStore would wait for a pipe, and follow a link anywhere. Refuse a database
    whose nodes decode to far more than is stored, too."""
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
    if is_database:
        require_bounded_nodes(directory, manifests)


def list_arrays(directory: Path) -> list[str]:
    """List the paths of the zarr arrays in a database, which any program may have written."""
    import tensorstore as ts

    base = {"driver": "file", "path": f"{directory}/"}
    try:
        keys = ts.KvStore.open({"driver": "ocdbt", "base": base}).result().list().result()
    except ValueError as error:
        raise FormatError(f"{directory} is not a readable OCDBT database: {error}") from error
    paths = [key.decode(errors="backslashreplace").rpartition("/") for key in keys]
    return sorted(path for path, _, name in paths if name in (".zarray", "zarr.json"))


class DatabaseUpload(LocalUpload):
    """An upload of files as keys of a database. Each process writes its own; that of the first takes over the rest."""

    takes_whole_files = True
    _database: _Database | None = None

    def __init__(
        self, directory: Path, token: str = "", *, mark: str, process: int = 0, is_first: bool = False
    ) -> None:
        _require_text(directory)
        super().__init__(directory, token, is_first=is_first)
        self._mark, self._branch = mark, f"{_BRANCH}{process}" if process else ""
        try:
            self._database = _Database(self.made_folder(self._branch))
        except BaseException:
            self.close()
            raise

    def create(self, name: str, nbytes: int) -> NoReturn:
        raise NotImplementedError("a database only takes whole files; use put")

    def put(self, files: Sequence[tuple[str, bytes]]) -> None:
        assert self._database is not None
        for name, data in files:
            self._database.put(name, data)

    def link(self, name: str, source: Store, entry: Entry) -> bool:
        return False

    def sync(self) -> None:
        assert self._database is not None
        self._database.finish()
        self._unsynced = list(self._written())
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
        if self._database is not None:
            self._database.close()
        super().abandon()


class _Database:
    """A database that is being written, by any number of threads. It closes the directory in the end."""

    def __init__(self, folder: Directory) -> None:
        self._folder, self._is_busy = folder, False
        self._store = _open(folder.path, _path_to(folder))
        self._lock = threading.Lock()
        self._begin()

    def close(self) -> None:
        """Close the directory, unless TensorStore may still write to it: its number could be given to another."""
        if not self._is_busy:
            self._folder.close()

    def _begin(self) -> None:
        import tensorstore as ts

        self._transaction = ts.Transaction()
        self._nbytes = self._keys = 0

    def put(self, key: str, value: bytes) -> None:
        with self._lock:
            self._store.with_transaction(self._transaction).write(key, value).result()
            self._nbytes, self._keys = self._nbytes + len(value), self._keys + 1
            if self._nbytes >= _COMMIT_BYTES or self._keys >= _COMMIT_KEYS:
                self._commit()
                self._begin()

    def _commit(self) -> None:
        self._is_busy = True  # and stays so if this is interrupted
        try:
            self._transaction.commit_sync()
        except ValueError as error:  # TensorStore does not raise OSError
            self._is_busy = False
            raise _told(error, self._folder) from error
        self._is_busy = False

    def finish(self) -> None:
        """Commit all values, so that they are in the files."""
        with self._lock:
            self._commit()
            self._begin()


def _path_to(folder: Directory) -> str:
    own = own_path(folder)
    return os.path.realpath(own) if own == folder.path else str(own)


def _told(error: ValueError, folder: Directory) -> OSError:
    """Return what TensorStore says, with the path of the directory instead of its number."""
    return OSError(str(error).replace(str(own_path(folder)), str(folder.path)))


def _join_branches(whole: Directory) -> bool:
    """Take over the databases of other processes, if there are any. Their files stay, their manifests are removed.

    After an error the directories stay open: TensorStore may still write to them, and their numbers could be given to
    others.
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
        source = _open(
            branch.path, f"{_path_to(whole)}/{name}", context
        )  # TensorStore only copies from below
        try:
            source.experimental_copy_range_to(target.with_transaction(transaction)).result()
            transaction.commit_sync()
        except ValueError as error:
            raise _told(error, whole) from error
        branch.unlink(DATABASE_MANIFEST)


class DatabaseFiles:
    """The values of a database, read as files. `keep` is what the directory must not outlive."""

    def __init__(self, directory: Path, names: Sequence[str], keep: object = None) -> None:
        require_plain_files(directory)
        self._keep = keep
        self._store = _open(directory, os.path.realpath(directory))
        self.directory, self.names = directory, names

    def hold(self, numbers: Iterable[int]) -> None:
        """Do nothing: the values cannot be kept readable when a save replaces the database, and removes it."""

    def read_into(self, number: int, memory: memoryview, offset: int) -> int:
        value = self._read(number, offset, offset + len(memory))
        memory[: len(value)] = value
        return len(value)

    def nbytes(self, number: int) -> int:
        return len(self._read(number, 0, None))

    def map(self, number: int) -> None:
        """Return None: values of a database cannot be mapped."""

    def rewritten(self) -> None:
        """Return None: values are only replaced as a whole."""

    def _read(self, number: int, start: int, stop: int | None) -> bytes:
        name = self.names[number]
        try:
            wanted = slice(start, stop)
            read = self._store.read(name, byte_range=wanted, staleness_bound=float("-inf")).result()
        except ValueError as error:
            if "OUT_OF_RANGE" in str(error):
                return b""  # like a file that was cut short
            raise CorruptionError(f"{self.directory}: {name!r} cannot be read: {error}") from error
        if read.state != "value":
            raise CorruptionError(f"{self.directory}: {name!r} is missing")
        return bytes(read.value)

    def close(self) -> None:
        self._store = None
