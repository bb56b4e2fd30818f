"""Remove checkpoints, rename them, hold them, and sweep the remains of dead saves, on disks and in buckets."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from eformer._engine.stores import bucket_removal, local_removal
from eformer._engine.stores.bucket import BucketStore
from eformer._engine.stores.directory import Directory
from eformer._engine.stores.durable import SCRATCH
from eformer._engine.stores.journal import sweep_dead
from eformer._engine.stores.leases import LEASES, leased
from eformer._engine.stores.local import on_disk

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from eformer._engine.stores.base import Identity, Store
    from eformer._engine.stores.objects import Objects


def identity_of(store: Store, name: str) -> Identity:
    """Return an identity that tells a checkpoint, a directory or a file, from a later one of the same name. Raise
    FileNotFoundError if it is gone."""
    if (place := on_disk(store)) is not None:
        return local_removal.identity_of(place / name)
    return bucket_removal.identity_of(*_bucket(store, name))


def remove_checkpoint(store: Store, name: str, identity: Identity | None = None) -> bool:
    """Remove a directory or a file that is a checkpoint so that nobody ever sees a part of it.

    Return False if a reader holds it or a save to it is under way, which only a bucket tells. Raise FileNotFoundError
    if it is gone, and ValueError if it is another one than that with the `identity`.
    """
    if (place := on_disk(store)) is not None:
        now = local_removal.identity_of(place / name)  # raises if it is gone
        local_removal.remove_checkpoint(place, name, identity or now)
        return True
    return bucket_removal.remove(*_bucket(store, name), identity)


def sweep(store: Store, name: str) -> None:
    """Remove what dead saves, and removals that died, have left in a directory; "" is the place itself."""
    if (place := on_disk(store)) is not None:
        with Directory.open(place) as directory:
            sweep_dead(directory, name)
    elif name:
        bucket_removal.sweep(*_bucket(store, name))


def set_aside(store: Store, name: str, why: str, marks: Sequence[str]) -> str:
    """Let a directory be no checkpoint any more, by whose `marks` readers know it, without losing anything.

    Return a name for it that was free, such as step-100.old. On a disk it has that name.
    """
    if (place := on_disk(store)) is not None:
        return local_removal.set_aside(place, name, why)
    return f"{name}.{bucket_removal.set_aside(*_bucket(store, name), why, marks)}"


@contextmanager
def held(store: Store, name: str) -> Iterator[str]:
    """Yield a path by which a checkpoint can be read even if it is removed meanwhile.

    On a disk its files are linked into a hidden directory; if this process dies, the next save beside it removes that.
    In a bucket a lease, which is renewed, keeps the checkpoint.
    """
    if (place := on_disk(store)) is not None:
        with local_removal.linked(place, name) as path:
            yield path
    else:
        with leased(*_bucket(store, name), "hold"):
            yield store.path_to(name)


def has_unfinished(store: Store) -> bool:
    """Tell whether a save to a place is under way, or was left by a writer that died."""
    if on_disk(store) is not None:
        kinds = store.kinds().items()
        return any(kind == "directory" and SCRATCH.fullmatch(name) for name, kind in kinds)
    return bool(store.sizes(LEASES))  # SeaweedFS goes on listing directories that are empty


def _bucket(store: Store, name: str) -> tuple[Objects, str]:
    """Return the objects of a bucket, and the key of a directory or a file there."""
    if not isinstance(store, BucketStore):
        store.begin()  # raises: it can only be read
        raise AssertionError(f"{store.url} is neither a disk nor a bucket")
    return store.objects, store.key_of(name)
