"""The scratch directory of a save on this machine, locked as long as its writers live.

It lies beside the files that it will become, so that they are moved by a rename. A later save can tell by the lock what
a dead one has left behind.

A save to a directory that does not exist yet has its scratch directory beside that one. The new directory is made in
there, and gets its name when it is complete: nobody ever sees it without its checkpoint.
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


class Scratch:
    """A scratch directory: `data` is the directory in it for new files, `place` the one that they will be in.

    Other processes join it by its name, the `token`; the process that made it removes it.
    """

    def __init__(self, directory: Path, token: str = "", *, is_first: bool = False) -> None:
        if is_first:
            _make_parent(directory)
        self.is_owner, self.token = not token, token
        self.is_new = _is_to_be_made(directory, token)  # the place is made by this save
        self._directory = directory
        self.around = Directory.open(directory.parent if self.is_new else directory)
        self.place = self.around
        self.data = self.folder = Directory(directory, -1)
        try:
            while self.folder.descriptor < 0:
                self._enter(token or scratch_name())
        except BaseException:
            self.close()
            raise

    def _enter(self, name: str) -> None:
        """Make the directory, or open the one that another process has made, and lock it."""
        self.token = name
        if self.is_owner:
            self.around.make(name, usable=True)
        try:
            self.folder = self.around.enter(name)
            lock(self.folder.descriptor, shared=True)
            if self.is_owner:
                self._make_contents()
            self.data = self.folder.enter(DATA)
            if self.is_new:
                self.place = self.folder.enter(self._new)
        except FileNotFoundError:  # swept between its creation and the lock
            self.data.close()
            self.folder.close()
            if not self.is_owner or not self.around.path.is_dir():
                raise

    @property
    def _new(self) -> str:
        """Where the new place is in the scratch directory: with its name, so that nobody joins who means another."""
        return f"{NEW}/{self._directory.name}"

    def _make_contents(self) -> None:
        self.folder.make(DATA, usable=True)
        if self.is_new:
            self.folder.make(NEW, usable=True)
            with self.folder.enter(NEW) as folder:
                folder.make(self._directory.name)

    @property
    def place_path(self) -> Path:
        """Where the place is by now: a new one gets its name at the end of `exclusive`."""
        return self.around.path / self.token / self._new if self.is_new else self._directory

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Keep other saves to the place waiting. A new place appears at the end."""
        if self.is_new:
            with self.around.locked():
                if not os.path.lexists(self._directory):
                    yield
                    self._appear()
                    return
            self.place.close()  # another save has made it meanwhile
            self.place, self.is_new = Directory.open(self._directory), False
            with self.place.locked():
                self._move_inside()
                yield
            return
        with self.place.locked():
            yield

    def _move_inside(self) -> None:
        """Move the scratch directory into a place that another save has made: later saves to the place look there."""
        with suppress(OSError):  # the place is a mount point
            self.around.rename(self.token, self.place, self.token)
            self.around.close()
            self.around = Directory(self.place.path, os.dup(self.place.descriptor))

    def _appear(self) -> None:
        """Give the new directory its name."""
        self.place.sync()
        with self.folder.enter(NEW) as folder:
            folder.put(self._directory.name, self.around, self._directory.name)
        self.around.sync()

    def remove(self) -> None:
        if not self.is_owner or self.folder.descriptor < 0:
            return
        for _ in range(2):  # a disk may fail once
            with suppress(OSError):  # left to the next save
                for name in (DATA, NEW):  # after a commit they are empty or gone, and need no listing
                    self.folder.remove_if_empty(name)
                self.around.remove_if_empty(self.token)
                if self.around.status(self.token) is not None:
                    remove_opened(self.around, self.token, self.folder)
                return

    def close(self) -> None:
        try:
            self.remove()
        finally:
            self.abandon()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def abandon(self) -> None:
        """Let go of the directory as a process does that dies: everything in it stays."""
        if self.folder.descriptor >= 0:
            unlock(self.folder.descriptor)
        for directory in (self.data, self.folder, self.place, self.around):
            directory.close()


def _make_parent(directory: Path) -> None:
    """Make what the directory is in, if it is not there, so that it survives a crash; and the directory, if another
    program has made it, which may have died before it synced it."""
    make_directories(directory.parent)
    if not directory.parent.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(directory))
    if directory.is_dir():
        sync_directory(directory.parent)


def _is_to_be_made(directory: Path, token: str) -> bool:
    """Tell whether a save makes the directory, or whether the upload of this token does."""
    if token:
        return not (directory / token).is_dir() and (directory.parent / token).is_dir()
    return not os.path.lexists(directory)
