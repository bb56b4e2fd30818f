"""The place that a conversion creates: a file or directory of this machine, or objects of a bucket. No jax."""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from eformer._engine.record.text import size
from eformer._engine.stores.base import publish
from eformer._engine.stores.durable import make_directories
from eformer._engine.stores.local import LocalStore, appearing, on_disk
from eformer._engine.stores.locate import store_at

if TYPE_CHECKING:
    from collections.abc import Iterator

    from eformer._engine.stores.base import Store

_CHUNK = 4 * 2**20


class Destination:
    """A place where nothing is yet.

    On this machine a checkpoint appears as a whole, when it is complete. In a bucket each tree is committed by its
    index, one after the other, and other files are uploaded when they are complete.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        store = store_at(path)
        self._where = where.absolute() if (where := on_disk(store)) else None
        self._store = store if self._where is None else LocalStore(self._where)
        self._around, self.name = self._store.parent()
        if self.name in ("", ".."):
            raise ValueError(f"{os.fspath(path)!r} does not name a file or directory to create")

    def require_free(self, nbytes: int) -> None:
        """Raise if something is there, or if there is not enough space for so many bytes."""
        where = self._where
        is_taken = self._around.kind(self.name) is not None if where is None else not _is_free(where)
        if is_taken:
            raise FileExistsError(
                f"{where or self._store.url} already exists; a conversion creates a new checkpoint: choose another path"
            )
        if where is not None:
            existing = next(parent for parent in where.parents if parent.exists())
            free = shutil.disk_usage(existing).free
            if nbytes > free:
                raise OSError(
                    f"not enough space for {where}: it takes {size(nbytes)}, {existing} has {size(free)} left"
                )

    @contextmanager
    def creating(self, *, in_files: bool) -> Iterator[tuple[Store, str]]:
        """Yield the store around the new checkpoint and the name that it gets there.

        With `in_files` the store is one of this machine, where any file can be written under that name.
        """
        if self._where is not None:
            make_directories(self._where.parent)
            with appearing(self._where) as path:
                yield LocalStore(path.parent), path.name
        elif in_files:
            with tempfile.TemporaryDirectory(prefix="eformer-convert-") as folder:
                yield LocalStore(Path(folder)), self.name
                _upload(Path(folder), self._around)
        else:
            yield self._around, self.name


def _is_free(where: Path) -> bool:
    """Tell whether nothing is at a path, or an empty directory that can be replaced."""
    if where.is_dir() and not where.is_symlink() and not where.is_mount():
        return not any(where.iterdir())
    return not os.path.lexists(where)


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
