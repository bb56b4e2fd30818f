"""Ask a store for the properties of a disk: a path, links, files that several names share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from eformer._engine.stores.directory import Directory
from eformer._engine.stores.durable import replaceable_mode
from eformer._engine.stores.local import LocalStore

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from eformer._engine.stores.base import Store

_ALL_DEPTHS = 1000


def on_disk(store: Store) -> Path | None:
    """Return the path of a store that is a directory of this machine; None for any other."""
    return store.path if isinstance(store, LocalStore) else None


def is_there(store: Store) -> bool:
    """Tell whether a store is a directory: one that exists, or a prefix that objects have."""
    if (place := on_disk(store)) is not None:
        return place.is_dir()
    try:
        return bool(store.kinds())
    except FileNotFoundError:
        return False


def resolved(store: Store, name: str = "") -> tuple[Store, str]:
    """Follow a link that the caller named. Return the store and the name of the file itself, or the store without links
    on the way to it."""
    return store.resolve(name) if isinstance(store, LocalStore) else (store, name)


def check_replaceable(store: Store, name: str) -> None:
    """Raise OSError if something is there that a file cannot replace: a directory, a pipe, a device."""
    if (place := on_disk(store)) is not None:
        with Directory.open(place) as directory:
            replaceable_mode(directory, name)


def usage(store: Store, names: Sequence[str]) -> dict[str, int]:
    """Return how many bytes each file takes, and each directory with all that is in it. A file with several names
    counts for the first of them."""
    if isinstance(store, LocalStore):
        return store.usage(names)
    found = dict.fromkeys(names, 0)
    for path, nbytes in store.sizes("", _ALL_DEPTHS).items():
        if (top := path.partition("/")[0]) in found:
            found[top] += nbytes
    return found
