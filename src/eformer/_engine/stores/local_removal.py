"""Remove whole checkpoints of this machine, and give them other names."""

from __future__ import annotations

import stat
from contextlib import suppress
from typing import TYPE_CHECKING

from eformer._engine.stores.directory import Directory
from eformer._engine.stores.local_upload import LocalUpload

if TYPE_CHECKING:
    import os
    from pathlib import Path

    from eformer._engine.stores.base import Identity


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
    upload = LocalUpload(directory)
    try:
        place, data = upload.place, upload.data
        status = place.status(name)
        if status is None or _identity(status) != identity:
            raise _changed(place, name)
        is_directory = stat.S_ISDIR(status.st_mode)
        if is_directory:
            place.require_removable(name)
        place.rename(name, data, name)
        place.sync()
        with suppress(FileNotFoundError):  # a save sweeps it at the same time
            _remove_same(place, data, name, status)
    finally:
        upload.close()


def _remove_same(place: Directory, data: Directory, name: str, planned: os.stat_result) -> None:
    """Remove a checkpoint that was moved to `data`, if it is the one that was planned; else put it back."""
    if not stat.S_ISDIR(planned.st_mode):
        if not _is_same(data.status(name), planned):
            raise _put_back(place, data, name)
        data.unlink(name)
        return
    try:
        inner = data.enter(name)
    except NotADirectoryError as error:
        raise _put_back(place, data, name) from error
    with inner:
        if inner.inode != planned.st_ino:
            raise _put_back(place, data, name)
        data.remove_opened(name, inner)


def _is_same(status: os.stat_result | None, planned: os.stat_result) -> bool:
    return status is not None and (status.st_mode, status.st_ino) == (planned.st_mode, planned.st_ino)


def _put_back(place: Directory, data: Directory, name: str) -> ValueError:
    data.put(name, place, name)
    return _changed(place, name)


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


def remove_file(directory: Path, name: str) -> None:
    """Remove a file that eformer wrote beside a checkpoint, if it is there."""
    with Directory.open(directory) as place:
        place.unlink(name)
