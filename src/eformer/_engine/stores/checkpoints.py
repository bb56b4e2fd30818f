"""Remove checkpoints, rename them, hold them, and sweep the remains of dead saves, on disks and in buckets.

Tests: tests/engine/stores/test_neighbours.py, tests/engine/tools/test_prune.py, tests/engine/runs/test_follow.py.
"""

from __future__ import annotations

import errno
import stat
from contextlib import ExitStack, closing, contextmanager, suppress
from typing import TYPE_CHECKING

from eformer._engine.stores.bucket import BucketStore
from eformer._engine.stores.bucket_removal import (
    identity_in_bucket,
    remove_from_bucket,
    set_aside_in_bucket,
    sweep_bucket,
)
from eformer._engine.stores.directory import Directory, remove_entry, require_removable, walk
from eformer._engine.stores.durable import SCRATCH, scratch_name
from eformer._engine.stores.journal import JOURNAL, sweep_dead
from eformer._engine.stores.leases import LEASES, leased
from eformer._engine.stores.local import on_disk
from eformer._engine.stores.local_upload import LocalUpload
from eformer._engine.stores.scratch import Scratch
from eformer.errors import NotFoundError

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from eformer._engine.stores.base import Identity, Store
    from eformer._engine.stores.objects import Objects

_NO_SPACE = {errno.ENOSPC, errno.EDQUOT}


def identity_of(store: Store, name: str) -> Identity:
    """Return an identity that tells a checkpoint (a directory or a file) from a later checkpoint of the same name.
    Raise FileNotFoundError if it is gone."""
    if (place := on_disk(store)) is not None:
        return _identity((place / name).lstat())
    return identity_in_bucket(*_bucket(store, name))


def remove_checkpoint(store: Store, name: str, identity: Identity | None = None) -> bool:
    """Remove a checkpoint, a directory or a file, so that readers see all of it or nothing.

    Return False if a reader holds it or a save to it is under way, which is known only in a bucket. Raise
    FileNotFoundError if it is gone, and ValueError if it does not have the `identity`.
    """
    if (place := on_disk(store)) is not None:
        now = identity_of(store, name)  # raises if it is gone
        _remove_from_disk(place, name, identity or now)
        return True
    return remove_from_bucket(*_bucket(store, name), identity)


def sweep(store: Store, name: str) -> None:
    """Remove the remains of dead saves and dead removals in a directory; "" is the place itself."""
    if (place := on_disk(store)) is not None:
        with Directory.open(place) as directory:
            _sweep_on_disk(directory, name)
    elif name:
        sweep_bucket(*_bucket(store, name))


def set_aside(store: Store, name: str, why: str, marks: Sequence[str]) -> str:
    """Put a checkpoint aside: readers no longer find it, and no data is lost. `marks` are the files by which readers
    know it.

    Return a new name for it, such as step-100.old. On a disk the directory is renamed; in a bucket only the marks are.
    """
    if (directory := on_disk(store)) is None:
        return f"{name}.{set_aside_in_bucket(*_bucket(store, name), why, marks)}"
    with Directory.open(directory) as place:
        number, aside = 1, f"{name}.{why}"
        while place.status(aside) is not None:
            number += 1
            aside = f"{name}.{why}-{number}"
        place.rename(name, place, aside)
        place.sync()
    return aside


@contextmanager
def held(store: Store, name: str) -> Iterator[str]:
    """Yield a path by which a checkpoint can be read even if it is removed meanwhile.

    On a disk its files are linked into a hidden directory. If this process dies, the next save beside it removes that
    directory. In a bucket a lease, which is renewed, keeps the checkpoint.
    """
    if (place := on_disk(store)) is not None:
        with _linked(place, store, name) as path:
            yield path
    else:
        with leased(*_bucket(store, name), "hold"):
            yield store.path_to(name)


def has_unfinished(store: Store) -> bool:
    """Tell whether a place may have published a part of an unfinished save, whose writer is alive or dead."""
    if on_disk(store) is not None:  # a save writes its journal before it publishes directories
        return any(store.exists(f"{name}/{JOURNAL}") for name in store.kinds() if SCRATCH.fullmatch(name))
    return bool(store.sizes(LEASES))  # not `kinds`: SeaweedFS goes on listing empty directories


def _bucket(store: Store, name: str) -> tuple[Objects, str]:
    """Return the objects of a bucket, and the key of a directory or a file there."""
    if not isinstance(store, BucketStore):
        store.begin()  # raises for a store that is read-only
        raise AssertionError(f"{store.url} is neither a disk nor a bucket")
    return store.objects, store.key_of(name)


# ----------------------------------------------------------------------------------------- on a disk


def _sweep_on_disk(place: Directory, name: str) -> None:
    """Sweep a directory. Remove it if it is empty afterwards."""
    if not name:
        sweep_dead(place)
        return
    with suppress(OSError):  # it cannot be listed, or a save to it has just begun
        with place.enter(name) as inner:
            was_left = any(SCRATCH.fullmatch(one) for one in inner.kinds())
            sweep_dead(inner)
        if was_left:
            place.remove_if_empty(name)


def _identity(status: os.stat_result) -> Identity:
    """Return an identity of a file or a directory. The inode alone may be used again."""
    return status.st_mode, status.st_ino, status.st_mtime_ns


def _remove_from_disk(directory: Path, name: str, identity: Identity) -> None:
    """Remove a whole checkpoint. Raise ValueError if it no longer has this identity.

    Move it into a hidden directory first, so that a partly removed checkpoint is never taken for a whole one. Check its
    identity again there: if another checkpoint got its name in the last moment, move that one back.
    """
    try:
        scratch = Scratch(directory)
    except OSError as error:
        if error.errno not in _NO_SPACE:
            raise
        # The disk is full: instead of moving it, give the checkpoint a hidden name, which takes no space.
        with Directory.open(directory) as place:
            _remove(place, name, identity, place, scratch_name())
        return
    with scratch:
        _remove(scratch.place, name, identity, scratch.data, name)


def _remove(place: Directory, name: str, identity: Identity, target: Directory, hidden: str) -> None:
    """Move a checkpoint to a hidden place and remove it there."""
    changed = ValueError(
        f"{place.path / name} has changed since its removal was planned, and was not removed"
    )
    status = place.status(name)
    if status is None or _identity(status) != identity:
        raise changed
    with ExitStack() as stack:
        # A save commits under the lock of its directory: no save commits between this look and the rename.
        locked = place
        if stat.S_ISDIR(status.st_mode):
            require_removable(place, name)
            locked = stack.enter_context(place.enter(name))
        stack.enter_context(locked.locked())
        now = place.status(name)
        if now is None or _identity(now) != identity:
            raise changed
        place.rename(name, target, hidden)
        place.sync()
    with suppress(FileNotFoundError):  # a save may sweep it at the same time
        moved = target.status(hidden)
        if moved is None or (moved.st_mode, moved.st_ino) != (status.st_mode, status.st_ino):
            target.put(hidden, place, name)
            raise changed
        remove_entry(target, hidden)


@contextmanager
def _linked(directory: Path, store: Store, name: str) -> Iterator[str]:
    """Link the files of a checkpoint into a hidden directory, which is removed at the end, and yield their path."""
    with closing(LocalUpload(directory)) as upload:
        for path, entry in walk(directory, name):
            is_hidden = "/." in f"/{path}".rpartition("/")[0]
            if is_hidden or not entry.is_file(follow_symlinks=False):
                continue
            file = f"{name}/{path}"
            if not upload.link(file, store, store.read(file, 0, 0)[1]):
                raise NotFoundError(f"{store.path_to(file)} cannot be linked")
        yield str(upload.data.path / name)
