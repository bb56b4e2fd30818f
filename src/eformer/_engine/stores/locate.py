"""Find the store that a path or a URL names."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from eformer._engine.stores.local import LocalStore
from eformer._engine.stores.memory import SCHEME as MEMORY
from eformer._engine.stores.memory import MemoryStore

if TYPE_CHECKING:
    from eformer._engine.stores.base import Store


def store_at(path: str | os.PathLike[str]) -> Store:
    """Return the store of a directory, which need not exist yet."""
    if os.fspath(path).startswith(MEMORY):
        return MemoryStore(os.fspath(path))
    return LocalStore(local_path(path))


def locate(path: str | os.PathLike[str]) -> tuple[Store, str]:
    """Return the store of a directory and ""; or, for anything else, the store it would be in and its name there."""
    if os.fspath(path).startswith(MEMORY):
        store = MemoryStore(os.fspath(path))
        return (store, "") if store.is_there() else store.parent()
    where = local_path(path)
    return (LocalStore(where), "") if where.is_dir() else (LocalStore(where.parent), where.name)


def absolute(path: str | os.PathLike[str]) -> str:
    """Return a path that names the same place, whatever the current directory is later."""
    return os.fspath(path) if os.fspath(path).startswith(MEMORY) else str(local_path(path).absolute())


def local_path(path: str | os.PathLike[str]) -> Path:
    """Return a path of this machine; refuse a URL, which would quietly name a directory of this machine."""
    if not os.fspath(path):
        raise ValueError("the path is empty")
    if "://" in os.fspath(path):
        raise ValueError(f"{path}: only local paths are supported so far")
    return Path(path)
