"""The place that a conversion creates: a file or directory of this machine, or objects of a bucket. No jax."""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from eformer._engine.record.text import size
from eformer._engine.stores.base import publish
from eformer._engine.stores.durable import make_directories
from eformer._engine.stores.local import LocalStore, appearing, on_disk
from eformer._engine.stores.locate import store_at

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from eformer._engine.stores.base import Store

_CHUNK = 4 * 2**20


class Destination(Protocol):
    """A place where nothing is yet."""

    name: str

    def require_free(self, nbytes: int) -> None:
        """Raise if something is there, or if there is not enough space for so many bytes."""

    def creating(self, *, in_files: bool) -> AbstractContextManager[tuple[Store, str]]:
        """Yield the store around the new checkpoint and the name that it gets there.

        With `in_files` the store is one of this machine, where any file can be written under that name.
        """


def destination_at(path: str | os.PathLike[str]) -> Destination:
    store = store_at(path)
    where = on_disk(store)
    found: Destination = _InBucket(store) if where is None else _OnDisk(where.absolute())
    if found.name in ("", ".."):
        raise ValueError(f"{os.fspath(path)!r} does not name a file or directory to create")
    return found


class _OnDisk:
    """The new checkpoint appears as a whole, when it is complete."""

    def __init__(self, where: Path) -> None:
        self._where, self.name = where, where.name

    def require_free(self, nbytes: int) -> None:
        where = self._where
        is_empty = (
            where.is_dir() and not where.is_symlink() and not where.is_mount() and not any(where.iterdir())
        )
        if os.path.lexists(where) and not is_empty:
            raise _taken(str(where))
        existing = next(parent for parent in where.parents if parent.exists())
        _require_space(existing, nbytes, str(where))

    @contextmanager
    def creating(self, *, in_files: bool) -> Iterator[tuple[Store, str]]:
        make_directories(self._where.parent)
        with appearing(self._where) as path:
            yield LocalStore(path.parent), path.name


class _InBucket:
    """A checkpoint is committed by its index, one tree after the other; other files are uploaded when they are
    complete."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._around, self.name = store.parent()

    def require_free(self, nbytes: int) -> None:
        if self._around.kind(self.name) is not None:
            raise _taken(self._store.url)

    @contextmanager
    def creating(self, *, in_files: bool) -> Iterator[tuple[Store, str]]:
        if not in_files:
            yield self._around, self.name
            return
        with tempfile.TemporaryDirectory(prefix="eformer-convert-") as folder:
            yield LocalStore(Path(folder)), self.name
            _upload(Path(folder), self._around)


def _upload(folder: Path, store: Store) -> None:
    """Upload all files below a directory, which appear together."""
    files = {
        path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()
    }
    with closing(store.begin()) as upload:
        for name, path in files.items():
            upload.stream(name, path.stat().st_size, _chunks(path))
        upload.sync()
        publish(upload, files)


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            yield chunk


def _require_space(existing: Path, nbytes: int, where: str) -> None:
    free = shutil.disk_usage(existing).free
    if nbytes > free:
        raise OSError(
            f"not enough space for {where}: it takes {size(nbytes)}, {existing} has {size(free)} left"
        )


def _taken(where: str) -> FileExistsError:
    return FileExistsError(
        f"{where} already exists; a conversion creates a new checkpoint: choose another path"
    )
