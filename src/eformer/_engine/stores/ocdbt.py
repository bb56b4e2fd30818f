"""Put many small files into few: an OCDBT database of TensorStore in a directory."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any, NoReturn

from eformer._engine.record.names import is_text
from eformer._engine.stores.inside import walk
from eformer._engine.stores.local_upload import LocalUpload
from eformer._engine.stores.removal import DATABASE_MARK
from eformer.errors import CorruptionError, FormatError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from eformer._engine.stores.base import Entry, Replaced, Store

DATABASE_MANIFEST = "manifest.ocdbt"

# What is written is held in memory until it is committed.
_COMMIT_BYTES = 8 * 2**20
_COMMIT_KEYS = 20_000

_CACHE_BYTES = 32 * 2**20

_BRANCH = "process-"  # how the directories begin in which other processes have written databases of their own


def _context() -> Any:
    import tensorstore as ts  # late: slow to import, and only these need it

    # Who writes syncs all files at the end. Without a cache every read would begin at the root of the database.
    return ts.Context({"file_io_sync": False, "cache_pool": {"total_bytes_limit": _CACHE_BYTES}})


def _open(directory: Path, context: Any = None) -> Any:
    import tensorstore as ts

    if not is_text(str(directory)):
        raise ValueError(f"{str(directory)!r} is not UTF-8, which TensorStore needs for a database")
    base = {"driver": "file", "path": f"{os.path.realpath(directory)}/"}  # it takes no path with dots
    spec = {"driver": "ocdbt", "base": base, "config": {"compression": None}}
    context = context or _context()
    try:
        return ts.KvStore.open(spec, context=context).result()
    except ValueError as error:
        raise FormatError(f"{directory} holds no OCDBT database that can be read: {error}") from error


def require_plain_files(directory: Path, *, is_database: bool = True) -> None:
    """TensorStore would wait for a pipe, and follow a link to anywhere."""
    if directory.is_symlink():
        raise FormatError(f"{directory} is a link, and no database of the checkpoint")
    if is_database and not (directory / DATABASE_MANIFEST).is_file():
        raise FileNotFoundError(f"{directory} holds no OCDBT database: {DATABASE_MANIFEST} is missing")
    for entry in walk(directory):
        if not entry.is_file(follow_symlinks=False) and not entry.is_dir(follow_symlinks=False):
            raise FormatError(f"{entry.path} is not a regular file")


def list_arrays(directory: Path) -> list[str]:
    """List the zarr arrays of a database, whoever wrote it, by their paths in it."""
    import tensorstore as ts

    base = {"driver": "file", "path": f"{directory}/"}
    try:
        keys = ts.KvStore.open({"driver": "ocdbt", "base": base}).result().list().result()
    except ValueError as error:
        raise FormatError(f"{directory} holds no OCDBT database that can be read: {error}") from error
    paths = [key.decode(errors="backslashreplace").rpartition("/") for key in keys]
    return sorted(path for path, _, name in paths if name in (".zarray", "zarr.json"))


class DatabaseUpload(LocalUpload):
    """New files as keys of a database. Each process writes one of its own; the first one's becomes that of all."""

    takes_whole_files = True

    def __init__(self, directory: Path, token: str = "", *, mark: str, process: int = 0) -> None:
        super().__init__(directory, token)
        self._mark, self._branch = mark, f"{_BRANCH}{process}" if process else ""
        try:
            self._database = _Database(self.data.path / self._branch)
        except BaseException:
            self.close()
            raise

    def create(self, name: str, nbytes: int) -> NoReturn:
        raise NotImplementedError("a database takes files as a whole")

    def put(self, files: Sequence[tuple[str, bytes]]) -> None:
        for name, data in files:
            self._database.put(name, data)

    def link(self, name: str, source: Store, entry: Entry) -> bool:
        return False

    def sync(self) -> None:
        self._database.finish()
        written = self.files(self._branch)
        self.sync_files([name for name in written if self._branch or not name.startswith(_BRANCH)])

    def publish(
        self,
        moves: Mapping[str, str],
        replaced: Sequence[Replaced] = (),
        *,
        save_id: str,
        unmarked: Sequence[str] | None = None,
    ) -> None:
        if moves:
            super().put([(DATABASE_MARK, self._mark.encode())])
            if _join_branches(self.data.path):
                self.sync()
            else:
                super().sync()
        described = None if unmarked is None else [DATABASE_MARK]
        super().publish(moves, replaced, save_id=save_id, unmarked=described)


class _Database:
    """Values by key. Several threads may write."""

    def __init__(self, directory: Path) -> None:
        self._store = _open(directory)
        self._lock = threading.Lock()
        self._begin()

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
        try:
            self._transaction.commit_sync()
        except ValueError as error:  # TensorStore has no errors of the operating system
            raise OSError(str(error)) from error

    def finish(self) -> None:
        """Write everything that was put into the files."""
        with self._lock:
            self._commit()
            self._begin()


def _join_branches(directory: Path) -> bool:
    """Take over the databases of other processes, if there are any. Their files stay, their manifests are removed."""
    import tensorstore as ts

    branches = sorted(path for path in directory.glob(f"{_BRANCH}*") if (path / DATABASE_MANIFEST).exists())
    if not branches:
        return False
    context = _context()
    whole = _open(directory, context)
    for branch in branches:
        transaction = ts.Transaction(atomic=True)
        try:
            _open(branch, context).experimental_copy_range_to(whole.with_transaction(transaction)).result()
            transaction.commit_sync()
        except ValueError as error:
            raise OSError(str(error)) from error
        os.unlink(branch / DATABASE_MANIFEST)
    return True


class DatabaseFiles:
    """The keys of a database, as files."""

    def __init__(self, directory: Path, names: Sequence[str]) -> None:
        require_plain_files(directory)
        self._store = _open(directory)
        self.directory, self.names = directory, names

    def hold(self, numbers: Iterable[int]) -> None:
        """A database that is replaced is removed; what is in it cannot be kept."""

    def read_into(self, number: int, memory: memoryview, offset: int) -> int:
        value = self._read(number, offset, offset + len(memory))
        memory[: len(value)] = value
        return len(value)

    def nbytes(self, number: int) -> int:
        return len(self._read(number, 0, None))

    def map(self, number: int) -> None:
        """What is in a database can only be read."""

    def rewritten(self) -> None:
        """A value is replaced as a whole."""

    def _read(self, number: int, start: int, stop: int | None) -> bytes:
        name = self.names[number]
        try:
            wanted = slice(start, stop)
            read = self._store.read(name, byte_range=wanted, staleness_bound=float("-inf")).result()
        except ValueError as error:
            if "OUT_OF_RANGE" in str(error):
                return b""  # cut short, as a file would be
            raise CorruptionError(f"{self.directory}: {name!r} cannot be read: {error}") from error
        if read.state != "value":
            raise CorruptionError(f"{self.directory}: {name!r} is missing")
        return bytes(read.value)

    def close(self) -> None:
        self._store = None
