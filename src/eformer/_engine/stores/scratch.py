"""The scratch directory of a save on this machine, which is locked while its writers live.

It lies beside the final files, so that a rename moves them. A later save tells by the lock whether the writers are dead
and the directory can be removed.

For a save to a new directory, the scratch directory lies beside that directory. The new directory is made inside of it,
and gets its name when it is complete: it is never visible without its checkpoint.

Tests: tests/engine/stores/test_new_place.py, tests/engine/stores/test_local.py.
"""

from __future__ import annotations

import errno
import os
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Self

from eformer._engine.stores.directory import Directory, lock, remove_opened, unlock
from eformer._engine.stores.durable import make_directories, scratch_name, sync_directory
from eformer._engine.stores.journal import DATA, NEW

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from eformer._engine.stores.journal import Journal


class Scratch:
    """A scratch directory. `data` is its directory for new files, `place` their final directory.

    Other processes join it by its name, the `token`; the process that made it removes it. With a `journal` it stays
    for the next save. `is_new` tells whether the place is made by this save.
    """

    journal: Journal | None = None

    def __init__(self, directory: Path, token: str = "", *, may_be_new: bool = False) -> None:
        if may_be_new:
            make_directories(directory.parent)
            if not directory.parent.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(directory))
            if directory.is_dir():  # another program may have made it, and died before syncing it
                sync_directory(directory.parent)
        self.is_maker, self.token, self._directory = not token, token, directory
        self.is_new = not os.path.lexists(directory / token)
        if token and self.is_new:  # fails if the directory of the other process is not visible here yet
            self.is_new = (directory.parent / token).is_dir()
        self.around = Directory.open(directory.parent if self.is_new else directory)
        self.place = self.around
        self.data = self.top = self._new = Directory(directory, -1)
        try:
            while self.top.descriptor < 0:
                self._enter(token or scratch_name())
        except BaseException:
            self.close()
            raise

    def _enter(self, name: str) -> None:
        """Make the directory, or open the directory of another process, and lock it."""
        self.token = name
        if self.is_maker:
            self.around.make(name, usable=True)
        try:
            self.top = self.around.enter(name)
            # Shared, because several processes write. A sweep needs the lock for itself, so it fails while a writer
            # lives.
            lock(self.top.descriptor, shared=True)
            self.data = self._inner(self.top, DATA)
            if self.is_new:  # with its name, so that a process with another token cannot join
                self._new = self._inner(self.top, NEW)
                self.place = self._inner(self._new, self._directory.name, usable=False)
        except FileNotFoundError:  # another save swept it before it was locked
            for directory in (self._new, self.data, self.top):
                directory.close()
            if not self.is_maker or not self.around.path.is_dir():
                raise

    def _inner(self, folder: Directory, name: str, *, usable: bool = True) -> Directory:
        if self.is_maker:
            folder.make(name, usable=usable)
        return folder.enter(name)

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Keep other saves to the place waiting. A new place appears at the end."""
        if self.is_new:
            with self.around.locked():
                if not os.path.lexists(self._directory):
                    yield
                    self.place.sync()
                    self._new.put(self._directory.name, self.around, self._directory.name)
                    self.around.sync()
                    return
            self.place.close()  # another save has made the place meanwhile
            self.place, self.is_new = Directory.open(self._directory), False
            with self.place.locked():
                self._move_inside()
                yield
            return
        with self.place.locked():
            yield

    def _move_inside(self) -> None:
        """Move the scratch directory into a place that another save has made, because later saves sweep inside of the
        place."""
        with suppress(OSError):  # the place is a mount point
            self.around.rename(self.token, self.place, self.token)
            self.around.close()
            self.around = Directory(self.place.path, os.dup(self.place.descriptor))

    def close(self) -> None:
        try:
            if self.is_maker and self.top.descriptor >= 0 and not self.journal:
                self._remove()
        finally:
            self.abandon()

    def _remove(self) -> None:
        for _ in range(2):  # retried, because a disk may fail once
            with suppress(OSError):  # the next save removes it
                for name in (DATA, NEW):  # after a commit these are empty or gone, so no listing is needed
                    self.top.remove_if_empty(name)
                self.around.remove_if_empty(self.token)
                if self.around.status(self.token) is not None:
                    remove_opened(self.around, self.token, self.top)
                return

    def abandon(self) -> None:
        """Close the directory and remove nothing, as if this process had died."""
        if self.top.descriptor >= 0:
            unlock(self.top.descriptor)
        for directory in (self.data, self._new, self.top, self.place, self.around):
            directory.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
