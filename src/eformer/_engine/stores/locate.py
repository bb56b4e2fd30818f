"""Find the store that a path or a URL names."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from eformer._engine.stores.local import LocalStore
from eformer._engine.stores.local_paths import local_path
from eformer._engine.stores.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from eformer._engine.stores.base import Store

# The stores that are not on this machine's disk, by the scheme of their URLs.
_BY_SCHEME: dict[str, Callable[[str], Store]] = {"memory": MemoryStore}


def store_at(path: str | os.PathLike[str]) -> Store:
    """Return the store of a directory, which need not exist yet."""
    scheme, is_url, _ = os.fspath(path).partition("://")
    if is_url and scheme in _BY_SCHEME:
        return _BY_SCHEME[scheme](os.fspath(path))
    return LocalStore(local_path(path))


def locate(path: str | os.PathLike[str]) -> tuple[Store, str]:
    """Return the store of a directory and ""; or, for anything else, the store it would be in and its name there."""
    store = store_at(path)
    return (store, "") if store.is_there() else store.parent()


def absolute(path: str | os.PathLike[str]) -> str:
    """Return a path that names the same place, whatever the current directory is later."""
    where = store_at(path).local_path()
    return os.fspath(path) if where is None else str(where.absolute())
