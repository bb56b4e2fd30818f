"""Remove whole checkpoints of this machine, and give them other names."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import closing, contextmanager, suppress
from typing import TYPE_CHECKING

from eformer._engine.stores.directory import Directory, remove_opened, require_removable
from eformer._engine.stores.durable import scratch_name
from eformer._engine.stores.local import LocalStore
from eformer._engine.stores.local_upload import LocalUpload
from eformer._engine.stores.scratch import Scratch
from eformer.errors import NotFoundError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from eformer._engine.stores.base import Identity, Store

_NO_SPACE = {errno.ENOSPC, errno.EDQUOT}
_MOST_DEPTH = 64  # of directories in a checkpoint that is linked


def identity_of(path: Path) -> Identity:
    """Return an identity of a file or a directory: more than the inode, which may be used again."""
    return _identity(path.lstat())


def _identity(status: os.stat_result) -> Identity:
    return status.st_mode, status.st_ino, status.st_mtime_ns


def remove_checkpoint(directory: Path, name: str, identity: Identity) -> None:
    """Remove a whole checkpoint; raise ValueError if it is not the one with this identity any more.

    It is moved into a hidden directory first, so that a partly removed checkpoint is never taken for a whole one, and
    looked at again there: another that was given its name in the last moment goes back.
    """
    try:
        scratch = Scratch(directory)
    except OSError as error:
        if error.errno not in _NO_SPACE:
            raise
        with Directory.open(directory) as place:  # the checkpoint itself is hidden, which takes no space
            _remove(place, name, identity, place, scratch_name())
        return
    with scratch:
        _remove(scratch.place, name, identity, scratch.data, name)


def _remove(place: Directory, name: str, identity: Identity, target: Directory, hidden: str) -> None:
    """Move a checkpoint to a hidden place and remove it there."""
    status = place.status(name)
    if status is None or _identity(status) != identity:
        raise _changed(place, name)
    if stat.S_ISDIR(status.st_mode):
        require_removable(place, name)
    place.rename(name, target, hidden)
    place.sync()
    with suppress(FileNotFoundError):  # a save sweeps it at the same time
        if not _remove_same(target, hidden, status):
            target.put(hidden, place, name)
            raise _changed(place, name)


def _remove_same(target: Directory, hidden: str, planned: os.stat_result) -> bool:
    """Remove a checkpoint that was moved, and return True, if it is the one that was planned."""
    if not stat.S_ISDIR(planned.st_mode):
        status = target.status(hidden)
        if status is None or (status.st_mode, status.st_ino) != (planned.st_mode, planned.st_ino):
            return False
        target.unlink(hidden)
        return True
    try:
        inner = target.enter(hidden)
    except NotADirectoryError:
        return False
    with inner:
        if os.fstat(inner.descriptor).st_ino != planned.st_ino:
            return False
        remove_opened(target, hidden, inner)
    return True


def _changed(place: Directory, name: str) -> ValueError:
    return ValueError(f"{place.path / name} has changed since its removal was planned, and was not removed")


def set_aside(directory: Path, name: str, why: str) -> str:
    """Give a checkpoint another name, by which it is no step of a run any more: step-100.damaged. Return that name."""
    with Directory.open(directory) as place:
        number, aside = 1, f"{name}.{why}"
        while place.status(aside) is not None:
            number += 1
            aside = f"{name}.{why}-{number}"
        place.rename(name, place, aside)
        place.sync()
    return aside


@contextmanager
def linked(directory: Path, name: str) -> Iterator[str]:
    """Link the files of a checkpoint into a hidden directory, which is removed at the end, and yield their path."""
    store = LocalStore(directory)
    with closing(LocalUpload(directory)) as upload:
        for file in _files(store, name, _MOST_DEPTH):
            if not upload.link(file, store, store.read(file, 0, 0)[1]):
                raise NotFoundError(f"{store.path_to(file)} cannot be linked")
        yield str(upload.data.path / name)


def _files(store: Store, below: str, depth: int) -> Iterator[str]:
    """List the files of a directory, and of those in it."""
    for name, kind in store.kinds(below).items():
        path = f"{below}/{name}"
        if kind == "file":
            yield path
        elif kind == "directory" and depth and not name.startswith("."):
            yield from _files(store, path, depth - 1)
