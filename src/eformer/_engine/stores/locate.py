"""Find the store that a path or a URL names."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from eformer._engine.stores.cache import current_cache
from eformer._engine.stores.hub import hub_at, is_hub_url, refuse_to_write
from eformer._engine.stores.local import LocalStore, is_there
from eformer._engine.stores.urls import is_bucket_url, local_path

if TYPE_CHECKING:
    from collections.abc import Callable

    from eformer._engine.stores.base import Store


STORES: dict[str, Callable[[str], Store]] = {}
"""Further stores by scheme: functions that make a store from a URL."""


def store_at(path: str | os.PathLike[str]) -> Store:
    """Return the store of a directory, which need not exist yet."""
    if make := STORES.get(_scheme(path)):
        return make(os.fspath(path))
    if is_bucket_url(os.fspath(path)):
        from eformer._engine.stores.clouds import bucket_at  # late: obstore is needed for buckets only

        store = bucket_at(os.fspath(path))
        store.cache = current_cache()
        return store
    if is_hub_url(os.fspath(path)):
        return hub_at(os.fspath(path))
    return LocalStore(local_path(path))


def _scheme(path: str | os.PathLike[str]) -> str:
    return os.fspath(path).partition("://")[0]


def locate(path: str | os.PathLike[str]) -> tuple[Store, str]:
    """Return the store of a directory and "". For any other path return the store around it, and its name there."""
    store = store_at(path)
    return (store, "") if is_there(store) else store.parent()


def absolute(path: str | os.PathLike[str]) -> str:
    """Return a path to save to that still names the same place if the current directory changes."""
    if _scheme(path) in STORES:
        return os.fspath(path)
    if is_hub_url(os.fspath(path)):
        refuse_to_write(os.fspath(path))
    return os.fspath(path) if is_bucket_url(os.fspath(path)) else str(local_path(path).absolute())
