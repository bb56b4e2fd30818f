"""A directory of several checkpoints and other files, which appears by one rename, whole and durable.

It is made in a scratch directory beside its place. Several processes join it by its token, and write to it; the process
that made it commits it. A later save removes the remains of dead writers.

Tests: tests/engine/stores/test_whole_directory.py.
"""

from __future__ import annotations

import ctypes
import errno
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Self

from eformer._engine.stores.directory import Directory, function_of_libc, sync_opened, walk
from eformer._engine.stores.durable import make_directories, sync_directory
from eformer._engine.stores.journal import sweep_dead
from eformer._engine.stores.scratch import Scratch

if TYPE_CHECKING:
    from pathlib import Path

_renameat2 = function_of_libc(
    "renameat2", ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint
)
_EXCHANGE = 2  # RENAME_EXCHANGE
_NO_EXCHANGE = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP}


class WholeDirectory:
    """A new directory for the place `final`: `path` is the directory until then, `token` its name for others."""

    def __init__(self, final: Path, token: str = "") -> None:
        self.final = final
        if not token:
            make_directories(final.parent)
            with Directory.open(final.parent) as place:
                sweep_dead(place)
        self._scratch = Scratch(final.parent, token)
        self.token = self._scratch.token
        self.path = self._scratch.data.path / final.name
        if not token:
            self.path.mkdir()

    def commit(self, *, replace: bool = False) -> None:
        """Give the directory its name, and sync it before. Raise FileExistsError if the name is taken; with `replace`,
        remove the directory of that name, when the new one is in place."""
        sync_tree(self.path)
        scratch, name = self._scratch, self.final.name
        with scratch.place.locked():
            if not replace or scratch.place.status(name) is None:
                scratch.data.put(name, scratch.place, name)
            else:
                self._exchange(name)
            scratch.place.sync()

    def _exchange(self, name: str) -> None:
        """Swap the new directory and the old one; the old one is removed with the scratch directory."""
        data, place = self._scratch.data, self._scratch.place
        if exchange(data, place, name):
            return
        # Without the call, the name is free for a moment. No sweep removes `aside`, so a crash loses neither.
        aside = f".{name}.before-{self.token.removeprefix('.').removesuffix('.tmp')}"
        place.rename(name, place, aside)
        data.put(name, place, name)
        place.sync()
        place.rename(aside, data, aside)

    def close(self) -> None:
        """Remove the scratch directory with everything in it."""
        self._scratch.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def exchange(here: Directory, there: Directory, name: str) -> bool:
    """Swap the entries of a name in two directories at once. Return False if the system cannot do this."""
    if _renameat2 is None:
        return False
    text = os.fsencode(name)
    if _renameat2(here.descriptor, text, there.descriptor, text, _EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _NO_EXCHANGE:
        return False
    raise OSError(number, os.strerror(number), str(there.path / name))


def sync_tree(top: Path) -> None:
    """Sync every file and directory below a directory, and the directory itself."""
    directories = [top]
    for path, entry in walk(top):
        if entry.is_dir(follow_symlinks=False):
            directories.append(top / path)
        elif entry.is_file(follow_symlinks=False):
            _sync_file(top / path)
    for directory in reversed(directories):
        with suppress(FileNotFoundError):
            sync_directory(directory)


def _sync_file(path: Path) -> None:
    with path.open("rb") as file:
        sync_opened(file.fileno())
